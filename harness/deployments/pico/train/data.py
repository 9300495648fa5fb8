"""Token streams on the training device, and random cuts of them."""

import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from specpilot.errors import NotFound

__all__ = ["cuts", "load_tokens"]


def load_tokens(path: Path, device: torch.device, wait_s: float = 0.0) -> Tensor:
    """Read a uint16 ``.npy`` as int32 onto the device; wait for it to appear if asked to."""
    deadline = time.monotonic() + wait_s
    while not path.exists():
        if time.monotonic() > deadline:
            raise NotFound(f"{path} does not exist.", hint="Run the corpus step first.")
        time.sleep(0.5)
    return torch.from_numpy(np.load(path).astype(np.int32)).to(device)


def cuts(tokens: Tensor, count: int, length: int, generator: torch.Generator) -> Tensor:
    """``count`` random cuts of ``length`` tokens: int64 ``[count, length]``."""
    starts = torch.randint(tokens.numel() - length, (count,), generator=generator)
    span = torch.arange(length, device=tokens.device)
    return tokens[starts.to(tokens.device)[:, None] + span].long()
