"""Train a DFlash2-style pairwise selector for the frozen drafter, on a CPU in minutes.

``score[d, a, b] = logit_d(b) + <A[a] * P h_d, B[b]>`` over the drafter's top candidates, with ``a``
the true token before: cross entropy of the target's token where it is a candidate, weighted by
depth with ``exp(-(d - 1) / gamma)``. ``A`` and ``B`` start as the leading singular vectors of the
corpus' bigram association and ``P h`` near a constant, and a penalty keeps ``A`` and ``B`` near
that start: pairs too rare to learn from the blocks stay at what plain text says. Blocks are kept in
``work`` beside the checkpoint: a run that was stopped goes on.
"""

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from specpilot.errors import NotFound
from specpilot.harness.deployments.pico.train.data import load_tokens
from specpilot.harness.deployments.pico.train.drafter import load_drafter
from specpilot.harness.deployments.pico.train.lattices import (
    SEQUENCES,
    Blocks,
    collect_shard,
)
from specpilot.harness.deployments.pico.train.model import load_target

__all__ = ["PairwiseSelector", "associations", "main", "measure", "save_selector"]

TOP_K = 16
GAMMA = 5.0
CHECKED = 16  # one block in so many is checked, never trained on


class PairwiseSelector(nn.Module):
    """Parameters under the names of a DFlash2 checkpoint's ``candidate_selector``."""

    def __init__(self, vocab_size: int, hidden_size: int, rank: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.randn(vocab_size, rank) * 0.1)
        self.successor_codebook = nn.Parameter(torch.randn(vocab_size, rank) * 0.1)
        self.hidden_projection = nn.Linear(hidden_size, rank, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, blocks: Blocks) -> Tensor:
        """Scores float32 [N, D, K] of each block's candidates after its own token before."""
        gate = self.hidden_projection(self.dropout(blocks.hidden.float()))
        left = self.predecessor_codebook[blocks.before.long()] * gate
        right = self.successor_codebook[blocks.tokens.long()]
        return blocks.logits + (right @ left[..., None])[..., 0]

    @torch.no_grad()
    def start_from(self, left: Tensor, right: Tensor, mean: Tensor) -> None:
        """Begin at ``<left[a], right[b]> / 4``; ``mean`` [hidden] is the blocks' hidden state."""
        self.predecessor_codebook.copy_(left)
        self.successor_codebook.copy_(right)
        project = self.hidden_projection.weight
        project.copy_((0.25 * mean / mean.square().sum()).expand_as(project))
        project.add_(0.002 * torch.randn_like(project))


def associations(tokens: Tensor, vocab_size: int, rank: int) -> tuple[Tensor, Tensor]:
    """Factors [vocab, rank] of log((count + 1) / (expected + 1)) of neighbouring tokens."""
    ids = tokens.long()
    pairs = torch.bincount(ids[:-1] * vocab_size + ids[1:], minlength=vocab_size**2)
    counts = pairs.view(vocab_size, vocab_size).float()
    expected = counts.sum(1, keepdim=True) * counts.sum(0) / counts.sum()
    u, s, v = torch.svd_lowrank(((counts + 1) / (expected + 1)).log(), q=rank, niter=3)
    return u * s.sqrt(), v * s.sqrt()


def importance(blocks: Blocks) -> Tensor:
    """Weight [N, D] of each position: 0 where there is no label."""
    depth = torch.arange(blocks.label.shape[1])
    return (blocks.label >= 0) * torch.exp(-depth / GAMMA)


def selector_loss(scores: Tensor, blocks: Blocks) -> Tensor:
    losses = F.cross_entropy(
        scores.flatten(0, 1), blocks.label.long().clamp(min=0).flatten(), reduction="none"
    )
    weight = importance(blocks).flatten()
    return (losses * weight).sum() / weight.sum()


@torch.no_grad()
def measure(selector: PairwiseSelector, blocks: Blocks) -> dict[str, float]:
    """Loss and share of first places, with the selector and with the drafter's logits alone."""
    out = {}
    weight = importance(blocks)
    training = selector.training
    selector.eval()
    for name, scores in (("selector", selector(blocks)), ("plain", blocks.logits)):
        first = (scores.argmax(-1) == blocks.label) * weight
        out[f"{name}_loss"] = round(float(selector_loss(scores, blocks)), 4)
        out[f"{name}_first"] = round(float(first.sum() / weight.sum()), 4)
    selector.train(training)
    return out


def save_selector(selector: PairwiseSelector, folder: Path) -> None:
    """Write the selector as the engine reads it: config.json and model.safetensors (bfloat16)."""
    folder.mkdir(parents=True, exist_ok=True)
    vocab, rank = selector.predecessor_codebook.shape
    config = {
        "vocab_size": vocab,
        "hidden_size": selector.hidden_projection.in_features,
        "dflash_config": {"selector_rank": rank, "selector_top_k": TOP_K},
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    state = {
        f"candidate_selector.{name}": value.detach().to(torch.bfloat16).contiguous()
        for name, value in selector.state_dict().items()
    }
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def load_blocks(args: argparse.Namespace) -> Blocks:
    """The blocks of all shards, collected now where they were not before."""
    target = load_target(args.target).requires_grad_(False)
    drafter = load_drafter(args.drafter).requires_grad_(False)
    parts = []
    for number, path in enumerate(sorted(args.shards.glob("[0-9]*_[0-9]*.npz"))):
        kept = args.work / f"blocks_{path.stem}.npz"
        if not kept.exists():
            began = time.monotonic()
            with np.load(path, allow_pickle=False) as shard:
                ids = torch.from_numpy(shard["ids"].astype(np.int64))
            blocks = collect_shard(target, drafter, ids, args.anchors, TOP_K, args.seed + number)
            blocks.save(kept)
            seconds = time.monotonic() - began
            print(f"blocks: {kept.name}, {len(blocks)}, {seconds:.1f} s", flush=True)
        parts.append(Blocks.load(kept))
    if not parts:
        raise NotFound(f"{args.shards} holds no shards.", hint="Run the continuations step first.")
    return Blocks.join(parts)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True, help="folder of train.npy")
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--drafter", type=Path, required=True)
    parser.add_argument("--shards", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--anchors", type=int, default=24, help="blocks a sequence")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--table-lr", type=float, default=0.005)
    parser.add_argument("--projection-lr", type=float, default=0.002)
    parser.add_argument("--pull", type=float, default=2e-4, help="penalty of leaving the start")
    parser.add_argument("--dropout", type=float, default=0.3, help="of the hidden states")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    args.work.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    blocks = load_blocks(args)
    # Neighbouring blocks share sequences: whole groups are checked, so that none was half seen.
    group = SEQUENCES * args.anchors
    run = torch.arange(len(blocks)) // group % CHECKED
    checked, seen = blocks.take(run == CHECKED - 1), blocks.take(run != CHECKED - 1)
    if len(checked) == 0:
        checked = seen
    vocab = load_target(args.target).config.vocab_size
    selector = PairwiseSelector(vocab, blocks.hidden.shape[-1], args.rank, args.dropout)
    tables = [selector.predecessor_codebook, selector.successor_codebook]
    projection = {"params": selector.hidden_projection.parameters(), "lr": args.projection_lr}
    groups = [{"params": tables, "lr": args.table_lr}, projection]
    optimizer = torch.optim.Adam(groups, betas=(0.9, 0.99))
    peaks = [args.table_lr, args.projection_lr]
    checkpoint, step, curve = args.work / "selector.pt", 0, []
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        selector.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step, curve, start = saved["step"], saved["curve"], saved["start"]
    else:
        mean = seen.hidden[:: max(1, len(seen) // 4096)].float().mean((0, 1))
        tokens = load_tokens(args.corpus / "train.npy", torch.device("cpu"))
        start = associations(tokens, vocab, args.rank)
        selector.start_from(*start, mean)
        curve.append({"step": 0, **measure(selector, checked)})
        print("selector", json.dumps(curve[-1]), flush=True)
    draw = torch.Generator().manual_seed(args.seed + step)
    while step < args.steps:
        batch = seen.take(torch.randint(len(seen), (args.batch,), generator=draw))
        factor = min(1.0, (step + 1) / 50, 0.5 * (1 + math.cos(math.pi * step / args.steps)))
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * factor
        loss = selector_loss(selector(batch), batch)
        left = [(now - then).square().sum() for now, then in zip(tables, start, strict=True)]
        optimizer.zero_grad()
        (loss + args.pull * sum(left)).backward()
        optimizer.step()
        step += 1
        if step % 100 == 0 or step == args.steps:
            curve.append(
                {"step": step, "train_loss": round(loss.item(), 4), **measure(selector, checked)}
            )
            print("selector", json.dumps(curve[-1]), flush=True)
            state: dict[str, Any] = {"step": step, "curve": curve, "start": start}
            state |= {"model": selector.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, checkpoint.with_suffix(".new"))
            checkpoint.with_suffix(".new").replace(checkpoint)
    save_selector(selector, args.work / "selector")
    record = {
        "seed": args.seed,
        "rank": args.rank,
        "corpus_tokens": len(np.load(args.corpus / "train.npy", mmap_mode="r")),
        "shards": sorted(path.stem for path in args.shards.glob("[0-9]*_[0-9]*.npz")),
        "anchors": args.anchors,
        "blocks": len(blocks),
        "positions": int((blocks.label >= 0).sum()),
        "steps": args.steps,
        "batch": args.batch,
        "table_lr": args.table_lr,
        "projection_lr": args.projection_lr,
        "pull": args.pull,
        "dropout": args.dropout,
        "curve": curve,
    }
    (args.work / "selector" / "curve.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
