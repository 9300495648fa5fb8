"""Train the drafter on the target's own greedy continuations.

Every step runs the frozen target over some sequences, picks random anchors (shared by the batch)
and block lengths of 4, 8 or 16 rows, and lowers the cross entropy of the tokens that follow,
weighted by depth with ``exp(-(d - 1) / gamma)`` since a draft counts only if all before it were
right. Labels inside a prompt are people's text, not the target's: they weigh ``TEXT_WEIGHT``.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from specpilot.harness.deployments.pico.train.data import load_tokens
from specpilot.harness.deployments.pico.train.drafter import (
    Drafter,
    DrafterConfig,
    block_ids,
    save_drafter,
)
from specpilot.harness.deployments.pico.train.evaluate import heldout_continuations, measure
from specpilot.harness.deployments.pico.train.model import load_target
from specpilot.harness.deployments.pico.train.optim import (
    Schedule,
    build_optimizers,
    sum_over_ranks,
)
from specpilot.harness.deployments.pico.train.train_target import Ranks

__all__ = ["main"]

TEXT_WEIGHT = 0.2
ROWS = (4, 8, 16)
ROW_SHARES = (0.2, 0.4, 0.4)


def draft_loss(hidden: Tensor, weight: Tensor, labels: Tensor, importance: Tensor) -> Tensor:
    """Weighted mean cross entropy; hidden [B, A, R - 1, H], labels and importance [B, A, R - 1]."""
    logits = F.linear(hidden, weight).float().flatten(0, -2)
    losses = F.cross_entropy(logits, labels.flatten(), reduction="none")
    return (losses * importance.flatten()).sum() / importance.sum()


def load_shards(folder: Path, device: torch.device) -> tuple[Tensor, Tensor]:
    ids, prompts = [], []
    for path in sorted(folder.glob("[0-9]*_[0-9]*.npz")):
        with np.load(path) as shard:
            ids.append(torch.from_numpy(shard["ids"].astype(np.int32)))
            prompts.append(torch.from_numpy(shard["prompts"].astype(np.int64)))
    return torch.cat(ids).to(device), torch.cat(prompts).to(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--shards", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--anchors", type=int, default=64)
    parser.add_argument("--gamma", type=float, default=5.0)
    parser.add_argument("--matrix-lr", type=float, default=0.02)
    parser.add_argument("--other-lr", type=float, default=0.002)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--config", default="{}", help="JSON fields that replace the shape's")
    parser.add_argument("--no-compile", action="store_true")
    args = parser.parse_args()

    ranks = Ranks()
    device = ranks.device
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(args.seed)
    target = load_target(args.target, device).requires_grad_(False)
    fields = {"vocab_size": target.config.vocab_size, "hidden_size": target.config.hidden_size}
    drafter = Drafter(DrafterConfig(**fields | json.loads(args.config))).to(device)
    block = drafter.config.block_size
    weight = target.model.embed_tokens.weight
    loss_of = draft_loss
    ids, prompts = load_shards(args.shards, device)
    held_out = load_tokens(args.corpus / "heldout.npy", device)
    checks = heldout_continuations(target, held_out, 128, 128, 128, seed=3)
    # Measuring uses other shapes than training: it keeps to the uncompiled modules.
    features_of = load_target(args.target, device).requires_grad_(False)
    hidden_of: Callable[..., Tensor] = drafter
    if not args.no_compile:
        for layer in features_of.model.layers:
            layer.compile()
        hidden_of = torch.compile(drafter)
        loss_of = torch.compile(draft_loss)
    parameters = [p for p in drafter.parameters() if p.requires_grad]
    optimizers = build_optimizers(drafter, args.matrix_lr, args.other_lr, args.other_lr)
    draw = torch.Generator().manual_seed(args.seed * 1000 + ranks.rank)
    depth = torch.arange(1, block, device=device)
    by_depth = torch.exp(-(depth - 1) / args.gamma)
    sizes = torch.tensor(ROWS)
    shares = torch.tensor(ROW_SHARES)

    def step_loss() -> Tensor:
        chosen = torch.randint(len(ids), (args.batch,), generator=draw).to(device)
        sequence, given = ids[chosen].long(), prompts[chosen]
        last = sequence.shape[1] - block
        anchors = torch.randint(8, last, (args.anchors,), generator=draw).to(device)
        rows = sizes[torch.multinomial(shares, args.anchors, True, generator=draw)].to(device)
        at = anchors[:, None] + depth
        labels = sequence[:, at]
        importance = torch.where(at >= given[:, None, None], 1.0, TEXT_WEIGHT)
        importance = importance * by_depth * (depth < rows[:, None])
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            with torch.no_grad():
                _, kept = features_of(sequence, keep=drafter.config.target_layer_ids)
                embedded = target.model.embed_tokens(block_ids(sequence, anchors, block))
            hidden = hidden_of(embedded, torch.cat(kept, -1), anchors, rows)
            return loss_of(hidden[:, :, 1:], weight, labels, importance)

    began = time.monotonic()
    step_loss().backward()
    drafter.zero_grad(set_to_none=True)
    print(f"drafter: compiled in {time.monotonic() - began:.1f} s", flush=True)
    schedule = Schedule(args.seconds, args.steps)
    args.work.mkdir(parents=True, exist_ok=True)
    checkpoint = args.work / "checkpoint.pt"
    curve: list[dict[str, float]] = []
    step = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, map_location=device, weights_only=True)
        drafter.load_state_dict(saved["model"])
        for optimizer, state in zip(optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        step, curve = saved["step"], saved["curve"]
        schedule.began -= saved["seconds"]
        draw.manual_seed(args.seed * 1000 + ranks.rank + step)

    def save() -> None:
        saved = {
            "model": drafter.state_dict(),
            "optimizers": [o.state_dict() for o in optimizers],
            "step": step,
            "seconds": time.monotonic() - schedule.began,
            "curve": curve,
        }
        torch.save(saved, checkpoint.with_suffix(".new"))
        checkpoint.with_suffix(".new").replace(checkpoint)
        save_drafter(drafter, args.work / "drafter")
        (args.work / "drafter_curve.json").write_text(json.dumps(curve))

    progress, last_checked, running = 0.0, time.monotonic(), torch.zeros((), device=device)
    while True:
        if step % 10 == 0:
            progress = ranks.agree(schedule.progress(step))
            if progress >= 1:
                break
        factor = schedule.apply(optimizers, step, progress)
        loss = step_loss()
        loss.backward()
        if ranks.world > 1:
            sum_over_ranks(parameters, ranks.world)
        for optimizer in optimizers:
            optimizer.step()
        for p in parameters:
            p.grad = None
        running += loss.detach()
        step += 1
        if step % 100 == 0:
            point = {
                "step": step,
                "seconds": round(time.monotonic() - schedule.began, 1),
                "train_loss": round(float(running) / 100, 4),
                "lr_factor": round(factor, 4),
            }
            running.zero_()
            if ranks.rank == 0:
                if time.monotonic() - last_checked > 40:
                    point |= measure(target, drafter, checks, 128, 128, blocks=(8,))
                    last_checked = time.monotonic()
                curve.append(point)
                print("drafter", json.dumps(point), flush=True)
                if "chain_tau.block8" in point:
                    save()
    if ranks.rank == 0:
        final = measure(target, drafter, checks, 128, 128)
        seconds = round(time.monotonic() - schedule.began, 1)
        curve.append({"step": step, "seconds": seconds, **final})
        save()
        print(f"drafter: {step} steps", json.dumps(final), flush=True)
    if ranks.world > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
