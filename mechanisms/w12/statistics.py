"""What W12 costs on one matrix, beside what any lossless code of BF16 could reach."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from specpilot.mechanisms.w12.codec import W12Matrix, decode

__all__ = ["TensorStatistics", "draw", "statistics_of", "total"]


@dataclass(frozen=True, slots=True)
class TensorStatistics:
    """``bits_per_weight`` counts everything stored. ``entropy_bits`` is the bound for codes that
    keep sign and mantissa as they are and code exponents tensor-wide: 8 + H(exponent)."""

    name: str
    rows: int
    columns: int
    bits_per_weight: float
    escapes: int
    raw_rows: int
    entropy_bits: float

    @property
    def weights(self) -> int:
        return self.rows * self.columns


def statistics_of(name: str, matrix: W12Matrix) -> TensorStatistics:
    """Measure one encoded matrix."""
    rows, columns = matrix.shape
    exponents = (decode(matrix) >> np.uint16(7)) & np.uint16(0xFF)
    counts = np.bincount(exponents.reshape(-1), minlength=256)
    shares = counts[counts > 0] / exponents.size
    return TensorStatistics(
        name=name,
        rows=rows,
        columns=columns,
        bits_per_weight=matrix.bits_per_weight,
        escapes=len(matrix.escape_bits),
        raw_rows=len(matrix.raw_rows),
        entropy_bits=8.0 + float(-(shares * np.log2(shares)).sum()),
    )


def total(statistics: list[TensorStatistics]) -> TensorStatistics:
    """Return the weighted sum over matrices, as one line named ``total``."""
    weights = sum(each.weights for each in statistics)

    def mean(field: str) -> float:
        return sum(getattr(each, field) * each.weights for each in statistics) / max(1, weights)

    return TensorStatistics(
        name="total",
        rows=sum(each.rows for each in statistics),
        columns=0,
        bits_per_weight=mean("bits_per_weight"),
        escapes=sum(each.escapes for each in statistics),
        raw_rows=sum(each.raw_rows for each in statistics),
        entropy_bits=mean("entropy_bits"),
    )


def draw(statistics: list[TensorStatistics], path: Path) -> None:
    """Draw bits per weight of every matrix beside its entropy bound (format by suffix)."""
    from matplotlib.figure import Figure

    ordered = sorted(statistics, key=lambda each: each.bits_per_weight)
    figure = Figure(figsize=(7, 1 + 0.2 * len(ordered)), layout="constrained")
    axes = figure.add_subplot()
    places = range(len(ordered))
    axes.barh(places, [each.bits_per_weight for each in ordered], label="W12, everything counted")
    bounds = [each.entropy_bits for each in ordered]
    axes.plot(bounds, places, "k|", markersize=9, label="8 + H(exponent)")
    axes.set_yticks(places, [each.name for each in ordered], fontsize=6)
    axes.set_xlim(9.5, max(12.6, *(each.bits_per_weight + 0.1 for each in ordered)))
    axes.set_xlabel("bits per weight")
    axes.legend(fontsize="small", loc="lower right")
    figure.savefig(path)
