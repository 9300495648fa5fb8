"""The ceiling and the three factors of the gap."""

import time

import pytest

from specpilot.errors import InvalidInput
from specpilot.harness.cost_model import (
    AcceptanceProfile,
    ModelShape,
    ceiling,
    gap,
    load_hardware,
    read_drafter,
)
from specpilot.harness.cost_model.ceiling import best_rows
from specpilot.types import Regime

from .configs27b import DRAFTER_27B, TARGET_27B

TARGET = ModelShape.from_config(TARGET_27B)
DRAFTER = read_drafter(DRAFTER_27B, "dflash", TARGET)
REGIME = Regime(1, 1024, 1024)
TREES = AcceptanceProfile.of({8: 4.6, 16: 5.03, 32: 5.5, 64: 5.8}, "made up for the test")


def best(**change):
    arguments = {"ar_ms": 20.0, "best_tree": TREES, "block": 8, "rows": (8, 16, 32, 64)} | change
    return ceiling(TARGET, DRAFTER, load_hardware("H100"), REGIME, **arguments)


def test_the_factors_multiply_to_the_whole_gap() -> None:
    top = best()
    tokens, kernels, step = 4.25, 21.0, 23.1
    found = gap(top, tokens_per_pass=tokens, kernels_ms=kernels, step_ms=step)
    speedup = tokens * top.ar_ms / step
    assert found.whole == pytest.approx(top.speedup_over_ar / speedup)
    assert found.overhead == pytest.approx(1.1)
    assert found.tokens == pytest.approx(top.tokens_per_pass / tokens)
    assert sum(found.log_shares().values()) == pytest.approx(1)
    assert found.largest == "tokens"


def test_the_ceiling_lies_above_a_system_with_slower_kernels_or_fewer_tokens() -> None:
    top = best()
    assert gap(top, tokens_per_pass=5.0, kernels_ms=22, step_ms=24).whole > 1
    assert top.speedup_over_ar == pytest.approx(top.tokens_per_pass * 20.0 / top.floor_ms)


def test_the_chosen_rows_pay_for_themselves() -> None:
    def steps(r: int) -> float:
        return {8: 10.0, 16: 10.2, 32: 14.0, 64: 20.0}[r]

    assert best_rows(TREES, (8, 16, 32, 64), steps) == 16
    assert best_rows(TREES, (64, 8), lambda r: 10.0) == 64
    assert best_rows(AcceptanceProfile.of({8: 3.0}, "flat"), (8, 16), lambda r: 10.0) == 8


def test_profiles_interpolate_between_points_and_hold_beyond_them() -> None:
    assert TREES.at(16) == 5.03
    assert 4.6 < TREES.at(12) < 5.03
    assert TREES.at(1) == 1.0
    assert 1.0 < TREES.at(4) < 4.6
    assert TREES.at(1000) == 5.8
    chain = AcceptanceProfile.geometric(0.5, 4)
    assert chain.tokens_per_pass == (1.0, 1.5, 1.75, 1.875)


@pytest.mark.parametrize(
    ("points", "field"),
    [({}, "rows"), ({8: 9.0}, "tokens_per_pass"), ({8: 0.5}, "tokens_per_pass"), ({0: 1}, "rows")],
)
def test_impossible_profiles_are_refused(points: dict[int, float], field: str) -> None:
    with pytest.raises(InvalidInput, match=field):
        AcceptanceProfile.of(points, "test")


def test_impossible_measurements_are_refused() -> None:
    with pytest.raises(InvalidInput, match="ar_ms"):
        best(ar_ms=0.0)
    with pytest.raises(InvalidInput, match="kernels_ms"):
        gap(best(), tokens_per_pass=4, kernels_ms=30, step_ms=20)
    with pytest.raises(InvalidInput, match="step_ms"):
        gap(best(), tokens_per_pass=4, kernels_ms=30, step_ms=float("nan"))
    with pytest.raises(InvalidInput, match="rows"):
        best(rows=())


def test_a_ceiling_from_configs_takes_less_than_50_ms() -> None:
    def whole() -> None:
        target = ModelShape.from_config(TARGET_27B)
        drafter = read_drafter(DRAFTER_27B, "dflash", target)
        ceiling(target, drafter, load_hardware("H100"), REGIME, ar_ms=20, best_tree=TREES,
                block=8, rows=(8, 16, 32, 64))  # fmt: skip

    whole()
    times = []
    for _ in range(5):
        start = time.process_time()
        whole()
        times.append(time.process_time() - start)
    assert min(times) < 0.050
