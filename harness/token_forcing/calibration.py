"""Where rounding ends: the near-tie threshold and the large margin, from stock against stock.

Legitimate numeric variation (decode against prefill, batch sizes, graphs on or off, dtype of the
accumulation) moves logits a little. The near-tie threshold is the 99.9 % quantile of the change
in the gap between the two best tokens; a large margin is several times that. Both are frozen in
the ledger before a round, so that no result can choose its own threshold.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from specpilot.errors import CheckFailed, InvalidInput
from specpilot.harness.token_forcing.margins import RequestMargins, TimedOutput
from specpilot.harness.token_forcing.scorer import Progress, Scorer

__all__ = ["Calibration", "VariantNoise", "calibrate", "gap_changes"]

QUANTILE = 0.999
FLOOR = 1e-3
"""Logits; above the rounding of FP32 sums over some thousand terms at logits of 20 to 30."""
CEILING = 1.0
"""Logits; a stock system that differs more from itself is broken, or is not the scorer's model."""
LARGE_FACTOR = 4.0
LARGE_FLOOR = 0.5
MINIMUM_POSITIONS = 2000
"""The 99.9 % quantile then has two observations above it."""
TOP = 8


@dataclass(frozen=True, slots=True)
class VariantNoise:
    """One variant against the scorer on stock's own text. ``quantile`` is in logits; ``flips``
    is the share of positions where the two disagree about the best token."""

    name: str
    positions: int
    quantile: float
    flips: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """Frozen thresholds in logits: a margin above ``near_tie`` is a mismatch, above ``large`` an
    event. ``variants`` say where they come from."""

    near_tie: float
    large: float
    quantile: float
    positions: int
    variants: tuple[VariantNoise, ...]

    def __post_init__(self) -> None:
        if not 0 < self.near_tie <= CEILING or not self.large > self.near_tie:
            raise InvalidInput(
                f"near_tie {self.near_tie} and large {self.large} are no thresholds: wanted "
                f"0 < near_tie <= {CEILING} and near_tie < large."
            )

    def to_dict(self) -> dict[str, Any]:
        """The calibration as the ledger keeps it."""
        return {**asdict(self), "variants": [asdict(v) for v in self.variants]}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> "Calibration":
        """Read a calibration back from the ledger. Raises ``InvalidInput`` if it is none."""
        try:
            variants = tuple(VariantNoise(**v) for v in record["variants"])
            return cls(**{**record, "variants": variants})
        except (KeyError, TypeError) as error:
            raise InvalidInput(f"Not a calibration: {error}.") from error


def gap_changes(base: RequestMargins, variant: RequestMargins) -> npt.NDArray[np.float32]:
    """Return |change of the top-2 gap| by position, [tokens] fp32 logits.

    The gap is between the base's two best tokens. A token outside the variant's listed ones
    counts with the last listed margin, which understates its change.
    """
    best, second = base.top_ids[:, 0], base.top_ids[:, 1]
    positions = np.arange(base.tokens)

    def margin_of(ids: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        listed = variant.top_ids == ids[:, None]
        column = np.where(listed.any(1), listed.argmax(1), variant.top_ids.shape[1] - 1)
        found: npt.NDArray[np.float32] = variant.top_margins[positions, column]
        return found

    gap = base.top_margins[:, 1]
    change: npt.NDArray[np.float32] = np.abs(margin_of(second) - margin_of(best) - gap)
    return change


def calibrate(
    outputs: Sequence[TimedOutput],
    scorer: Scorer,
    variants: Mapping[str, Scorer],
    *,
    minimum_positions: int = MINIMUM_POSITIONS,
    progress: Progress | None = None,
) -> Calibration:
    """Measure the thresholds on greedy ``outputs`` of the stock system.

    Decode against prefill is always among the variants: the emitted tokens are the decode's
    argmax, so their margins under the scorer show how far a flip reaches. ``variants`` are
    further scorers of the same weights under other legitimate numerics. The thresholds follow the
    noisiest variant. Raises ``CheckFailed`` on fewer than ``minimum_positions`` tokens, or if
    stock differs from itself by more than ``CEILING``.
    """
    base = scorer.margins(outputs, top=TOP, progress=progress)
    positions = sum(request.tokens for request in base)
    if positions < minimum_positions:
        raise CheckFailed(
            f"{positions} output tokens are too few to calibrate on.",
            hint=f"Give stock outputs of at least {minimum_positions} tokens together.",
        )
    margins = np.concatenate([request.margins for request in base])
    noises = [
        VariantNoise(
            "decode", positions, float(np.quantile(margins, QUANTILE)), float((margins > 0).mean())
        )
    ]
    for name, variant in variants.items():
        other = variant.margins(outputs, top=TOP, progress=progress)
        pairs = list(zip(base, other, strict=True))
        changes = np.concatenate([gap_changes(a, b) for a, b in pairs])
        flips = np.concatenate([a.top_ids[:, 0] != b.top_ids[:, 0] for a, b in pairs])
        noises.append(
            VariantNoise(
                name, positions, float(np.quantile(changes, QUANTILE)), float(flips.mean())
            )
        )
    worst = max(noises, key=lambda noise: noise.quantile)
    if worst.quantile > CEILING:
        raise CheckFailed(
            f"Stock differs from the scorer by {worst.quantile:.3g} logits at the "
            f"{QUANTILE:.1%} quantile ({worst.name}); more than {CEILING} is no rounding.",
            hint="Do the scorer and stock load the same weights?",
        )
    near_tie = max(worst.quantile, FLOOR)
    large = max(LARGE_FACTOR * near_tie, LARGE_FLOOR)
    return Calibration(near_tie, large, QUANTILE, positions, tuple(noises))
