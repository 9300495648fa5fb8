"""The specification of the W12 products: decode in plain torch, then multiply in fp32.

Works on the planes of ``mechanisms.w12.codec.W12Matrix`` as torch tensors: ``q`` uint8 [N, K],
``b`` uint8 [N, K/2] (even column in the low nibble), ``base`` uint8 [N], escapes in CSR order.
"""

import torch
from torch import Tensor

__all__ = ["decode_planes", "decode_view", "dense", "linear"]


def decode_planes(q: Tensor, b: Tensor, base: Tensor) -> Tensor:
    """Return the coded weights, bf16 [N, K]; escapes read as exact zeros."""
    nibble = torch.stack([b & 0xF, b >> 4], dim=-1).flatten(1)[:, : q.shape[1]]
    return _assemble(q, nibble.int(), base)


def decode_view(q: Tensor, base: Tensor) -> Tensor:
    """Return the 8-bit view, bf16 [N, K]: the four low mantissa bits at their midpoint, 8."""
    return _assemble(q, torch.full_like(q, 8).int(), base)


def dense(
    q: Tensor,
    b: Tensor,
    base: Tensor,
    row_start: Tensor,
    column: Tensor,
    value: Tensor,
    *,
    view: bool = False,
) -> Tensor:
    """Return all weights, escapes in their places: bf16 [N, K]; ``view`` of the 8-bit view."""
    weight = decode_view(q, base) if view else decode_planes(q, b, base)
    row = torch.repeat_interleave(torch.arange(len(base), device=q.device), row_start.diff())
    weight[row, column.long()] = value
    return weight


def linear(x: Tensor, *parts: Tensor, view: bool = False) -> Tensor:
    """Return ``x @ W.T`` in fp64, [M, N], for x [M, K] and W in W12, parts as for ``dense``."""
    return x.double() @ dense(*parts, view=view).double().T


def _assemble(q: Tensor, nibble: Tensor, base: Tensor) -> Tensor:
    wide = q.int()
    code = (wide & 0x80) << 8 | (wide & 7) << 8 | (wide & 0x78) << 1 | nibble
    # A BF16 whose exponent field is the 4-bit code, times 2^base: exact, zeros and gradual
    # underflow included (the product is formed in fp64, which has room for every step).
    small = (code << 16).view(torch.float32).double()
    return (small * torch.exp2(base.double())[:, None]).to(torch.bfloat16)
