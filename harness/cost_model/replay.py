"""Exact replay: what a tree policy would have accepted, on recorded lattices.

Greedy acceptance is a walk down the tree along the target's own continuation, so any policy, budget
or block length can be judged without a model. Replay ranks and rejects; it never promotes: times
are not replayed, and a trace recorded at one policy's cycles holds only the positions where that
policy drafted (``exact`` is False then). ``bias`` says how far a replay was from the live run.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from specpilot.errors import InvalidInput
from specpilot.harness.cost_model.ceiling import AcceptanceProfile
from specpilot.harness.cost_model.traces import Cycle, Trace
from specpilot.mechanisms.trees.lattice import Lattice
from specpilot.mechanisms.trees.policies import Policy
from specpilot.mechanisms.trees.tree import MAX_ROWS, Tree

__all__ = ["Replay", "bias", "oracle", "profile", "replay", "replay_batched", "spearman"]


@dataclass(frozen=True, slots=True)
class Replay:
    """τ of a policy on a trace. ``low``..``high``: 95 % t interval, requests as clusters.

    ``tokens_per_pass`` is tokens over exact passes, bonus included; ``rows_per_pass`` the mean rows
    of a pass over all its requests. ``exact``: every cycle began where this policy would have begun
    it. The bounds are None with fewer than two requests.
    """

    rows: int
    block: int
    tokens: int
    passes: int
    rows_per_pass: float
    low: float | None
    high: float | None
    exact: bool

    @property
    def tokens_per_pass(self) -> float:
        return self.tokens / self.passes


class _Walk:
    """One request of a trace, on its way: where the next cycle begins and what is left to say."""

    def __init__(self, trace: Trace, request: str, block: int) -> None:
        self.output = trace.outputs[request]
        self.cycles = trace.cycles[request]
        self.exact = trace.header.every_position
        self.request = request
        self.depth = block - 1
        self.index = 0
        self.tokens = 0
        self.passes = 0

    @property
    def done(self) -> bool:
        return self.index >= len(self.cycles) or not self.continuation

    @property
    def cycle(self) -> Cycle:
        return self.cycles[self.index]

    @property
    def continuation(self) -> tuple[int, ...]:
        at = self.cycle.position + 1
        return self.output[at : at + self.depth + 1]

    @property
    def lattice(self) -> Lattice:
        whole = self.cycle.lattice
        if self.depth >= whole.depth:
            return whole
        return Lattice(whole.tokens[: self.depth], whole.first, whole.edges[: self.depth - 1])

    def verify(self, tree: Tree) -> None:
        """Walk the tree along the continuation, count the pass, go to where the next one begins."""
        node, accepted = 0, 0
        wanted = self.continuation
        for token in wanted:
            child = tree.children[node].get(token)
            if child is None:
                break
            node, accepted = child, accepted + 1
        self.emit(accepted)

    def emit(self, accepted: int) -> None:
        emitted = min(accepted + 1, len(self.output) - 1 - self.cycle.position)
        self.tokens += emitted
        self.passes += 1
        if not self.exact:
            self.index += 1
            return
        position = self.cycle.position + emitted
        self.index += emitted
        if not self.done and self.cycle.position != position:
            raise InvalidInput(
                f"the trace has no lattice at position {position} of request {self.request!r}.",
                hint="Its header says that every position was recorded; record it again.",
            )


def _block(trace: Trace, block: int | None) -> int:
    limit = trace.header.block
    chosen = limit if block is None else block
    if not 2 <= chosen <= limit:
        raise InvalidInput(
            f"field 'block' is {chosen}; the trace was recorded with blocks of {limit} rows.",
            hint="A shorter block is a cut of the recorded one, a longer one was never drafted.",
        )
    return chosen


def _walks(trace: Trace, block: int) -> list[_Walk]:
    walks = [_Walk(trace, request, block) for request in trace.cycles]
    walks = [walk for walk in walks if not walk.done]
    if not walks:
        raise InvalidInput("the trace has no cycle with a continuation; nothing can be replayed.")
    return walks


def replay(trace: Trace, policy: Policy, rows: int, *, block: int | None = None) -> Replay:
    """Replay ``policy(lattice, anchor, rows) -> Tree`` over a trace.

    ``rows`` are those of the exact pass, anchor included; ``block`` cuts the lattices to a shorter
    block (None: as recorded; a drafter that runs a shorter block sees fewer masks, so its lattice
    may differ a little). Raises ``InvalidInput`` for rows or block out of range.
    """
    chosen = _block(trace, block)
    walks = _walks(trace, chosen)
    used = 0
    for walk in walks:
        while not walk.done:
            tree = policy(walk.lattice, walk.cycle.anchor, rows)
            used += tree.rows
            walk.verify(tree)
    return _result(walks, rows, chosen, used)


def oracle(trace: Trace, *, block: int | None = None) -> Replay:
    """Replay the oracle: accept the target's token whenever it is among the position's candidates.

    No tree of any size on this lattice accepts more. ``rows`` of the result is 0: not bounded.
    """
    chosen = _block(trace, block)
    walks = _walks(trace, chosen)
    for walk in walks:
        while not walk.done:
            accepted = 0
            pairs = zip(walk.continuation, walk.lattice.tokens, strict=False)
            for token, candidates in pairs:
                if token not in candidates:
                    break
                accepted += 1
            walk.emit(accepted)
    return _result(walks, 0, chosen, 0)


def profile(
    trace: Trace, policy: Policy, rows: Sequence[int], *, name: str, block: int | None = None
) -> AcceptanceProfile:
    """Replay a policy at several row counts: τ as a function of rows, for ceilings and what-ifs."""
    points = {r: replay(trace, policy, r, block=block).tokens_per_pass for r in rows}
    return AcceptanceProfile.of(points, f"replay of {name} on {trace.header.deployment}")


def replay_batched(
    trace: Trace,
    policy: Policy,
    *,
    requests: int,
    rows: int,
    shared: bool,
    block: int | None = None,
) -> Replay:
    """Replay batches of ``requests`` requests in lockstep with ``rows`` rows for each pass in all.

    ``shared``: the nodes of highest path score of all requests get the rows, which is optimal for
    path-probability scores (one heap over all requests); otherwise each request gets the same.
    The policy must be nested (fewer rows give a prefix), as best-first is. τ is tokens for each
    request and pass. Raises ``InvalidInput`` if the rows do not cover the anchors.
    """
    chosen = _block(trace, block)
    if requests < 1 or rows < requests:
        raise InvalidInput(
            f"fields 'requests' {requests} and 'rows' {rows}: each request needs its anchor's row."
        )
    waiting = _walks(trace, chosen)
    everyone, used, steps = list(waiting), 0, 0
    running: list[_Walk] = []
    while running or waiting:
        while waiting and len(running) < requests:
            running.append(waiting.pop(0))
        for walk, tree in zip(running, _allocate(running, policy, rows, shared), strict=True):
            used += tree.rows
            walk.verify(tree)
        steps += 1
        running = [walk for walk in running if not walk.done]
    result = _result(everyone, rows, chosen, used)
    return Replay(
        rows, chosen, result.tokens, result.passes, used / steps, result.low, result.high,
        result.exact,
    )  # fmt: skip


def _allocate(running: Sequence[_Walk], policy: Policy, rows: int, shared: bool) -> Iterator[Tree]:
    count = len(running)
    if not shared:
        for walk in running:
            yield policy(walk.lattice, walk.cycle.anchor, min(rows // count, MAX_ROWS))
        return
    limit = min(rows - count + 1, MAX_ROWS)
    trees = [policy(walk.lattice, walk.cycle.anchor, limit) for walk in running]
    # Parents score at least as high as their children and come first, so every prefix is a tree.
    nodes = sorted(
        (-score, node, r)
        for r, tree in enumerate(trees)
        for node, score in enumerate(tree.scores)
        if node > 0
    )
    given = [1] * count
    for _, _, r in nodes[: rows - count]:
        given[r] += 1
    for walk, size in zip(running, given, strict=True):
        yield policy(walk.lattice, walk.cycle.anchor, size)


def _result(walks: Sequence[_Walk], rows: int, block: int, used: int) -> Replay:
    tokens = np.array([w.tokens for w in walks], dtype=float)
    passes = np.array([w.passes for w in walks], dtype=float)
    rate = float(tokens.sum() / passes.sum())
    low = high = None
    count = len(walks)
    if count > 1:
        from scipy.stats import t

        residual = tokens - rate * passes
        error = math.sqrt(count / (count - 1) * float((residual**2).sum())) / passes.sum()
        half = float(t.ppf(0.975, count - 1)) * float(error)
        low, high = max(1.0, rate - half), rate + half
    return Replay(
        rows=rows,
        block=block,
        tokens=int(tokens.sum()),
        passes=int(passes.sum()),
        rows_per_pass=used / float(passes.sum()),
        low=low,
        high=high,
        exact=all(w.exact for w in walks),
    )


def bias(replayed: float, live: float) -> float:
    """Return how far replayed τ lies from live τ: 0.03 is 3 % too high."""
    if not live > 0:
        raise InvalidInput(f"live tokens_per_pass is {live!r}; it must be positive.")
    return replayed / live - 1.0


def spearman(replayed: Sequence[float], live: Sequence[float]) -> float:
    """Return the rank correlation of replayed and live τ over the same policies, in order."""
    if len(replayed) != len(live) or len(live) < 3:
        raise InvalidInput(
            f"ranks need at least three policies, each replayed and live; got {len(replayed)} and "
            f"{len(live)}."
        )
    from scipy.stats import spearmanr

    return float(spearmanr(replayed, live).statistic)
