"""A Gated DeltaNet layer: short convolution, gated delta rule, gated norm.

Three forms of one recurrence, chosen by the rows of the pass: the chunked form for prompts, a
single step for plain decoding, and the tree form for verification. The first two advance the state
at once; the tree form leaves it alone and returns what a commit of any path needs. The state and
everything that feeds it are fp32 (fp64 in an fp64 model).

Source: Yang et al., Gated Delta Networks (arXiv 2412.06464), as Qwen3.5 lays it out.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specpilot.harness.engines.reference.config import GdnConfig
from specpilot.harness.engines.reference.layers import RmsNorm
from specpilot.harness.engines.reference.rows import Rows, TreeLayout
from specpilot.harness.engines.reference.weights import WeightFolder, linear
from specpilot.kernels.gdn_chunk.naive import chunk_gated_delta_rule

__all__ = ["GdnLayer", "GdnState", "GdnUpdates", "commit_", "tree_form"]


class GdnState(NamedTuple):
    """Committed state of one layer (of all, in ``commit_``): views into the pool, updated in place.

    ``memory`` [R, value_heads, key_dim, value_dim], fp32 or fp64. ``conv`` [R, width - 1,
    channels]: the last inputs of the convolution, oldest first, before convolution and activation.
    """

    memory: Tensor
    conv: Tensor


class GdnUpdates(NamedTuple):
    """What one layer of a verify pass keeps for its commit, instead of a state for every node.

    ``k`` [R, key_heads, T, key_dim], ``u`` [R, value_heads, T, value_dim], ``decay`` [R,
    value_heads, T] (log decay summed along each path) and ``inputs`` [R, T, channels] of the
    convolution.
    """

    k: Tensor
    u: Tensor
    decay: Tensor
    inputs: Tensor


class GdnLayer:
    """One layer's weights; one input projection yields [q | k | v | z | b | a]."""

    def __init__(
        self, weights: WeightFolder, name: str, hidden: int, shape: GdnConfig, eps: float
    ) -> None:
        self.shape = shape
        channels, heads = shape.conv_channels, shape.value_heads
        width = heads * shape.value_dim
        parts = [
            weights.get(f"{name}.in_proj_{part}.weight", (size, hidden))
            for part, size in (("qkv", channels), ("z", width), ("b", heads), ("a", heads))
        ]
        self.w_in = weights.keep(torch.cat(parts))
        self.w_out = weights.keep(weights.get(f"{name}.out_proj.weight", (hidden, width)))
        conv = weights.get(f"{name}.conv1d.weight", (channels, 1, shape.conv_width))
        self.conv = conv[:, 0].t().contiguous()
        self.norm = RmsNorm.load(weights, f"{name}.norm.weight", shape.value_dim, eps)
        wide = self.norm.scale.dtype
        self.rate = -weights.get(f"{name}.A_log", (heads,), wide).exp()
        self.dt_bias = weights.get(f"{name}.dt_bias", (heads,), wide)
        self.split = (channels, width, heads, heads)
        # q / |q| / sqrt(dk) and k / |k| for [q heads | k heads], as RmsNorm with these weights.
        scale = torch.full((2 * shape.key_heads, shape.key_dim), shape.key_dim**-0.5, dtype=wide)
        scale[: shape.key_heads] /= shape.key_dim**0.5
        self.unit = RmsNorm(scale.to(conv.device), 1e-6 / shape.key_dim)

    def __call__(self, x: Tensor, state: GdnState, rows: Rows) -> tuple[Tensor, GdnUpdates | None]:
        """Map ``x`` [R, T, hidden] to [R, T, hidden]; updates for a tree, else None."""
        mixed, z, b, a = linear(x, self.w_in).split_with_sizes(self.split, -1)
        line = torch.cat((state.conv, mixed), 1)
        q, k, v = self._heads(F.silu(self._convolve(line, rows)))
        g = F.softplus(a.to(self.rate.dtype) + self.dt_bias).mul_(self.rate)
        beta = b.to(self.rate.dtype).sigmoid()
        updates = None
        if rows.tree is not None:
            out, k, u, decay = tree_form(q, k, v, g, beta, state.memory, rows.tree)
            updates = GdnUpdates(k, u, decay, mixed)
        else:
            if rows.count == 1:
                out = self._step(q, k, v, g, beta, state.memory)
            else:
                out, memory = chunk_gated_delta_rule(q, k, v, g, beta, state.memory)
                state.memory.copy_(memory)
            state.conv.copy_(line[:, rows.count :])
        return linear(self._gated_norm(out, z), self.w_out), updates

    def _convolve(self, line: Tensor, rows: Rows) -> Tensor:
        """Depthwise convolution of ``line`` [R, width - 1 + T, C] along chains or tree paths."""
        width, channels = self.conv.shape
        if rows.count == 1:
            return (line * self.conv).sum(1, keepdim=True)
        if rows.tree is None:
            taps = [line[:, i : i + rows.count] for i in range(width)]
        else:
            assert rows.tree.taps is not None
            taken = line.flatten(0, 1).index_select(0, rows.tree.taps)
            taken = taken.view(rows.requests, rows.count, width, channels)
            return (taken * self.conv).sum(2)
        out = taps[0] * self.conv[0]
        for tap, weight in zip(taps[1:], self.conv[1:], strict=True):
            out.addcmul_(tap, weight)
        return out

    def _heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split [R, T, C] into heads; q and k l2-normalised, q scaled, all in the state's dtype."""
        s = self.shape
        keys = 2 * s.key_heads * s.key_dim
        qk = mixed[..., :keys].view(*mixed.shape[:2], 2 * s.key_heads, s.key_dim)
        v = mixed[..., keys:].view(*mixed.shape[:2], s.value_heads, s.value_dim)
        q, k = self.unit.wide(qk).split_with_sizes((s.key_heads, s.key_heads), 2)
        return q, k, v.to(self.rate.dtype)

    def _step(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, memory: Tensor
    ) -> Tensor:
        """One token a request, updating ``memory`` in place. Returns [R, 1, heads, value_dim]."""
        requests, _, heads, value_dim = v.shape
        group = (self.shape.key_heads, heads // self.shape.key_heads)
        k_row, q_row = (x.transpose(1, 2).unsqueeze(2) for x in (k, q))  # [R, Hk, 1, 1, key_dim]
        grouped = memory.view(requests, *group, *memory.shape[2:])
        memory.mul_(g.exp().transpose(1, 2).unsqueeze(-1))
        u = v.view(requests, *group, 1, value_dim) - k_row @ grouped
        grouped.addcmul_(k_row.mT, u.mul_(beta.view(requests, *group, 1, 1)))
        return (q_row @ grouped).view(requests, 1, heads, value_dim)

    def _gated_norm(self, out: Tensor, z: Tensor) -> Tensor:
        normed = self.norm.wide(out)
        gate = F.silu(z.to(normed.dtype)).view_as(normed)
        return normed.mul_(gate).flatten(2).to(z.dtype)


def tree_form(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, memory: Tensor, tree: TreeLayout
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Every node of a tree at once; arguments as in ``kernels.gdn_tree.naive.tree_wy``.

    The same equations, arranged for few operations: products of keys and queries are made once a
    key head and shared by its value heads, and everything that the tree alone decides comes from
    its layout. Returns outputs [R, T, Hv, dv] and the k, u and decay of ``GdnUpdates``.
    """
    requests, count, heads, value_dim = v.shape
    key_heads, key_dim = k.shape[2:]
    lanes, group = requests * heads, heads // key_heads

    both = torch.cat((k, q), 1).transpose(1, 2)  # [R, Hk, 2 T, dk]: all keys, then all queries
    keys = both[:, :, :count]
    pairs = (both @ keys.mT).view(requests, key_heads, 1, 2, count, count)
    shared = both.unsqueeze(2).expand(-1, -1, group, -1, -1).reshape(lanes, 2 * count, key_dim)
    read = torch.bmm(shared, memory.reshape(lanes, key_dim, value_dim))
    decay = (tree.above @ g).mT.contiguous()  # [R, Hv, T]
    # The bar comes before exp: e^G_n e^-G_m apart overflows, and so may what no path holds.
    weight = (decay.unsqueeze(-1) - decay.unsqueeze(-2) + tree.barred.unsqueeze(1)).exp_()
    weight = weight.view(requests, key_heads, group, 1, count, count)
    mixed = (pairs * weight).view(lanes, 2, count, count)
    read = read.view(lanes, 2, count, value_dim).mul_(decay.exp().view(lanes, 1, count, 1))
    strength = beta.mT.reshape(lanes, count, 1)
    rhs = v.transpose(1, 2).reshape(lanes, count, value_dim).sub(read[:, 0]).mul_(strength)
    lower = mixed[:, 0] * strength  # its diagonal is not read
    # Transposed, both are as LAPACK wants them: half the time.
    u = torch.linalg.solve_triangular(lower.mT, rhs.mT, upper=True, left=False, unitriangular=True)
    out = torch.baddbmm(read[:, 1], mixed[:, 1], u.mT)
    return (
        out.view(requests, heads, count, value_dim).transpose(1, 2),
        keys,
        u.mT.unflatten(0, (requests, heads)),
        decay,
    )


def commit_(state: GdnState, updates: Sequence[GdnUpdates], path: Tensor, length: Tensor) -> None:
    """Advance all layers' state in place by each request's accepted path.

    ``state`` as in ``GdnState`` with a layer dimension after R; ``updates`` one a layer; ``path``
    int64 [R, P], the path's nodes and then its last one again; ``length`` int64 [R], its nodes.

    The same function as ``kernels.gdn_tree.naive.commit`` and ``conv_commit`` of every layer, in
    one go and without a temporary of the state's size: S = e^G_last S + sum_j e^(G_last - G_j) k_j
    u_j^T over the path.
    """
    heads = state.memory.shape[2]
    decay = torch.stack([update.decay for update in updates], 1)  # [R, layers, heads, T]
    at = path[:, None, None].expand(*decay.shape[:3], -1)
    decay = decay.gather(-1, at)
    total = decay[..., -1:]
    held = torch.arange(path.shape[1], device=path.device) < length[:, None]
    weight = (total - decay).exp_() * held[:, None, None]

    def along(parts: list[Tensor]) -> Tensor:
        whole = torch.stack(parts, 1)  # [R, layers, H, T, d]
        return whole.gather(
            3, at[:, :, : whole.shape[2], :, None].expand(-1, -1, -1, -1, whole.shape[-1])
        )

    k = along([update.k for update in updates])
    k = k.repeat_interleave(heads // k.shape[2], 2).mul_(weight.unsqueeze(-1)).flatten(0, 2)
    u = along([update.u for update in updates]).flatten(0, 2)
    state.memory.mul_(total.exp().unsqueeze(-1))
    state.memory.flatten(0, 2).baddbmm_(k.mT, u)

    line = torch.cat((state.conv, torch.stack([update.inputs for update in updates], 1)), 2)
    keep = state.conv.shape[2]
    order = torch.arange(keep, device=path.device)
    row = length[:, None] + order - keep  # of the path; below 0, of the old state
    rows = torch.where(row < 0, row + keep, path.gather(1, row.clamp(min=0)) + keep)
    state.conv.copy_(line.gather(2, rows[:, None, :, None].expand_as(state.conv)))
