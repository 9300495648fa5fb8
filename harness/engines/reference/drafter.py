"""The block drafter in the DFlash format: one non-causal pass proposes a whole block.

Its context is the target's: hidden states of chosen target layers, projected once (``fc``,
``hidden_norm``), give every drafter layer the keys and values of all committed tokens. The block is
the anchor and mask tokens at the positions that follow; its row j proposes the j-th next token
through the target's LM head. Only committed features stay in the cache: a block's own keys are
overwritten by the next ``extend``. Source: DFlash (arXiv 2602.06036), in SGLang's checkpoint names.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from specpilot.harness.engines.reference.drafter_config import DrafterConfig
from specpilot.harness.engines.reference.layers import (
    Attention,
    KvCache,
    Mlp,
    RmsNorm,
    Rope,
    load_norm,
    rotate_,
)
from specpilot.harness.engines.reference.markov import MarkovHead
from specpilot.harness.engines.reference.rows import block_rows
from specpilot.harness.engines.reference.sampling import likeliest
from specpilot.harness.engines.reference.selector import Selector, load_selector, log_total
from specpilot.harness.engines.reference.target import Target
from specpilot.harness.engines.reference.weights import WeightFolder, by_input
from specpilot.mechanisms.trees.lattice import Lattice

__all__ = ["BlockDrafter", "Drafter", "Place"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where features belong: ``count`` tokens from position ``start`` on of ``slot``."""

    slot: int
    start: int
    count: int


class Drafter(Protocol):
    """What the engine asks of a drafter. Slots are those of the target's state pool."""

    capture: tuple[int, ...]

    def allocate(self, slots: int, capacity: int) -> None:
        """Make room for ``slots`` requests of ``capacity`` positions each."""

    def extend(self, features: Tensor, places: Sequence[Place]) -> None:
        """Take the features [M, layers * hidden] of committed tokens, place after place."""

    def propose(
        self, anchors: Sequence[int], lengths: Sequence[int], block: int, top_k: int
    ) -> list[Lattice]:
        """Propose ``block - 1`` positions for slots 0, 1, ... that hold ``lengths`` tokens."""

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the ``length`` positions of ``source`` to ``target``."""


class BlockDrafter:
    """A DFlash, DFlash2 or DSpark drafter for ``target``. Raises as its config and weights do.

    ``selector``: draft through the pairwise selector in ``folder / "selector"``. A DFlash2 drafter
    uses its own in any case.
    """

    def __init__(
        self, folder: Path, target: Target, max_positions: int, selector: bool = False
    ) -> None:
        self.config = c = DrafterConfig.load(folder, target.config)
        self.target = target
        self.capture = c.target_layers
        weights = WeightFolder(folder, target.dtype, target.device)
        size = c.hidden_size
        self.fc = by_input(weights.get("fc.weight", (size, len(self.capture) * size)))
        self.hidden_norm = RmsNorm.load(weights, "hidden_norm.weight", size, c.rms_norm_eps)
        self.norm = RmsNorm.load(weights, "norm.weight", size, c.rms_norm_eps)
        self.rope = Rope(c.head_dim, c.rope_theta, max_positions, target.dtype, target.device)
        self.layers = [_Layer(weights, f"layers.{i}", c) for i in range(c.layers)]
        # Keys and values of the context for all layers in one product.
        attentions = [layer.attention for layer in self.layers]
        own = c.heads * c.head_dim
        # A drafter's matrices are never packed.
        context = [a.w_in[own:] for a in attentions if isinstance(a.w_in, Tensor)]
        self.w_context = by_input(torch.cat(context))
        self.b_context = None
        if c.attention_bias:
            self.b_context = torch.cat([a.b_in[own:] for a in attentions if a.b_in is not None])
        scales = [
            load_norm(weights, f"layers.{i}.self_attn.k_norm.weight", c.head_dim, 0.0)
            for i in range(c.layers)
        ]
        self.key_norm = RmsNorm(torch.stack(scales).unsqueeze(1), c.rms_norm_eps)
        self.selector: Selector | None = None
        if c.selector_rank:
            self.selector = Selector(weights, c)
        elif selector:
            self.selector = load_selector(folder / "selector", c, target.dtype, target.device)
        self.markov = MarkovHead(weights, c) if c.markov_rank else None
        self.mask = torch.tensor([c.mask_id], device=target.device)

    def allocate(self, slots: int, capacity: int) -> None:
        c, like = self.config, self.fc
        shape = (c.layers, slots, capacity, c.kv_heads, c.head_dim)
        self.capacity = capacity
        self.keys, self.values = like.new_zeros(shape), like.new_zeros(shape)
        self.caches = [KvCache(k, v) for k, v in zip(self.keys, self.values, strict=True)]

    def extend(self, features: Tensor, places: Sequence[Place]) -> None:
        c = self.config
        context = self.hidden_norm(F.linear(features, self.fc))
        pairs = F.linear(context, self.w_context, self.b_context)
        pairs = pairs.view(-1, c.layers, 2, c.kv_heads, c.head_dim)
        keys = self.key_norm(pairs[:, :, 0])  # [M, layers, kv_heads, head_dim]
        steps = [torch.arange(p.start, p.start + p.count, device=keys.device) for p in places]
        positions = torch.cat(steps)
        cos, sin = self.rope.at(positions)
        keys = rotate_(keys, (cos.unsqueeze(1), sin.unsqueeze(1)))
        rows = torch.cat(
            [step + p.slot * self.capacity for step, p in zip(steps, places, strict=True)]
        )
        self.keys.flatten(1, 2).index_copy_(1, rows, keys.transpose(0, 1))
        self.values.flatten(1, 2).index_copy_(1, rows, pairs[:, :, 1].transpose(0, 1))

    def hidden(self, anchors: Sequence[int], lengths: Sequence[int], block: int) -> Tensor:
        """Run a block: hidden states [R, block - 1, hidden] of the rows that draft."""
        if self.config.anchor_drafts:
            block -= 1
        rows = block_rows(0, lengths, block, self.capacity, self.fc)
        ids = self.mask.repeat(len(anchors), block)
        ids[:, 0] = torch.tensor(anchors, device=ids.device)
        x = F.embedding(ids, self.target.embedding)
        rope = self.rope.at(rows.positions)
        for layer, cache in zip(self.layers, self.caches, strict=True):
            x = x + layer.attention(layer.norm_in(x), cache, rows, rope)
            x = x + layer.mlp(layer.norm_mlp(x))
        return self.norm(x if self.config.anchor_drafts else x[:, 1:])

    def propose(
        self, anchors: Sequence[int], lengths: Sequence[int], block: int, top_k: int
    ) -> list[Lattice]:
        hidden = self.hidden(anchors, lengths, block)
        logits = self.target.logits(hidden)
        if self.selector is not None:
            return self.selector.lattices(hidden, logits, anchors)
        if self.markov is not None:
            return self.markov.lattices(hidden, logits, anchors, top_k)
        if top_k == 1:  # nothing to compare: log-probs stay 0
            ids = likeliest(logits)[..., None]
            logp = np.zeros(ids.shape)
        else:
            values, indices = logits.topk(top_k)
            ids = indices.cpu().numpy()
            logp = (values - log_total(logits, values)).float().cpu().numpy()
        table = zip(ids, logp, strict=True)
        vocab = self.config.vocab_size
        return [Lattice.marginal(tokens, row, vocab) for tokens, row in table]

    def move(self, source: int, target: int, length: int) -> None:
        for cache in (self.keys, self.values):
            cache[:, target, :length] = cache[:, source, :length]


class _Layer:
    """One drafter layer's weights; ``BlockDrafter`` runs it."""

    def __init__(self, weights: WeightFolder, name: str, c: DrafterConfig) -> None:
        size, eps, after = c.hidden_size, c.rms_norm_eps, f"{name}.post_attention_layernorm.weight"
        self.norm_in = RmsNorm.load(weights, f"{name}.input_layernorm.weight", size, eps)
        self.norm_mlp = RmsNorm.load(weights, after, size, eps)
        self.mlp = Mlp(weights, f"{name}.mlp", c.hidden_size, c.intermediate_size)
        self.attention = Attention(
            weights,
            f"{name}.self_attn",
            c.hidden_size,
            c.heads,
            c.kv_heads,
            c.head_dim,
            eps=c.rms_norm_eps,
            qk_norm=True,
            bias=c.attention_bias,
        )
