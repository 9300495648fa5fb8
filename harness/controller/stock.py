"""Stock at its best: the greedy chain whose block is fastest on the machine at hand.

A shorter or longer block is a launch argument that any operator would set, so no mechanism may
gain by it. On the reference engine the controller times the chain at every usual block once a
round, before anything is compared with stock; elsewhere stock is what the deployment says.
"""

import statistics
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from specpilot.errors import InvalidInput
from specpilot.harness.controller.measure import Arm, Cancelled, Prompt
from specpilot.harness.controller.sanity import check_generation
from specpilot.harness.deployments.health import read_config
from specpilot.harness.engines.client import SamplingParams
from specpilot.types import Deployment

__all__ = [
    "BLOCKS",
    "PROMPTS",
    "blocks_to_try",
    "check_stock",
    "choose",
    "time_blocks",
    "with_block",
]

BLOCKS = (4, 8, 16)
PROMPTS = 12


PLAIN = {"speculation": "chain", "weights": "plain", "selector": False}


def check_stock(deployment: Deployment) -> None:
    """Raise ``InvalidInput`` unless stock is one that a gain may be measured against.

    On the reference engine that is the chain, wherever there is a drafter, without mechanisms:
    against plain decoding or packed weights, whatever undoes them would be a gain.
    """
    if deployment.engine != "reference" or deployment.drafter is None:
        return
    settings = {**PLAIN, "speculation": "none", **deployment.launch, **deployment.stock}
    for name, plain in PLAIN.items():
        if settings[name] != plain:
            raise InvalidInput(
                f"{deployment.id} cannot be measured against: its {name} is {settings[name]!r}, "
                f"stock's is {plain!r}.",
                hint="Register it with the greedy chain as stock; mechanisms belong into patches.",
            )


def blocks_to_try(deployment: Deployment) -> tuple[int, ...]:
    """Blocks among which stock is chosen; empty where stock is not a chain that we choose."""
    if deployment.engine != "reference" or deployment.stock.get("speculation") != "chain":
        return ()
    assert deployment.drafter is not None
    longest = int(read_config(Path(deployment.drafter)).get("block_size", max(BLOCKS)))
    return tuple(block for block in BLOCKS if block <= longest)


def with_block(deployment: Deployment, block: int | None) -> Deployment:
    """Return the deployment with this block as stock's; None leaves it as it is."""
    if block is None:
        return deployment
    return replace(deployment, stock={**deployment.stock, "block": block})


def time_blocks(
    arms: Mapping[int, Arm],
    prompts: Sequence[Prompt],
    *,
    tokens: int,
    vocab_size: int,
    cancelled: threading.Event,
) -> dict[int, list[float]]:
    """Time every arm on every prompt, in an order that rotates; seconds a token by block.

    Raises what ``check_generation`` raises, and ``Cancelled``.
    """
    seconds: dict[int, list[float]] = {block: [] for block in arms}
    order = list(arms)
    params = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    for prompt in prompts:
        for block in order:
            if cancelled.is_set():
                raise Cancelled("The measurement was cancelled.")
            arm = arms[block]
            arm.engine.flush()
            generation = arm.engine.generate(prompt, params)
            check_generation(generation, prompt, arm=arm.name, tokens=tokens, vocab_size=vocab_size)
            seconds[block].append(generation.seconds / tokens)
        order.append(order.pop(0))
    return seconds


def choose(seconds: Mapping[int, Sequence[float]]) -> int:
    """Return the block with the least median time of a token; the shorter one on a tie."""
    return min(sorted(seconds), key=lambda block: statistics.median(seconds[block]))
