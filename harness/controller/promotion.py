"""The promotion rule: which measured gain counts, and which does not.

A candidate is promoted when the lower bound of its gain exceeds 1 % plus twice the noise, or 3 %
when its outputs diverge from those of the system it is compared with, if that is more (SpecPilot
paper, "controller"). Noise is the standard error of the mean of stock against stock under the
same design. The 1 % floor, not the 95 %, is what protects a round with many candidates: forty null
candidates at 1 % per-pair deviation pass "bound above zero" with probability 0.87 and this rule
with less than 0.0003. Nobody should lower it because the noise happens to be small.

A slower stock looks like a faster candidate. What other processes, and the candidate itself while
it idles, computed during A's blocks beyond what was computed during B's could have slowed A by
that share; as far as it is no chance (its own lower bound), the gain must exceed that too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from specpilot.harness.controller.statistics import (
    Estimate,
    critical_values,
    estimate,
    lower_bound,
    upper_bound,
)

__all__ = ["DIVERGED_FLOOR", "FLOOR", "Decision", "bias", "decide", "hopeless", "threshold"]

FLOOR = 0.01
DIVERGED_FLOOR = 0.03

Outcome = Literal["promote", "continue", "reject"]


@dataclass(frozen=True, slots=True)
class Decision:
    """The rule's answer at one look. Gain, bound, threshold and noise are fractions."""

    outcome: Outcome
    estimate: Estimate
    lower: float
    threshold: float
    noise: float
    diverged: bool
    reason: str


def threshold(noise: float, diverged: bool) -> float:
    """Return the gain that the lower bound must exceed, as a fraction."""
    plain = FLOOR + 2 * noise
    return max(DIVERGED_FLOOR, plain) if diverged else plain


MOST_TAKEN = 0.9
"""Cores; beyond it the share of A's time that may have been taken has no useful bound."""


def bias(taken_cores: Sequence[float], critical: float) -> float:
    """Return the gain, as a fraction, that CPU time taken from A but not from B may explain.

    ``taken_cores`` are, by cycle, cores that others used during A's blocks less those during B's.
    A core-second taken delays A by a second at most, so a share c of them explains c / (1 - c).
    """
    est = estimate(taken_cores)
    share = min(max(0.0, est.mean - critical * est.se), MOST_TAKEN)
    return share / (1.0 - share)


def hopeless(log_ratios: Sequence[float], noise: float, *, diverged: bool) -> Decision | None:
    """Return a rejection if even the upper bound is under the threshold, else None.

    Asking early costs nothing: it can only lower the rate of false promotions.
    """
    est = estimate(log_ratios)
    upper, needed = upper_bound(est), threshold(noise, diverged)
    if upper >= needed:
        return None
    reason = (
        f"More cycles cannot help: gain {est.gain:+.1%}, upper bound {upper:+.1%} after {est.n} "
        f"cycles, needed {needed:.1%}."
    )
    lower = lower_bound(est, critical_values((est.n,))[0])
    return Decision("reject", est, lower, needed, noise, diverged, reason)


def decide(
    log_ratios: Sequence[float],
    looks: tuple[int, ...],
    noise: float,
    *,
    diverged: bool,
    taken_cores: Sequence[float] = (),
) -> Decision:
    """Apply the rule at the look that ``len(log_ratios)`` is, which must be one of ``looks``.

    ``noise`` is the standard error of the stock-against-stock mean log-ratio for the cycles of the
    last look. ``taken_cores``: see ``bias``; empty where CPU time was not watched.
    """
    look = looks.index(len(log_ratios))
    last = look == len(looks) - 1
    est = estimate(log_ratios)
    lower = lower_bound(est, critical_values(looks)[look])
    explained = bias(taken_cores, critical_values((est.n,))[0]) if taken_cores else 0.0
    needed = threshold(noise, diverged) + explained
    found = f"gain {est.gain:+.1%}, lower bound {lower:+.1%}, needed {needed:.1%}"
    if explained >= 0.001:
        found += f", {explained:.1%} of it for CPU time that others took from the compared system"
    if diverged:
        found += " (outputs diverge from the compared system's)"
    outcome: Outcome
    if lower > needed:
        outcome, reason = "promote", f"The gain is significant: {found}."
    elif last:
        outcome, reason = "reject", f"The gain is not significant: {found}."
    else:
        outcome, reason = "continue", f"Not decided after {est.n} cycles: {found}."
    return Decision(outcome, est, lower, needed, noise, diverged, reason)
