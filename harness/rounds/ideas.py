"""What to try: the plan's patches and their stacks, each with the cost model's prediction.

Two mechanisms that barely pay alone may pay together (a wider tree and a better lattice, say), so
every pair of the plan's patches that can be merged is predicted as one candidate.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from specpilot.errors import SpecPilotError
from specpilot.harness.rounds.situation import Situation
from specpilot.mechanisms import registry
from specpilot.memory.transfer import PatchIdea

__all__ = ["Idea", "ideas"]


@dataclass(frozen=True, slots=True)
class Idea:
    """Mechanisms with parameters to try as one patch; ``predicted`` is a speedup over stock."""

    uses: tuple[tuple[str, Mapping[str, Any]], ...]
    predicted: float | None
    entries: tuple[str, ...]


def ideas(situation: Situation, patches: Sequence[PatchIdea]) -> list[Idea]:
    """Return the patches and those pairs that are predicted to beat both parts, best first."""
    found = [Idea(((p.mechanism, p.params),), p.predicted, (p.entry,)) for p in patches]
    found += _stacks(situation, patches)
    return sorted(found, key=lambda idea: -(idea.predicted or 0.0))


def _stacks(situation: Situation, patches: Sequence[PatchIdea]) -> Iterator[Idea]:
    for one, other in combinations(patches, 2):
        if one.mechanism == other.mechanism or one.predicted is None or other.predicted is None:
            continue
        predicted = _predict(situation, one, other)
        if predicted is not None and predicted > max(one.predicted, other.predicted):
            uses = ((one.mechanism, one.params), (other.mechanism, other.params))
            yield Idea(uses, predicted, (one.entry, other.entry))


def _predict(situation: Situation, one: PatchIdea, other: PatchIdea) -> float | None:
    """The stack's speedup over stock; None where the two contradict or nothing is known."""
    engine = situation.deployment.engine
    settings = registry.get(one.mechanism).settings(engine, one.params)
    added = registry.get(other.mechanism).settings(engine, other.params)
    if any(settings.get(name, value) != value for name, value in added.items()):
        return None
    try:
        return situation.predict({**settings, **added}).speedup_over_stock
    except SpecPilotError:
        return None
