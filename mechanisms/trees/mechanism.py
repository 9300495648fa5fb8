"""The mechanism ``best_first_tree``: verify the likeliest nodes of the drafter's lattice.

A stock block drafter's chain spends its rows on one path; the tree spends them on the nodes of
highest path probability, so a miss on the first choice is often met by a sibling. The number of
rows of the exact pass is the price. Block length alone is no mechanism: stock already uses the best
chain among its block lengths.
"""

from collections.abc import Mapping

from specpilot.mechanisms.base import Mechanism, ParamSpec, Setting, block_drafter_reasons

__all__ = ["BEST_FIRST_TREE"]


def _settings(params: Mapping[str, Setting]) -> dict[str, Setting]:
    if params["rows"] == 0:
        return {}
    return {
        "speculation": "tree",
        "rows": params["rows"],
        "block": params["block"],
        "top_k": params["top_k"],
    }


BEST_FIRST_TREE = Mechanism(
    id="best_first_tree",
    title="Best-first tree over the drafter's block",
    summary=(
        "Verifies the rows of highest path probability in the block drafter's lattice in one exact "
        "pass, instead of one chain. More tokens per pass; pays while extra rows are cheap."
    ),
    params={
        "rows": ParamSpec(0, "rows of the exact pass, anchor included; 0 is off", low=8, high=64),
        "block": ParamSpec(16, "rows of the drafter's block, anchor included", low=4, high=16),
        "top_k": ParamSpec(16, "candidates kept at each depth", low=4, high=16),
    },
    check=block_drafter_reasons,
    render={"reference": _settings, "mock": _settings},
    counter="spec_tree_passes",
    cost="tree",
    source="SpecPilot paper, Figure 6; DDTree, arXiv 2604.12989; OPT-Tree, arXiv 2406.17276",
)
