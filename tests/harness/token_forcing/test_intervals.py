"""The interval against known answers and against an independent calculation."""

import math

import numpy as np
import pytest
from scipy import stats

from specpilot.harness.token_forcing.coverage import (
    LEVEL,
    LIMIT,
    REQUESTS,
    TOKENS,
    WORLDS,
    coverage,
    coverage_at,
    simulate,
)
from specpilot.harness.token_forcing.intervals import mover_upper, zero_bound


def test_zero_of_48_requests_bounds_the_affected_share_like_clopper_pearson() -> None:
    share = stats.beta.ppf(0.975, 1, 48)
    assert zero_bound(48, 512, 0.975, 0.05) == pytest.approx(share * 0.05)


def test_zero_bound_becomes_the_rule_of_three_for_tokens_in_short_outputs() -> None:
    assert zero_bound(1000, 4, 0.95, 0.05) == pytest.approx(3.0 / 4000, rel=0.01)


def test_mover_agrees_with_the_formula_written_out() -> None:
    m1, n1 = [3, 0, 5, 2], [400, 300, 500, 450]
    m0, n0 = [2, 1, 3, 1], [410, 310, 480, 400]
    g = 4

    def arm(m: list[int], n: list[int]) -> tuple[float, list[float]]:
        r = sum(m) / sum(n)
        return r, [(a - r * b) / (sum(n) / g) for a, b in zip(m, n, strict=True)]

    (r1, u1), (r0, u0) = arm(m1, n1), arm(m0, n0)
    v1, v0 = (sum(x * x for x in u) / (g - 1) / g for u in (u1, u0))
    rho = sum(a * b for a, b in zip(u1, u0, strict=True)) / (g - 1) / g / math.sqrt(v1 * v0)
    t = 3.182446305284263  # Student t, 3 degrees of freedom, 0.975
    above = r1 * math.exp(t * math.sqrt(v1) / r1) - r1
    below = r0 - r0 * math.exp(-t * math.sqrt(v0) / r0)
    upper = r1 - r0 + math.sqrt(above**2 - 2 * rho * above * below + below**2)

    bound = mover_upper(m1, n1, m0, n0, affected_rate=1e-9)
    assert bound.upper == pytest.approx(upper, rel=1e-9)
    assert bound.difference == pytest.approx(r1 - r0)
    assert not bound.exact


def test_identical_arms_differ_by_less_than_independent_ones() -> None:
    m, n = np.array([4, 0, 2, 7, 1, 3] * 20), np.full(120, 512)
    assert mover_upper(m, n, m, n).upper < mover_upper(m, n, m, n, correlated=False).upper


def test_one_mismatch_never_bounds_lower_than_none() -> None:
    n = np.full(60, 512)
    none, one = np.zeros(60, int), np.eye(60, dtype=int)[0]
    assert mover_upper(one, n, none, n).upper >= mover_upper(none, n, none, n).upper


def test_zero_in_both_arms_gives_the_exact_bound() -> None:
    n, none = np.full(48, 96), np.zeros(48, int)
    bound = mover_upper(none, n, none, n)
    assert bound.exact
    assert bound.upper == pytest.approx(zero_bound(48, 96, 0.975))


@pytest.mark.parametrize("world", WORLDS, ids=lambda w: w.name)
def test_the_bound_covers_the_limit_in_short_simulations(world) -> None:
    found = coverage(world, requests=120, tokens=512, draws=300, seed=5)
    assert found["coverage"] >= 0.90  # four standard errors under 0.95
    assert found["lossless_accepted"] >= 0.9


@pytest.mark.parametrize(("requests", "missed"), [(48, 0.30), (240, 0.002)])
def test_an_excess_packed_beyond_the_assumption_is_missed_as_often_as_stated(
    requests: int, missed: float
) -> None:
    """0.5 points in requests that mismatch in 20 % of their tokens: documented at zero_bound."""
    rng = np.random.default_rng(6)
    n, none = np.full(requests, 512), np.zeros(requests, int)
    accepted = 0
    for _ in range(1000):
        hit = rng.random(requests) < LIMIT / 0.2
        bound = mover_upper(rng.binomial(n, 0.2 * hit), n, none, n)
        accepted += bound.upper <= LIMIT
    assert accepted / 1000 == pytest.approx(missed, abs=0.045)


def test_simulated_rates_are_the_ones_asked_for() -> None:
    rng = np.random.default_rng(0)
    for world in WORLDS:
        m1, n1, m0, n0 = simulate(world, 20_000, 512, LIMIT, rng)
        assert m1.sum() / n1.sum() == pytest.approx(world.stock_rate + LIMIT, rel=0.1)
        assert m0.sum() / n0.sum() == pytest.approx(world.stock_rate, rel=0.1)


def test_coverage_is_quoted_at_the_tabulated_size_below() -> None:
    assert coverage_at(29, 512) is None
    assert coverage_at(59, 600) == coverage_at(48, 512)
    assert coverage_at(5000, 9) == coverage_at(REQUESTS[-1], TOKENS[0])


@pytest.mark.slow
def test_the_committed_coverage_table_is_what_the_script_makes() -> None:
    draws = 1000
    for requests in (30, 120, 240):
        for tokens in (128, 512):
            found = min(coverage(w, requests, tokens, draws, 4)["coverage"] for w in WORLDS)
            quoted = coverage_at(requests, tokens)
            assert quoted is not None
            assert abs(found - quoted) < 4 * math.sqrt(0.05 * 0.95 / draws) + 0.01
    assert LEVEL == 0.975


@pytest.mark.parametrize("tokens", TOKENS)
def test_the_committed_coverage_of_240_requests_is_95_percent(tokens: int) -> None:
    """Lowest over the worlds, up to the simulation's own error (4000 draws: 0.0034)."""
    quoted = coverage_at(240, tokens)
    assert quoted is not None and quoted >= 0.95 - 2 * 0.0034
