"""The interval, the looks and the promotion rule have the error rates that they promise."""

import math

import numpy as np
import pytest

from specpilot.errors import InvalidInput
from specpilot.harness.controller.design import Design
from specpilot.harness.controller.promotion import bias, decide, hopeless, threshold
from specpilot.harness.controller.simulation import simulate_decision
from specpilot.harness.controller.statistics import (
    critical_values,
    estimate,
    interval,
    lower_bound,
    upper_bound,
)


def test_estimate_is_mean_and_standard_error() -> None:
    est = estimate([0.01, 0.02, 0.03, 0.04])
    assert est.mean == pytest.approx(0.025)
    assert est.se == pytest.approx(np.std([0.01, 0.02, 0.03, 0.04], ddof=1) / 2)
    assert est.gain == pytest.approx(math.expm1(0.025))


@pytest.mark.parametrize("values", [[], [0.1], [0.1, math.nan], [0.1, math.inf]])
def test_estimate_refuses_what_has_no_interval(values: list[float]) -> None:
    with pytest.raises(InvalidInput):
        estimate(values)


def test_critical_values_of_one_look_are_students() -> None:
    assert critical_values((8,))[0] == pytest.approx(1.895, abs=1e-3)


def test_critical_values_of_two_looks_are_obrien_flemings() -> None:
    assert critical_values((6, 12)) == pytest.approx((3.92, 1.87), abs=0.01)


def test_critical_values_of_more_looks() -> None:
    assert critical_values((4, 6, 8)) == pytest.approx((5.62, 2.84, 2.33), rel=0.02)


@pytest.mark.parametrize("looks", [(), (1,), (8, 8), (8, 4)])
def test_looks_must_increase(looks: tuple[int, ...]) -> None:
    with pytest.raises(InvalidInput, match="Looks"):
        critical_values(looks)


@pytest.mark.parametrize("n", [4, 8, 12])
def test_the_lower_bound_covers_at_95_percent(n: int) -> None:
    rng = np.random.default_rng(n)
    rows = rng.normal(0.02, 0.01, (4000, n))
    critical = critical_values((n,))[0]
    covered = np.mean(
        [lower_bound(estimate(list(row)), critical) <= math.expm1(0.02) for row in rows]
    )
    assert 0.938 <= covered <= 0.962


def test_two_looks_together_spend_5_percent() -> None:
    rng = np.random.default_rng(3)
    first, second = critical_values((6, 12))
    false = 0
    for row in rng.normal(0.0, 0.01, (4000, 12)):
        early, late = estimate(list(row[:6])), estimate(list(row))
        false += lower_bound(early, first) > 0 or lower_bound(late, second) > 0
    assert false / 4000 <= 0.058


def test_bounds_order_and_interval_are_ratios() -> None:
    est = estimate([0.01, 0.03, 0.02, 0.02])
    low, high = interval(est)
    assert lower_bound(est, critical_values((4,))[0]) < est.gain < upper_bound(est)
    assert low < math.exp(est.mean) < high


def test_threshold_is_one_percent_plus_twice_the_noise() -> None:
    assert threshold(0.002, diverged=False) == pytest.approx(0.014)


def test_threshold_of_diverging_outputs_is_three_percent_or_more() -> None:
    assert threshold(0.002, diverged=True) == pytest.approx(0.03)
    assert threshold(0.02, diverged=True) == pytest.approx(0.05)


def test_a_clear_gain_is_promoted_at_the_first_look() -> None:
    assert decide([0.2] * 5 + [0.21], (6, 12), 0.001, diverged=False).outcome == "promote"


def test_cpu_time_that_was_taken_from_both_by_chance_costs_nothing() -> None:
    ratios, chance = [0.02, 0.0201] * 4, [0.1, -0.12, 0.05, -0.02] * 2
    assert bias(chance, 1.9) == 0.0
    assert decide(ratios, (8,), 0.0001, diverged=False, taken_cores=chance).outcome == "promote"


def test_cpu_time_that_was_taken_from_one_must_be_exceeded() -> None:
    ratios, taken = [0.10, 0.101] * 4, [0.09, 0.11] * 4
    assert bias(taken, 1.9) == pytest.approx(0.1 / 0.9, abs=0.01)
    decision = decide(ratios, (8,), 0.0001, diverged=False, taken_cores=taken)
    assert decision.outcome == "reject" and "others took" in decision.reason
    assert bias([3.0, 3.1], 1.9) == pytest.approx(9.0)


def test_an_unclear_gain_waits_for_the_second_look() -> None:
    ratios = [0.01, 0.03, 0.02, 0.00, 0.04, 0.02]
    assert decide(ratios, (6, 12), 0.001, diverged=False).outcome == "continue"
    assert decide(ratios * 2, (6, 12), 0.001, diverged=True).outcome == "reject"


def test_a_hopeless_candidate_is_rejected_early_and_no_other() -> None:
    decision = hopeless([-0.1, -0.11, -0.1, -0.09], 0.001, diverged=False)
    assert decision is not None and decision.outcome == "reject"
    assert "More cycles cannot help" in decision.reason
    assert hopeless([0.0, 0.03, 0.01, -0.01], 0.001, diverged=False) is None


def test_a_gain_of_two_percent_counts_unless_outputs_diverge() -> None:
    ratios = [0.02, 0.0201] * 4
    assert decide(ratios, (8,), 0.0001, diverged=False).outcome == "promote"
    assert decide(ratios, (8,), 0.0001, diverged=True).outcome == "reject"


@pytest.mark.parametrize("looks", [(8,), (6, 12)])
@pytest.mark.parametrize("sd_pair", [0.003, 0.01, 0.03])
def test_a_against_a_is_promoted_at_most_once_in_1000_rounds(
    looks: tuple[int, ...], sd_pair: float
) -> None:
    design = Design(looks=looks, requests_per_block=1, tokens=48, seed=0)
    rng = np.random.default_rng(11)
    outcomes = [simulate_decision(rng, design, 0.0, sd_pair).outcome for _ in range(1000)]
    assert outcomes.count("promote") <= 1


@pytest.mark.parametrize("looks", [(8,), (6, 12)])
def test_three_percent_is_promoted_with_power_90_percent(looks: tuple[int, ...]) -> None:
    design = Design(looks=looks, requests_per_block=1, tokens=48, seed=0)
    rng = np.random.default_rng(12)
    outcomes = [simulate_decision(rng, design, 0.03, 0.01).outcome for _ in range(1000)]
    assert outcomes.count("promote") >= 900
