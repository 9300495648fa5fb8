"""The mechanism ``pairwise_selector``: score each candidate given the one before it.

A block drafter's positions are marginals: the likeliest token here and the likeliest there need not
follow one another. A pairwise selector of a few hundred thousand parameters, trained on the frozen
drafter's own candidates, turns them into conditional scores (DFlash2). The chain becomes the greedy
path through them, and a best-first tree spends its rows on paths that hold together.
"""

from collections.abc import Mapping
from pathlib import Path

from specpilot.mechanisms.base import Mechanism, ParamSpec, Setting, block_drafter_reasons
from specpilot.types import Deployment

__all__ = ["PAIRWISE_SELECTOR"]


def _settings(params: Mapping[str, Setting]) -> dict[str, Setting]:
    return {"selector": True} if params["enabled"] else {}


def _reasons(deployment: Deployment) -> tuple[str, ...]:
    if reasons := block_drafter_reasons(deployment):
        return reasons
    if deployment.drafter_kind == "dflash2":
        return ("its DFlash2 drafter has a selector of its own, which stock already uses",)
    assert deployment.drafter is not None
    folder = Path(deployment.drafter) / "selector"
    if not (folder / "config.json").is_file():
        return (f"it needs a selector trained for the drafter, and there is none in {folder}",)
    return ()


PAIRWISE_SELECTOR = Mechanism(
    id="pairwise_selector",
    title="Pairwise selector over the drafter's candidates",
    summary=(
        "Scores each of the block drafter's top candidates given the candidate before it, with a "
        "small trained table. The chain follows those scores; stacked with best_first_tree, the "
        "tree is cut from them. More tokens per pass for a little more drafting time."
    ),
    params={"enabled": ParamSpec(False, "whether the selector runs", choices=(True,))},
    check=_reasons,
    render={"reference": _settings},
    counter="spec_selector_passes",
    cost="acceptance",
    source="candidate_selector of the DFlash2 checkpoints; SpecPilot paper, Figure 6",
)
