"""Start, watch and end one server process, so that nothing of it outlives its use.

Between us and the server stands a keeper (``keeper.py``) that bounds the log and ends every
descendant, also when this process dies. What this module adds: readiness with a deadline, proof
that the server that answers is the one started here, and errors that quote the log's tail.
"""

import contextlib
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from specpilot.errors import Conflict, EngineFailure
from specpilot.harness.engines import keeper
from specpilot.harness.engines.client import EngineClient
from specpilot.harness.engines.launch import LaunchSpec
from specpilot.harness.engines.procfs import kill_marked, port_holders

__all__ = ["ServerProcess", "free_port"]

LOG_CAP_BYTES = 32 << 20
TAIL_BYTES = 2000
GRACE_S = 3.0
MARK = "SPECPILOT_RUN"
"""Environment variable that every descendant inherits: a last means to find those that got away."""


class ServerProcess:
    """One server under test, started by ``start`` and ended by ``stop`` or by leaving ``with``.

    ``wrap`` turns the command line into the one that is run (a sandbox around the server).
    The log, at most ``log_cap`` bytes of it, lies in a folder of its own that the server cannot
    write: in the server's folder it could be replaced by a link to a file of ours. It is gone
    after ``stop``, but for its tail.
    """

    def __init__(
        self,
        spec: LaunchSpec,
        *,
        name: str = "server",
        wrap: Callable[[Sequence[str]], Sequence[str]] = lambda argv: argv,
        log_cap: int = LOG_CAP_BYTES,
    ) -> None:
        self.spec = spec
        self.name = name
        self.pid: int | None = None
        self.exit_status: int | None = None
        self._wrap = wrap
        self._log_cap = log_cap
        self._log: Path | None = None
        self._tail = ""
        self._keeper: subprocess.Popen[bytes] | None = None
        self._started = threading.Event()
        self._reader: threading.Thread | None = None

    @property
    def base_url(self) -> str:
        return self.spec.base_url

    def __enter__(self) -> "ServerProcess":
        if self._keeper is None:
            self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start the process. Raises ``Conflict`` if something else already listens on the port."""
        if holders := port_holders(self.spec.port):
            raise Conflict(
                f"Port {self.spec.port} is in use by process {', '.join(map(str, holders))}.",
                hint="Choose another port or end that process.",
            )
        Path(self.spec.cwd).mkdir(parents=True, exist_ok=True)
        self._log = Path(tempfile.mkdtemp(prefix="specpilot-log-")) / "log"
        command = [sys.executable, "-I", "-S", keeper.__file__, "--log", str(self._log)]
        command += ["--log-cap", str(self._log_cap), "--grace-s", str(GRACE_S), "--"]
        self._keeper = subprocess.Popen(
            [*command, *self._wrap(self.spec.argv)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=self.spec.cwd,
            env={**self.spec.env, MARK: self.spec.nonce},
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read_keeper, daemon=True)
        self._reader.start()

    def _read_keeper(self) -> None:
        assert self._keeper is not None and self._keeper.stdout is not None
        for line in self._keeper.stdout:
            message = json.loads(line)
            self.pid = message.get("pid", self.pid)
            self.exit_status = message.get("exit", self.exit_status)
            self._started.set()
        self._started.set()

    @property
    def alive(self) -> bool:
        """Whether the server process runs."""
        return self._keeper is not None and self._keeper.poll() is None and self.exit_status is None

    @property
    def root_pid(self) -> int | None:
        """The keeper's pid: every descendant of the server is below it, orphans included."""
        return None if self._keeper is None else self._keeper.pid

    def wait_healthy(self, deadline_s: float) -> None:
        """Wait until the server answers and has proved to be ours.

        Raises ``EngineFailure`` with the log's tail if the process ends, is not healthy within
        ``deadline_s``, or if another process answers on its port.
        """
        deadline = time.monotonic() + deadline_s
        pause = 0.02
        with EngineClient(self.base_url, timeout_s=min(5.0, deadline_s)) as client:
            while True:
                self.check_alive()
                if client.health():
                    break
                if time.monotonic() > deadline:
                    raise EngineFailure(
                        f"The {self.name} on port {self.spec.port} was not healthy within "
                        f"{deadline_s:g} s.{self._quote()}"
                    )
                time.sleep(pause)
                pause = min(pause * 1.5, 0.5)
            self._check_identity(client)

    def check_alive(self) -> None:
        """Raise ``EngineFailure`` with the log's tail if the server process has ended."""
        if not self.alive:
            self._join_reader()
            status = "unknown" if self.exit_status is None else self.exit_status
            raise EngineFailure(
                f"The {self.name} on port {self.spec.port} ended with status {status}."
                + self._quote()
            )

    def tail(self) -> str:
        """The last 2000 bytes of the server's output."""
        if self._log is None:
            return self._tail
        text = b""
        for path in (self._log.with_name("log.1"), self._log):
            with contextlib.suppress(OSError), path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - TAIL_BYTES))
                text += file.read(TAIL_BYTES)
        return text[-TAIL_BYTES:].decode("utf-8", "replace").strip()

    def stop(self) -> None:
        """End the server and all its descendants: SIGTERM, SIGKILL after 3 s. Safe to repeat."""
        if self._keeper is None:
            return
        process = self._keeper
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(OSError):
            process.stdin.close()  # the keeper takes this as the order to end everything
        try:
            process.wait(2 * GRACE_S + keeper.SWEEP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._join_reader()
        process.stdout.close()
        if self._log is not None:
            self._tail = self.tail()
            shutil.rmtree(self._log.parent, ignore_errors=True)
            self._log = None
        kill_marked(MARK, self.spec.nonce)

    def _join_reader(self) -> None:
        if self._reader is not None:
            self._reader.join(GRACE_S)

    def _check_identity(self, client: EngineClient) -> None:
        holders = port_holders(self.spec.port)
        self._started.wait(GRACE_S)
        if holders and self.pid is not None:
            family = {self.pid, *keeper.descendants(self.pid)}
            strangers = [pid for pid in holders if pid not in family]
            if strangers:
                raise EngineFailure(
                    f"Process {strangers[0]} answers on port {self.spec.port}, not the server "
                    f"started there (process {self.pid})."
                )
        if "--nonce" in self.spec.argv and client.server_info().get("nonce") != self.spec.nonce:
            raise EngineFailure(
                f"The server on port {self.spec.port} does not know its launch's nonce: it is not "
                "the one started there."
            )

    def _quote(self) -> str:
        tail = self.tail()
        return f" Last output:\n{tail}" if tail else " It wrote no output."


def free_port() -> int:
    """A TCP port of 127.0.0.1 that was free a moment ago."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port
