"""Does sampled text follow the target's law? Tests for requests without keyed noise.

All tests use the target's law given the system's own text, restricted to the listed tokens (the
scorer's K best): given that a token is a listed one, its law is softmax(z / T) over the list,
exactly, whatever the rest of the vocabulary does. So each needs nothing but top log-probs, and is
valid under any dependence between tokens:

- predictable sets: is each set of ids, fixed before the token, hit as often as the law says? A
  martingale z-test; strongest against faults that the set resembles.
- randomised PIT: are the tokens' law-transformed values uniform? Against faults of any shape.
- fixed prefix: many independent draws after one context, chi-square against the exact law.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import optimize, stats

from specpilot.errors import InvalidInput, Unsupported
from specpilot.harness.token_forcing.failures import AuditFailure
from specpilot.harness.token_forcing.margins import RequestMargins, TimedOutput
from specpilot.harness.token_forcing.scorer import Scorer

__all__ = [
    "LawVerdict",
    "LawTest",
    "Listed",
    "SamplingLaw",
    "chi_square",
    "detectable_effect",
    "holm",
    "law_suite",
    "listed_law",
    "pit_test",
    "support",
    "tokens_for_bias",
    "z_battery",
]

Floats = npt.NDArray[np.float64]

LISTED = 128
MINIMUM_TOKENS = 500
PIT_SEED = 20_260_805


@dataclass(frozen=True, slots=True)
class SamplingLaw:
    """How the system samples: softmax(z / temperature) over all ids or the ``top_k`` best.

    ``top_p`` below 1 is not audited: engines differ in what they renormalise before it.
    """

    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.temperature < 100 or self.top_k == 0:
            raise InvalidInput(f"Not a sampling law: {self}.", hint="Greedy needs no law.")
        if self.top_p < 1 or self.top_k > LISTED:
            raise Unsupported(
                f"Sampling with top_p {self.top_p} and top_k {self.top_k} cannot be audited.",
                hint=f"Use top_p 1 and top_k -1 or at most {LISTED}.",
            )


def support(scored: RequestMargins, law: SamplingLaw) -> tuple[npt.NDArray[np.int32], Floats]:
    """Ids and logits (below the best) [tokens, K] of the listed tokens that may be sampled."""
    k = scored.top_ids.shape[1] if law.top_k == -1 else min(law.top_k, scored.top_ids.shape[1])
    return scored.top_ids[:, :k], -scored.top_margins[:, :k].astype(np.float64)


@dataclass(frozen=True, slots=True, eq=False)
class Listed:
    """Tokens of sampled text with their law, where the emitted one is listed.

    ``law`` [positions, K] sums to 1 over the listed ids [positions, K], best first; ``column``
    [positions] is the emitted token's. ``left_out`` counts positions whose token is not listed.
    """

    ids: npt.NDArray[np.int32]
    law: Floats
    column: npt.NDArray[np.int64]
    left_out: int


def listed_law(
    outputs: Sequence[TimedOutput], margins: Sequence[RequestMargins], law: SamplingLaw
) -> Listed:
    """Prepare the law tests from ``Scorer.margins(outputs, top=K)`` of the sampled text."""
    ids, laws, columns, left_out = [], [], [], 0
    for output, scored in zip(outputs, margins, strict=True):
        found, logits = support(scored, law)
        weights = np.exp(logits / law.temperature)
        match = found == np.asarray(output.output_ids)[:, None]
        kept = match.any(1)
        left_out += int((~kept).sum())
        ids.append(found[kept])
        laws.append((weights / weights.sum(1, keepdims=True))[kept])
        columns.append(match.argmax(1)[kept])
    return Listed(np.concatenate(ids), np.concatenate(laws), np.concatenate(columns), left_out)


@dataclass(frozen=True, slots=True)
class LawTest:
    """One test: its statistic, two-sided p, and p after Holm over the suite (1 until then)."""

    name: str
    statistic: float
    p: float
    adjusted_p: float = 1.0


def _sets(listed: Listed) -> Mapping[str, npt.NDArray[np.bool_]]:
    rank = np.broadcast_to(np.arange(listed.ids.shape[1]), listed.ids.shape)
    return {
        "best token": rank == 0,
        "second to fourth": (rank >= 1) & (rank <= 3),
        "ninth and later": rank >= 8,
        "ids divisible by 7": listed.ids % 7 == 0,
        "even ids": listed.ids % 2 == 0,
    }


def z_battery(listed: Listed) -> tuple[LawTest, ...]:
    """Test how often predictable sets are hit: Z = sum(1{y in B} - p(B)) / sqrt(sum p (1 - p)).

    Each set depends on the context alone, so the terms are martingale differences and Z is
    standard normal in the limit, however the tokens depend on each other.
    """
    rows = np.arange(len(listed.column))
    tests = []
    for name, chosen in _sets(listed).items():
        p = np.where(chosen, listed.law, 0.0).sum(1)
        variance = float((p * (1 - p)).sum())
        hits = chosen[rows, listed.column]
        z = float((hits - p).sum() / np.sqrt(variance)) if variance > 0 else 0.0
        tests.append(LawTest(name, z, float(2 * stats.norm.sf(abs(z)))))
    return tuple(tests)


def pit_test(listed: Listed, seed: int = PIT_SEED) -> LawTest:
    """Test that U = F(before y) + V p(y) is uniform (Kolmogorov-Smirnov), best token first.

    V is uniform noise of ``seed``. Under the law the U are independent and uniform (Rosenblatt
    1952), although the tokens are not independent.
    """
    rows = np.arange(len(listed.column))
    below = np.cumsum(listed.law, axis=1) - listed.law
    noise = np.random.default_rng(seed).random(len(rows))
    u = below[rows, listed.column] + noise * listed.law[rows, listed.column]
    found = stats.kstest(u, "uniform")
    return LawTest("randomised PIT", float(found.statistic), float(found.pvalue))


def chi_square(counts: npt.ArrayLike, law: npt.ArrayLike, name: str = "fixed prefix") -> LawTest:
    """Test independent draws after one context against their exact law, both [cells].

    Cells whose expectation is below 5 are merged, smallest first. The draws must come from
    independent seeds: tokens of one text are not independent.
    """
    seen, p = np.asarray(counts, float), np.asarray(law, float)
    if seen.shape != p.shape or seen.sum() < 1 or abs(p.sum() - 1) > 1e-6:
        raise InvalidInput(f"chi_square needs counts and a law of equal length, sum {p.sum():g}.")
    order = np.argsort(p, kind="stable")
    expected, starts, held = p[order] * seen.sum(), [0], 0.0
    for i, value in enumerate(expected):
        if held >= 5:
            starts.append(i)
            held = 0.0
        held += value
    if held < 5 and len(starts) > 1:
        starts.pop()
    e = np.add.reduceat(expected, starts)
    o = np.add.reduceat(seen[order], starts)
    statistic = float(((o - e) ** 2 / e).sum())
    return LawTest(name, statistic, float(stats.chi2.sf(statistic, max(len(e) - 1, 1))))


def holm(tests: Sequence[LawTest]) -> tuple[LawTest, ...]:
    """Fill in ``adjusted_p`` (Holm 1979): the suite is rejected where the smallest is below alpha,
    with that error rate over all its tests together."""
    order = sorted(range(len(tests)), key=lambda i: tests[i].p)
    adjusted = [1.0] * len(tests)
    highest = 0.0
    for place, i in enumerate(order):
        highest = max(highest, min(1.0, (len(tests) - place) * tests[i].p))
        adjusted[i] = highest
    return tuple(LawTest(t.name, t.statistic, t.p, a) for t, a in zip(tests, adjusted, strict=True))


@dataclass(frozen=True, slots=True)
class LawVerdict:
    """The suite on one system's sampled text. ``rejected`` iff some ``adjusted_p`` < ``level``.

    ``smallest_bias`` is the logit bias on a seventh of the probability that the z-test finds in
    nine of ten cases with this many tokens, None if none below 8.
    """

    rejected: bool
    level: float
    tests: tuple[LawTest, ...]
    tokens: int
    left_out: int
    smallest_bias: float | None


def law_suite(
    outputs: Sequence[TimedOutput], scorer: Scorer, law: SamplingLaw, *, level: float = 0.01
) -> LawVerdict:
    """Test whether sampled ``outputs`` follow the scorer's law: z battery and PIT, with Holm."""
    listed = listed_law(outputs, scorer.margins(outputs, top=LISTED), law)
    if len(listed.column) < MINIMUM_TOKENS:
        raise AuditFailure(
            "empty_output",
            f"{len(listed.column)} sampled tokens are too few to test a law on; "
            f"{MINIMUM_TOKENS} are needed.",
        )
    tests = holm((*z_battery(listed), pit_test(listed)))
    return LawVerdict(
        rejected=min(t.adjusted_p for t in tests) < level,
        level=level,
        tests=tests,
        tokens=len(listed.column),
        left_out=listed.left_out,
        smallest_bias=_smallest_bias(len(listed.column), level / len(tests)),
    )


def _smallest_bias(tokens: int, level: float) -> float | None:
    def shortfall(log_bias: float) -> float:
        return tokens_for_bias(float(np.exp(log_bias)), level=level) - tokens

    low, high = np.log(1e-4), np.log(8.0)
    if shortfall(high) > 0:
        return None
    return float(np.exp(optimize.brentq(shortfall, low, high, xtol=1e-3)))


def tokens_for_bias(
    bias: float, share: float = 1 / 7, level: float = 0.01, power: float = 0.9
) -> int:
    """Tokens that a one-sided z-test needs to find a logit bias on a set of probability ``share``.

    Two-proportion normal approximation; text whose set probabilities vary needs more.
    """
    moved = share * np.exp(bias) / (share * np.exp(bias) + 1 - share)
    spread = stats.norm.isf(level) * np.sqrt(share * (1 - share)) + stats.norm.ppf(power) * np.sqrt(
        moved * (1 - moved)
    )
    return int(np.ceil((spread / (moved - share)) ** 2))


def detectable_effect(draws: int, dof: int, level: float = 0.05, power: float = 0.8) -> float:
    """The smallest effect size w (Cohen) that a one-sample chi-square of ``draws`` finds."""
    critical = stats.chi2.isf(level, dof)
    noncentrality = optimize.brentq(lambda x: stats.ncx2.sf(critical, dof, x) - power, 1e-6, 1e5)
    return float(np.sqrt(noncentrality / draws))
