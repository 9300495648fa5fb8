"""What else the machine was doing while a cycle was timed: CPU time by process tree.

Read from ``/proc``, never from a system under test. Sampling takes a few milliseconds and happens
between timed blocks. GPUs are not watched.
"""

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["CpuSample", "descendants", "foreign_cores", "sample_cpu"]

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_BUSY_FIELDS = (1, 2, 3, 6, 7)  # user, nice, system, irq, softirq of /proc/stat's first line


@dataclass(frozen=True, slots=True)
class CpuSample:
    """CPU seconds used since boot by everything and by each watched tree, and when it was read."""

    at_s: float
    busy_s: float
    trees_s: dict[int, float]


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
