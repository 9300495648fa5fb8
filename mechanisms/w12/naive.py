"""The W12 code of one weight, written to be read: the specification of the codec.

A BF16 weight is sign s, exponent e (8 bits), mantissa m (7 bits). Each output channel has a
``base``; a weight fits when its exponent lies in the 15 binades ``base+1 .. base+15`` (code
c = e - base), or when it is zero, or when it lies below the window and has enough trailing zero
bits to be written with a shifted mantissa, exactly as BF16 itself writes subnormals (c = 0,
"gradual underflow"). Everything else is an escape and is stored whole, beside the planes.

The 12 bits are ``[s | c3 c2 c1 c0 | m6 .. m0]``. They are stored as a byte ``q`` and a nibble
``b``: ``q = [s | c0 m6 m5 m4 | c3 c2 c1]`` is the 8-bit view that a low-precision pass reads
alone, ``b = m3..m0``. (The SpecPilot paper, Figure 5, splits q once more into its planes A, the
sign and top mantissa bits, and E, the exponent code; one byte holds both.)
"""

__all__ = ["decode_value", "encode_value", "join", "split"]


def encode_value(bits: int, base: int) -> int | None:
    """Return the 12-bit code of the BF16 pattern ``bits`` under ``base``; None for an escape."""
    sign, exponent, mantissa = bits >> 15, (bits >> 7) & 0xFF, bits & 0x7F
    if exponent == 0xFF:
        return None
    code = exponent - base
    if exponent >= 1 and 1 <= code <= 15:
        return sign << 11 | code << 7 | mantissa
    significand = mantissa | (0x80 if exponent else 0)
    shift = base + 1 - max(exponent, 1)
    if significand == 0:
        return sign << 11
    if 0 <= shift <= 7 and significand & ((1 << shift) - 1) == 0 and significand >> shift < 0x80:
        return sign << 11 | significand >> shift
    return None


def decode_value(code12: int, base: int) -> int:
    """Return the BF16 pattern of a 12-bit code: the inverse of ``encode_value``."""
    sign, code, mantissa = code12 >> 11, (code12 >> 7) & 0xF, code12 & 0x7F
    if code:
        return sign << 15 | (base + code) << 7 | mantissa
    significand, exponent = mantissa, base + 1
    while significand and significand < 0x80 and exponent > 1:
        significand, exponent = significand << 1, exponent - 1
    normal = significand >= 0x80
    return sign << 15 | (exponent << 7 if normal else 0) | (significand & 0x7F)


def split(code12: int) -> tuple[int, int]:
    """Return ``(q, b)``: the 8-bit view and the low nibble of a 12-bit code."""
    sign, code, mantissa = code12 >> 11, (code12 >> 7) & 0xF, code12 & 0x7F
    return sign << 7 | (code & 1) << 6 | (mantissa >> 4) << 3 | code >> 1, mantissa & 0xF


def join(q: int, b: int) -> int:
    """Return the 12-bit code of ``(q, b)``: the inverse of ``split``."""
    code = (q & 7) << 1 | (q >> 6) & 1
    return (q >> 7) << 11 | code << 7 | ((q >> 3) & 7) << 4 | b
