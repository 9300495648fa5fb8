"""The verdict needs all of it: timing, audit, and mechanisms that ran."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from specpilot.harness import patches
from specpilot.harness.controller.design import Design
from specpilot.harness.controller.promotion import decide
from specpilot.harness.controller.receipts import idle_mechanisms, judge, speedups
from specpilot.harness.controller.simulation import measure_simulated

GOOD = decide([0.2, 0.21, 0.2, 0.19], (4,), 0.001, diverged=False)
BAD = decide([0.0, 0.001, 0.0, 0.002], (4,), 0.001, diverged=False)


def audit(status: str) -> Any:
    return SimpleNamespace(status=status, reasons=("because",))


@pytest.mark.parametrize(
    ("decision", "status", "idle", "verdict"),
    [
        (GOOD, "pass", [], "promoted"),
        (GOOD, "fail", [], "rejected"),
        (GOOD, "void", [], "rejected"),
        (GOOD, "not_enough", [], "rejected"),
        (GOOD, None, [], "rejected"),
        (GOOD, "pass", ["tree"], "rejected"),
        (BAD, "pass", [], "rejected"),
        (None, "pass", [], "rejected"),
    ],
)
def test_only_all_checks_together_promote(
    decision: Any, status: str | None, idle: list[str], verdict: str
) -> None:
    found, reason = judge(decision, audit(status) if status else None, idle)
    assert found == verdict
    assert reason


def test_a_mechanism_whose_counter_never_moved_is_named(tmp_path: Any) -> None:
    use = patches.MechanismUse("best_first_tree", {"rows": 16})
    patch = patches.create(tmp_path, "tree", "tree", [use])
    design = Design(looks=(2,), requests_per_block=1, tokens=4, seed=1)
    measured = measure_simulated(design)
    assert idle_mechanisms([patch], [measured]) == ["best_first_tree"]
    measured.b[0] = replace(measured.b[0], meta={"spec_tree_passes": 3})
    assert idle_mechanisms([patch], [measured]) == []


def test_speedups_are_ratios_with_intervals() -> None:
    design = Design(looks=(8,), requests_per_block=1, tokens=16, seed=1)
    measured = measure_simulated(design, gain=0.5, sd=0.01)
    measured.cycles = [
        replace(cycle, ar_over_a=0.7, ar_over_b=0.7 + cycle.log_ratio) for cycle in measured.cycles
    ]
    found = speedups(measured)
    assert found["final_over_stock"]["value"] == pytest.approx(1.5, abs=0.03)
    assert found["final_over_ar"]["low"] < found["final_over_ar"]["value"]
    assert found["stock_over_ar"]["value"] == pytest.approx(2.01, abs=0.01)
