"""Muon for matrices, AdamW for the rest, and a schedule that knows the time that is left.

Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) replaces the momentum of a
matrix by its nearest semi-orthogonal one. Matrices of one shape are stacked, so that a step costs
a few launches. Knows nothing about the model but parameter names.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

__all__ = ["Muon", "Schedule", "build_optimizers", "sum_over_ranks"]

# Quintic Newton-Schulz coefficients of the Muon post: fast to [0.7, 1.2], not to 1.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonalise(stack: Tensor, steps: int = 5) -> Tensor:
    """Nearest semi-orthogonal matrices, roughly, for ``[n, rows, cols]``."""
    a, b, c = NEWTON_SCHULZ
    x = stack.bfloat16() if stack.is_cuda else stack.float()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    def __init__(self, params: Sequence[Tensor], lr: float = 0.02, momentum: float = 0.95) -> None:
        groups: dict[torch.Size, list[Tensor]] = {}
        for p in params:
            groups.setdefault(p.shape, []).append(p)
        super().__init__([{"params": g} for g in groups.values()], {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            params = group["params"]
            state = self.state[params[0]]
            grads = torch.stack([p.grad for p in params])
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(grads)
            state["momentum"].lerp_(grads, 1 - group["momentum"])
            update = orthogonalise(grads.lerp(state["momentum"], group["momentum"]))
            rows, cols = params[0].shape
            scale = -group["lr"] * max(1.0, rows / cols) ** 0.5
            torch._foreach_add_(params, list(update.to(params[0].dtype).unbind()), alpha=scale)


def build_optimizers(
    model: nn.Module, matrix_lr: float, embedding_lr: float, other_lr: float
) -> list[torch.optim.Optimizer]:
    """Muon on the blocks' matrices; AdamW on embedding, norms, taps, gates and decay."""
    matrices, embedding, other = [], [], []
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        if "embed_tokens" in name:
            embedding.append(p)
        elif p.ndim == 2 and min(p.shape) >= 16:
            matrices.append(p)
        else:
            other.append(p)
    groups = [{"params": other, "lr": other_lr}]
    if embedding:
        groups.append({"params": embedding, "lr": embedding_lr})
    adam = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0, fused=True)
    optimizers = [Muon(matrices, lr=matrix_lr), adam]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


@dataclass
class Schedule:
    """Warm up, hold, then fall linearly to zero over the last ``cooldown`` of steps or seconds."""

    seconds: float
    steps: int
    warmup: int = 60
    cooldown: float = 0.45
    began: float = field(default_factory=time.monotonic)

    def progress(self, step: int) -> float:
        return max((time.monotonic() - self.began) / self.seconds, step / self.steps)

    def apply(self, optimizers: list[torch.optim.Optimizer], step: int, progress: float) -> float:
        factor = min(1.0, (step + 1) / self.warmup, max(0.0, (1 - progress) / self.cooldown))
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * factor
        return factor


def sum_over_ranks(parameters: Sequence[Tensor], world: int) -> None:
    """Average the gradients over data-parallel ranks in one all-reduce."""
    grads = [p.grad for p in parameters if p.grad is not None]
    flat = torch.cat([g.flatten() for g in grads])
    torch.distributed.all_reduce(flat)
    flat /= world
    for grad, part in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
        grad.copy_(part.view_as(grad))
