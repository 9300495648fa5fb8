"""What Linux tells about processes: who listens on a port, who inherited a mark.

Answers cover the processes that this user may look into; the others are passed over.
"""

import contextlib
import os
import signal
from pathlib import Path

__all__ = ["kill_marked", "port_holders"]

LISTENING = "0A"


def port_holders(port: int) -> list[int]:
    """The processes that listen on a local TCP port."""
    sockets = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                local_port = int(fields[1].rpartition(":")[2], 16)
                if fields[3] == LISTENING and local_port == port:
                    sockets.add(f"socket:[{fields[9]}]")
    if not sockets:
        return []
    holders = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if any(str(fd.readlink()) in sockets for fd in (process / "fd").iterdir()):
                holders.append(int(process.name))
    return holders


def kill_marked(variable: str, value: str) -> None:
    """SIGKILL every process that was started with ``variable=value`` in its environment."""
    mark = f"{variable}={value}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (process / "environ").read_bytes().split(b"\0"):
                os.kill(int(process.name), signal.SIGKILL)
