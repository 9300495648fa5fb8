"""Benchmark of the reference engine's passes on ``pico``, on this machine's CPU.

Each part of a step is timed by itself, in turn with the others, on one request with 256 committed
tokens of the open shard. ``value`` is the median over rounds, ``low`` and ``high`` their extremes.
The time of a pass depends on the threads that torch uses, so the note states them.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from specpilot.harness.engines.reference.drafter import BlockDrafter, Place
from specpilot.harness.engines.reference.sampling import likeliest
from specpilot.harness.engines.reference.target import Target, Verified
from specpilot.mechanisms.trees import policies
from specpilot.mechanisms.trees.tree import Tree

__all__ = ["run"]

PROMPT, ROUNDS, CALLS = 256, 15, 8
ROWS, BLOCKS = (4, 8, 16, 24), (4, 8, 16)


def run() -> list[dict[str, Any]]:
    """Microseconds of each part of a step, in the benchmark format."""
    from specpilot.harness.deployments import pico
    from specpilot.harness.deployments.pico.workload import shard

    folder = Path(pico.__file__).parent
    target = Target(folder / "target", max_positions=PROMPT + 64)
    drafter = BlockDrafter(folder / "drafter", target, PROMPT + 64)
    target.capture = drafter.capture
    with torch.inference_mode():
        repeats = _measure(_parts(target, drafter, list(shard("open")[: PROMPT + 1])))
    note = f"float32, 1 request, {PROMPT} tokens, {torch.get_num_threads()} torch threads"
    return [
        {
            "id": f"engine.pico.{name}",
            "value": round(statistics.median(times), 1),
            "low": round(min(times), 1),
            "high": round(max(times), 1),
            "unit": "us",
            "repeats": [round(t, 1) for t in times],
            "note": note,
        }
        for name, times in repeats.items()
    ]


def _parts(target: Target, drafter: BlockDrafter, text: list[int]) -> dict[str, Callable[[], Any]]:
    pool = target.pool(1, PROMPT + 64)
    drafter.allocate(1, PROMPT + 64)
    ids, anchor = torch.tensor(text[:PROMPT]), text[PROMPT]
    features = target.prefill(ids, pool, 0, 0).features
    assert features is not None
    drafter.extend(features[0], [Place(0, 0, PROMPT)])
    lattice = drafter.propose([anchor], [PROMPT], max(BLOCKS), 8)[0]

    def decode() -> None:
        hidden = target.decode(torch.tensor([anchor]), pool, [PROMPT]).hidden
        likeliest(target.logits(hidden))

    def verify(tree: Tree) -> Verified:
        verified = target.verify([tree], pool, [PROMPT])
        likeliest(target.logits(verified.output.hidden))
        return verified

    parts: dict[str, Callable[[], Any]] = {
        "ar_step": decode,
        "extend": partial(drafter.extend, features[0, :4], [Place(0, PROMPT, 4)]),
    }
    for rows in ROWS:
        tree = policies.best_first(lattice, anchor, rows)
        path = tree.path(tree.rows - 1)
        parts[f"verify.rows{rows}"] = partial(verify, tree)
        parts[f"commit.rows{rows}"] = partial(target.commit, verify(tree), pool, [path])
    for block in BLOCKS:
        parts[f"draft_chain.block{block}"] = partial(drafter.propose, [anchor], [PROMPT], block, 1)
        parts[f"draft_tree.block{block}"] = partial(drafter.propose, [anchor], [PROMPT], block, 8)
    return parts


def _measure(parts: dict[str, Callable[[], Any]]) -> dict[str, list[float]]:
    repeats: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(ROUNDS):
        for name, call in parts.items():
            call()  # the first call after another part finds cold caches
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            repeats[name].append((time.perf_counter() - start) * 1e6 / CALLS)
    return repeats
