"""Telemetry sees what processes use."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from specpilot.harness.controller.telemetry import (
    CpuSample,
    descendants,
    foreign_cores,
    sample_cpu,
)


@pytest.fixture
def burner() -> Iterator[int]:
    """A child process that computes until the test ends."""
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    yield child.pid
    child.kill()
    child.wait()


def test_a_process_tree_is_charged_with_what_it_uses(burner: int) -> None:
    before = sample_cpu([burner, os.getpid()])
    deadline = time.monotonic() + 20
    after = before
    while after.trees_s[burner] - before.trees_s[burner] < 0.1 and time.monotonic() < deadline:
        time.sleep(0.05)
        after = sample_cpu([burner, os.getpid()])
    used = after.trees_s[burner] - before.trees_s[burner]
    assert used >= 0.1
    ticks = 0.05  # the two trees are read one after the other, in steps of 10 ms
    assert after.trees_s[os.getpid()] - before.trees_s[os.getpid()] >= used - ticks
    assert burner in descendants(os.getpid())


def test_foreign_cores_leave_out_the_own_tree() -> None:
    before = CpuSample(0.0, 10.0, {1: 2.0})
    after = CpuSample(2.0, 13.0, {1: 3.0})
    assert foreign_cores(before, after, 1) == pytest.approx(1.0)
    assert foreign_cores(before, before, 1) == 0.0


def test_a_tree_that_has_ended_uses_nothing() -> None:
    assert sample_cpu([2**22 - 1]).trees_s == {2**22 - 1: 0.0}
