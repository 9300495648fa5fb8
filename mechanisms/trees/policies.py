"""Tree policies: cut the tree that one exact pass verifies out of a drafter's lattice.

All have one interface, ``policy(lattice, anchor, rows) -> Tree``, with ``rows`` counting the
anchor, so that replay and engines can swap them. If an edge's probability is the chance that the
target accepts the child once it accepted the parent, the expected number of accepted drafts is the
sum over nodes of their path probability; policies differ in which nodes they keep.
"""

from collections.abc import Callable, Mapping
from functools import partial
from heapq import heappop, heappush
from math import exp, inf

import numpy as np

from specpilot.errors import InvalidInput
from specpilot.mechanisms.trees.lattice import Lattice
from specpilot.mechanisms.trees.tree import MAX_ROWS, Tree

__all__ = ["Policy", "best_first", "best_size", "chain", "cost_aware", "ddtree", "eagle2"]

Policy = Callable[[Lattice, int, int], Tree]


def _check_rows(rows: int) -> None:
    if not 1 <= rows <= MAX_ROWS:
        raise InvalidInput(f"a pass of {rows} rows is outside 1 to {MAX_ROWS}.")


def chain(lattice: Lattice, anchor: int, rows: int) -> Tree:
    """Follow the likeliest candidate from the one before: what stock verifies."""
    _check_rows(rows)
    tokens, scores, before, total = [anchor], [0.0], 0, 0.0
    for position in range(min(rows - 1, lattice.depth)):
        row = lattice.row(position, before)
        before = int(row.argmax())
        total += float(row[before])
        tokens.append(int(lattice.tokens[position, before]))
        scores.append(total)
    n = len(tokens)
    return Tree(tuple(tokens), tuple(range(-1, n - 1)), tuple(range(n)), tuple(scores))


def best_first(lattice: Lattice, anchor: int, rows: int) -> Tree:
    """Keep the ``rows - 1`` nodes of highest path probability, likeliest first. Exact.

    No tree of as many rows has a larger sum of path probabilities (a path is never likelier than
    its prefix, so the best nodes are closed under ancestors). Fewer rows give a prefix of the same
    tree. A child enters the frontier only after its parent was taken, so exact ties keep parents.
    O(rows log rows), and each candidate row that is reached is sorted once. Candidates of
    probability 0 are never taken.
    """
    _check_rows(rows)
    depth, width = lattice.depth, lattice.width
    ids = lattice.tokens.tolist()
    per_parent = depth > 1 and lattice.edges.shape[1] > 1
    slots = range(width)
    ordered: dict[int, tuple[list[int], list[float]]] = {}

    def sorted_row(position: int, before: int) -> tuple[list[int], list[float]]:
        """Slots by falling log-prob, and log-probs by slot. (Faster than numpy on short rows.)"""
        key = position * width + before if per_parent else position
        found = ordered.get(key)
        if found is None:
            row: list[float] = lattice.row(position, before).tolist()
            found = ordered[key] = (sorted(slots, key=row.__getitem__, reverse=True), row)
        return found

    tokens, parent, levels, scores = [anchor], [-1], [0], [0.0]
    order, row = sorted_row(0, 0)
    # (minus path log-prob, serial, parent, position, rank among siblings, sorted row)
    frontier = [(-row[order[0]], 0, 0, 0, 0, order, row)] if row[order[0]] > -inf else []
    serial = 1
    while frontier and len(tokens) < rows:
        cost, _, up, position, rank, order, row = heappop(frontier)
        node = len(tokens)
        slot = order[rank]
        tokens.append(ids[position][slot])
        parent.append(up)
        levels.append(position + 1)
        scores.append(-cost)
        rank += 1
        if rank < width and row[order[rank]] > -inf:
            sibling = row[order[rank]] + scores[up]
            heappush(frontier, (-sibling, serial, up, position, rank, order, row))
            serial += 1
        if position + 1 < depth:
            order, row = sorted_row(position + 1, slot)
            if row[order[0]] > -inf:
                child = row[order[0]] - cost
                heappush(frontier, (-child, serial, node, position + 1, 0, order, row))
                serial += 1
    assert all(up < node for node, up in enumerate(parent))  # closed under ancestors
    return Tree(tuple(tokens), tuple(parent), tuple(levels), tuple(scores))


def ddtree(lattice: Lattice, anchor: int, rows: int) -> Tree:
    """Best-first on position marginals alone (DDTree, arXiv 2604.12989).

    On a pairwise lattice a position's marginal is the sum over the candidates before it, so this
    shows what the pairwise edges are worth.
    """
    if lattice.edges.shape[1] <= 1:
        return best_first(lattice, anchor, rows)
    rows_in = [np.exp(lattice.first)]
    for table in lattice.edges:
        rows_in.append(rows_in[-1] @ np.exp(table))
    with np.errstate(divide="ignore"):
        marginals = np.minimum(np.log(np.stack(rows_in)), 0.0)
    return best_first(Lattice(lattice.tokens, marginals[0], marginals[1:, None]), anchor, rows)


def eagle2(lattice: Lattice, anchor: int, rows: int, *, beam: int = 10, max_depth: int = 7) -> Tree:
    """EAGLE-2's dynamic tree (arXiv 2406.16858): a beam per depth, then the best of all expanded.

    At each depth the ``beam`` likeliest paths are expanded into their ``beam`` likeliest children;
    the tree is the ``rows - 1`` likeliest nodes seen. Ties keep parents before children.
    """
    _check_rows(rows)
    seen: list[tuple[float, int, int, int, int]] = []  # (score, position, slot, parent, index)
    layer: list[tuple[float, int, int]] = [(0.0, 0, -1)]  # (score, slot, index in seen)
    for position in range(min(max_depth, lattice.depth)):
        grown = []
        for score, before, index in layer:
            row = lattice.row(position, before)
            best = (-row).argsort(kind="stable")[:beam].tolist()
            grown += [(score + float(row[s]), s, index) for s in best if row[s] > -inf]
        grown.sort(key=lambda item: -item[0])
        start = len(seen)
        seen += [(s, position, slot, up, start + i) for i, (s, slot, up) in enumerate(grown)]
        layer = [(s, slot, start + i) for i, (s, slot, _) in enumerate(grown[:beam])]
    kept = sorted(seen, key=lambda item: (-item[0], item[1]))[: rows - 1]
    kept.sort(key=lambda item: item[4])
    place = {-1: 0, **{item[4]: node for node, item in enumerate(kept, start=1)}}
    return Tree(
        (anchor, *(int(lattice.tokens[position, slot]) for _, position, slot, _, _ in kept)),
        (-1, *(place[up] for _, _, _, up, _ in kept)),
        (0, *(position + 1 for _, position, _, _, _ in kept)),
        (0.0, *(score for score, *_ in kept)),
    )


def best_size(scores: tuple[float, ...], seconds: Mapping[int, float]) -> int:
    """Return the rows, among the keys of ``seconds``, with the most expected tokens a second.

    ``scores`` are path log-probs in the order of ``best_first`` (anchor first, score 0), and
    ``seconds`` is the time of one whole step (draft, exact pass, overhead) by rows. Step time jumps
    where tiles and graphs change, so all sizes are compared. Ties take fewer rows.
    """
    if not seconds or min(seconds) < 1 or any(not s > 0 for s in seconds.values()):
        raise InvalidInput(f"step times by rows must be positive and by rows >= 1: {seconds}.")
    best_rows, best_rate, tokens, used = 0, 0.0, 0.0, 0
    for rows in sorted(seconds):
        tokens += sum(map(exp, scores[used:rows]))  # the anchor's own term is the bonus token
        used = rows
        rate = tokens / seconds[rows]
        if rate > best_rate:
            best_rows, best_rate = rows, rate
    return best_rows


def _cost_aware(lattice: Lattice, anchor: int, rows: int, *, seconds: Mapping[int, float]) -> Tree:
    _check_rows(rows)
    sizes = {size: time for size, time in seconds.items() if size <= rows}
    if not sizes:
        raise InvalidInput(
            f"no step time for {rows} rows or fewer; there are times for {sorted(seconds)}."
        )
    tree = best_first(lattice, anchor, max(sizes))
    size = best_size(tree.scores, sizes)
    return Tree(tree.tokens[:size], tree.parent[:size], tree.depth[:size], tree.scores[:size])


def cost_aware(seconds: Mapping[int, float]) -> Policy:
    """Return a policy: best-first, cut where expected tokens a second stop rising.

    ``seconds`` maps each size that the engine has, in rows, to the time of one whole step;
    ``rows`` of the policy is an upper limit (CaDDTree, arXiv 2606.01813). Raises ``InvalidInput``
    when no size fits.
    """
    return partial(_cost_aware, seconds=dict(seconds))
