"""What else the machine was doing while a cycle was timed: CPU by process tree, GPU by driver.

Read from ``/proc`` and ``nvidia-smi``, never from a system under test. Sampling takes a few
milliseconds and happens between timed blocks.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["CpuSample", "GpuSample", "descendants", "foreign_cores", "sample_cpu", "sample_gpus"]

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_BUSY_FIELDS = (1, 2, 3, 6, 7)  # user, nice, system, irq, softirq of /proc/stat's first line


@dataclass(frozen=True, slots=True)
class CpuSample:
    """CPU seconds used since boot by everything and by each watched tree, and when it was read."""

    at_s: float
    busy_s: float
    trees_s: dict[int, float]


@dataclass(frozen=True, slots=True)
class GpuSample:
    """One GPU's state: SM clock in MHz, temperature in °C, power in W, pids that compute on it."""

    uuid: str
    name: str
    sm_clock_mhz: float
    temperature_c: float
    power_w: float
    pids: tuple[int, ...]


def _stats() -> dict[int, tuple[int, float]]:
    """Map each pid to its parent and its CPU seconds, reaped children included."""
    found: dict[int, tuple[int, float]] = {}
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            text = Path(entry.path, "stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        fields = text.rpartition(")")[2].split()
        ticks = sum(int(value) for value in fields[11:15])
        found[int(entry.name)] = (int(fields[1]), ticks * _TICK_S)
    return found


def _tree(root: int, children: dict[int, list[int]]) -> list[int]:
    found, todo = [], [root]
    while todo:
        pid = todo.pop()
        found.append(pid)
        todo.extend(children.get(pid, ()))
    return found


def _children(stats: dict[int, tuple[int, float]]) -> dict[int, list[int]]:
    children: dict[int, list[int]] = {}
    for pid, (parent, _) in stats.items():
        children.setdefault(parent, []).append(pid)
    return children


def descendants(root: int) -> list[int]:
    """Return the pids of all living processes under ``root``, without ``root`` itself."""
    return _tree(root, _children(_stats()))[1:]


def sample_cpu(roots: Iterable[int]) -> CpuSample:
    """Read the CPU time of the machine and of the process trees under ``roots``."""
    stats = _stats()
    children = _children(stats)
    with Path("/proc/stat").open(encoding="ascii") as file:
        fields = file.readline().split()
    busy = sum(int(fields[index]) for index in _BUSY_FIELDS) * _TICK_S
    trees = {
        root: sum(stats[pid][1] for pid in _tree(root, children) if pid in stats) for root in roots
    }
    return CpuSample(time.perf_counter(), busy, trees)


def foreign_cores(before: CpuSample, after: CpuSample, own: int) -> float:
    """Return the cores kept busy, between two samples, by processes outside the tree of ``own``."""
    wall = after.at_s - before.at_s
    mine = after.trees_s[own] - before.trees_s[own]
    return max(0.0, after.busy_s - before.busy_s - mine) / wall if wall > 0 else 0.0


def sample_gpus() -> tuple[GpuSample, ...]:
    """Ask the driver about every GPU. Empty where there is no ``nvidia-smi``."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    pids: dict[str, list[int]] = {}
    for uuid, pid in _query(program, "--query-compute-apps=gpu_uuid,pid"):
        pids.setdefault(uuid, []).append(int(pid))
    rows = _query(program, "--query-gpu=uuid,name,clocks.sm,temperature.gpu,power.draw")
    return tuple(
        GpuSample(
            uuid, name, _number(clock), _number(heat), _number(power), tuple(pids.get(uuid, ()))
        )
        for uuid, name, clock, heat, power in rows
    )


def _query(program: str, query: str) -> list[list[str]]:
    text = subprocess.run(
        [program, query, "--format=csv,noheader,nounits"],
        capture_output=True, text=True, timeout=20, check=True,
    ).stdout  # fmt: skip
    return [
        [cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip()
    ]


def _number(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:  # "[N/A]" on devices without the sensor
        return float("nan")
