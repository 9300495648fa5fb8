"""The building blocks that targets and drafters share: norm, rotary positions, MLP, attention.

Weights are plain tensors (or packed ones), fused at load time so that a step is few operations: on
a small model the number of operations, not their size, sets the step's time.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from specpilot.harness.engines.reference.rows import Rows
from specpilot.harness.engines.reference.weights import WeightFolder, linear

__all__ = ["Attention", "KvCache", "Mlp", "RmsNorm", "Rope", "load_norm", "rotate_"]


class RmsNorm:
    """x / sqrt(mean(x^2) + eps) * w over the last dimension, in fp32 or fp64; x's dtype out.

    Computed as ``x / hypot(|x|, sqrt(n eps)) * (w sqrt(n))``: half the operations of the textbook
    form, which a small model's step is made of. ``weight`` [..., n] broadcasts over x.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        size = weight.shape[-1]
        self.scale = weight * size**0.5
        self.floor = weight.new_tensor((size * eps) ** 0.5)

    @classmethod
    def load(
        cls, weights: WeightFolder, name: str, size: int, eps: float, offset: float = 0.0
    ) -> "RmsNorm":
        """Read tensor ``name`` [size], to which ``offset`` is added."""
        return cls(load_norm(weights, name, size, offset), eps)

    def __call__(self, x: Tensor) -> Tensor:
        normed = self.wide(x)
        return normed if normed.dtype == x.dtype else normed.to(x.dtype)

    def wide(self, x: Tensor) -> Tensor:
        """Like a call, but stay in fp32 or fp64."""
        if x.dtype != self.scale.dtype:  # even a conversion to the same dtype takes its time
            x = x.to(self.scale.dtype)
        length = torch.linalg.vector_norm(x, 2.0, -1, True)
        return x.div(length.hypot_(self.floor)).mul_(self.scale)


def load_norm(weights: WeightFolder, name: str, size: int, offset: float) -> Tensor:
    """Return a norm's weight plus ``offset``, at least fp32 (1 + w rounds away in bfloat16)."""
    wide = torch.promote_types(weights.dtype, torch.float32)
    return weights.get(name, (size,), wide) + offset


class Rope:
    """Rotary position tables ``[positions, 1, rotary_dim]`` (neox halves), in the model's dtype."""

    def __init__(
        self,
        rotary_dim: int,
        theta: float,
        positions: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        wide = torch.promote_types(dtype, torch.float32)
        exponent = torch.arange(0, rotary_dim, 2, dtype=wide, device=device) / rotary_dim
        angle = torch.arange(positions, dtype=wide, device=device)[:, None] / theta**exponent
        cos, sin = angle.cos(), angle.sin()
        # The first half of sin is negated so that rotation is x * cos + swapped halves * sin.
        self.cos = torch.cat((cos, cos), -1).to(dtype).unsqueeze(1)
        self.sin = torch.cat((-sin, sin), -1).to(dtype).unsqueeze(1)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin of ``positions`` [...]: two tensors [..., 1, rotary_dim]."""
        return self.cos[positions], self.sin[positions]


def rotate_(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the leading dimensions of ``x`` [..., heads, head_dim] in place."""
    cos, sin = rope
    part = x[..., : cos.shape[-1]]
    left, right = part.chunk(2, -1)
    swapped = torch.cat((right, left), -1)
    part.mul_(cos).addcmul_(swapped, sin)
    return x


class KvCache:
    """Keys and values of one layer, ``[slots, capacity, kv_heads, head_dim]`` each.

    Token-major, so that rows of any mix of slots are written and moved by one flat index.
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys = keys
        self.values = values
        self._flat = (keys.flatten(0, 1), values.flatten(0, 1))

    def write(self, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store ``keys`` and ``values`` [R, T, kv_heads, head_dim] at flat cache rows [R * T]."""
        self._flat[0].index_copy_(0, rows, keys.flatten(0, 1))
        self._flat[1].index_copy_(0, rows, values.flatten(0, 1))

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy flat cache rows ``source`` to ``target`` (they may overlap)."""
        for flat in self._flat:
            flat.index_copy_(0, target, flat.index_select(0, source))


def attend(query: Tensor, cache: KvCache, rows: Rows) -> Tensor:
    """Attention of ``query`` [R, T, heads, d] over the cache: [R, T, heads * d].

    Query heads that share a key head are folded into rows, so keys are never repeated.
    """
    count, heads, dim = query.shape[1:]
    kv_heads = cache.keys.shape[2]
    group = heads // kv_heads
    keys = cache.keys[rows.slots, : rows.span].transpose(1, 2)
    values = cache.values[rows.slots, : rows.span].transpose(1, 2)
    # A new layout in which the group's heads of a row lie together: row t, head h is t * group + h.
    folded = query.view(rows.requests, count, kv_heads, group * dim).transpose(1, 2)
    folded = folded.reshape(rows.requests, kv_heads, count * group, dim)
    bias = rows.bias
    if bias is not None and group > 1:
        bias = bias.repeat_interleave(group, 2)
    out = F.scaled_dot_product_attention(folded, keys, values, attn_mask=bias)
    out = out.view(rows.requests, kv_heads, count, group * dim).transpose(1, 2)
    return out.reshape(rows.requests, count, heads * dim)


class Attention:
    """Grouped-query attention with optional q/k norm, bias and output gate.

    One projection yields [queries | keys | values | gate] by head; Qwen3.5 stores each head's query
    and gate side by side, which loading undoes.
    """

    def __init__(
        self,
        weights: WeightFolder,
        name: str,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        eps: float,
        qk_norm: bool,
        output_gate: bool = False,
        bias: bool = False,
        norm_offset: float = 0.0,
    ) -> None:
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        size, kv_size = heads * head_dim, kv_heads * head_dim

        def project(kind: str, tail: tuple[int, ...]) -> Tensor:
            wide = 2 * size if output_gate else size
            q = weights.get(f"{name}.q_proj.{kind}", (wide, *tail))
            parts = [q]
            if output_gate:
                split = q.view(heads, 2, head_dim, *tail)
                parts = [split[:, 0].flatten(0, 1), split[:, 1].flatten(0, 1)]
            k = weights.get(f"{name}.k_proj.{kind}", (kv_size, *tail))
            v = weights.get(f"{name}.v_proj.{kind}", (kv_size, *tail))
            return torch.cat((parts[0], k, v, *parts[1:]))

        self.w_in = weights.keep(project("weight", (hidden,)))
        self.b_in = project("bias", ()) if bias else None
        self.w_out = weights.keep(weights.get(f"{name}.o_proj.weight", (hidden, size)))
        self.b_out = weights.get(f"{name}.o_proj.bias", (hidden,)) if bias else None
        self.split = (size + kv_size, kv_size) + ((size,) if output_gate else ())
        self.norm: RmsNorm | None = None  # of [queries | keys], by head
        if qk_norm:
            q_norm = load_norm(weights, f"{name}.q_norm.weight", head_dim, norm_offset)
            k_norm = load_norm(weights, f"{name}.k_norm.weight", head_dim, norm_offset)
            both = torch.cat((q_norm.expand(heads, -1), k_norm.expand(kv_heads, -1)))
            self.norm = RmsNorm(both, eps)

    def __call__(
        self, x: Tensor, cache: KvCache, rows: Rows, rope: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Map ``x`` [R, T, hidden] to [R, T, hidden], writing the rows' keys and values."""
        parts = linear(x, self.w_in, self.b_in).split_with_sizes(self.split, -1)
        qk = parts[0].view(*x.shape[:2], -1, self.head_dim)
        qk = rotate_(qk.clone() if self.norm is None else self.norm(qk), rope)
        values = parts[1].view(*x.shape[:2], self.kv_heads, self.head_dim)
        cache.write(rows.cache_rows, qk[:, :, self.heads :], values)
        out = attend(qk[:, :, : self.heads], cache, rows)
        if len(parts) == 3:
            out = out.mul_(parts[2].sigmoid())
        return linear(out, self.w_out, self.b_out)


class Mlp:
    """SwiGLU: down(silu(gate(x)) * up(x)), gate and up in one projection."""

    def __init__(self, weights: WeightFolder, name: str, hidden: int, inner: int) -> None:
        gate = weights.get(f"{name}.gate_proj.weight", (inner, hidden))
        up = weights.get(f"{name}.up_proj.weight", (inner, hidden))
        self.w_in = weights.keep(torch.cat((gate, up)))
        self.w_out = weights.keep(weights.get(f"{name}.down_proj.weight", (hidden, inner)))

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = linear(x, self.w_in).chunk(2, -1)
        return linear(F.silu(gate).mul_(up), self.w_out)
