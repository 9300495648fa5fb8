"""Where controller and clients meet: the socket's path, and what a start that lost a race says."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["EXIT_TAKEN", "short_path", "socket_path"]

EXIT_TAKEN = 3
"""Exit status of a controller whose state directory another one has."""


def socket_path(state: Path) -> Path:
    return state / "controller" / "controller.sock"


@contextlib.contextmanager
def short_path(path: Path) -> Iterator[str]:
    """Yield a name of ``path`` that fits into a socket address, which takes 107 bytes."""
    if len(os.fsencode(path)) < 100:
        yield str(path)
        return
    fd = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{path.name}"
    finally:
        os.close(fd)
