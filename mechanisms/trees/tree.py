"""The tree that one exact pass verifies: node 0 is the anchor, parents come before children."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from specpilot.errors import InvalidInput

__all__ = ["MAX_ROWS", "Tree"]

MAX_ROWS = 128  # what the tree kernels take; a block drafter's trees stay far below


@dataclass(frozen=True, eq=False)
class Tree:
    """Candidate tokens of one exact pass, in topological order. Build with ``of`` or ``chain``.

    Node 0 is the anchor: the last emitted token, which the target has not seen yet. ``tokens``,
    ``parent`` (-1 for the anchor) and ``depth`` (0 for the anchor) have one entry a node;
    ``scores`` holds each node's path log-prob under the drafter, 0 for the anchor.
    """

    tokens: tuple[int, ...]
    parent: tuple[int, ...]
    depth: tuple[int, ...]
    scores: tuple[float, ...]

    @classmethod
    def of(
        cls,
        tokens: Sequence[int],
        parent: Sequence[int],
        *,
        vocab_size: int,
        scores: Sequence[float] | None = None,
        limit: int = MAX_ROWS,
    ) -> "Tree":
        """Check and make a tree that someone else laid out.

        Raises ``InvalidInput`` for an empty tree, more than ``limit`` nodes, lengths that differ,
        a first node with a parent, further roots, parents that do not come before their child
        (so every cycle), ids outside the vocabulary, equal siblings, NaN or positive scores.
        """
        ids, up = [int(t) for t in tokens], [int(p) for p in parent]
        path = [0.0] * len(ids) if scores is None else [float(s) for s in scores]
        if not ids or len(ids) != len(up) or len(ids) != len(path):
            raise InvalidInput(
                f"a tree needs as many tokens as parents and scores and at least the anchor; got "
                f"{len(ids)}, {len(up)} and {len(path)}."
            )
        if len(ids) > limit:
            raise InvalidInput(
                f"the tree has {len(ids)} nodes, the limit is {limit}.", hint="Lower the rows."
            )
        if up[0] != -1:
            raise InvalidInput(f"node 0 is the anchor and has no parent (-1), got {up[0]}.")
        depth = [0] * len(ids)
        siblings: set[tuple[int, int]] = set()
        for node in range(1, len(ids)):
            if not 0 <= up[node] < node:
                raise InvalidInput(
                    f"node {node} has parent {up[node]}, which does not come before it.",
                    hint="Order nodes so that parents precede children; only node 0 is a root.",
                )
            if (up[node], ids[node]) in siblings:
                raise InvalidInput(f"node {up[node]} has two children with token {ids[node]}.")
            siblings.add((up[node], ids[node]))
            depth[node] = depth[up[node]] + 1
        for token in ids:
            if not 0 <= token < vocab_size:
                raise InvalidInput(
                    f"token {token} lies outside the vocabulary of {vocab_size}.",
                    hint="Does the drafter use the target's tokenizer?",
                )
        if any(not score <= 0.0 for score in path):
            raise InvalidInput("a path score is NaN or positive; scores are sums of log-probs.")
        return cls(tuple(ids), tuple(up), tuple(depth), tuple(path))

    @classmethod
    def chain(cls, tokens: Sequence[int], *, vocab_size: int, limit: int = MAX_ROWS) -> "Tree":
        """Make the tree of one path: the anchor, then drafts. Raises as ``of`` does."""
        return cls.of(tokens, range(-1, len(tokens) - 1), vocab_size=vocab_size, limit=limit)

    @property
    def rows(self) -> int:
        """Nodes, the anchor included: the rows of the exact pass."""
        return len(self.tokens)

    @cached_property
    def children(self) -> tuple[dict[int, int], ...]:
        """For each node, its children as token -> node, in drafting order."""
        below: tuple[dict[int, int], ...] = tuple({} for _ in self.tokens)
        for node in range(1, self.rows):
            below[self.parent[node]][self.tokens[node]] = node
        return below

    def path(self, node: int) -> tuple[int, ...]:
        """Nodes from the anchor to ``node``, both included."""
        nodes = [node]
        while nodes[-1] != 0:
            nodes.append(self.parent[nodes[-1]])
        return tuple(reversed(nodes))

    def ancestors(self) -> NDArray[np.bool_]:
        """Bool [rows, rows]: entry (n, m) is true when m is n or an ancestor of n."""
        mask = np.eye(self.rows, dtype=np.bool_)
        for node in range(1, self.rows):
            mask[node] |= mask[self.parent[node]]
        return mask

    def capped(self, max_depth: int) -> "Tree":
        """Drop nodes deeper than ``max_depth``; order and the rest stay."""
        kept = [n for n in range(self.rows) if self.depth[n] <= max_depth]
        if len(kept) == self.rows:
            return self
        place = {-1: -1, **{old: new for new, old in enumerate(kept)}}
        return Tree(
            tuple(self.tokens[n] for n in kept),
            tuple(place[self.parent[n]] for n in kept),
            tuple(self.depth[n] for n in kept),
            tuple(self.scores[n] for n in kept),
        )
