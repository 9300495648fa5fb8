"""The light side of the vector index: asks the worker, and starts one if none answers.

Never waits for the encoder: while the worker warms up, or where the optional packages are missing,
``scores`` answers None at once and the search rests on words and structure.
"""

import hashlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from specpilot.memory.semantic.encoder import available

__all__ = ["SemanticClient", "socket_path"]

_LIMIT: Final = 200
_ANSWER_S: Final = 0.5
_RESTART_S: Final = 20.0
_MAX_SOCKET: Final = 100
_PASSED_ON: Final = (
    "HOME",
    "LANG",
    "LD_LIBRARY_PATH",
    "PATH",
    "PYTHONPATH",
    "TMPDIR",
    "VIRTUAL_ENV",
)


class SemanticClient:
    """Cosines of a store's heads to a question, from the worker of that store.

    Pass ``scores`` as ``vectors`` to a search. ``start`` off asks a running worker only.
    """

    def __init__(self, store: Path, *, start: bool = True) -> None:
        self._store = store.absolute()
        self._socket = socket_path(self._store)
        self._start = start
        self._started_at = -_RESTART_S
        self._connection: socket.socket | None = None
        self._lock = threading.Lock()

    def scores(self, text: str) -> Mapping[int, float] | None:
        """Return cosine by store row of the nearest heads, or None while no index is ready."""
        with self._lock:
            try:
                answer = self._ask(text)
            except (OSError, ValueError, KeyError):
                self.close()
                self._start_worker()
                return None
        if not answer["ready"]:
            return None
        return {int(row): float(score) for row, score in answer["scores"].items()}

    def close(self) -> None:
        """Let the connection go; the worker lives on until it is idle."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _ask(self, text: str) -> dict[str, Any]:
        if self._connection is None:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.settimeout(_ANSWER_S)
            try:
                connection.connect(str(self._socket))
            except OSError:
                connection.close()
                raise
            self._connection = connection
        line = json.dumps({"text": text[:2000], "limit": _LIMIT}).encode() + b"\n"
        self._connection.sendall(line)
        received = b""
        while not received.endswith(b"\n"):
            chunk = self._connection.recv(65_536)
            if not chunk:
                raise ConnectionError("the memory worker closed the connection")
            received += chunk
        answer = json.loads(received)
        if not isinstance(answer, dict):
            raise ValueError("the memory worker answered no object")
        return answer

    def _start_worker(self) -> None:
        now = time.monotonic()
        if not self._start or now - self._started_at < _RESTART_S or not available():
            return
        self._started_at = now
        environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        environment |= {
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "0",
        }
        log = self._socket.with_suffix(".log")
        with log.open("wb") as output:
            subprocess.Popen(
                [sys.executable, "-P", "-m", "specpilot.memory.semantic.worker",
                 "--store", str(self._store), "--socket", str(self._socket)],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                env=environment, start_new_session=True,
            )  # fmt: skip


def socket_path(store: Path) -> Path:
    """Return where the worker of a store listens: beside it, or under /tmp if that is too long."""
    beside = store.absolute().with_suffix(".sock")
    if len(os.fsencode(beside)) <= _MAX_SOCKET:
        return beside
    folder = Path(tempfile.gettempdir()) / f"specpilot-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user")
    return folder / (hashlib.sha256(os.fsencode(beside)).hexdigest()[:16] + ".sock")
