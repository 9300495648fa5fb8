"""What a pairwise selector learns from: the frozen drafter's candidates and the target's choice.

Sequences come from ``continuations``: a cut of the corpus and its greedy continuation. At random
anchors the drafter proposes a block; at each depth we keep its hidden state, its top candidates
with their logits, the sequence's token before, and the place among the candidates of the token that
the target would choose after that prefix (in a continuation, the token that follows).
"""

from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from specpilot.harness.deployments.pico.train.drafter import Drafter, block_ids
from specpilot.harness.deployments.pico.train.model import Target

__all__ = ["Blocks", "collect", "collect_shard"]

SEQUENCES, ANCHORS = 8, 8  # of one drafter pass
FIRST_ANCHOR = 16
SHORT_SHARE = 0.25  # of the blocks have 8 rows, as stock's chain; the others 16


@dataclass(frozen=True)
class Blocks:
    """N blocks of D depths and K candidates.

    ``hidden`` float16 [N, D, hidden]; ``tokens`` int16 [N, D, K], best first; ``logits`` float32
    [N, D, K]; ``before`` int16 [N, D]; ``label`` int8 [N, D], -1 where the target's token is no
    candidate or the block is shorter.
    """

    hidden: Tensor
    tokens: Tensor
    logits: Tensor
    before: Tensor
    label: Tensor

    def __len__(self) -> int:
        return len(self.label)

    def take(self, rows: Tensor | slice) -> "Blocks":
        return Blocks(*(getattr(self, f.name)[rows] for f in fields(self)))

    @staticmethod
    def join(parts: list["Blocks"]) -> "Blocks":
        return Blocks(*(torch.cat([getattr(p, f.name) for p in parts]) for f in fields(Blocks)))

    def save(self, path: Path) -> None:
        draft = path.with_suffix(".new.npz")
        np.savez(draft, **{f.name: getattr(self, f.name).numpy() for f in fields(self)})
        draft.replace(path)

    @staticmethod
    def load(path: Path) -> "Blocks":
        with np.load(path, allow_pickle=False) as file:
            return Blocks(*(torch.from_numpy(file[f.name]) for f in fields(Blocks)))


@torch.no_grad()
def collect(
    target: Target, drafter: Drafter, ids: Tensor, anchors: Tensor, rows: Tensor, top_k: int
) -> Blocks:
    """Blocks at ``anchors`` [A] of every sequence of ids [B, T]; ``rows`` [A] is their length."""
    block = drafter.config.block_size
    depth = torch.arange(1, block, device=ids.device)
    final, kept = target(ids, keep=drafter.config.target_layer_ids)
    chosen = target.logits(final).argmax(-1)
    features = torch.cat(kept, -1)
    parts = []
    # Few anchors at a time: every block row meets the keys of all blocks in the pass.
    for at, length in zip(anchors.split(ANCHORS), rows.split(ANCHORS), strict=True):
        embedded = target.model.embed_tokens(block_ids(ids, at, block))
        hidden = drafter(embedded, features, at, length)[:, :, 1:]
        logits, tokens = target.logits(hidden).topk(top_k)
        before = at[:, None] + depth - 1
        hit = tokens == chosen[:, before][..., None]  # chosen after ``before``
        label = torch.where(hit.any(-1) & (depth < length[:, None]), hit.int().argmax(-1), -1)
        found = (
            hidden.half(),
            tokens.short(),
            logits.float(),
            ids[:, before].short(),
            label.to(torch.int8),
        )
        parts.append(Blocks(*(x.flatten(0, 1).cpu() for x in found)))
    return Blocks.join(parts)


def collect_shard(
    target: Target, drafter: Drafter, ids: Tensor, per_sequence: int, top_k: int, seed: int
) -> Blocks:
    """Blocks at ``per_sequence`` random anchors of every sequence of ids [n, T].

    ``SEQUENCES`` sequences share their anchors; their blocks stand together.
    """
    block = drafter.config.block_size
    draw = torch.Generator().manual_seed(seed)
    parts = []
    for part in ids.split(SEQUENCES):
        last = ids.shape[1] - block
        anchors = torch.randint(FIRST_ANCHOR, last, (per_sequence,), generator=draw)
        short = torch.rand(per_sequence, generator=draw) < SHORT_SHARE
        rows = torch.where(short, min(8, block), block)
        parts.append(
            collect(target, drafter, part, anchors.to(ids.device), rows.to(ids.device), top_k)
        )
    return Blocks.join(parts)
