"""Measure a target and its drafter on held-out code, without an engine.

Each prompt is continued greedily by the target. The drafter is then asked at every position of the
continuation, with features of everything before it, so that the drafts of any chain are known;
walking them gives tau, tokens emitted per exact pass, bonus included. The oracle accepts as long as
the target's token is among the drafter's ``ORACLE_TOP``.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from specpilot.harness.deployments.pico.train.data import cuts, load_tokens
from specpilot.harness.deployments.pico.train.drafter import Drafter, block_ids, load_drafter
from specpilot.harness.deployments.pico.train.generate import GreedyDecoder
from specpilot.harness.deployments.pico.train.model import Target, load_target
from specpilot.harness.deployments.pico.train.train_target import heldout_loss

__all__ = ["ORACLE_TOP", "accepted_rows", "chain_tau", "measure"]

ORACLE_TOP = 16


@torch.no_grad()
def accepted_rows(
    target: Target, drafter: Drafter, ids: Tensor, prompt: int, rows: int
) -> tuple[Tensor, Tensor]:
    """Drafts that chain and oracle accept at each anchor: two int64 ``[B, T - prompt - rows]``.

    ids ``[B, T]`` are prompts of ``prompt`` tokens and their greedy continuations; an anchor is the
    last emitted token, so the first one stands at position ``prompt``.
    """
    device = ids.device
    depth = torch.arange(1, rows, device=device)
    chain, oracle = [], []
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        _, kept = target(ids, keep=drafter.config.target_layer_ids)
        features = torch.cat(kept, -1)
        # Few anchors at a time: every block row meets the keys of all blocks in the call.
        for anchors in torch.arange(prompt, ids.shape[1] - rows, device=device).split(16):
            embedded = target.model.embed_tokens(block_ids(ids, anchors, rows))
            used = torch.full_like(anchors, rows)
            hidden = drafter(embedded, features, anchors, used)[:, :, 1:]
            top = target.logits(hidden).float().topk(ORACLE_TOP, -1).indices
            hit = top == ids[:, anchors[:, None] + depth][..., None]
            chain.append(hit[..., 0].cumprod(-1).sum(-1))
            oracle.append(hit.any(-1).cumprod(-1).sum(-1))
    return torch.cat(chain, 1), torch.cat(oracle, 1)


def chain_tau(accepted: Tensor, tokens: int) -> tuple[int, int]:
    """Walk the chains ``[B, >= tokens]`` for ``tokens`` tokens each: (tokens emitted, passes)."""
    emitted = passes = 0
    for row in accepted.tolist():
        at = 0
        while at < tokens:
            step = min(row[at] + 1, tokens - at)
            at += step
            emitted += step
            passes += 1
    return emitted, passes


def measure(
    target: Target,
    drafter: Drafter,
    ids: Tensor,
    prompt: int,
    tokens: int,
    blocks: Sequence[int] = (4, 8, 16),
    batch: int = 32,
) -> dict[str, float]:
    """tau of chain and oracle at each block length over sequences ``[n, prompt + tokens + 16]``."""
    out: dict[str, float] = {}
    for rows in blocks:
        parts = [accepted_rows(target, drafter, part, prompt, rows) for part in ids.split(batch)]
        for name, accepted in zip(("chain", "oracle"), zip(*parts, strict=True), strict=True):
            emitted, passes = chain_tau(torch.cat(accepted), tokens)
            out[f"{name}_tau.block{rows}"] = round(emitted / passes, 4)
    return out


def heldout_continuations(
    target: Target, held_out: Tensor, count: int, prompt: int, tokens: int, seed: int
) -> Tensor:
    """Greedy continuations of random held-out cuts, long enough for the last block's labels."""
    prompts = cuts(held_out, count, prompt, torch.Generator().manual_seed(seed))
    decoder = GreedyDecoder(target, count, prompt + tokens + 16)
    return decoder.run(prompts, torch.full((count,), prompt, device=held_out.device))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--drafter", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--seed", type=int, default=2)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    target, drafter = load_target(args.target, device), load_drafter(args.drafter, device)
    held_out = load_tokens(args.corpus / "heldout.npy", device)
    windows = cuts(held_out, 256, 1025, torch.Generator().manual_seed(args.seed))
    ids = heldout_continuations(
        target, held_out, args.prompts, args.prompt_tokens, args.tokens, args.seed
    )
    result: dict[str, object] = {
        "prompts": args.prompts,
        "prompt_tokens": args.prompt_tokens,
        "tokens": args.tokens,
        "heldout_loss": round(heldout_loss(target, windows), 4),
        **measure(target, drafter, ids, args.prompt_tokens, args.tokens),
    }
    print("evaluate", json.dumps(result), flush=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
