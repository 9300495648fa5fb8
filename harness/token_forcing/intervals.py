"""Intervals for mismatch rates whose unit of replication is the request.

After the first different token two arms write different texts, so their tokens are no pairs; the
requests are, by prompt. A rate is a ratio of sums (output lengths are random), its variance that
of the linearised per-request influences.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import stats

__all__ = ["AFFECTED_RATE", "DifferenceBound", "mover_upper", "zero_bound"]

AFFECTED_RATE = 0.05
"""Assumed mismatch rate inside an affected request: over twice the 2.0-2.4 % of the faults in the
SpecPilot paper (Figure 4)."""


@dataclass(frozen=True, slots=True)
class DifferenceBound:
    """Rates of both arms with two-sided limits, and the upper bound of their difference.

    All are shares of tokens. The arms' limits leave out ``1 - level`` on each side; ``upper`` is
    one-sided at ``level``.
    """

    rate: float
    rate_low: float
    rate_high: float
    stock_rate: float
    stock_low: float
    stock_high: float
    difference: float
    upper: float
    level: float
    exact: bool


def zero_bound(
    requests: int,
    tokens_per_request: float,
    level: float,
    affected_rate: float = AFFECTED_RATE,
) -> float:
    """Return the upper bound of a mismatch rate when no request shows a mismatch.

    Zero of G requests bounds the share of affected requests by Clopper-Pearson,
    ``1 - (1 - level)^(1/G)``. From requests to tokens there is no bound without an assumption:
    what was never seen could fill whole requests. Assumed is that an affected request mismatches
    in at most ``affected_rate`` of its tokens. Below one mismatch a request the assumption is
    void and one token takes its place, which gives the rule of three for tokens.

    Where the assumption fails the bound may too: an excess d packed into requests that mismatch
    in a share c of their tokens shows in none of G requests with probability (1 - d/c)^G. For
    d = 0.5 points and c = 20 % that is 0.30 of 48 requests and 0.002 of 240; and such requests
    hold large-margin events, of which the event rule needs 8.
    """
    share = -np.expm1(np.log1p(-level) / requests)
    return float(share * max(affected_rate, 1.0 / tokens_per_request))


def _influence(
    mismatches: npt.NDArray[np.float64], tokens: npt.NDArray[np.float64]
) -> tuple[float, npt.NDArray[np.float64]]:
    rate = mismatches.sum() / tokens.sum()
    return float(rate), (mismatches - rate * tokens) / tokens.mean()


def mover_upper(
    mismatches: npt.ArrayLike,
    tokens: npt.ArrayLike,
    stock_mismatches: npt.ArrayLike,
    stock_tokens: npt.ArrayLike,
    *,
    level: float = 0.975,
    affected_rate: float = AFFECTED_RATE,
    correlated: bool = True,
) -> DifferenceBound:
    """Bound the system's mismatch rate minus stock's from above: MOVER on log-scale limits.

    All four are [requests] counts, paired by prompt. Arm limits are ``r exp(+-t sqrt(v) / r)``;
    they combine with the arms' correlation (Zou and Donner 2008, "Construction of confidence
    limits about effect measures"). ``level`` is nominal: 0.975 covers about 95 % for skewed
    request rates (``coverage.json``). The system's upper limit is never below ``zero_bound``, so
    seeing few mismatches cannot claim more than seeing none; a stock arm without mismatches has
    the exact lower limit 0. ``correlated=False`` treats the arms as independent.
    """
    m1, n1 = np.asarray(mismatches, float), np.asarray(tokens, float)
    m0, n0 = np.asarray(stock_mismatches, float), np.asarray(stock_tokens, float)
    requests = len(m1)
    t = float(stats.t.ppf(level, requests - 1))
    r1, u1 = _influence(m1, n1)
    r0, u0 = _influence(m0, n0)
    v1, v0 = u1.var(ddof=1) / requests, u0.var(ddof=1) / requests
    rho = 0.0
    if correlated and v1 > 0 and v0 > 0:
        covariance = float(u1 @ u0) / (requests - 1) / requests
        rho = float(np.clip(covariance / np.sqrt(v1 * v0), -1, 1))

    def limits(rate: float, variance: float, mean_tokens: float) -> tuple[float, float]:
        floor = zero_bound(requests, mean_tokens, level, affected_rate)
        if rate == 0:
            return 0.0, floor
        spread = np.exp(t * np.sqrt(variance) / rate)
        return rate / spread, max(rate * spread, floor)

    low1, high1 = limits(r1, v1, n1.mean())
    low0, high0 = limits(r0, v0, n0.mean())
    above, below = high1 - r1, r0 - low0
    upper = r1 - r0 + np.sqrt(max(above**2 - 2 * rho * above * below + below**2, 0.0))
    return DifferenceBound(
        rate=r1,
        rate_low=float(low1),
        rate_high=float(min(high1, 1.0)),
        stock_rate=r0,
        stock_low=float(low0),
        stock_high=float(min(high0, 1.0)),
        difference=r1 - r0,
        upper=float(min(upper, 1.0)),
        level=level,
        exact=r1 == 0 or r0 == 0,
    )
