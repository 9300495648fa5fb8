"""Both rules on counts whose verdict is known."""

import numpy as np
import pytest

from specpilot.errors import InvalidInput
from specpilot.harness.token_forcing.margins import RequestMargins
from specpilot.harness.token_forcing.rules import Units, event_rule, excess_p, rate_rule, units


def margins(prompt: str, values: list[float]) -> RequestMargins:
    array = np.array(values, dtype=np.float32)
    ids = np.zeros((len(array), 1), dtype=np.int32)
    return RequestMargins(prompt, array, ids, np.zeros((len(array), 1), dtype=np.float32))


def counts(
    requests: int, tokens: int = 512, system: int = 0, stock: int = 0, events: int = 0
) -> Units:
    """``system`` and ``stock`` mismatches and ``events`` of the system in every request."""
    n = np.full(requests, tokens)
    zero = np.zeros(requests, int)
    return Units(
        tuple(map(str, range(requests))), n, zero + system, zero + events, n, zero + stock, zero
    )


@pytest.mark.parametrize(("stock", "rejected_at"), [(0, 5), (2, 9), (5, 13), (10, 20), (20, 33)])
def test_conditional_binomial_rejects_from_the_known_count(stock: int, rejected_at: int) -> None:
    assert excess_p(rejected_at, 1.0, stock, 1.0) < 0.05
    assert excess_p(rejected_at - 1, 1.0, stock, 1.0) >= 0.05


def test_units_add_up_repeats_of_one_prompt() -> None:
    found = units(
        [margins("a", [0, 0]), margins("b", [0, 0])],
        [margins("a", [0, 0.2]), margins("b", [0, 0]), margins("a", [3.0, 0.2])],
        near_tie=0.1,
        large=1.0,
    )
    assert found.prompts == ("a", "b")
    assert found.tokens.tolist() == [4, 2]
    assert found.mismatches.tolist() == [3, 0]
    assert found.events.tolist() == [1, 0]


def test_units_refuse_arms_of_other_prompts() -> None:
    with pytest.raises(InvalidInput, match="1 of 2 prompts"):
        units([margins("a", [0]), margins("b", [0])], [margins("a", [0])], 0.1, 1.0)


def test_no_mismatch_passes_from_36_requests_and_is_not_enough_below() -> None:
    assert rate_rule(counts(36)).status == "pass"
    assert rate_rule(counts(34)).status == "not_enough"


def test_under_30_requests_is_never_a_pass() -> None:
    generous = rate_rule(counts(29), limit=0.4)
    assert generous.bound is not None and generous.bound.upper < 0.4
    assert generous.status == "not_enough"
    assert generous.coverage is None


@pytest.mark.parametrize("requests", [0, 1])
def test_no_interval_without_two_requests(requests: int) -> None:
    found = rate_rule(counts(requests))
    assert (found.status, found.bound) == ("not_enough", None)


def test_a_fault_of_the_papers_size_fails_the_rate_rule() -> None:
    assert rate_rule(counts(60, system=12, stock=4)).status == "fail"  # 2.3 % against 0.8 %


def test_equal_rates_pass_the_rate_rule() -> None:
    rng = np.random.default_rng(2)
    n = np.full(240, 512)
    zero = np.zeros(240, int)
    m1, m0 = rng.binomial(n, 0.006), rng.binomial(n, 0.006)
    found = rate_rule(Units(tuple(map(str, range(240))), n, m1, zero, n, m0, zero))
    assert found.status == "pass"
    assert found.coverage is not None and found.coverage > 0.9


def test_explained_events_do_not_reject_and_unexplained_do() -> None:
    found = counts(60, events=1)
    explained = event_rule(found, audited=60, unexplained=0, stock_audited=0, stock_unexplained=0)
    assert (explained.status, explained.events) == ("pass", 60)
    assert explained.p_requests < 1e-10 and explained.p_sign_flip < 0.001
    rejected = event_rule(found, audited=60, unexplained=8, stock_audited=0, stock_unexplained=0)
    assert rejected.status == "fail"


def test_a_capped_audit_counts_for_the_share_it_saw() -> None:
    """200 of 6000 events audited, 5 unexplained: at the same density all would hold 150."""
    found = counts(60, events=100)
    stock = Units(
        found.prompts,
        found.tokens,
        found.mismatches,
        found.events,
        found.stock_tokens,
        found.stock_mismatches,
        np.full(60, 1),
    )
    capped = event_rule(stock, audited=200, unexplained=5, stock_audited=60, stock_unexplained=5)
    assert capped.status == "fail"
    whole = event_rule(stock, audited=6000, unexplained=5, stock_audited=60, stock_unexplained=5)
    assert whole.status == "pass"


def test_events_in_one_request_alone_do_not_move_the_request_test() -> None:
    zero, n = np.zeros(60, int), np.full(60, 512)
    events = np.eye(60, dtype=int)[0] * 30
    found = Units(tuple(map(str, range(60))), n, events, events, n, zero, zero)
    verdict = event_rule(found, audited=30, unexplained=0, stock_audited=0, stock_unexplained=0)
    assert verdict.p_requests == pytest.approx(0.5)
    assert verdict.p_sign_flip > 0.4
