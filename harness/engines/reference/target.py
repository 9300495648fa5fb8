"""The target model: prompts in chunks, one row a request in decoding, trees in verification.

``prefill`` and ``decode`` advance the state as they go. ``verify`` leaves it alone and returns
updates, of which ``commit`` applies one path a request: rejected rows need no undoing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from specpilot.harness.engines.reference.config import TargetConfig
from specpilot.harness.engines.reference.gdn import GdnLayer, GdnState, GdnUpdates, commit_
from specpilot.harness.engines.reference.layers import Attention, Mlp, RmsNorm, Rope
from specpilot.harness.engines.reference.rows import Rows, chain_rows, tree_rows
from specpilot.harness.engines.reference.state import StatePool
from specpilot.harness.engines.reference.weights import WeightFolder, by_input
from specpilot.mechanisms.trees.tree import Tree

__all__ = ["Output", "Target", "Verified"]


@dataclass(frozen=True, slots=True)
class Output:
    """What a pass returns. ``hidden`` [R, T, hidden], after the final norm.

    ``features`` [R, T, layers * hidden]: residual stream after each captured layer, concatenated
    in the order asked for; None when nothing was asked for.
    """

    hidden: Tensor
    features: Tensor | None


@dataclass(frozen=True, slots=True)
class Verified:
    """A verify pass and the updates from which any of its paths can be committed."""

    output: Output
    rows: Rows
    lengths: tuple[int, ...]
    updates: tuple[GdnUpdates, ...]


class Target:
    """A dense or hybrid decoder from a Hugging Face folder.

    ``capture`` lists 0-based layers whose outputs passes return as features; it may be set later.
    ``packed`` keeps the layers' matrices in W12 and decodes each when it is used: the same bits in
    less memory, at the price of decoding ``packed_matrices`` of them in every pass.
    Raises the errors of ``TargetConfig.load`` and ``WeightFolder``.
    """

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        capture: Sequence[int] = (),
        max_positions: int | None = None,
        packed: bool = False,
    ) -> None:
        self.config = config = TargetConfig.load(folder)
        self.dtype, self.device = dtype, torch.device(device)
        self.capture = tuple(capture)
        weights = WeightFolder(folder, dtype, self.device, packed)
        shape, eps = (config.vocab_size, config.hidden_size), config.rms_norm_eps
        self.embedding = weights.get(f"{config.prefix}embed_tokens.weight", shape)
        self.head = by_input(
            self.embedding if config.tied else weights.get("lm_head.weight", shape)
        )
        name, size = f"{config.prefix}norm.weight", config.hidden_size
        self.norm = RmsNorm.load(weights, name, size, eps, config.norm_offset)
        self.rope = Rope(
            config.rotary_dim,
            config.rope_theta,
            max_positions or config.max_positions,
            dtype,
            self.device,
        )
        self.layers = [
            _Layer(weights, f"{config.prefix}layers.{i}", config, kind)
            for i, kind in enumerate(config.layer_types)
        ]
        self.packed_matrices = weights.packed or 0

    def pool(self, slots: int, capacity: int) -> StatePool:
        """Allocate state for ``slots`` requests of ``capacity`` cache rows each."""
        return StatePool(self.config, slots, capacity, self.dtype, self.device)

    def prefill(self, ids: Tensor, pool: StatePool, slot: int, length: int) -> Output:
        """Append ``ids`` int64 [T] to ``slot``, which holds ``length`` tokens."""
        rows = chain_rows(slot, [length], ids.shape[0], pool.capacity, self.embedding)
        return self._forward(ids[None], pool, rows)[0]

    def decode(self, ids: Tensor, pool: StatePool, lengths: Sequence[int]) -> Output:
        """Append one token a request, ``ids`` int64 [R], to slots 0 to R - 1."""
        rows = chain_rows(0, lengths, 1, pool.capacity, self.embedding)
        return self._forward(ids[:, None], pool, rows)[0]

    def verify(self, trees: Sequence[Tree], pool: StatePool, lengths: Sequence[int]) -> Verified:
        """Compute all nodes of one tree a request, slots 0 to R - 1, without advancing the state.

        Trees of fewer nodes than the largest are padded: their outputs beyond their own rows mean
        nothing.
        """
        width = self.config.gdn.conv_width if self.config.gdn else None
        parents = [tree.parent for tree in trees]
        rows = tree_rows(0, lengths, parents, pool.capacity, width, self.embedding)
        ids = torch.tensor(
            [tree.tokens + (0,) * (rows.count - tree.rows) for tree in trees], device=self.device
        )
        output, updates = self._forward(ids, pool, rows)
        return Verified(output, rows, tuple(lengths), updates)

    def commit(self, verified: Verified, pool: StatePool, paths: Sequence[tuple[int, ...]]) -> None:
        """Advance slots 0 to R - 1 by the rows on ``paths`` (from the anchor down, at least it)."""
        rows = verified.rows
        for r, path in enumerate(paths):
            if path != tuple(range(len(path))):  # a chain's keys already lie where they belong
                base = pool.capacity * (rows.first + r) + verified.lengths[r]
                source = torch.tensor(path, device=self.device) + base
                target = torch.arange(base, base + len(path), device=self.device)
                for cache in pool.kv:
                    cache.move(source, target)
        if not verified.updates:
            return
        longest = max(map(len, paths))
        taken = torch.tensor(
            [path + (path[-1],) * (longest - len(path)) for path in paths], device=self.device
        )
        length = torch.tensor([len(path) for path in paths], device=self.device)
        state = GdnState(pool.memory[rows.slots], pool.conv[rows.slots])
        commit_(state, verified.updates, taken, length)

    def logits(self, hidden: Tensor, fp32: bool = False) -> Tensor:
        """Logits [..., vocabulary] of ``hidden`` [..., hidden], in the model's dtype.

        ``fp32`` computes the LM head in at least float32, with a copy of it made on first use.
        """
        if fp32:
            head = self._wide_head
            return F.linear(hidden.to(head.dtype), head)
        return F.linear(hidden, self.head)

    @cached_property
    def _wide_head(self) -> Tensor:
        return self.head.to(torch.promote_types(self.dtype, torch.float32))

    def _forward(
        self, ids: Tensor, pool: StatePool, rows: Rows
    ) -> tuple[Output, tuple[GdnUpdates, ...]]:
        x = F.embedding(ids, self.embedding)
        rope = self.rope.at(rows.positions)
        kv = gdn = 0
        updates: list[GdnUpdates] = []
        captured: dict[int, Tensor] = {}
        for i, layer in enumerate(self.layers):
            y = layer.norm_in(x)
            if isinstance(layer.mixer, GdnLayer):
                y, update = layer.mixer(y, pool.gdn(gdn, rows), rows)
                gdn += 1
                if update is not None:
                    updates.append(update)
            else:
                y = layer.mixer(y, pool.kv[kv], rows, rope)
                kv += 1
            x = x + y
            x = x + layer.mlp(layer.norm_mlp(x))
            if i in self.capture:
                captured[i] = x
        features = torch.cat([captured[i] for i in self.capture], -1) if self.capture else None
        return Output(self.norm(x), features), tuple(updates)


class _Layer:
    """One decoder layer's weights; ``Target`` runs it."""

    def __init__(self, weights: WeightFolder, name: str, config: TargetConfig, kind: str) -> None:
        size, eps, offset = config.hidden_size, config.rms_norm_eps, config.norm_offset
        after = f"{name}.post_attention_layernorm.weight"
        self.norm_in = RmsNorm.load(weights, f"{name}.input_layernorm.weight", size, eps, offset)
        self.norm_mlp = RmsNorm.load(weights, after, size, eps, offset)
        self.mlp = Mlp(weights, f"{name}.mlp", size, config.intermediate_size)
        self.mixer: GdnLayer | Attention
        if kind == "linear_attention":
            assert config.gdn is not None
            self.mixer = GdnLayer(
                weights, f"{name}.linear_attn", size, config.gdn, config.rms_norm_eps
            )
        else:
            self.mixer = Attention(
                weights,
                f"{name}.self_attn",
                size,
                config.heads,
                config.kv_heads,
                config.head_dim,
                eps=config.rms_norm_eps,
                qk_norm=config.qk_norm,
                output_gate=config.output_gate,
                bias=config.attention_bias,
                norm_offset=config.norm_offset,
            )
