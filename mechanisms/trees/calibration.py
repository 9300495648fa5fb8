"""Calibrate a drafter's lattice by what the target chose in past cycles.

A drafter's log-probs rank well within a row, but trees compare rows: of different depths, and on
and off the chain of first choices. (A marginal drafter is far less often right once a sibling has
been accepted: vLLM pull request 42910.) Counts by depth, rank, spine and predicted probability
correct that. Only accepted nodes count, and there the target's token is known, so every candidate
of the row is a trial, in the tree or not: what is learned does not depend on the trees drawn.
Trees are guesses under greedy, sampled-walk and keyed acceptance, which stay lossless whatever is
learned. Under the ratio rules a calibration may only come from earlier cycles; it does.
"""

import numpy as np
from numpy.typing import NDArray

from specpilot.errors import InvalidInput
from specpilot.mechanisms.trees.acceptance import Walk
from specpilot.mechanisms.trees.lattice import Lattice
from specpilot.mechanisms.trees.tree import Tree

__all__ = ["Calibration"]

_EDGES = np.log([0.003, 0.01, 0.03, 0.1, 0.25, 0.5, 0.75, 0.9])  # of predicted probability
_BINS = len(_EDGES) + 1


class Calibration:
    """Counts of candidates and of those that the target chose; fixed memory.

    ``weight`` is how many trials the drafter's own probability counts for: with few trials it
    stands, with many the counts decide.
    """

    def __init__(self, depth: int, width: int, weight: float = 32.0) -> None:
        if depth < 1 or width < 1 or not weight > 0:
            raise InvalidInput(
                f"calibration needs depth, width and weight above 0, got {depth}, {width}, {weight}"
            )
        shape = (depth, width, 2, _BINS)
        self._weight = weight
        self._trials = np.zeros(shape)
        self._chosen = np.zeros(shape)
        self._predicted = np.zeros(shape)

    @property
    def trials(self) -> int:
        """Candidates seen so far."""
        return int(self._trials.sum())

    def update(self, lattice: Lattice, tree: Tree, walk: Walk) -> None:
        """Learn from one finished cycle: the lattice it used, its tree and what was accepted."""
        self._check(lattice)
        before, spine = 0, True
        for node, token in zip(walk.path, walk.emitted, strict=True):
            position = tree.depth[node]
            if position >= lattice.depth:
                return
            row = lattice.row(position, before)
            order = (-row).argsort(kind="stable")
            ranks = np.arange(lattice.width)
            cells = (position, ranks, int(spine), _bins(row[order]))
            ids = lattice.tokens[position, order]
            self._trials[cells] += 1
            self._predicted[cells] += np.exp(row[order])
            self._chosen[cells] += ids == token
            found = np.flatnonzero(ids == token)
            if not found.size:
                return
            before, spine = int(order[found[0]]), spine and found[0] == 0

    def apply(self, lattice: Lattice) -> Lattice:
        """Return the pairwise lattice with corrected log-probs, at most 0.

        A candidate of probability p in a cell with n trials, of which c were chosen while the
        drafter predicted m of them, gets ``p * (c + w) / (m + w)`` with weight w as trials of
        the cell's own mean: 1 at no trials, the observed over the predicted rate at many.
        """
        self._check(lattice)
        depth, width = lattice.depth, lattice.width
        first = self._correct(lattice.first[None, :], 0, np.array([True]))[0]
        edges = np.empty((depth - 1, width, width))
        on_spine = int(lattice.first.argmax())
        for position in range(1, depth):
            rows = np.broadcast_to(lattice.edges[position - 1], (width, width))
            edges[position - 1] = self._correct(rows, position, np.arange(width) == on_spine)
            on_spine = int(rows[on_spine].argmax())
        return Lattice(lattice.tokens, first, edges)

    def _correct(
        self, rows: NDArray[np.float64], position: int, spine: NDArray[np.bool_]
    ) -> NDArray[np.float64]:
        order = (-rows).argsort(axis=1, kind="stable")
        rank = np.empty_like(order)
        np.put_along_axis(rank, order, np.arange(rows.shape[1])[None, :], axis=1)
        cells = (position, rank, spine.astype(np.int64)[:, None], _bins(rows))
        trials = self._trials[cells]
        mean = self._predicted[cells] / np.maximum(trials, 1)
        prior = self._weight * np.where(trials > 0, mean, 1.0)
        factor = (self._chosen[cells] + prior) / (self._predicted[cells] + prior)
        corrected: NDArray[np.float64] = np.minimum(rows + np.log(factor), 0.0)
        return corrected

    def _check(self, lattice: Lattice) -> None:
        depth, width = self._trials.shape[:2]
        if lattice.depth > depth or lattice.width > width:
            raise InvalidInput(
                f"a lattice of {lattice.depth} x {lattice.width} exceeds the calibration's "
                f"{depth} x {width}."
            )


def _bins(logp: NDArray[np.float64]) -> NDArray[np.int64]:
    return np.searchsorted(_EDGES, logp).astype(np.int64)
