"""The memory worker: one process that owns encoder and collection and answers over a socket.

``python -P -m specpilot.memory.semantic.worker --store FILE --socket PATH`` answers JSON lines: a
request ``{"text", "limit"}`` gets ``{"ready", "scores"}``; until the encoder is loaded ``ready``
is false at once. A lock file lets one worker serve a store; it ends when nobody has asked for a
while. It reads texts and returns numbers: nothing that it is told can change the store's entries.
"""

import argparse
import fcntl
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from specpilot.errors import SpecPilotError
from specpilot.memory.semantic.encoder import load_encoder
from specpilot.memory.semantic.index import VectorIndex, chroma_collection
from specpilot.memory.store import MemoryStore

__all__ = ["MAX_LINE", "main", "serve"]

MAX_LINE: Final = 16_384
_IDLE_S: Final = 900.0
_CONNECTION_S: Final = 30.0
_LOOK_S: Final = 0.5


def main() -> int:
    """Run the worker until it is idle for long. Exit 0 also when another one serves already."""
    parser = argparse.ArgumentParser(description="Serve the memory's vector index.")
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--idle", type=float, default=_IDLE_S, help="end after so many seconds")
    arguments = parser.parse_args()

    def load() -> VectorIndex:
        return VectorIndex(MemoryStore(arguments.store), load_encoder(), chroma_collection())

    serve(arguments.socket, load, arguments.idle, needed=arguments.store.exists)
    return 0


def serve(
    path: Path,
    load: Callable[[], VectorIndex],
    idle_s: float = _IDLE_S,
    needed: Callable[[], bool] = lambda: True,
) -> None:
    """Listen at a Unix socket (mode 0600) until idle or no longer ``needed``.

    Returns at once where another worker serves that socket.
    """
    lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return
    try:
        path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            before = os.umask(0o177)
            try:
                listener.bind(str(path))
            finally:
                os.umask(before)
            listener.listen(16)
            _Worker(load, idle_s, needed).run(listener)
    finally:
        path.unlink(missing_ok=True)
        os.close(lock)


class _Worker:
    def __init__(
        self, load: Callable[[], VectorIndex], idle_s: float, needed: Callable[[], bool]
    ) -> None:
        self._load = load
        self._needed = needed
        self._idle_s = idle_s
        self._index: VectorIndex | None = None
        self._failed = False
        self._turn = threading.Lock()
        self._asked = time.monotonic()

    def run(self, listener: socket.socket) -> None:
        loader = threading.Thread(target=self._warm, daemon=True)
        loader.start()
        listener.settimeout(min(_LOOK_S, self._idle_s))
        while not self._failed and self._needed() and not self._idle():
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            self._asked = time.monotonic()
            threading.Thread(target=self._talk, args=(connection,), daemon=True).start()

    def _idle(self) -> bool:
        return time.monotonic() - self._asked >= self._idle_s

    def _warm(self) -> None:
        try:
            index = self._load()
            index.refresh()
            self._index = index
        except Exception as error:
            print(f"memory worker: {error}", file=sys.stderr, flush=True)
            self._failed = True

    def _talk(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rwb") as stream:
            connection.settimeout(_CONNECTION_S)
            try:
                while line := stream.readline(MAX_LINE):
                    stream.write(json.dumps(self._answer(line)).encode() + b"\n")
                    stream.flush()
                    self._asked = time.monotonic()
            except (OSError, ValueError, TypeError, KeyError, SpecPilotError):
                return  # a connection that cannot be served is closed; the worker goes on

    def _answer(self, line: bytes) -> dict[str, Any]:
        request = json.loads(line)
        text, limit = request["text"], request["limit"]
        if not isinstance(text, str) or type(limit) is not int or not 0 < limit <= 1000:
            raise ValueError("a request has a text and a limit of 1 to 1000")
        index = self._index
        if index is None:
            return {"ready": False, "scores": {}}
        with self._turn:
            index.refresh()
            return {"ready": True, "scores": index.scores(text, limit)}


if __name__ == "__main__":
    sys.exit(main())
