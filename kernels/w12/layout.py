"""Rearrange W12 planes for the Triton kernel, so that one load feeds whole MMA operands.

A tile covers ``BLOCK_K`` columns of every row. With J = BLOCK_K / 4, row r of tile t is, as
uint16: in ``q`` 2J words, first half h = 0 then h = 1, where the 32-bit word m of half h holds the
bytes of columns (2hJ + 2m, 2hJ + 2m + 1, (2h+1)J + 2m, (2h+1)J + 2m + 1); in ``b`` J words in the
same order, h = 0 in the low nibbles and h = 1 in the high ones. One decode of a pair of words thus
gives two operands whose columns are contiguous slices of x.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specpilot.errors import InvalidInput

__all__ = ["BLOCK_K", "TiledW12", "tile", "untile"]

BLOCK_K = 256


@dataclass(frozen=True, slots=True)
class TiledW12:
    """A W12 matrix on a device, ready for ``gemm``. K is padded to a multiple of ``BLOCK_K``.

    ``q`` int16 [N, K/2], ``b`` int16 [N, K/4], ``scale`` fp32 [N] = 2^(base - 112), escapes in CSR
    order: ``row_start`` int32 [N + 1], ``column`` int32 [E], ``value`` bf16 [E].
    """

    rows: int
    columns: int
    q: Tensor
    b: Tensor
    scale: Tensor
    row_start: Tensor
    column: Tensor
    value: Tensor

    @property
    def nbytes(self) -> int:
        tensors = (self.q, self.b, self.scale, self.row_start, self.column, self.value)
        return sum(t.numel() * t.element_size() for t in tensors)


def tile(
    q: Tensor, b: Tensor, base: Tensor, row_start: Tensor, column: Tensor, value: Tensor
) -> TiledW12:
    """Build the tiled form from planes ``q`` uint8 [N, K] and ``b`` uint8 [N, ceil(K/2)].

    Raises:
        InvalidInput: plane shapes that do not belong together.
    """
    rows, columns = q.shape
    if b.shape != (rows, (columns + 1) // 2) or base.shape != (rows,):
        raise InvalidInput(
            f"W12 planes disagree: q {tuple(q.shape)}, b {tuple(b.shape)}, "
            f"base {tuple(base.shape)}.",
            hint="b holds two columns a byte, base one value a row.",
        )
    padded = -(-columns // BLOCK_K) * BLOCK_K
    nibble = torch.stack([b & 0xF, b >> 4], dim=-1).flatten(1)[:, :columns]
    bytes_q = _order(torch.nn.functional.pad(q, (0, padded - columns)))
    bytes_b = _order(torch.nn.functional.pad(nibble, (0, padded - columns)))
    low, high = bytes_b.unflatten(2, (2, -1)).unbind(2)
    return TiledW12(
        rows=rows,
        columns=columns,
        q=bytes_q.flatten(1).contiguous().view(torch.int16),
        b=(low | high << 4).flatten(1).contiguous().view(torch.int16),
        scale=torch.exp2(base.float() - 112),
        row_start=row_start.int(),
        column=column.int(),
        value=value,
    )


def _order(plane: Tensor) -> Tensor:
    """Order the bytes of every tile row: [N, K] to [N, tiles, BLOCK_K]."""
    quarter = BLOCK_K // 4
    # columns of a tile as (half, low or high slice, word, byte) -> (half, word, slice, byte)
    parts = plane.unflatten(1, (-1, 2, 2, quarter // 2, 2))
    return parts.permute(0, 1, 2, 4, 3, 5).reshape(plane.shape[0], -1, BLOCK_K)


def untile(weight: TiledW12) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the planes and lists that ``tile`` was given: q, b, base, row_start, column, value."""
    q = _disorder(weight.q.view(torch.uint8))[:, : weight.columns]
    packed = weight.b.view(torch.uint8).unflatten(1, (-1, BLOCK_K // 2))
    nibble = _disorder(torch.cat((packed & 0xF, packed >> 4), 2).flatten(1))[:, : weight.columns]
    nibble = torch.nn.functional.pad(nibble, (0, weight.columns % 2))
    base = (weight.scale.log2() + 112).round().to(torch.uint8)
    b = nibble[:, 0::2] | nibble[:, 1::2] << 4
    return q, b, base, weight.row_start, weight.column, weight.value


def _disorder(plane: Tensor) -> Tensor:
    """Undo ``_order``: [N, K] to [N, K]."""
    parts = plane.unflatten(1, (-1, 2, BLOCK_K // 8, 2, 2))
    return parts.permute(0, 1, 2, 4, 3, 5).flatten(1)
