"""Isolation of the systems under test: four tiers, chosen by what the machine allows.

A system under test runs what an agent wrote, so it must not read the sealed prompts, the
controller's key or the other system, and must not write the ledger. What can be enforced depends
on the machine; the tier goes into every receipt:

- 0 ``none``: the controller's own user, clean environment, no restriction. Not for finals.
- 1 ``landlock``: files and TCP ports by allow-list, no signals to others (Linux >= 6.12 for all).
- 2 ``bubblewrap``: tier 1 inside namespaces of its own (processes, IPC, mounts).
- 3 ``user``: a user id of its own and Landlock; needs root.

A tier counts as available only after a probe inside it failed to read the controller's files and
succeeded in reading the engine's code.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import IntEnum
from pathlib import Path

from specpilot.errors import Unsupported
from specpilot.harness.controller.landlock import abi_version

__all__ = [
    "Confinement",
    "Tier",
    "available_tier",
    "code_trees",
    "confine",
    "gpu_paths",
    "probe",
    "system_paths",
]

FIRST_UID = 61184
"""Start of the range that systemd sets aside for users of a moment; each arm gets its own."""
MAX_FILE_BYTES = 4 << 30


class Tier(IntEnum):
    NONE = 0
    LANDLOCK = 1
    BUBBLEWRAP = 2
    USER = 3

    @property
    def title(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Confinement:
    """What one system under test may touch: trees to read, trees to write, one port to serve.

    ``uid`` is the user it becomes at tier 3. ``landlock`` is set by ``confine``.
    """

    read: tuple[str, ...]
    write: tuple[str, ...]
    bind_ports: tuple[int, ...] = ()
    uid: int | None = None
    landlock: bool = True
    max_file_bytes: int = MAX_FILE_BYTES


def code_trees() -> tuple[str, ...]:
    """Return the folders of Python, its packages and SpecPilot: all that an engine's code needs."""
    trees = {sys.prefix, sys.base_prefix, str(Path(sys.executable).resolve().parent)}
    for name in ("specpilot", "harness", "mechanisms", "kernels"):
        full = name if name == "specpilot" else f"specpilot.{name}"
        spec = importlib.util.find_spec(full)
        if spec is not None:
            trees.update(spec.submodule_search_locations or ())
    return tuple(sorted(trees))


def system_paths() -> tuple[str, ...]:
    """Return what any program needs: libraries, their configuration, facts about the CPU.

    ``/proc`` is not listed whole: under one user it would show the controller's environment and
    open files.
    """
    etc = (
        "alternatives", "group", "hosts", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime",
        "nsswitch.conf", "passwd", "ssl/certs",
    )  # fmt: skip
    proc = ("self", "cpuinfo", "meminfo", "stat", "version", "filesystems", "sys/vm", "sys/kernel")
    return (
        "/usr", "/bin", "/lib", "/lib64", *(f"/etc/{name}" for name in etc),
        *(f"/proc/{name}" for name in proc), "/sys/devices/system", "/sys/fs/cgroup",
        "/sys/kernel/mm", "/dev/urandom", "/dev/random", "/dev/zero",
    )  # fmt: skip


def gpu_paths() -> tuple[str, ...]:
    """Return the devices and files through which CUDA reaches the driver."""
    devices = sorted(str(path) for path in Path("/dev").glob("nvidia*"))
    return (*devices, "/proc/driver/nvidia", "/sys/bus/pci", "/sys/devices", "/sys/module/nvidia")


def confine(
    tier: Tier, confinement: Confinement, argv: Sequence[str], *, gpu: bool = False
) -> list[str]:
    """Return the command line that runs ``argv`` inside ``confinement`` at ``tier``."""
    rights = replace(
        confinement,
        read=(*system_paths(), *confinement.read),
        write=("/dev/null", *(gpu_paths() if gpu else ()), *confinement.write),
        uid=confinement.uid if tier is Tier.USER else None,
        landlock=tier is not Tier.NONE and abi_version() > 0,
    )
    policy = json.dumps(asdict(rights), separators=(",", ":"))
    enter = [sys.executable, "-P", "-m", "specpilot.harness.controller.enter", policy, *argv]
    return [*_bubblewrap(rights), *enter] if tier is Tier.BUBBLEWRAP else enter


def _bubblewrap(rights: Confinement) -> list[str]:
    program = shutil.which("bwrap")
    if program is None:
        raise Unsupported("bubblewrap is not installed.", hint="Install it, or use another tier.")
    command = [program, "--die-with-parent", "--unshare-pid", "--unshare-ipc", "--unshare-uts"]
    command += ["--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp"]
    for path in rights.read:
        if not path.startswith(("/proc", "/dev")):
            command += ["--ro-bind-try", path, path]
    for path in rights.write:
        if path != "/dev/null":
            bind = "--dev-bind-try" if path.startswith("/dev") else "--bind-try"
            command += [bind, path, path]
    return command


_PROBE = """
import json, os, sys
secrets, code, work = json.loads(sys.argv[1])
leaks = []
for path in secrets:
    try:
        os.listdir(path) if os.path.isdir(path) else open(path, "rb").read(1)
        leaks.append("read " + path)
    except OSError:
        pass
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_APPEND))
        leaks.append("write " + path)
    except OSError:
        pass
for path in code:
    os.listdir(path)
open(os.path.join(work, "probe"), "w").close()
print(json.dumps(leaks))
"""


def probe(tier: Tier, secrets: Sequence[Path], work: Path) -> str | None:
    """Run a probe inside ``tier`` and return what is wrong with it, None if it holds.

    ``secrets`` are the controller's files and folders, ``work`` a folder that the probe may write.
    """
    if tier is Tier.NONE:
        return None
    if abi_version() == 0:
        return "the kernel has no Landlock"
    if tier is Tier.USER and os.geteuid() != 0:
        return "only root can start a process as another user"
    if tier is Tier.BUBBLEWRAP and shutil.which("bwrap") is None:
        return "bubblewrap is not installed"
    rights = Confinement(read=code_trees(), write=(str(work),), uid=FIRST_UID)
    if tier is Tier.USER:
        os.chown(work, FIRST_UID, FIRST_UID)
    facts = json.dumps([[str(path) for path in secrets], code_trees(), str(work)])
    command = confine(tier, rights, [sys.executable, "-P", "-c", _PROBE, facts])
    try:
        done = subprocess.run(
            command, cwd=work, env=_clean_environment(work), capture_output=True, text=True,
            timeout=30,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"a probe could not be run: {error}"
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["no message"]
        return f"a probe could not run the engine's code: {lines[-1]}"
    leaks: list[str] = json.loads(done.stdout)
    return f"a probe inside it could {', '.join(leaks)}" if leaks else None


def available_tier(secrets: Sequence[Path], work: Path) -> tuple[Tier, Mapping[str, str]]:
    """Return the highest tier whose probe holds, and why each higher one does not."""
    reasons: dict[str, str] = {}
    for tier in (Tier.USER, Tier.BUBBLEWRAP, Tier.LANDLOCK):
        problem = probe(tier, secrets, work)
        if problem is None:
            return tier, reasons
        reasons[tier.title] = problem
    return Tier.NONE, reasons


def _clean_environment(work: Path) -> dict[str, str]:
    return {"PATH": "/usr/bin:/bin", "HOME": str(work), "TMPDIR": str(work), "LANG": "C.UTF-8"}
