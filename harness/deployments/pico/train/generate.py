"""Greedy continuations of the target for thousands of sequences at once.

Static caches and one CUDA graph a step; prompts are fed token by token through the same graph, so
their lengths may differ. Sequences run on after end-of-text. On a CPU it runs without a graph.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from specpilot.harness.deployments.pico.train.model import (
    GatedAttention,
    GatedDeltaNet,
    Target,
)

__all__ = ["GreedyDecoder"]


def write_state(state: Tensor, decay: Tensor, k: Tensor, u: Tensor) -> None:
    """``S <- decay S + k u^T`` in place; S [B, H, dk, dv]."""
    state.copy_(state * decay[..., None, None] + k[..., :, None] * u[..., None, :])


class GreedyDecoder:
    """Decodes ``batch`` sequences of ``length`` tokens, prompts included."""

    def __init__(self, target: Target, batch: int, length: int, compiled: bool = False) -> None:
        self.target, self.batch, self.length = target, batch, length
        self.device = target.cos.device
        self.cuda = self.device.type == "cuda"
        self.write_state: Callable[..., None] = (
            torch.compile(write_state) if compiled else write_state
        )
        half = torch.bfloat16 if self.cuda else torch.float32
        self.caches: list[tuple[Tensor, Tensor]] = []
        for layer in target.blocks():
            if layer.kind == "linear_attention":
                m = layer.linear_attn
                channels, _, taps = m.conv1d.weight.shape
                recent = self._zeros((batch, taps - 1, channels), torch.float32)
                state = self._zeros((batch, m.value_heads, m.dk, m.dv), torch.float32)
                self.caches.append((recent, state))
            else:
                a = layer.self_attn
                shape = (batch, a.kv_heads, length, a.head_dim)
                self.caches.append((self._zeros(shape, half), self._zeros(shape, half)))
        self.ids = self._zeros((batch, length), torch.int64)
        self.prompt_lengths = self._zeros((batch,), torch.int64)
        self.at = self._zeros((1,), torch.int64)
        self.graph: torch.cuda.CUDAGraph | None = None

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    @torch.no_grad()
    def run(self, prompts: Tensor, prompt_lengths: Tensor) -> Tensor:
        """Continue prompts ``[B, <= length]`` greedily and return ids ``[B, length]``."""
        if self.cuda and self.graph is None:
            self._capture()
        for first, second in self.caches:
            first.zero_()
            second.zero_()
        self.ids.zero_()
        self.ids[:, : prompts.shape[1]] = prompts
        self.prompt_lengths.copy_(prompt_lengths)
        self.at.zero_()
        for _ in range(self.length - 1):
            if self.graph is not None:
                self.graph.replay()
            else:
                self._step()
        return self.ids.clone()

    def _capture(self) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self._step()
                self.at.zero_()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self._step()

    def _step(self) -> None:
        target = self.target
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.cuda):
            token = self.ids.index_select(1, self.at)[:, 0]
            x = target.model.embed_tokens(token)
            cos, sin = target.cos[self.at][:, None], target.sin[self.at][:, None]
            for layer, cache in zip(target.blocks(), self.caches, strict=True):
                y = layer.input_layernorm(x)
                if layer.kind == "linear_attention":
                    x = x + self._delta_net(layer.linear_attn, y, *cache)
                else:
                    x = x + self._attention(layer.self_attn, y, cos, sin, *cache)
                x = x + layer.mlp(layer.post_attention_layernorm(x))
            best = target.logits(target.model.norm(x)).argmax(-1)
        self.at += 1
        given = self.ids.index_select(1, self.at)[:, 0]
        following = torch.where(self.at < self.prompt_lengths, given, best)
        self.ids.index_copy_(1, self.at, following[:, None])

    def _delta_net(self, m: GatedDeltaNet, x: Tensor, taps: Tensor, state: Tensor) -> Tensor:
        g, beta = m.gates(x)
        window = torch.cat([taps, m.in_proj_qkv(x)[:, None].float()], 1)
        mixed = F.silu((window * m.conv1d.weight[:, 0].T.float()).sum(1))
        taps.copy_(window[:, 1:])
        q, k, v = m.split(mixed)
        repeat = m.value_heads // m.key_heads
        q, k = q.repeat_interleave(repeat, 1), k.repeat_interleave(repeat, 1)
        decay = g.exp()
        with torch.autocast(x.device.type, enabled=False):
            read = (torch.stack([k, q], 2) @ state) * decay[..., None, None]
        u = beta[..., None] * (v - read[:, :, 0])
        o = read[:, :, 1] + (q * k).sum(-1, keepdim=True) * u
        self.write_state(state, decay, k, u)
        return m.finish(o, x)

    def _attention(
        self, m: GatedAttention, x: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        q, k, v, gate = m.project(x, cos, sin)
        keys.index_copy_(2, self.at, k[:, :, None].to(keys.dtype))
        values.index_copy_(2, self.at, v[:, :, None].to(values.dtype))
        visible = torch.arange(self.length, device=x.device) <= self.at
        # The query heads of one KV head are rows of one product.
        rows = q.to(keys.dtype).unflatten(1, (m.kv_heads, m.heads // m.kv_heads))
        mask = torch.zeros(self.length, dtype=keys.dtype, device=x.device)
        mask = mask.masked_fill(~visible, -torch.inf).expand(*rows.shape[:3], -1)
        o = F.scaled_dot_product_attention(rows, keys, values, attn_mask=mask)
        return m.o_proj(o.flatten(1) * gate.sigmoid())
