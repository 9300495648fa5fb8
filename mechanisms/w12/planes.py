"""The planes of W12, block by block: fill them, patch single codes in them, put them together.

Passes of NumPy over blocks small enough to stay in the cache; that, and how few passes there are,
makes the codec fast. A code is ``[s | 0000 | c3 c2 c1 c0 | m6 .. m0]``, uint16: a BF16
whose exponent is c. Knows nothing of escapes; ``naive.py`` says what each bit means.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

__all__ = ["ESCAPED", "MAGNITUDE", "SIGN", "WINDOW", "Scratch", "fill", "from_gradual", "gradual",
           "join", "offset_of", "parts_of", "patch"]  # fmt: skip

U8 = NDArray[np.uint8]
U16 = NDArray[np.uint16]
U32 = NDArray[np.uint32]
I32 = NDArray[np.int32]
Places = NDArray[np.intp]

WINDOW = 15  # codes 1..15
SIGN = np.uint16(0x8000)
MAGNITUDE = np.uint16(0x7FFF)
ESCAPED = np.uint16(0xFFFF)
_BLOCK_WEIGHTS = 1 << 18


def parts_of(rows: int, columns: int, weights: int) -> Iterator[slice]:
    """The slices of whole rows, about ``weights`` weights each, that make up a matrix."""
    step = max(1, weights // columns)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


class Scratch:
    """Buffers for one block of rows: memory that is used again and stays in the cache.

    ``wide`` and ``code`` uint16 and ``flag`` bool are [block, columns]; ``low`` and ``high`` uint8
    [block, columns rounded up to even]; ``pairs`` uint16 [block, half of that].
    """

    def __init__(self, rows: int, columns: int) -> None:
        block, even = min(rows, max(1, _BLOCK_WEIGHTS // columns)), columns + columns % 2
        self.wide = np.empty((block, columns), np.uint16)
        self.code = np.empty((block, columns), np.uint16)
        self.flag = np.empty((block, columns), np.bool_)
        self.low = np.zeros((block, even), np.uint8)
        self.high = np.zeros((block, even), np.uint8)
        self.pairs = np.empty((block, even // 2), np.uint16)


def fill(bits: U16, base: I32, q: U8, b: U8, scratch: Scratch) -> tuple[Places, Places]:
    """Write the planes as if every weight were in its row's window.

    Returns rows and columns, in order, of the weights that are not: their codes mean nothing yet.
    """
    offset = offset_of(base)
    wrong = []
    for part in parts_of(len(bits), bits.shape[1], _BLOCK_WEIGHTS):
        rows = part.stop - part.start
        code, wide, flag = scratch.code[:rows], scratch.wide[:rows], scratch.flag[:rows]
        np.subtract(bits[part], offset[part], out=code)  # the sign stays, unless below the window
        np.add(code, code, out=wide)  # the sign drops out
        np.subtract(wide, np.uint16(0x80 << 1), out=wide)
        np.greater_equal(wide, np.uint16(WINDOW << 8), out=flag)
        wrong.append(np.flatnonzero(flag) + part.start * bits.shape[1])
        _split(code, q[part], b[part], scratch)
    return np.divmod(np.concatenate(wrong), bits.shape[1])


def _split(code: U16, q: U8, b: U8, scratch: Scratch) -> None:
    """Write codes to the 8-bit view and the nibble plane."""
    rows, columns = code.shape
    low, nibble, pairs = scratch.low[:rows], scratch.high[:rows], scratch.pairs[:rows]
    np.copyto(low[:, :columns], code, casting="unsafe")
    np.bitwise_and(low, np.uint8(0x0F), out=nibble)
    np.right_shift(nibble.view(np.uint16), np.uint16(4), out=pairs)
    np.bitwise_or(pairs, nibble.view(np.uint16), out=pairs)
    np.copyto(b, pairs, casting="unsafe")
    np.right_shift(low, np.uint8(1), out=low)
    np.bitwise_and(low, np.uint8(0x78), out=low)
    np.right_shift(code, np.uint16(8), out=q, casting="unsafe")
    np.bitwise_or(q, low[:, :columns], out=q)


def patch(q: U8, b: U8, row: Places, column: Places, code: U16) -> None:
    """Put single codes into the planes."""
    q[row, column] = code >> np.uint16(8) | code >> np.uint16(1) & np.uint16(0x78)
    for odd in (0, 1):  # apart, so that no byte is written twice
        here = column % 2 == odd
        cell = row[here], column[here] // 2
        nibble = (code[here] & np.uint16(0xF)).astype(np.uint8)
        b[cell] = b[cell] & np.uint8(0x0F if odd else 0xF0) | nibble << np.uint8(4 * odd)


def offset_of(base: NDArray[np.integer]) -> U16:
    """``base`` in the place of a BF16 exponent, as a column to subtract from magnitudes."""
    return (base.astype(np.uint16) << np.uint16(7))[:, None]


def gradual(magnitude: U16, base: NDArray[np.integer]) -> U16:
    """Codes (c = 0, shifted mantissa) of weights outside the window; ``ESCAPED`` if none fits."""
    exponent = (magnitude >> np.uint16(7)).astype(np.int32)
    significand = (magnitude & np.uint16(0x7F)).astype(np.int32) | np.where(exponent > 0, 0x80, 0)
    shift = base.astype(np.int32) + 1 - np.maximum(exponent, 1)
    in_range = (shift >= 0) & (shift <= 7) & (exponent < 0xFF)
    shift = np.where(in_range, shift, 0)
    shifted = significand >> shift
    fits = in_range & ((shifted << shift) == significand) & (shifted < 0x80) | (significand == 0)
    return np.where(fits, shifted, ESCAPED).astype(np.uint16)


def join(q: U8, b: U8, base: U8, out: U16, scratch: Scratch) -> tuple[Places, Places]:
    """Write to ``out`` the weights whose c is one of 1..15; return the rows and columns of others.

    There, ``out`` is the code with the row's base in the place of its exponent.
    """
    offset = offset_of(base)
    below = []
    for part in parts_of(len(q), q.shape[1], _BLOCK_WEIGHTS):
        _assemble(q[part], b[part], offset[part], out[part], scratch)
        rows = part.stop - part.start
        code, flag = scratch.high[:rows, : q.shape[1]], scratch.flag[:rows]
        np.bitwise_and(q[part], np.uint8(0x47), out=code)  # c0 and c3 c2 c1
        np.equal(code, np.uint8(0), out=flag)
        below.append(np.flatnonzero(flag) + part.start * q.shape[1])
    return np.divmod(np.concatenate(below), q.shape[1])


def _assemble(q: U8, b: U8, offset: U16, out: U16, scratch: Scratch) -> None:
    rows, columns = q.shape
    low, high, pairs = scratch.low[:rows], scratch.high[:rows, :columns], scratch.pairs[:rows]
    np.copyto(pairs, b)
    np.left_shift(pairs, np.uint16(4), out=low.view(np.uint16))
    np.bitwise_or(pairs, low.view(np.uint16), out=pairs)
    np.bitwise_and(pairs, np.uint16(0x0F0F), out=low.view(np.uint16))
    np.bitwise_and(q, np.uint8(0x78), out=high)
    np.left_shift(high, np.uint8(1), out=high)
    np.bitwise_or(high, low[:, :columns], out=high)  # [c0 m6..m0]
    np.bitwise_and(q, np.uint8(0x87), out=low[:, :columns])  # [s 0000 c3 c2 c1]
    np.copyto(out, low[:, :columns])
    np.left_shift(out, np.uint16(8), out=out)
    np.bitwise_or(out, high, out=out)
    np.add(out, offset, out=out)


def from_gradual(mantissa: U16, base: U8) -> U16:
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
