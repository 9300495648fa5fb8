"""The ceiling of a deployment, and the gap to it in three factors that multiply to the whole.

Speedup over AR is tokens per exact pass × AR time per token / step time. The ceiling keeps the
measured AR time and takes everything else at its best: draft once, verify the best tree in one
exact pass, every kernel at its byte floor (SpecPilot paper, phase 0). A system that drafts more
than once for each exact pass, as two-level verification does, can pass it.

τ is ``tokens_per_pass`` everywhere: tokens emitted per exact target pass, bonus included. It is an
input (measured or replayed); no step model can predict it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from specpilot.errors import InvalidInput
from specpilot.harness.cost_model.drafters import DrafterShape
from specpilot.harness.cost_model.floors import ComponentFloor, step_floor, total_ms
from specpilot.harness.cost_model.shapes import ModelShape
from specpilot.types import Hardware, Regime

__all__ = ["AcceptanceProfile", "Ceiling", "Gap", "best_rows", "ceiling", "gap"]


@dataclass(frozen=True, slots=True)
class AcceptanceProfile:
    """τ as a function of the rows of the exact pass, for one drafter, policy and workload.

    ``tokens_per_pass[i]`` belongs to ``rows[i]`` (anchor included); between the points it is
    interpolated over log(rows). ``source`` says where it comes from: replay, live, assumed.
    """

    rows: tuple[int, ...]
    tokens_per_pass: tuple[float, ...]
    source: str

    def __post_init__(self) -> None:
        if len(self.rows) != len(self.tokens_per_pass) or not self.rows:
            raise InvalidInput(
                f"acceptance profile: {len(self.rows)} rows for {len(self.tokens_per_pass)} values "
                "of tokens_per_pass."
            )
        if self.rows[0] < 1 or any(a >= b for a, b in pairwise(self.rows)):
            raise InvalidInput(f"acceptance profile: field 'rows' {self.rows} must rise from >= 1.")
        for rows, tokens in zip(self.rows, self.tokens_per_pass, strict=True):
            if not 1.0 <= tokens <= rows:
                raise InvalidInput(
                    f"acceptance profile: tokens_per_pass is {tokens} at {rows} rows.",
                    hint="It counts the bonus, so it lies between 1 and the rows of the pass.",
                )

    @staticmethod
    def of(points: Mapping[int, float], source: str) -> "AcceptanceProfile":
        """Build a profile from a mapping of rows to τ."""
        rows = tuple(sorted(points))
        return AcceptanceProfile(rows, tuple(float(points[r]) for r in rows), source)

    @staticmethod
    def geometric(acceptance: float, block: int, source: str = "assumed") -> "AcceptanceProfile":
        """A chain whose every draft is accepted with the same probability: τ = Σ a^i."""
        if not 0 <= acceptance <= 1 or block < 1:
            raise InvalidInput(
                f"acceptance {acceptance!r} must lie in [0, 1] and block {block!r} be at least 1."
            )
        values = [sum(acceptance**i for i in range(r)) for r in range(1, block + 1)]
        return AcceptanceProfile(tuple(range(1, block + 1)), tuple(values), source)

    def at(self, rows: int) -> float:
        """τ at ``rows``; 1 row is AR, beyond the last point τ stays what it was there."""
        if rows < 1:
            raise InvalidInput(f"field 'rows' is {rows}; an exact pass has at least one row.")
        points = dict(zip(self.rows, self.tokens_per_pass, strict=True))
        points.setdefault(1, 1.0)
        known = sorted(points)
        if rows >= known[-1]:
            return points[known[-1]]
        high = next(k for k in known if k >= rows)
        if high == rows:
            return points[rows]
        low = known[known.index(high) - 1]
        share = math.log(rows / low) / math.log(high / low)
        return points[low] + share * (points[high] - points[low])


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The best that one draft and one exact pass can do. Times in ms, speedup over measured AR."""

    rows: int
    tokens_per_pass: float
    floor_ms: float
    ar_ms: float
    speedup_over_ar: float
    floors: tuple[ComponentFloor, ...]


def best_rows(
    profile: AcceptanceProfile, rows: Sequence[int], step_ms: Callable[[int], float]
) -> int:
    """Return the number of rows with the most tokens per ms, the fewest rows on a tie.

    Pass time is a step function of rows (tiles, graph sizes), so the choice scans the rows that the
    engine has instead of following a slope (algorithm: CaDDTree, arXiv 2606.01813).
    """
    if not rows:
        raise InvalidInput("no rows to choose from; give the rows that the engine runs.")
    return max(sorted(rows), key=lambda r: profile.at(r) / step_ms(r))


def ceiling(
    shape: ModelShape,
    drafter: DrafterShape,
    hardware: Hardware,
    regime: Regime,
    *,
    ar_ms: float,
    best_tree: AcceptanceProfile,
    block: int,
    rows: Sequence[int],
) -> Ceiling:
    """Return the ceiling over the row counts in ``rows``.

    ``ar_ms`` is the measured time of an AR step at the same regime and ``best_tree`` the τ of the
    best tree known at each row count (replay; an oracle's τ gives a looser ceiling).
    """
    _positive(ar_ms=ar_ms)

    def floors(count: int) -> tuple[ComponentFloor, ...]:
        return step_floor(shape, drafter, hardware, regime, count, block=block)

    by_rows = {count: floors(count) for count in rows}
    chosen = best_rows(best_tree, rows, lambda r: total_ms(by_rows[r]))
    tokens, floor = best_tree.at(chosen), total_ms(by_rows[chosen])
    return Ceiling(chosen, tokens, floor, ar_ms, tokens * ar_ms / floor, by_rows[chosen])


@dataclass(frozen=True, slots=True)
class Gap:
    """How far a system is from its ceiling: ``whole`` = tokens × kernel × overhead, each >= 1.

    ``tokens``: τ of the best tree over τ measured. ``kernel``: time in kernels over the floors of
    the ceiling's step. ``overhead``: step time over time in kernels. A factor below 1 means that
    the system already does better than the ceiling assumes there.
    """

    tokens: float
    kernel: float
    overhead: float

    @property
    def whole(self) -> float:
        return self.tokens * self.kernel * self.overhead

    @property
    def largest(self) -> Literal["tokens", "kernel", "overhead"]:
        """Where to work first."""
        factors: dict[Literal["tokens", "kernel", "overhead"], float] = {
            "tokens": self.tokens,
            "kernel": self.kernel,
            "overhead": self.overhead,
        }
        return max(factors, key=lambda name: factors[name])

    def log_shares(self) -> dict[str, float]:
        """Shares of the gap in log space, where the factors add up; all 0 if there is no gap."""
        whole = math.log(self.whole)
        terms = {"tokens": self.tokens, "kernel": self.kernel, "overhead": self.overhead}
        return {name: math.log(f) / whole if whole else 0.0 for name, f in terms.items()}


def gap(best: Ceiling, *, tokens_per_pass: float, kernels_ms: float, step_ms: float) -> Gap:
    """Return the gap between a measured system and its ceiling.

    ``kernels_ms`` is the time that a step spends in kernels (profiler), ``step_ms`` the whole step.
    The product equals ceiling speedup over measured speedup. Raises ``InvalidInput`` for values
    that are not positive, or kernels longer than the step.
    """
    _positive(tokens_per_pass=tokens_per_pass, kernels_ms=kernels_ms, step_ms=step_ms)
    if kernels_ms > step_ms * (1 + 1e-9):
        raise InvalidInput(
            f"field 'kernels_ms' is {kernels_ms:.4g}, more than the step's {step_ms:.4g} ms.",
            hint="Measure both in the same run.",
        )
    return Gap(
        tokens=best.tokens_per_pass / tokens_per_pass,
        kernel=kernels_ms / best.floor_ms,
        overhead=step_ms / kernels_ms,
    )


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not (math.isfinite(value) and value > 0):
            raise InvalidInput(f"field {name!r} is {value!r}; it must be a positive number.")
