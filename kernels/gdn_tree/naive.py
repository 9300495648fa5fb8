"""Gated DeltaNet and its short convolution over a tree of tokens: the specification, in torch.

One layout everywhere. ``R`` requests, ``N`` tree rows (anchor included, parents before children),
``Hk`` key heads, ``Hv`` value heads (``Hv`` a multiple of ``Hk``; value head h uses key head
``h // (Hv // Hk)``):

    q, k   [R, N, Hk, dk]   L2-normalised, q already times dk**-0.5
    v      [R, N, Hv, dv]
    g      [R, N, Hv]       log decay, <= 0
    beta   [R, N, Hv]       write strength in [0, 1]
    state  [R, Hv, dk, dv]  fp32 or fp64; everything is computed in its dtype
    parent [R, N]           int64, -1 at a root and at padding rows

Per node n with parent state S (Yang et al., Gated Delta Networks, arXiv 2412.06464, eq. 10)::

    u_n = beta_n (v_n - e^{g_n} S^T k_n);  S_n = e^{g_n} S + k_n u_n^T;  o_n = S_n^T q_n

A padding row has parent -1, beta 0 and g 0: it changes nothing and its own output means nothing.
The masks and indices depend on the tree alone, so a model computes them once per pass, not per
layer. This module knows nothing of projections, activations and norms around the recurrence.
"""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "TreeUpdates",
    "ancestor_mask",
    "commit",
    "conv_commit",
    "conv_index",
    "conv_tree",
    "depths",
    "tree_path",
    "tree_wy",
]


class TreeUpdates(NamedTuple):
    """What a pass keeps so that any root path can be committed without running it again.

    ``k`` [R, Hv, N, dk], ``u`` [R, Hv, N, dv] and ``decay`` [R, Hv, N] (log decay summed along the
    path to each node, the node included): dk + dv + 1 numbers a node against dk * dv for a state.
    """

    k: Tensor
    u: Tensor
    decay: Tensor


def ancestor_mask(parent: Tensor) -> Tensor:
    """Return bool [R, N, N]: entry (n, m) is true when m is n or an ancestor of n."""
    n = parent.shape[-1]
    step = torch.zeros(*parent.shape, n + 1, dtype=torch.float32, device=parent.device)
    step.scatter_(-1, torch.where(parent < 0, n, parent).unsqueeze(-1), 1.0)
    reach = step[..., :n] + torch.eye(n, device=parent.device)
    span = 1
    while span < n:  # reach covers ancestors up to `span` generations; squaring doubles that
        reach = (reach @ reach).clamp_(max=1.0)
        span *= 2
    return reach > 0


def depths(parent: Tensor) -> Tensor:
    """Return int64 [R, N]: 0 at roots, else one more than the parent's depth."""
    return ancestor_mask(parent).sum(-1) - 1


def _by_head(x: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """[R, N, H, d] -> [R, heads, N, d], repeating key heads for grouped value attention."""
    x = x.to(dtype).transpose(1, 2)
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def tree_path(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, parent: Tensor
) -> tuple[Tensor, Tensor]:
    """Run the recurrence node by node, each from its parent's state.

    Returns outputs [R, N, Hv, dv] and every node's state [R, N, Hv, dk, dv], both in
    ``state.dtype``. Slow and memory-hungry on purpose: this is what the other forms must equal.
    """
    heads, dtype = state.shape[1], state.dtype
    q, k, v = (_by_head(x, heads, dtype) for x in (q, k, v))
    decay = g.to(dtype).exp().transpose(1, 2)[..., None, None]  # [R, Hv, N, 1, 1]
    strength = beta.to(dtype).transpose(1, 2)[..., None]
    request = torch.arange(state.shape[0], device=state.device)
    states = state.new_empty(state.shape[0], parent.shape[1] + 1, *state.shape[1:])
    states[:, 0] = state  # slot n + 1 holds node n, so that parent -1 reads the initial state
    out = []
    for n in range(parent.shape[1]):
        s = decay[:, :, n] * states[request, parent[:, n] + 1]
        u = strength[:, :, n] * (v[:, :, n] - (s.mT @ k[:, :, n, :, None]).squeeze(-1))
        s = s + k[:, :, n, :, None] * u[:, :, None, :]
        states[:, n + 1] = s
        out.append((s.mT @ q[:, :, n, :, None]).squeeze(-1))
    return torch.stack(out, dim=1), states[:, 1:]


def tree_wy(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, mask: Tensor
) -> tuple[Tensor, TreeUpdates]:
    """Compute every node at once: one unit-triangular solve under the ancestor mask.

    With ``G`` the log decay summed along each path and ``D[n, m] = e^{G_n - G_m}`` for ancestors::

        (I + tril(beta D K K^T)) U = beta (V - e^G K S)
        O = e^G Q S + (D * Q K^T) U

    ``mask`` is ``ancestor_mask(parent)``. The state is read once. Differences are exponentiated
    under the mask only (``e^{G_n} e^{-G_m}`` apart overflows), and the solve is a substitution
    (doubling the inverse loses all accuracy on repeated keys). Returns outputs [R, N, Hv, dv] and
    the updates that ``commit`` takes, in ``state.dtype``.
    """
    heads, dtype = state.shape[1], state.dtype
    q, k, v = (_by_head(x, heads, dtype) for x in (q, k, v))
    above = mask.unsqueeze(1)  # [R, 1, N, N]
    decay = above.to(dtype) @ g.to(dtype).transpose(1, 2).unsqueeze(-1)  # [R, Hv, N, 1]
    weight = (decay - decay.mT).masked_fill(~above, -torch.inf).exp()
    strength = beta.to(dtype).transpose(1, 2).unsqueeze(-1)
    from_root = decay.exp()
    n = k.shape[-2]
    read = torch.cat((k, q), dim=-2) @ state  # keys and queries meet the state in one product
    pairs = torch.cat((k, q), dim=-2) @ k.mT
    rhs = strength * (v - from_root * read[..., :n, :])
    lower = strength * weight * pairs[..., :n, :]  # unitriangular ignores its diagonal
    u = torch.linalg.solve_triangular(lower, rhs, upper=False, unitriangular=True)
    out = from_root * read[..., n:, :] + (weight * pairs[..., n:, :]) @ u
    return out.transpose(1, 2), TreeUpdates(k, u, decay.squeeze(-1))


def commit(state: Tensor, updates: TreeUpdates, path: Tensor, length: Tensor) -> Tensor:
    """Return the state [R, Hv, dk, dv] after each request's accepted path.

    ``path`` int64 [R, L] lists node indices from the root down, padded with any valid index;
    ``length`` int64 [R] counts the entries that hold. Length 0 returns the state unchanged.
    """
    rows, longest = path.shape
    heads = state.shape[1]
    at = path[:, None, :].expand(rows, heads, longest)
    decay = updates.decay.gather(-1, at)
    last = (length - 1).clamp(min=0)[:, None, None].expand(rows, heads, 1)
    total = decay.gather(-1, last).masked_fill((length == 0)[:, None, None], 0.0)
    held = torch.arange(longest, device=path.device) < length[:, None]  # [R, L]
    weight = (total - decay).masked_fill(~held[:, None], -torch.inf).exp().unsqueeze(-1)
    k = updates.k.gather(2, at[..., None].expand(-1, -1, -1, updates.k.shape[-1]))
    u = updates.u.gather(2, at[..., None].expand(-1, -1, -1, updates.u.shape[-1]))
    return total.exp().unsqueeze(-1) * state + (k * weight).mT @ u


def conv_index(parent: Tensor, width: int) -> Tensor:
    """Return int64 [R, N, width]: for each node the rows of ``cat(conv state, x)`` it convolves.

    Oldest first. The conv state has ``width - 1`` rows, oldest first, so node n is row
    ``width - 1 + n`` and a root continues with row ``width - 2``.
    """
    rows, n = parent.shape
    keep = width - 1
    before_state = torch.arange(-1, keep - 1, device=parent.device).clamp(min=0)
    previous = torch.cat(
        (before_state.expand(rows, keep), torch.where(parent < 0, keep - 1, parent + keep)), dim=1
    )
    taps = [torch.arange(keep, keep + n, device=parent.device).expand(rows, n)]
    for _ in range(keep):
        taps.append(previous.gather(1, taps[-1]))
    return torch.stack(taps[::-1], dim=-1)


def conv_tree(
    x: Tensor, conv_state: Tensor, weight: Tensor, index: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Causal depthwise convolution along every root path; no activation.

    ``x`` [R, N, C] pre-convolution inputs, ``conv_state`` [R, width - 1, C] the last committed
    inputs, ``weight`` [C, width], ``index`` from ``conv_index``. Returns [R, N, C].
    """
    rows, n, width = index.shape
    line = torch.cat((conv_state, x), dim=1)
    taken = line.gather(1, index.reshape(rows, n * width, 1).expand(-1, -1, x.shape[-1]))
    out = (taken.view(rows, n, width, -1) * weight.t()).sum(2)
    return out if bias is None else out + bias


def conv_commit(x: Tensor, conv_state: Tensor, path: Tensor, length: Tensor) -> Tensor:
    """Return the conv state [R, width - 1, C] after each request's accepted path.

    ``path`` [R, L] and ``length`` [R] as in ``commit``; the new state is the last ``width - 1``
    rows of ``cat(conv_state, x[path])``.
    """
    keep = conv_state.shape[1]
    line = torch.cat((conv_state, x), dim=1)
    held = torch.arange(keep, device=path.device).expand(path.shape[0], keep)
    order = torch.cat((held, path + keep), dim=1)
    rows = order.gather(1, length[:, None] + held)
    return line.gather(1, rows[..., None].expand(-1, -1, x.shape[-1]))
