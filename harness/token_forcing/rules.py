"""The two rules of token forcing: how many mismatches, and how many that nothing explains.

Rate rule: the system's mismatch rate is at most 0.5 points above stock's. Event rule: no excess
of large-margin events that stock's own numeric variants leave unexplained. Both take requests
(prompts) as the unit of replication. SpecPilot paper, Figure 4.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy import stats

from specpilot.errors import InvalidInput
from specpilot.harness.token_forcing.coverage import coverage_at
from specpilot.harness.token_forcing.intervals import AFFECTED_RATE, DifferenceBound, mover_upper
from specpilot.harness.token_forcing.margins import RequestMargins

__all__ = [
    "EventVerdict",
    "MINIMUM_REQUESTS",
    "RateVerdict",
    "Units",
    "event_rule",
    "excess_p",
    "rate_rule",
    "unexplained_p",
    "units",
]

MINIMUM_REQUESTS = 30
"""Below this count no interval here has its coverage: the rate rule answers ``not_enough``."""

SIGN_FLIPS = 9_999
SIGN_FLIP_SEED = 20_260_803

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Units:
    """Counts of both arms per unit of replication, paired by prompt. All are [units] int64."""

    prompts: tuple[str, ...]
    tokens: Counts
    mismatches: Counts
    events: Counts
    stock_tokens: Counts
    stock_mismatches: Counts
    stock_events: Counts


def units(
    stock: Sequence[RequestMargins],
    system: Sequence[RequestMargins],
    near_tie: float,
    large: float,
) -> Units:
    """Count tokens, mismatches (margin > ``near_tie``) and events (margin > ``large``) by prompt.

    Repeated requests of one prompt add up to one unit. Raises ``InvalidInput`` if the arms do not
    hold the same prompts.
    """

    def count(arm: Sequence[RequestMargins]) -> dict[str, Counts]:
        by_prompt: dict[str, Counts] = {}
        for request in arm:
            found = [
                request.tokens,
                int((request.margins > near_tie).sum()),
                int((request.margins > large).sum()),
            ]
            by_prompt[request.prompt] = by_prompt.get(request.prompt, 0) + np.array(found)
        return by_prompt

    ours, theirs = count(system), count(stock)
    if ours.keys() != theirs.keys():
        raise InvalidInput(
            f"The arms share {len(ours.keys() & theirs.keys())} of {len(ours.keys() | theirs)} "
            "prompts.",
            hint="Audit both arms on the same prompts.",
        )
    prompts = tuple(theirs)
    a = np.array([ours[p] for p in prompts], dtype=np.int64).reshape(-1, 3)
    b = np.array([theirs[p] for p in prompts], dtype=np.int64).reshape(-1, 3)
    return Units(prompts, a[:, 0], a[:, 1], a[:, 2], b[:, 0], b[:, 1], b[:, 2])


@dataclass(frozen=True, slots=True)
class RateVerdict:
    """What the rate rule found. ``coverage`` is the true coverage of ``bound.upper`` at this
    count of requests and tokens, None under the smallest count of the table."""

    status: Literal["pass", "fail", "not_enough"]
    requests: int
    tokens: int
    stock_tokens: int
    mismatches: int
    stock_mismatches: int
    bound: DifferenceBound | None
    limit: float
    coverage: float | None


def rate_rule(
    found: Units,
    *,
    limit: float = 0.005,
    level: float = 0.975,
    affected_rate: float = AFFECTED_RATE,
    minimum: int = MINIMUM_REQUESTS,
    correlated: bool = True,
) -> RateVerdict:
    """Accept iff the upper bound of the rate difference is at most ``limit``.

    ``level`` is the bound's nominal one-sided level; 0.975 gives about 95 % true coverage, the
    "95 % confidence" of the rule. Under ``minimum`` requests the answer is ``not_enough``, as it
    is where no mismatch was seen in either arm but the count cannot bound the rate by ``limit``.
    """
    requests = len(found.prompts)
    tokens, stock_tokens = int(found.tokens.sum()), int(found.stock_tokens.sum())
    mismatches = int(found.mismatches.sum())
    stock_mismatches = int(found.stock_mismatches.sum())
    bound = None
    status: Literal["pass", "fail", "not_enough"] = "not_enough"
    if requests >= 2:
        bound = mover_upper(
            found.mismatches,
            found.tokens,
            found.stock_mismatches,
            found.stock_tokens,
            level=level,
            affected_rate=affected_rate,
            correlated=correlated,
        )
        nothing_seen = mismatches == 0 and stock_mismatches == 0
        if requests >= minimum and bound.upper <= limit:
            status = "pass"
        elif requests >= minimum and not nothing_seen:
            status = "fail"
    return RateVerdict(
        status=status,
        requests=requests,
        tokens=tokens,
        stock_tokens=stock_tokens,
        mismatches=mismatches,
        stock_mismatches=stock_mismatches,
        bound=bound,
        limit=limit,
        coverage=coverage_at(requests, min(tokens, stock_tokens) / max(requests, 1)),
    )


def excess_p(count: int, exposure: float, stock_count: int, stock_exposure: float) -> float:
    """Return the one-sided p that ``count`` exceeds stock's under equal rates.

    Conditional binomial (Przyborowski and Wilenski 1940): given the sum, the system's count is
    Bin(sum, exposure / (exposure + stock_exposure)).
    """
    total = count + stock_count
    if total == 0:
        return 1.0
    share = exposure / (exposure + stock_exposure)
    return float(stats.binom.sf(count - 1, total, share))


def _sign_flip_p(differences: npt.NDArray[np.float64]) -> float:
    """One-sided permutation p that the mean of paired differences is above 0 (seeded)."""
    moved = differences[differences != 0]
    if moved.sum() <= 0:
        return 1.0
    rng = np.random.default_rng(SIGN_FLIP_SEED)
    signs = rng.integers(0, 2, (SIGN_FLIPS, len(moved)), dtype=np.int8) * 2 - 1
    reached = int((signs @ moved >= moved.sum() - 1e-9).sum())
    return (reached + 1) / (SIGN_FLIPS + 1)


@dataclass(frozen=True, slots=True)
class EventVerdict:
    """What the event rule found: raw counts and, after the audit, unexplained ones.

    ``p_*`` are one-sided: requests with at least one event (exact, on discordant prompts), events
    by sign flips of per-request differences, and unexplained events per token. Up to ``audited``
    events of each arm were looked at.
    """

    status: Literal["pass", "fail"]
    events: int
    stock_events: int
    requests_with_event: int
    stock_requests_with_event: int
    p_requests: float
    p_sign_flip: float
    audited: int
    stock_audited: int
    unexplained: int
    stock_unexplained: int
    p_unexplained: float
    level: float


def unexplained_p(
    found: Units, *, audited: int, unexplained: int, stock_audited: int, stock_unexplained: int
) -> float:
    """Return the one-sided p that unexplained events are denser than stock's own.

    Audited are samples of each arm's events (all of them up to 200). Exposure is tokens times the
    share of the arm's events that were audited, so that a capped sample counts for what it is.
    """

    def exposure(tokens: Counts, events: Counts, seen: int) -> float:
        total = int(events.sum())
        return float(tokens.sum()) * (seen / total if total else 1.0)

    return excess_p(
        unexplained,
        exposure(found.tokens, found.events, audited),
        stock_unexplained,
        exposure(found.stock_tokens, found.stock_events, stock_audited),
    )


def event_rule(
    found: Units,
    *,
    audited: int,
    unexplained: int,
    stock_audited: int,
    stock_unexplained: int,
    level: float = 0.005,
) -> EventVerdict:
    """Reject iff the system's unexplained events exceed stock's own at ``level``.

    Token counts are used for the unexplained (``unexplained_p``), although events may come in
    runs: an honest system has next to none, and one request full of them is a fault, not noise.
    The raw counts are reported with tests that stand runs, and reject nothing alone: an excess
    that stock's own variants explain is honest numerics.
    """
    events, stock_events = int(found.events.sum()), int(found.stock_events.sum())
    tokens, stock_tokens = int(found.tokens.sum()), int(found.stock_tokens.sum())
    only = int(((found.events > 0) & (found.stock_events == 0)).sum())
    stock_only = int(((found.events == 0) & (found.stock_events > 0)).sum())
    p_unexplained = unexplained_p(
        found,
        audited=audited,
        unexplained=unexplained,
        stock_audited=stock_audited,
        stock_unexplained=stock_unexplained,
    )
    scaled = found.stock_events * (tokens / stock_tokens)
    return EventVerdict(
        status="fail" if p_unexplained < level else "pass",
        events=events,
        stock_events=stock_events,
        requests_with_event=int((found.events > 0).sum()),
        stock_requests_with_event=int((found.stock_events > 0).sum()),
        p_requests=excess_p(only, tokens, stock_only, stock_tokens),
        p_sign_flip=_sign_flip_p(found.events - scaled),
        audited=audited,
        stock_audited=stock_audited,
        unexplained=unexplained,
        stock_unexplained=stock_unexplained,
        p_unexplained=p_unexplained,
        level=level,
    )
