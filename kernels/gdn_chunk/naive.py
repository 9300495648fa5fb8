"""The gated delta rule over a chain of tokens, in plain PyTorch.

Two forms of one function. ``recurrent_gated_delta_rule`` is the specification: one step a token.
``chunk_gated_delta_rule`` computes the same by the WY form: every product inside a chunk is
batched over all chunks, and only one matrix product a chunk remains sequential. It is
differentiable and serves prefill and training. Neither knows about convolutions, gates or layers.

Shapes of both: q, k ``[B, T, Hk, dk]`` with q and k l2-normalised over ``dk`` and q scaled by
``dk ** -0.5`` beforehand; v ``[B, T, Hv, dv]``; g (log decay, <= 0) and beta ``[B, T, Hv]``;
``Hv`` a multiple of ``Hk``, value head h reading key head ``h // (Hv / Hk)``. The state is
``[B, Hv, dk, dv]``. Sums run in float32, or in float64 where v is float64; the output has v's
dtype, the state keeps the dtype of the sums.

Source: Yang et al., "Gated Delta Networks" (arXiv 2412.06464), sections 3.2 and 3.3.
"""

from typing import Any

import torch
from torch import Tensor

from specpilot.errors import InvalidInput

__all__ = ["chunk_gated_delta_rule", "recurrent_gated_delta_rule", "unit_lower_inverse"]


def recurrent_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Step token by token and return (o ``[B, T, Hv, dv]``, final state ``[B, Hv, dk, dv]``).

    ``S_t = exp(g_t) S_{t-1} + k_t u_t^T`` with ``u_t = beta_t (v_t - exp(g_t) S_{t-1}^T k_t)``, and
    ``o_t = S_t^T q_t``.
    """
    q, k, v, g, beta, state, out_dtype = _prepare(q, k, v, g, beta, initial_state)
    repeat = v.shape[2] // k.shape[2]
    q, k = q.repeat_interleave(repeat, 2), k.repeat_interleave(repeat, 2)
    outputs = []
    for t in range(v.shape[1]):
        state = state * g[:, t, :, None, None].exp()
        read = torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        update = beta[:, t, :, None] * (v[:, t] - read)
        state = state + k[:, t, :, :, None] * update[:, :, None, :]
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    out = torch.stack(outputs, 1) if outputs else torch.zeros_like(v)
    return out.to(out_dtype), state


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    chunk: int = 64,
) -> tuple[Tensor, Tensor]:
    """Same function and shapes as ``recurrent_gated_delta_rule``, ``chunk`` tokens at a time.

    T need not be a multiple of ``chunk`` (a power of two): rows of beta = 0 and g = 0 pad the last
    chunk and change nothing. Raises ``InvalidInput`` for contradicting shapes.
    """
    if chunk < 1 or chunk & (chunk - 1):
        raise InvalidInput(f"chunk must be a power of two, got {chunk}.")
    q, k, v, g, beta, state, out_dtype = _prepare(q, k, v, g, beta, initial_state)
    batch, tokens, key_heads, dk = k.shape
    value_heads, dv = v.shape[2:]
    group = value_heads // key_heads
    pad = -tokens % chunk
    count = (tokens + pad) // chunk
    if count == 0:
        return torch.zeros_like(v, dtype=out_dtype), state

    def split(x: Tensor, heads: tuple[int, int]) -> Tensor:
        """[B, T, H, ...] -> [B, Hk, group or 1, chunks, chunk, ...]."""
        x = torch.nn.functional.pad(x, (0, 0) * (x.ndim - 2) + (0, pad)) if pad else x
        x = x.reshape(batch, count, chunk, *heads, *x.shape[3:])
        return x.permute(0, 3, 4, 1, 2, *range(5, x.ndim))

    q, k = split(q, (key_heads, 1)), split(k, (key_heads, 1))
    v, g, beta = (split(x, (key_heads, group)) for x in (v, g, beta))

    total = g.cumsum(-1)
    row = torch.arange(chunk, device=v.device)
    future = row[:, None] < row[None, :]
    # The difference is masked before exp: exp(G_i) * exp(-G_j) overflows float32 at strong decay.
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(future, -torch.inf).exp()
    keys_t = k.transpose(-1, -2)
    lower = (beta[..., None] * decay * (k @ keys_t)).masked_fill(row[:, None] <= row[None, :], 0)
    inverse = unit_lower_inverse(lower)
    fresh = inverse @ (beta[..., None] * v)  # U if the chunk began at a zero state
    reach = inverse @ ((beta * total.exp())[..., None] * k)  # U = fresh - reach @ S
    scores = decay * (q @ keys_t)

    # Across chunks: S' = (exp(G_C) I - Kd^T reach) S + Kd^T fresh, with Kd_j = exp(G_C - G_j) k_j.
    last = total[..., -1]
    kd_t = ((last[..., None] - total).exp()[..., None] * k).transpose(-1, -2)
    identity = torch.eye(dk, dtype=v.dtype, device=v.device)
    carry = (last.exp()[..., None, None] * identity - kd_t @ reach).flatten(0, 2)
    gain = (kd_t @ fresh).flatten(0, 2)
    state = state.reshape(-1, dk, dv)
    starts = []
    for n in range(count):
        starts.append(state)
        state = torch.baddbmm(gain[:, n], carry[:, n], state)
    start = torch.stack(starts, 1).view(batch, key_heads, group, count, dk, dv)

    out = (total.exp()[..., None] * q - scores @ reach) @ start + scores @ fresh
    out = out.permute(0, 3, 4, 1, 2, 5).reshape(batch, count * chunk, value_heads, dv)
    return out[:, :tokens].to(out_dtype), state.view(batch, value_heads, dk, dv)


def unit_lower_inverse(lower: Tensor) -> Tensor:
    """Invert ``I + lower``, ``lower`` ``[..., n, n]`` strictly lower triangular, n a power of 2.

    Blocked substitution: the inverses of two neighbouring diagonal blocks and the block under
    them give the inverse of twice the size, log2(n) times. (The Neumann product over the whole
    matrix needs as many products and loses all digits when keys repeat and beta is near 1.)
    """
    out: Tensor = _UnitLowerInverse.apply(lower)
    return out


class _UnitLowerInverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lower: Tensor) -> Tensor:
        n = lower.shape[-1]
        row = torch.arange(n, device=lower.device)
        inverse = torch.eye(n, dtype=lower.dtype, device=lower.device).expand_as(lower)
        size = 1
        while size < n:
            block = row // size
            under = (block[:, None] % 2 == 1) & (block[:, None] - 1 == block[None, :])
            step = lower.masked_fill(~under, 0)
            # At size 1 both neighbours are 1, so the products reduce to the entry itself.
            inverse = inverse - (step if size == 1 else inverse @ step @ inverse)
            size *= 2
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        inverse_t = inverse.transpose(-1, -2)
        full: Tensor = inverse_t @ grads[0] @ inverse_t
        return -full.tril(-1)


def _prepare(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, torch.dtype]:
    batch, tokens, value_heads, dv = v.shape
    if q.shape != k.shape or k.shape[:2] != (batch, tokens) or value_heads % k.shape[2]:
        raise InvalidInput(
            f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} contradict each other: "
            "they share batch and tokens, and v's heads are a multiple of k's."
        )
    if g.shape != v.shape[:3] or beta.shape != v.shape[:3]:
        raise InvalidInput(
            f"g {tuple(g.shape)} and beta {tuple(beta.shape)} must be {tuple(v.shape[:3])}."
        )
    dtype = torch.float64 if v.dtype == torch.float64 else torch.float32
    shape = (batch, value_heads, k.shape[3], dv)
    if initial_state is None:
        state = torch.zeros(shape, dtype=dtype, device=v.device)
    elif initial_state.shape == shape:
        state = initial_state.to(dtype)
    else:
        raise InvalidInput(f"initial_state is {tuple(initial_state.shape)}, must be {shape}.")
    q, k, g, beta = (x.to(dtype) for x in (q, k, g, beta))
    return q, k, v.to(dtype), g, beta, state, v.dtype
