"""Tree attention in torch: every row sees the whole context and its own root path.

Layout: ``R`` requests, ``N`` tree rows, ``Hq`` query heads, ``Hk`` key heads (``Hq`` a multiple;
query head h uses key head ``h // (Hq // Hk)``), head size ``d``:

    q                 [R, N, Hq, d]
    k_tree, v_tree    [R, N, Hk, d]       keys and values of the tree's own rows
    k_past, v_past    [R, L, Hk, d]       the context, of which ``length`` [R] rows hold
    mask              [R, N, N] bool      row n sees row m (n and its ancestors)
"""

import torch
from torch import Tensor

__all__ = ["tree_attention"]


def tree_attention(
    q: Tensor,
    k_tree: Tensor,
    v_tree: Tensor,
    k_past: Tensor,
    v_past: Tensor,
    length: Tensor,
    mask: Tensor,
    scale: float | None = None,
) -> Tensor:
    """Softmax attention, outputs [R, N, Hq, d] in q's dtype; ``scale`` is ``d**-0.5`` by default.

    A row that sees nothing (padding with no context) gives zeros.
    """
    repeat = q.shape[2] // k_tree.shape[2]
    k = torch.cat((k_past, k_tree), dim=1).repeat_interleave(repeat, dim=2)
    v = torch.cat((v_past, v_tree), dim=1).repeat_interleave(repeat, dim=2)
    held = torch.arange(k_past.shape[1], device=q.device) < length[:, None]
    sees = torch.cat((held[:, None].expand(-1, q.shape[1], -1), mask), dim=2)[:, None]
    scores = torch.einsum("rnhd,rmhd->rhnm", q, k) * (scale or q.shape[-1] ** -0.5)
    weights = scores.masked_fill(~sees, -torch.inf).softmax(-1)
    weights = torch.where(sees.any(-1, keepdim=True), weights, 0.0)
    return torch.einsum("rhnm,rmhd->rnhd", weights, v)
