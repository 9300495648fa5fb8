"""What one forward pass computes: its rows, where they sit, and what each may see.

A pass serves neighbouring slots ``first .. first + requests - 1`` of the state pool with the same
number of rows each. Row n of request r is a token at position ``length[r] + depth[r, n]``, whose
keys go to cache row ``length[r] + n``. It sees its request's committed rows and, among the pass's
own, itself and its ancestors. Everything here depends on the trees alone: it is made once a pass
and shared by all layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

__all__ = ["Rows", "TreeLayout", "block_rows", "chain_rows", "tree_rows"]


class TreeLayout(NamedTuple):
    """How the rows of a pass over R trees of T rows see each other; the same in every layer.

    ``depth`` int64 [R, T]. ``above`` [R, T, T]: 1 where column m is row n or an ancestor of it,
    else 0; ``barred``: 0 there, else -inf; both at least fp32. ``taps`` int64 [R * T * width]: rows
    of the flattened ``cat(conv state, inputs)`` that each row convolves, or None without GDN.
    """

    depth: Tensor
    above: Tensor
    barred: Tensor
    taps: Tensor | None


@dataclass(frozen=True, slots=True)
class Rows:
    """One pass over R requests of T rows.

    ``positions`` int64 [R, T]. ``cache_rows`` int64 [R * T]: rows of the flattened KV cache.
    ``span``: cache rows that attention reads. ``bias`` [R, 1, T, span], 0 or -inf, or None where
    every row sees everything. ``tree`` is None for a chain that is committed as it is computed
    (prefill, and decoding by single rows) and for a drafter's block.
    """

    first: int
    requests: int
    count: int
    positions: Tensor
    cache_rows: Tensor
    span: int
    bias: Tensor | None
    tree: TreeLayout | None

    @property
    def slots(self) -> slice:
        return slice(self.first, self.first + self.requests)


def chain_rows(first: int, lengths: Sequence[int], count: int, capacity: int, like: Tensor) -> Rows:
    """Rows of a chain that is certain: prompt tokens, or one anchor each in plain decoding.

    ``like`` gives the dtype and device of the bias, ``capacity`` the cache rows of a slot.
    """
    span = max(lengths) + count
    bias = None
    if count > 1 or len(lengths) > 1:
        last = torch.tensor(lengths, device=like.device)[:, None] + torch.arange(
            count, device=like.device
        )
        bias = _bias(torch.arange(span, device=like.device) <= last[..., None], like)
    return _rows(first, lengths, count, capacity, like, span, bias, None)


def block_rows(first: int, lengths: Sequence[int], count: int, capacity: int, like: Tensor) -> Rows:
    """Rows of a drafter's block: each sees the committed rows and the whole block."""
    span = max(lengths) + count
    bias = None
    if len(lengths) > 1:
        end = torch.tensor(lengths, device=like.device)[:, None, None] + count
        seen = torch.arange(span, device=like.device) < end
        bias = _bias(seen.expand(-1, count, -1), like)
    return _rows(first, lengths, count, capacity, like, span, bias, None)


def tree_rows(
    first: int,
    lengths: Sequence[int],
    parents: Sequence[tuple[int, ...]],
    capacity: int,
    conv_width: int | None,
    like: Tensor,
) -> Rows:
    """Rows of one tree a request; ``parents`` as in ``Tree.parent``.

    Shorter trees are padded with rows that nothing sees. ``conv_width`` is None for dense targets.
    """
    count = max(map(len, parents))
    tree = _layout(tuple(parents), count, conv_width, like.dtype, like.device)
    span = max(lengths) + count
    bias = like.new_full((len(lengths), 1, count, span), -torch.inf)
    for r, length in enumerate(lengths):
        bias[r, :, :, :length] = 0
        bias[r, 0, :, length : length + count] = tree.barred[r]
    return _rows(first, lengths, count, capacity, like, span, bias, tree)


def _rows(
    first: int,
    lengths: Sequence[int],
    count: int,
    capacity: int,
    like: Tensor,
    span: int,
    bias: Tensor | None,
    tree: TreeLayout | None,
) -> Rows:
    order = torch.arange(count, device=like.device)
    length = torch.tensor(lengths, device=like.device)[:, None]
    slots = torch.arange(first, first + len(lengths), device=like.device)[:, None]
    return Rows(
        first=first,
        requests=len(lengths),
        count=count,
        positions=length + (order if tree is None else tree.depth),
        cache_rows=(length + capacity * slots + order).flatten(),
        span=span,
        bias=bias,
        tree=tree,
    )


def _bias(seen: Tensor, like: Tensor) -> Tensor:
    """[R, T, span] bool -> [R, 1, T, span] additive."""
    return like.new_zeros(seen.shape).masked_fill_(~seen, -torch.inf).unsqueeze(1)


@lru_cache(maxsize=64)  # chains, and trees that recur, are laid out once
def _layout(
    parents: tuple[tuple[int, ...], ...],
    count: int,
    width: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> TreeLayout:
    keep = (width or 1) - 1
    line = keep + count  # rows of one request's cat(conv state, inputs)
    wide = np.float64 if dtype == torch.float64 else np.float32
    depth = np.zeros((len(parents), count), np.int64)
    above = np.zeros((len(parents), count, count), wide)
    taps = np.empty((len(parents), count, keep + 1), np.int64)
    for r, up in enumerate(parents):
        for n in range(count):  # a row continues its parent's; a few operations on the host each
            parent = up[n] if n < len(up) else -1
            if parent < 0:
                taps[r, n, :keep] = range(r * line, r * line + keep)
            else:
                depth[r, n] = depth[r, parent] + 1
                above[r, n] = above[r, parent]
                taps[r, n, :keep] = taps[r, parent, 1:]
            above[r, n, n] = 1
            taps[r, n, keep] = r * line + keep + n
    seen = torch.from_numpy(above).to(device)
    return TreeLayout(
        torch.from_numpy(depth).to(device),
        seen,
        torch.zeros_like(seen).masked_fill_(seen == 0, -torch.inf),
        None if width is None else torch.from_numpy(taps).flatten().to(device),
    )
