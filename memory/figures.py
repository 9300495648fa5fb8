"""Measured figures: a value with its unit and interval, and which unit each metric has."""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

__all__ = ["Figure", "Metric", "STRICT", "Unit"]

STRICT = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)
"""Every stored model refuses unknown fields, coercion, NaN and infinity."""

Metric = Literal[
    "speedup_over_ar",
    "speedup_over_stock",
    "speedup_over_previous",
    "speedup_over_baseline",
    "tokens_per_pass",
    "time",
    "throughput",
    "bandwidth",
    "size",
    "bits_per_weight",
    "rate",
    "change",
    "error",
    "count",
]
Unit = Literal["x", "tokens", "us", "ms", "s", "tok/s", "GB/s", "TB/s", "KB", "MB", "GB", "bits",
               "%", "points", "1"]  # fmt: skip

_UNITS: dict[str, tuple[str, ...]] = {
    "speedup_over_ar": ("x",),
    "speedup_over_stock": ("x",),
    "speedup_over_previous": ("x",),
    "speedup_over_baseline": ("x",),
    "tokens_per_pass": ("tokens",),
    "time": ("us", "ms", "s"),
    "throughput": ("tok/s",),
    "bandwidth": ("GB/s", "TB/s"),
    "size": ("KB", "MB", "GB"),
    "bits_per_weight": ("bits",),
    "rate": ("%",),
    "change": ("%", "points"),
    "error": ("1",),
    "count": ("1",),
}


class Figure(BaseModel):
    """One number as it was reported.

    A speedup is a ratio (``1.85`` for 1.85 times as fast, below 1 for a loss), never a percentage.
    ``low`` and ``high`` bound it at ``confidence`` and must include it; without a confidence they
    are the range over cases (models, shapes) that was reported, and the value is one end of it.
    """

    model_config = STRICT

    metric: Metric
    value: float
    unit: Unit
    low: float | None = None
    high: float | None = None
    confidence: Annotated[float, Field(gt=0, lt=1)] | None = None
    over: Annotated[str, Field(max_length=120)] = ""

    @model_validator(mode="after")
    def _units_and_interval(self) -> Self:
        allowed = _UNITS[self.metric]
        if self.unit not in allowed:
            raise ValueError(
                f"{self.metric} is given in {' or '.join(allowed)}, not in {self.unit!r}"
            )
        if self.metric.startswith("speedup") and not 0 < self.value < 1000:
            raise ValueError(f"a speedup is a ratio between 0 and 1000, not {self.value}")
        if (self.low is None) != (self.high is None):
            raise ValueError("an interval needs both low and high")
        if self.low is not None and self.high is not None:
            if not self.low <= self.value <= self.high:
                raise ValueError(
                    f"the interval [{self.low}, {self.high}] excludes its mean {self.value}"
                )
        elif self.confidence is not None:
            raise ValueError("confidence without an interval says nothing: give low and high")
        return self

    @property
    def is_speedup(self) -> bool:
        return self.metric.startswith("speedup")

    def __str__(self) -> str:
        unit = {"x": "×", "1": ""}.get(self.unit, f" {self.unit}")
        kind = "" if self.confidence else "range "
        interval = "" if self.low is None else f" [{kind}{self.low:g}, {self.high:g}]"
        against = self.over or {
            "speedup_over_ar": "AR",
            "speedup_over_stock": "stock",
            "speedup_over_previous": "the previous system",
        }.get(self.metric, "")
        return f"{self.value:g}{unit}{interval}" + (f" over {against}" if against else "")
