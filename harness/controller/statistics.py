"""What a set of paired cycles says about the ratio of two systems' speed.

Everything is on the natural-log scale until it is reported: a cycle's value is
``log(seconds of A / seconds of B)`` for the same prompts and equal token counts, so positive means
that B is faster. Only Student's t is used: percentile bootstraps cover 88 % at four cycles and
92 % at eight where they promise 95 %.

This module does not know which cycles count; telemetry decides that before, by fixed rules.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from scipy import stats

from specpilot.errors import InvalidInput

__all__ = ["Estimate", "critical_values", "estimate", "interval", "lower_bound", "upper_bound"]


@dataclass(frozen=True, slots=True)
class Estimate:
    """Mean, standard deviation and standard error of ``n`` per-cycle log-ratios."""

    n: int
    mean: float
    sd: float

    @property
    def se(self) -> float:
        return self.sd / math.sqrt(self.n)

    @property
    def gain(self) -> float:
        """The gain as a fraction: 0.03 means that B is 3 % faster."""
        return math.expm1(self.mean)


def estimate(log_ratios: Sequence[float]) -> Estimate:
    """Summarise per-cycle log-ratios. Raises ``InvalidInput`` unless two or more, all finite."""
    n = len(log_ratios)
    if n < 2:
        raise InvalidInput(f"An interval needs at least 2 cycles, got {n}.")
    for value in log_ratios:
        if not math.isfinite(value):
            raise InvalidInput(f"A cycle's log-ratio is {value}; only finite values are averaged.")
    mean = math.fsum(log_ratios) / n
    sd = math.sqrt(math.fsum((value - mean) ** 2 for value in log_ratios) / (n - 1))
    return Estimate(n, mean, sd)


def lower_bound(est: Estimate, critical: float) -> float:
    """Return the one-sided lower bound of the gain, as a fraction, at critical value ``t``."""
    return math.expm1(est.mean - critical * est.se)


def upper_bound(est: Estimate, confidence: float = 0.95) -> float:
    """Return the one-sided upper bound of the gain, as a fraction."""
    return math.expm1(est.mean + float(stats.t.ppf(confidence, est.n - 1)) * est.se)


def interval(est: Estimate, confidence: float = 0.95) -> tuple[float, float]:
    """Return the two-sided t interval of the ratio itself (1.03, not 0.03)."""
    half = float(stats.t.ppf(0.5 + confidence / 2, est.n - 1)) * est.se
    return math.exp(est.mean - half), math.exp(est.mean + half)


@cache
def critical_values(looks: tuple[int, ...], alpha: float = 0.05) -> tuple[float, ...]:
    """Return Student's t critical value of each look, so that all looks together spend ``alpha``.

    ``looks`` are the numbers of cycles at which the bound is read, increasing. One look is a plain
    one-sided test. More are spent after O'Brien and Fleming in the form of Lan and DeMets (1983):
    by information fraction f, ``2 (1 - Phi(z / sqrt(f)))`` is spent with z the two-sided normal
    quantile of ``alpha``; each look's increment becomes a t quantile at its own n (conservative,
    as the looks' correlation is not used). Looks (6, 12) give 3.92 and 1.87.
    """
    if not looks or looks[0] < 2 or any(b <= a for a, b in pairwise(looks)):
        raise InvalidInput(f"Looks must increase and start at 2 cycles or more, got {looks}.")
    if len(looks) == 1:
        return (float(stats.t.ppf(1 - alpha, looks[0] - 1)),)
    z = float(stats.norm.ppf(1 - alpha / 2))
    spent = 0.0
    values = []
    for n in looks:
        total = 2 * float(stats.norm.sf(z / math.sqrt(n / looks[-1])))
        values.append(float(stats.t.isf(total - spent, n - 1)))
        spent = total
    return tuple(values)
