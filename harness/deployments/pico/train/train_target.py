"""Train the target on random cuts of the corpus until the time or the steps are used up.

``torchrun --nproc-per-node N`` makes it data-parallel. A checkpoint is written every minute and
found again at the next start; the exported folder is written beside it, in bfloat16, so that a
run that is cut off still leaves weights.
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from specpilot.harness.deployments.pico.train.data import cuts, load_tokens
from specpilot.harness.deployments.pico.train.model import Target, TargetConfig, save_target
from specpilot.harness.deployments.pico.train.optim import (
    Schedule,
    build_optimizers,
    sum_over_ranks,
)

__all__ = ["Ranks", "heldout_loss", "main"]

CHECKPOINT_EVERY_S = 60.0


class Ranks:
    """This process among the data-parallel ones (one, without torchrun)."""

    def __init__(self) -> None:
        self.world = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0"))
        self.device = torch.device(
            f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"
        )
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if self.world > 1:
            torch.distributed.init_process_group("nccl" if self.device.type == "cuda" else "gloo")

    def agree(self, value: float) -> float:
        """Rank 0's value on every rank."""
        if self.world == 1:
            return value
        shared = torch.tensor([value], dtype=torch.float64, device=self.device)
        torch.distributed.broadcast(shared, 0)
        return float(shared)


def head_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float().flatten(0, -2), labels.flatten())


@torch.no_grad()
def heldout_loss(model: Target, windows: Tensor, batch: int = 32) -> float:
    """Mean cross entropy in nats a token over windows ``[n, T + 1]``."""
    total = 0.0
    for part in windows.split(batch):
        with torch.autocast(part.device.type, torch.bfloat16, enabled=part.is_cuda):
            hidden, _ = model(part[:, :-1])
            loss = head_loss(hidden, model.model.embed_tokens.weight, part[:, 1:])
        total += float(loss) * len(part)
    return total / len(windows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="checkpoint and exported folder")
    parser.add_argument("--seconds", type=float, default=480)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--batch", type=int, default=64, help="sequences a step and process")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--matrix-lr", type=float, default=0.02)
    parser.add_argument("--embedding-lr", type=float, default=0.004)
    parser.add_argument("--other-lr", type=float, default=0.002)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--config", default="{}", help="JSON fields that replace the shape's")
    parser.add_argument("--no-compile", action="store_true")
    args = parser.parse_args()

    ranks = Ranks()
    device = ranks.device
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(args.seed)
    model = Target(TargetConfig(**json.loads(args.config))).to(device)
    weight = model.model.embed_tokens.weight
    loss_of = head_loss
    if not args.no_compile:
        for layer in model.model.layers:
            layer.compile()
        loss_of = torch.compile(head_loss)
    parameters = list(model.parameters())
    optimizers = build_optimizers(model, args.matrix_lr, args.embedding_lr, args.other_lr)

    def step_loss(batch: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            hidden, _ = model(batch[:, :-1])
            return loss_of(hidden, weight, batch[:, 1:])

    # Kernels compile on made-up tokens while another process still writes the corpus.
    began = time.monotonic()
    draw = torch.Generator().manual_seed(args.seed * 1000 + ranks.rank)
    fake = torch.randint(
        2, model.config.vocab_size, (args.batch, args.length + 1), generator=draw
    ).to(device)
    step_loss(fake).backward()
    model.zero_grad(set_to_none=True)
    heldout_loss(model, fake, args.batch)
    if ranks.rank == 0:
        print(f"target: compiled in {time.monotonic() - began:.1f} s", flush=True)
    tokens = load_tokens(args.corpus / "train.npy", device, wait_s=300)
    held_out = load_tokens(args.corpus / "heldout.npy", device, wait_s=60)
    windows = cuts(held_out, args.batch, args.length + 1, torch.Generator().manual_seed(1))

    schedule = Schedule(args.seconds, args.steps)
    args.work.mkdir(parents=True, exist_ok=True)
    checkpoint = args.work / "checkpoint.pt"
    curve: list[dict[str, float]] = []
    step = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, map_location=device, weights_only=True)
        model.load_state_dict(saved["model"])
        for optimizer, state in zip(optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        step, curve = saved["step"], saved["curve"]
        schedule.began -= saved["seconds"]
        draw.manual_seed(args.seed * 1000 + ranks.rank + step)

    def save() -> None:
        saved = {
            "model": model.state_dict(),
            "optimizers": [o.state_dict() for o in optimizers],
            "step": step,
            "seconds": time.monotonic() - schedule.began,
            "curve": curve,
        }
        torch.save(saved, checkpoint.with_suffix(".new"))
        checkpoint.with_suffix(".new").replace(checkpoint)
        save_target(model, args.work / "target")
        (args.work / "target_curve.json").write_text(json.dumps(curve))

    progress, last_saved, running = 0.0, time.monotonic(), torch.zeros((), device=device)
    while True:
        if step % 10 == 0:
            progress = ranks.agree(schedule.progress(step))
            if progress >= 1:
                break
        factor = schedule.apply(optimizers, step, progress)
        loss = step_loss(cuts(tokens, args.batch, args.length + 1, draw))
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
                "tokens": step * args.batch * args.length * ranks.world,
                "seconds": round(time.monotonic() - schedule.began, 1),
                "train_loss": round(float(running) / 100, 4),
                "lr_factor": round(factor, 4),
            }
            running.zero_()
            if step % 500 == 0:
                point["heldout_loss"] = round(heldout_loss(model, windows, args.batch), 4)
            if ranks.rank == 0:
                curve.append(point)
                print("target", json.dumps(point), flush=True)
                if time.monotonic() - last_saved > CHECKPOINT_EVERY_S:
                    save()
                    last_saved = time.monotonic()
    if ranks.rank == 0:
        final = heldout_loss(model, windows, args.batch)
        curve.append(
            {
                "step": step,
                "tokens": step * args.batch * args.length * ranks.world,
                "seconds": round(time.monotonic() - schedule.began, 1),
                "heldout_loss": round(final, 4),
            }
        )
        save()
        print(f"target: {step} steps, held-out loss {final:.4f}", flush=True)
    if ranks.world > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
