"""Exact replay: what a tree policy would have accepted on recorded text, without the target.

A trace holds a lattice at every position of a text that the target itself chose (greedily, or with
keyed noise), so a policy can be followed wherever its own acceptances lead. Lattices recorded only
where some other policy happened to land would favour that policy (vLLM pull request 42910). A
block drafter's lattice depends on the text before it alone, so replay gives exactly the tokens per
pass that the engine would. Traces on disk, and replay by request with intervals, are
``harness.cost_model``'s.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from specpilot.errors import InvalidInput
from specpilot.mechanisms.trees.acceptance import greedy
from specpilot.mechanisms.trees.calibration import Calibration
from specpilot.mechanisms.trees.lattice import Lattice
from specpilot.mechanisms.trees.policies import Policy
from specpilot.mechanisms.trees.tree import Tree

__all__ = ["Replay", "Trace", "oracle", "replay"]


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """One request: ``tokens`` that the target chose and a lattice after each but the last.

    ``lattices[t]`` has ``tokens[t]`` as its anchor.
    """

    tokens: tuple[int, ...]
    lattices: tuple[Lattice, ...]

    def __post_init__(self) -> None:
        if len(self.tokens) < 2 or len(self.lattices) != len(self.tokens) - 1:
            raise InvalidInput(
                f"a trace of {len(self.tokens)} tokens needs a lattice after each but the last, "
                f"got {len(self.lattices)}."
            )


@dataclass(frozen=True, slots=True)
class Replay:
    """Outcome by trace: ``tokens`` emitted and ``passes`` used, anchor of the start excluded."""

    tokens: tuple[int, ...]
    passes: tuple[int, ...]

    @property
    def tokens_per_pass(self) -> float:
        """τ over all traces."""
        return sum(self.tokens) / sum(self.passes)


def _follow(traces: Iterable[Trace], accepted: Callable[[Trace, int], int]) -> Replay:
    tokens, passes = [], []
    for trace in traces:
        at, count = 0, 0
        while at < len(trace.lattices):
            at += 1 + accepted(trace, at)
            count += 1
        tokens.append(len(trace.lattices))
        passes.append(count)
    return Replay(tuple(tokens), tuple(passes))


def replay(
    traces: Iterable[Trace],
    policy: Policy,
    rows: int,
    *,
    block: int | None = None,
    calibration: Calibration | None = None,
) -> Replay:
    """Follow ``policy`` at ``rows`` through all traces.

    ``block`` cuts lattices to ``block - 1`` positions, as a drafter's block of that many rows would
    (its first positions do not depend on later masks only if the drafter is causal; for others the
    cut is an approximation). A ``calibration`` is applied and then learns, cycle by cycle.
    """

    def accepted(trace: Trace, at: int) -> int:
        drawn = trace.lattices[at]
        if block is not None and drawn.depth > block - 1:
            drawn = Lattice(drawn.tokens[: block - 1], drawn.first, drawn.edges[: block - 2])
        used = drawn if calibration is None else calibration.apply(drawn)
        tree = policy(used, trace.tokens[at], rows)
        left = len(trace.lattices) - at - 1
        tree = tree.capped(left)
        walk = greedy(tree, _choices(tree, trace.tokens[at + 1 :]))
        if calibration is not None:
            calibration.update(drawn, tree, walk)
        return len(walk.path) - 1

    return _follow(traces, accepted)


def _choices(tree: Tree, truth: Sequence[int]) -> list[int]:
    """The target's token at each depth; right on the true path, which is all that a walk sees."""
    return [truth[depth] for depth in tree.depth]


def oracle(traces: Iterable[Trace]) -> Replay:
    """Accept as long as the target's token is any of the candidates: no tree can do better."""

    def accepted(trace: Trace, at: int) -> int:
        lattice, count = trace.lattices[at], 0
        left = len(trace.lattices) - at - 1
        while count < min(left, lattice.depth):
            if trace.tokens[at + 1 + count] not in lattice.tokens[count]:
                break
            count += 1
        return count

    return _follow(traces, accepted)
