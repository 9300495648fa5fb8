"""W12: encode and decode whole BF16 matrices, vectorised over blocks that fit the cache.

Knows nothing of files, layers or devices. Works on NumPy arrays of BF16 bit patterns (uint16), so
that it runs without torch; ``naive.py`` says what each bit means.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specpilot.errors import CheckFailed, InvalidInput

__all__ = ["MAX_ESCAPES_PER_ROW", "W12Matrix", "decode", "encode", "verify"]

U8 = NDArray[np.uint8]
U16 = NDArray[np.uint16]
I32 = NDArray[np.int32]

# A row with more escapes than this costs more than it saves in the reduction; it stays BF16.
MAX_ESCAPES_PER_ROW = 64
# A row whose escapes would take more than the 4 bits saved on every weight stays BF16 as well.
_ESCAPE_BITS = 48
# Codes 1..15 hold the window; three further positions below the largest exponent are tried.
_WINDOW = 15
_POSITIONS = 4
# 2^base must be a BF16 scale that a GPU can multiply by; this covers every weight under 2^16.
_MAX_BASE = 127
_BLOCK_WEIGHTS = 1 << 19


@dataclass(frozen=True, slots=True)
class W12Matrix:
    """One weight matrix of shape [rows, columns] (output channels first) in W12.

    ``q`` uint8 [rows, columns] is the 8-bit view. ``b`` uint8 [rows, ceil(columns / 2)] holds the
    low mantissa nibbles, even column in the low half. ``base`` uint8 [rows]. Escapes are in CSR
    order: row r owns ``escape_column``/``escape_bits`` at ``row_start[r] : row_start[r + 1]``, and
    its planes hold an exact zero there. Rows listed in ``raw_rows`` are stored whole in
    ``raw_bits`` uint16 [len(raw_rows), columns]; their planes are zero.
    """

    columns: int
    q: U8
    b: U8
    base: U8
    row_start: I32
    escape_column: I32
    escape_bits: U16
    raw_rows: I32
    raw_bits: U16

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.base), self.columns

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays: what the format really costs, bases and escape lists included."""
        arrays = (self.q, self.b, self.base, self.row_start, self.escape_column)
        arrays_raw = (self.escape_bits, self.raw_rows, self.raw_bits)
        return sum(array.nbytes for array in (*arrays, *arrays_raw))

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.nbytes / max(1, len(self.base) * self.columns)


def encode(bits: U16) -> W12Matrix:
    """Encode BF16 patterns, uint16 [rows, columns], without loss.

    Raises:
        InvalidInput: not a non-empty two-dimensional uint16 array.
    """
    if bits.dtype != np.uint16 or bits.ndim != 2 or bits.size == 0:
        raise InvalidInput(
            f"W12 encodes a non-empty matrix of BF16 patterns; got {bits.dtype} {bits.shape}.",
            hint="Reshape to [output channels, input features] and view BF16 as uint16.",
        )
    rows, columns = bits.shape
    q = np.empty((rows, columns), np.uint8)
    b = np.empty((rows, (columns + 1) // 2), np.uint8)
    base = np.empty(rows, np.uint8)
    escapes: list[tuple[I32, I32]] = []
    step = max(1, _BLOCK_WEIGHTS // columns)
    for start in range(0, rows, step):
        part = slice(start, min(start + step, rows))
        base[part], where = _encode_block(bits[part], q[part], b[part])
        escapes.append((where[0] + np.int32(start), where[1]))
    return _collect(bits, q, b, base, escapes)


def decode(matrix: W12Matrix) -> U16:
    """Return the BF16 patterns, uint16 [rows, columns], that ``encode`` was given."""
    rows, columns = matrix.shape
    out = np.empty((rows, columns), np.uint16)
    step = max(1, _BLOCK_WEIGHTS // columns)
    for start in range(0, rows, step):
        part = slice(start, min(start + step, rows))
        _decode_block(matrix.q[part], matrix.b[part], matrix.base[part], out[part])
    counts = np.diff(matrix.row_start)
    out[np.repeat(np.arange(rows), counts), matrix.escape_column] = matrix.escape_bits
    out[matrix.raw_rows] = matrix.raw_bits
    return out


def _encode_block(bits: U16, q: U8, b: U8) -> tuple[U8, tuple[I32, I32]]:
    """Fill ``q`` and ``b`` and return the bases and the positions of the escapes."""
    magnitude = bits & np.uint16(0x7FFF)
    base = _choose_base(magnitude)
    code = magnitude - _offset(base)  # wraps below the window; those are repaired one by one
    row, column = _outside(code)
    value, fits = _gradual(magnitude[row, column], base[row])
    code[row, column] = value
    sign = bits & np.uint16(0x8000)
    np.bitwise_or(code, sign, out=code)
    code[row[~fits], column[~fits]] = 0
    _split(code, q, b)
    return base, (row[~fits].astype(np.int32), column[~fits].astype(np.int32))


def _choose_base(magnitude: U16) -> U8:
    """The window of each row with the fewest escapes, near the row's largest finite exponent."""
    top = magnitude.max(axis=1)
    if (top >= 0x7F80).any():
        top = np.where(magnitude < 0x7F80, magnitude, 0).max(axis=1)
    exponent = (top >> np.uint16(7)).astype(np.int32)
    base: I32 = np.clip(exponent - _WINDOW, 0, _MAX_BASE)
    misses = _misses(magnitude, base)
    for shift in range(1, _POSITIONS):
        # Moving the window down loses the row's largest weight at least, and a few escapes are
        # cheaper than the search for one less.
        rows = np.flatnonzero(misses > max(2, magnitude.shape[1] >> 11))
        lower = np.clip(exponent[rows] - shift - _WINDOW, 0, _MAX_BASE)
        fewer = _misses(magnitude[rows], lower)
        better = fewer < misses[rows]
        base[rows[better]], misses[rows[better]] = lower[better], fewer[better]
    return base.astype(np.uint8)


def _misses(magnitude: U16, base: I32) -> NDArray[np.int64]:
    """Escapes of each row under ``base``, zeros and gradual underflow not counted."""
    row, column = _outside(magnitude - _offset(base))
    _, fits = _gradual(magnitude[row, column], base[row])
    return np.bincount(row[~fits], minlength=len(base))


def _offset(base: NDArray[np.integer]) -> U16:
    """``base`` in the place of a BF16 exponent, as a column to subtract from magnitudes."""
    return (base.astype(np.uint16) << np.uint16(7))[:, None]


def _outside(code: U16) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Rows and columns whose code (magnitude minus offset, wrapping) is not one of 1..15."""
    missed = code - np.uint16(0x80) >= np.uint16(_WINDOW << 7)
    return np.divmod(np.flatnonzero(missed), code.shape[1])


def _gradual(magnitude: U16, base: NDArray[np.integer]) -> tuple[U16, NDArray[np.bool_]]:
    """Codes (c = 0, shifted mantissa) of weights outside the window, and which of them fit."""
    exponent = (magnitude >> np.uint16(7)).astype(np.int32)
    significand = (magnitude & np.uint16(0x7F)).astype(np.int32) | np.where(exponent > 0, 0x80, 0)
    shift = base.astype(np.int32) + 1 - np.maximum(exponent, 1)
    in_range = (shift >= 0) & (shift <= 7) & (exponent < 0xFF)
    shift = np.where(in_range, shift, 0)
    shifted = significand >> shift
    fits = in_range & ((shifted << shift) == significand) & (shifted < 0x80) | (significand == 0)
    return np.where(fits, shifted, 0).astype(np.uint16), fits


def _split(code: U16, q: U8, b: U8) -> None:
    """Write codes ``[s | 0000 | c3..c0 | m6..m0]`` to the 8-bit view and the nibble plane."""
    q[:] = (code >> np.uint16(8)) & np.uint16(0x87) | (code >> np.uint16(1)) & np.uint16(0x78)
    nibble = (code & np.uint16(0xF)).astype(np.uint8)
    if nibble.shape[1] % 2:
        nibble = np.pad(nibble, ((0, 0), (0, 1)))
    pairs = nibble.view(np.uint16)
    b[:] = pairs | pairs >> np.uint16(4)


def _decode_block(q: U8, b: U8, base: U8, out: U16) -> None:
    wide = q.astype(np.uint16)
    low = np.empty((b.shape[0], 2 * b.shape[1]), np.uint8)
    low[:, 0::2] = b & np.uint8(0xF)
    low[:, 1::2] = b >> np.uint8(4)
    code = (wide & np.uint16(0x7)) << np.uint16(8) | (wide & np.uint16(0x78)) << np.uint16(1)
    code |= low[:, : q.shape[1]]
    magnitude = code + _offset(base)
    row, column = np.divmod(np.flatnonzero(code < 0x80), code.shape[1])
    magnitude[row, column] = _from_gradual(code[row, column], base[row])
    np.bitwise_or(magnitude, (wide & np.uint16(0x80)) << np.uint16(8), out=out)


def _from_gradual(mantissa: U16, base: U8) -> U16:
    """BF16 magnitudes of codes with c = 0: shift the mantissa up as far as the exponent allows."""
    significand = mantissa.astype(np.int32)
    exponent = base.astype(np.int32) + 1
    for _ in range(7):
        low = (significand < 0x80) & (exponent > 1) & (significand > 0)
        significand = np.where(low, significand << 1, significand)
        exponent = np.where(low, exponent - 1, exponent)
    normal = significand >= 0x80
    bits: U16 = (np.where(normal, exponent << 7, 0) | significand & 0x7F).astype(np.uint16)
    return bits


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
    starts = np.zeros(rows + 1, np.int32)
    np.cumsum(np.where(raw, 0, counts), out=starts[1:])
    return W12Matrix(
        columns=columns,
        q=q,
        b=b,
        base=base,
        row_start=starts,
        escape_column=column,
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
