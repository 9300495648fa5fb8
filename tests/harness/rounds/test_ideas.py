"""Stacks of the plan's patches are predicted as one candidate and kept where they promise more."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from specpilot.errors import InvalidInput
from specpilot.harness.rounds.ideas import ideas
from specpilot.memory.transfer import PatchIdea

TREE = PatchIdea("best_first_tree", {"rows": 16, "block": 16}, 1.08, "best-first-tree")
SELECTOR = PatchIdea("pairwise_selector", {"enabled": True}, 1.05, "drafter-dflash2-selector")


@dataclass
class Situation:
    """A deployment on the reference engine whose cost model says ``together``."""

    together: float | None

    @property
    def deployment(self) -> Any:
        return SimpleNamespace(engine="reference")

    def predict(self, settings: dict[str, Any]) -> Any:
        assert settings == {"speculation": "tree", "rows": 16, "block": 16, "top_k": 16,
                            "selector": True}  # fmt: skip
        if self.together is None:
            raise InvalidInput("tokens_per_pass is not known.")
        return SimpleNamespace(speedup_over_stock=self.together)


def test_a_stack_that_promises_more_than_its_parts_comes_first() -> None:
    found = ideas(Situation(1.17), [TREE, SELECTOR])  # type: ignore[arg-type]
    assert [idea.predicted for idea in found] == [1.17, 1.08, 1.05]
    assert [name for name, _ in found[0].uses] == ["best_first_tree", "pairwise_selector"]


def test_a_stack_that_promises_less_or_nothing_is_left_out() -> None:
    for together in (1.07, None):
        assert len(ideas(Situation(together), [TREE, SELECTOR])) == 2  # type: ignore[arg-type]


def test_patches_without_a_prediction_stay_single() -> None:
    blind = [PatchIdea(p.mechanism, p.params, None, p.entry) for p in (TREE, SELECTOR)]
    assert len(ideas(Situation(1.17), blind)) == 2  # type: ignore[arg-type]
