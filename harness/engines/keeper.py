"""The keeper: the parent process of one system under test, which leaves nothing behind.

Runs alone by path (``python -I -S keeper.py ...``) with nothing but the standard library. It starts
the server in a session of its own, writes its output to a log of bounded size, and adopts every
process that the server's descendants leave as an orphan (``PR_SET_CHILD_SUBREAPER``). It ends all
of them when the server ends, when it gets SIGTERM, or when its standard input closes, which the
kernel does even if the controller was killed with SIGKILL. (``PR_SET_PDEATHSIG`` alone would not
do: it fires when the *thread* that started the server ends, and grandchildren do not inherit it.)

Standard output carries JSON lines to the controller: ``{"pid": N}`` once the server runs and
``{"exit": status}`` once everything has ended; a negative status is a signal's number.
"""

import argparse
import contextlib
import ctypes
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
PIPE_BYTES = 1 << 16
SWEEP_S = 5.0
"""How long to go on killing descendants that fork as fast as they are killed."""


class CappedLog:
    """A log of at most ``cap`` bytes on disk: the newest output, in ``path`` and ``path.1``."""

    def __init__(self, path: Path, cap: int) -> None:
        self.path = path
        self.half = cap // 2
        self.size = 0
        self.file = path.open("wb", buffering=0)

    def write(self, data: bytes) -> None:
        if self.size + len(data) > self.half:
            self.file.close()
            self.path.replace(self.path.with_name(self.path.name + ".1"))
            self.file = self.path.open("wb", buffering=0)
            self.size = 0
        self.file.write(data)
        self.size += len(data)


def descendants(root: int) -> list[int]:
    """Every process below ``root``, whatever session or group it moved to."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            stat = (entry / "stat").read_text()
            parent = int(stat[stat.rindex(")") + 2 :].split()[1])
            parents.setdefault(parent, []).append(int(entry.name))
    found: list[int] = []
    todo = [root]
    while todo:
        children = parents.get(todo.pop(), [])
        found += children
        todo += children
    return found


def kill_all_descendants() -> None:
    """SIGKILL and reap until no descendant is left; new forks are caught by the next turn."""
    deadline = time.monotonic() + SWEEP_S
    while time.monotonic() < deadline:
        for pid in descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.005)


def prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def die_with_keeper() -> None:
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def tell(message: dict[str, object]) -> None:
    with contextlib.suppress(OSError):  # the controller may be gone
        os.write(1, json.dumps(message).encode() + b"\n")


def keep(command: list[str], log: CappedLog, grace_s: float) -> int:
    """Run ``command`` until it ends or is to end; returns its status once all is cleared."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_write)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, lambda number, frame: None)
    read, write = os.pipe2(os.O_CLOEXEC)
    try:
        server = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=write,
            stderr=write,
            start_new_session=True,
            preexec_fn=die_with_keeper,
        )
    except OSError as error:
        log.write(f"cannot start {command[0]}: {error}\n".encode())
        return 127
    os.close(write)
    os.set_blocking(read, False)
    tell({"pid": server.pid})
    waiting = selectors.DefaultSelector()
    for fd in (0, wake_read, read):
        waiting.register(fd, selectors.EVENT_READ)
    kill_at: float | None = None
    while server.poll() is None:
        timeout = None if kill_at is None else max(kill_at - time.monotonic(), 0.0)
        ready = {key.fd for key, _ in waiting.select(timeout)}
        end = 0 in ready
        if wake_read in ready:
            end |= bool({signal.SIGTERM, signal.SIGINT} & set(os.read(wake_read, 512)))
        if read in ready and not drain(read, log, rounds=16):
            waiting.unregister(read)
        if end and kill_at is None:
            with contextlib.suppress(KeyError):
                waiting.unregister(0)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(server.pid, signal.SIGTERM)
            kill_at = time.monotonic() + grace_s
        if kill_at is not None and time.monotonic() >= kill_at:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(server.pid, signal.SIGKILL)
            server.kill()
            kill_at += grace_s
    kill_all_descendants()
    drain(read, log, rounds=64)
    return server.returncode


def drain(fd: int, log: CappedLog, rounds: int) -> bool:
    """Copy what is there to the log; False at the end of the stream."""
    for _ in range(rounds):
        try:
            data = os.read(fd, PIPE_BYTES)
        except BlockingIOError:
            return True
        if not data:
            return False
        log.write(data)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--log", required=True)
    parser.add_argument("--log-cap", type=int, required=True)
    parser.add_argument("--grace-s", type=float, required=True)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    status = keep(command, CappedLog(Path(args.log), args.log_cap), args.grace_s)
    tell({"exit": status})
    sys.exit(0)


if __name__ == "__main__":
    main()
