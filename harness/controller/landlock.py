"""Landlock from Python: what a process may touch, enforced by the kernel, without privileges.

The three system calls are made through ctypes; rights are masked by the kernel's ABI version
(https://docs.kernel.org/userspace-api/landlock.html). Restrictions are inherited by children and
can never be lifted. Landlock does not govern UDP, connections to Unix sockets by path, or files
that are already open.
"""

import ctypes
import os
import stat
import struct
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Rules", "abi_version", "no_new_privileges", "restrict"]

_CREATE, _ADD, _RESTRICT = 444, 445, 446  # the same numbers on every architecture
_CREATE_VERSION = 1
_RULE_PATH, _RULE_PORT = 1, 2
_PR_SET_NO_NEW_PRIVS = 38

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_ABI1 = (1 << 13) - 1
_REFER, _TRUNCATE, _IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_FOR_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
_BIND_TCP, _CONNECT_TCP = 1, 2
_SCOPE_ABSTRACT_SOCKETS, _SCOPE_SIGNALS = 1, 2


@dataclass(frozen=True, slots=True)
class Rules:
    """What stays allowed: trees to read and execute, trees to write, TCP ports to listen on.

    Paths that do not exist are left out. No TCP connection can be opened at all.
    """

    read: Sequence[str]
    write: Sequence[str]
    bind_ports: Sequence[int] = ()


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _call(number: int, *arguments: object) -> int:
    result = int(_libc().syscall(number, *arguments))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def abi_version() -> int:
    """Return the kernel's Landlock ABI, 0 where there is none or it is switched off.

    ABI 1 governs files, 4 TCP ports as well, 6 signals and abstract Unix sockets.
    """
    try:
        return _call(_CREATE, None, 0, _CREATE_VERSION)
    except OSError:
        return 0


def no_new_privileges() -> None:
    """Give up, for good, what set-user-id programs would grant. Landlock requires it."""
    if _libc().prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_NO_NEW_PRIVS) failed")


def restrict(rules: Rules) -> None:
    """Restrict this thread and all its future children to ``rules``. Raises ``OSError``."""
    abi = abi_version()
    files = _ABI1
    files |= _REFER if abi >= 2 else 0
    files |= _TRUNCATE if abi >= 3 else 0
    files |= _IOCTL_DEV if abi >= 5 else 0
    network = _BIND_TCP | _CONNECT_TCP if abi >= 4 else 0
    scope = _SCOPE_ABSTRACT_SOCKETS | _SCOPE_SIGNALS if abi >= 6 else 0
    attributes = struct.pack("=QQQ", files, network, scope)
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    ruleset = _call(_CREATE, attributes, size, 0)
    try:
        for paths, rights in ((rules.read, _READ), (rules.write, files)):
            for path in paths:
                _allow_path(ruleset, path, rights & files)
        if network:
            for port in rules.bind_ports:
                _call(_ADD, ruleset, _RULE_PORT, struct.pack("=QQ", _BIND_TCP, port), 0)
        no_new_privileges()
        _call(_RESTRICT, ruleset, 0)
    finally:
        os.close(ruleset)


def _allow_path(ruleset: int, path: str, rights: int) -> None:
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except (FileNotFoundError, PermissionError):
        return
    try:
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            rights &= _FOR_FILES
        _call(_ADD, ruleset, _RULE_PATH, struct.pack("=Qi", rights, fd), 0)
    finally:
        os.close(fd)
