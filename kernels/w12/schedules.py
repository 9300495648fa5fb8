"""How a W12 product is cut: measured schedules by shape, a rule for shapes never measured.

The number of parts of K belongs to the shape and never to the number of rows, because it alone
decides the order of the sums: so a row's result does not depend on the rows beside it.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["ROW_CLASSES", "Schedule", "choose"]

ROW_CLASSES = (16, 32, 64)
"""Rows are padded to one of these; the last is the most that one product takes."""

_BLOCKS = 240  # of 64 channels, times parts of K: what the measured schedules come close to
_DEFAULT_TILES = {16: (64, 4, 3), 32: (64, 4, 3), 64: (128, 8, 3)}


@dataclass(frozen=True, slots=True)
class Schedule:
    """``block_n`` channels a block, K in ``splits`` parts, and Triton's warps and stages.

    Results depend bitwise on ``splits`` alone.
    """

    block_n: int = 64
    splits: int = 1
    warps: int = 4
    stages: int = 3


def choose(rows: int, columns: int, m: int) -> Schedule:
    """The schedule for a weight [rows, columns] and ``m`` rows of x, 1 to 64.

    Measured on an H200 for the shapes in ``schedules.json``; for others a rule that gives the same
    number of parts for nine of those ten.
    """
    row_class = next(size for size in ROW_CLASSES if m <= size)
    measured = _measured().get(f"{rows}x{columns}")
    if measured is not None:
        block_n, warps, stages = measured["tiles"][str(row_class)]
        return Schedule(block_n, measured["splits"], warps, stages)
    block_n, warps, stages = _DEFAULT_TILES[row_class]
    return Schedule(block_n, max(1, round(_BLOCKS / -(-rows // 64))), warps, stages)


@cache
def _measured() -> dict[str, Any]:
    text = Path(__file__).with_name("schedules.json").read_text(encoding="utf-8")
    shapes: dict[str, Any] = json.loads(text)["shapes"]
    return shapes
