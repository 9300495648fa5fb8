"""W12: encode and decode whole BF16 matrices: windows, escapes and rows that stay as they are.

Knows nothing of files, layers or devices. Works on NumPy arrays of BF16 bit patterns (uint16), so
that it runs without torch; ``planes.py`` does the passes over every weight.
"""

from dataclasses import dataclass

import numpy as np

from specpilot.errors import CheckFailed, InvalidInput
from specpilot.mechanisms.w12.planes import (
    ESCAPED,
    I32,
    MAGNITUDE,
    SIGN,
    U8,
    U16,
    U32,
    WINDOW,
    Places,
    Scratch,
    fill,
    from_gradual,
    gradual,
    join,
    offset_of,
    parts_of,
    patch,
)

__all__ = ["MAX_ESCAPES_PER_ROW", "W12Matrix", "decode", "encode", "verify"]

# A row with more escapes than this costs more than it saves in the reduction; it stays BF16.
MAX_ESCAPES_PER_ROW = 64
# A row whose escapes would take more than the 4 bits saved on every weight stays BF16 as well.
_ESCAPE_BITS = 48
# The window is tried below the row's largest exponent and at three further positions.
_POSITIONS = 4
# 2^base must be a BF16 scale that a GPU can multiply by; this covers every weight under 2^16.
_MAX_BASE = 127
# The few weights outside their windows are dealt with a chunk at a time: they cost by the call.
_CHUNK_WEIGHTS = 1 << 21


@dataclass(frozen=True, slots=True)
class W12Matrix:
    """One weight matrix of shape [rows, columns] (output channels first) in W12.

    ``q`` uint8 [rows, columns] is the 8-bit view. ``b`` uint8 [rows, ceil(columns / 2)] holds the
    low mantissa nibbles, even column in the low half. ``base`` uint8 [rows]. Escape i is the weight
    at ``escape_place[i]`` (row * columns + column, ascending), stored whole in ``escape_bits[i]``;
    the planes hold an exact zero there. Rows listed in ``raw_rows`` are stored whole in
    ``raw_bits`` uint16 [len(raw_rows), columns]; their planes are zero.
    """

    columns: int
    q: U8
    b: U8
    base: U8
    escape_place: U32
    escape_bits: U16
    raw_rows: I32
    raw_bits: U16

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.base), self.columns

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays: what the format really costs, bases and escapes included."""
        arrays = (self.q, self.b, self.base, self.escape_place, self.escape_bits)
        return sum(array.nbytes for array in (*arrays, self.raw_rows, self.raw_bits))

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.nbytes / max(1, len(self.base) * self.columns)

    @property
    def row_start(self) -> I32:
        """Where each row's escapes start, int32 [rows + 1]: the escapes in CSR order."""
        edges = np.arange(len(self.base) + 1, dtype=np.int64) * self.columns
        return np.searchsorted(self.escape_place, edges).astype(np.int32)

    @property
    def escape_column(self) -> I32:
        return (self.escape_place % np.uint32(self.columns)).astype(np.int32)


def encode(bits: U16) -> W12Matrix:
    """Encode BF16 patterns, uint16 [rows, columns], without loss.

    Raises:
        InvalidInput: not a non-empty two-dimensional uint16 array of less than 2^32 weights.
    """
    if bits.dtype != np.uint16 or bits.ndim != 2 or not 0 < bits.size < 1 << 32:
        raise InvalidInput(
            f"W12 encodes a non-empty matrix of BF16 patterns; got {bits.dtype} {bits.shape}.",
            hint="Reshape to [output channels, input features] and view BF16 as uint16.",
        )
    rows, columns = bits.shape
    q = np.empty((rows, columns), np.uint8)
    b = np.empty((rows, (columns + 1) // 2), np.uint8)
    base = np.empty(rows, np.uint8)
    escapes: list[tuple[I32, I32]] = []
    scratch = Scratch(rows, columns)
    for part in parts_of(rows, columns, _CHUNK_WEIGHTS):
        base[part], row, column = _encode_chunk(bits[part], q[part], b[part], scratch)
        escapes.append((row + np.int32(part.start), column))
    return _collect(bits, q, b, base, escapes)


def decode(matrix: W12Matrix) -> U16:
    """Return the BF16 patterns, uint16 [rows, columns], that ``encode`` was given."""
    rows, columns = matrix.shape
    out = np.empty((rows, columns), np.uint16)
    scratch = Scratch(rows, columns)
    for part in parts_of(rows, columns, _CHUNK_WEIGHTS):
        _decode_chunk(matrix.q[part], matrix.b[part], matrix.base[part], out[part], scratch)
    out.reshape(-1)[matrix.escape_place] = matrix.escape_bits
    out[matrix.raw_rows] = matrix.raw_bits
    return out


def _encode_chunk(bits: U16, q: U8, b: U8, scratch: Scratch) -> tuple[U8, I32, I32]:
    """Fill ``q`` and ``b``; return the bases, and rows and columns of the escapes, in order."""
    exponent = _highest(bits)
    base: I32 = np.clip(exponent - WINDOW, 0, _MAX_BASE)
    row, column = fill(bits, base, q, b, scratch)
    value = gradual(bits[row, column] & MAGNITUDE, base[row])
    moved = _lower_bases(bits, exponent, base, _count(row[value == ESCAPED], len(base)))
    if len(moved):
        part_q, part_b = np.empty_like(q[moved]), np.empty_like(b[moved])
        again, places = fill(bits[moved], base[moved], part_q, part_b, scratch)
        q[moved], b[moved] = part_q, part_b
        kept = ~np.isin(row, moved)
        row = np.concatenate((row[kept], moved[again]))
        column = np.concatenate((column[kept], places))
        order = np.argsort(row, kind="stable")
        row, column = row[order], column[order]
        value = gradual(bits[row, column] & MAGNITUDE, base[row])
    escaped = value == ESCAPED
    patch(q, b, row, column, np.where(escaped, 0, value | bits[row, column] & SIGN))
    return base.astype(np.uint8), row[escaped].astype(np.int32), column[escaped].astype(np.int32)


def _highest(bits: U16) -> I32:
    """The largest finite exponent of each row."""
    # Read as unsigned, negative weights lie above the positive ones; as signed, below them.
    positive, negative = bits.view(np.int16).max(axis=1), bits.max(axis=1)
    top = np.maximum(positive, (negative & MAGNITUDE).view(np.int16)).astype(np.int32)
    if (top >= 0x7F80).any():
        magnitude = bits & MAGNITUDE
        top = np.where(magnitude < 0x7F80, magnitude, 0).max(axis=1).astype(np.int32)
    return top >> 7


def _lower_bases(bits: U16, exponent: I32, base: I32, misses: I32) -> Places:
    """Lower the window of rows that then have fewer escapes; return the rows so changed.

    Lowering loses at least the weights of the window's highest binade: where those are as many as
    the escapes, and fewer than a handful of escapes, are left alone.
    """
    few = max(2, bits.shape[1] >> 11)
    searched = np.flatnonzero(misses > few)
    code = (bits[searched] & MAGNITUDE) - offset_of(base[searched])
    highest = code - np.uint16(WINDOW << 7) < np.uint16(0x8000 - (WINDOW << 7))
    worth = np.count_nonzero(highest, axis=1) < misses[searched]
    searched, code = searched[worth], code[worth]
    if not len(searched):
        return searched
    start, before = exponent[searched] - WINDOW, base[searched]
    # Only weights near either end of the window can be inside for one base and out for another.
    near = code - np.uint16(0x80) >= np.uint16(WINDOW - _POSITIONS + 1 << 7)
    row, column = np.divmod(np.flatnonzero(near), bits.shape[1])
    magnitude = bits[searched[row], column] & MAGNITUDE
    for shift in range(1, _POSITIONS):
        lower: I32 = np.clip(start - shift, 0, _MAX_BASE)
        inside = magnitude - offset_of(lower)[row, 0] - np.uint16(0x80) < np.uint16(WINDOW << 7)
        lost = ~inside & (gradual(magnitude, lower[row]) == ESCAPED)
        fewer = _count(row[lost], len(searched))
        better = fewer < misses[searched]
        better &= misses[searched] > few
        base[searched[better]], misses[searched[better]] = lower[better], fewer[better]
    return searched[base[searched] != before]


def _count(row: Places, rows: int) -> I32:
    return np.bincount(row, minlength=rows).astype(np.int32)


def _decode_chunk(q: U8, b: U8, base: U8, out: U16, scratch: Scratch) -> None:
    row, column = join(q, b, base, out, scratch)
    code = out[row, column] - offset_of(base)[row, 0]
    out[row, column] = from_gradual(code & np.uint16(0x7F), base[row]) | code & SIGN


def _collect(bits: U16, q: U8, b: U8, base: U8, escapes: list[tuple[I32, I32]]) -> W12Matrix:
    """Sort rows into coded and raw ones and build the escape lists."""
    rows, columns = bits.shape
    row = np.concatenate([part[0] for part in escapes])
    column = np.concatenate([part[1] for part in escapes])
    counts = np.bincount(row, minlength=rows)
    raw = (counts > MAX_ESCAPES_PER_ROW) | (counts * _ESCAPE_BITS > 4 * columns)
    q[raw], b[raw], base[raw] = 0, 0, 0
    kept = ~raw[row]
    row, column = row[kept], column[kept]
    return W12Matrix(
        columns=columns,
        q=q,
        b=b,
        base=base,
        escape_place=(row.astype(np.int64) * columns + column).astype(np.uint32),
        escape_bits=bits[row, column],
        raw_rows=np.flatnonzero(raw).astype(np.int32),
        raw_bits=bits[raw],
    )


def verify(bits: U16, matrix: W12Matrix) -> None:
    """Decode ``matrix`` and compare it with ``bits``.

    Raises:
        CheckFailed: any bit differs; the message names the first weight.
    """
    wrong = np.argwhere(decode(matrix) != bits)
    if len(wrong):
        raise CheckFailed(
            f"W12 decode differs from the source at {len(wrong)} weights, first at "
            f"{tuple(int(i) for i in wrong[0])}.",
            hint="Keep the BF16 file and report this tensor.",
        )
