"""What pico is worth as a speculative deployment, measured on the open shard on this machine.

tau is tokens emitted per exact pass, bonus included, on the target's greedy continuations, float32.
Prompts are measured in groups; ``low`` and ``high`` are the groups' extremes.
"""

from pathlib import Path
from typing import Any

__all__ = ["run"]

FOLDER = Path(__file__).parent
GROUPS, PROMPTS, PROMPT_TOKENS, TOKENS = 4, 12, 128, 128
BLOCKS = (4, 8, 16)
KEY = b"pico benchmark"


def run() -> list[dict[str, Any]]:
    """Chain and oracle tau at 4, 8 and 16 rows, and the target's held-out loss in nats a token."""
    import torch

    from specpilot.harness.deployments.pico.train import evaluate
    from specpilot.harness.deployments.pico.train.drafter import load_drafter
    from specpilot.harness.deployments.pico.train.generate import GreedyDecoder
    from specpilot.harness.deployments.pico.train.model import load_target
    from specpilot.harness.deployments.pico.train.train_target import heldout_loss
    from specpilot.harness.deployments.workload import load_workload

    target = load_target(FOLDER / "target")
    drafter = load_drafter(FOLDER / "drafter")
    workload = load_workload("pico", PROMPT_TOKENS)
    cuts = torch.tensor(workload.prompts("open", GROUPS * PROMPTS, KEY))
    decoder = GreedyDecoder(target, len(cuts), PROMPT_TOKENS + TOKENS + 16)
    ids = decoder.run(cuts, torch.full((len(cuts),), PROMPT_TOKENS))
    results = []
    note = f"{len(cuts)} open prompts of {PROMPT_TOKENS} tokens, {TOKENS} greedy tokens each"
    for rows in BLOCKS:
        parts = [
            evaluate.accepted_rows(target, drafter, part, PROMPT_TOKENS, rows)
            for part in ids.split(PROMPTS)
        ]
        for name, accepted in zip(("chain", "oracle"), zip(*parts, strict=True), strict=True):
            counts = [evaluate.chain_tau(part, TOKENS) for part in accepted]
            tokens, passes = (sum(c) for c in zip(*counts, strict=True))
            taus = [t / p for t, p in counts]
            label = f"pico.{name}_tau.block{rows}"
            results.append(_result(label, tokens / passes, taus, "tokens/pass", note))
    windows = torch.tensor(load_workload("pico", 1025).prompts("open", 16, KEY))
    losses = [heldout_loss(target, window[None]) for window in windows]
    mean = sum(losses) / len(losses)
    note = f"{len(windows)} windows of 1024 tokens of the open shard"
    return [*results, _result("pico.heldout_loss", mean, losses, "nats/token", note)]


def _result(name: str, value: float, repeats: list[float], unit: str, note: str) -> dict[str, Any]:
    return {
        "id": name,
        "value": round(value, 4),
        "low": round(min(repeats), 4),
        "high": round(max(repeats), 4),
        "unit": unit,
        "repeats": [round(r, 4) for r in repeats],
        "note": note,
    }
