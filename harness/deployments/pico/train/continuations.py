"""Write the drafter's training set: random cuts of the corpus, continued greedily by the target.

Shards of ``ids`` uint16 ``[n, length]`` and ``prompts`` uint16 ``[n]`` (tokens that were given).
"""

import argparse
import time
from pathlib import Path

import numpy as np
import torch

from specpilot.harness.deployments.pico.train.data import cuts, load_tokens
from specpilot.harness.deployments.pico.train.generate import GreedyDecoder
from specpilot.harness.deployments.pico.train.model import load_target

__all__ = ["main"]

SHORTEST_PROMPT, LONGEST_PROMPT = 32, 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--shards", type=int, default=64, help="at most so many")
    parser.add_argument("--batch", type=int, default=8192)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-compile", action="store_true")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    began = time.monotonic()
    target = load_target(args.target, device)
    tokens = load_tokens(args.corpus / "train.npy", device)
    decoder = GreedyDecoder(target, args.batch, args.length, compiled=not args.no_compile)
    draw = torch.Generator().manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    longest = min(LONGEST_PROMPT, args.length // 2)
    shard, slowest = 0, 0.0
    while shard < args.shards and time.monotonic() - began + slowest < args.seconds:
        start = time.monotonic()
        prompts = cuts(tokens, args.batch, longest, draw)
        lengths = torch.randint(SHORTEST_PROMPT, longest + 1, (args.batch,), generator=draw)
        ids = decoder.run(prompts, lengths.to(device)).cpu().numpy().astype(np.uint16)
        path = args.out / f"{args.seed}_{shard}.npz"
        np.savez(path.with_suffix(".new.npz"), ids=ids, prompts=lengths.numpy().astype(np.uint16))
        path.with_suffix(".new.npz").replace(path)
        shard += 1
        slowest = time.monotonic() - start
        print(
            f"continuations: shard {shard}, {args.batch} x {args.length}, {slowest:.1f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
