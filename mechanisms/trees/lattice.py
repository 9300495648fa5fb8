"""The lattice: what a drafter proposes for the next positions, as every tree policy sees it.

Position d (0 is the token after the anchor) has K candidate ids and log-probs of each candidate
given the one before it. A drafter of marginals (DFlash) ignores the candidate before; one with a
Markov head or a pairwise selector (DSpark, DFlash2) does not. Sizes: D positions, K candidates.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specpilot.errors import InvalidInput

__all__ = ["Lattice"]

_ROUNDING = 1e-4  # log-softmax in low precision may end this far above 0


@dataclass(frozen=True, slots=True, eq=False)
class Lattice:
    """Candidates and edge log-probs of one request. Build with ``marginal`` or ``pairwise``.

    ``tokens`` int64 [D, K], distinct within a position. ``first`` float64 [K]: log-probs at
    position 0. ``edges`` float64 [D - 1, P, K]: ``edges[d - 1, a, b]`` is the log-prob of candidate
    b at position d after candidate a at d - 1; P is 1 when it does not depend on a, else K.
    """

    tokens: NDArray[np.int64]
    first: NDArray[np.float64]
    edges: NDArray[np.float64]

    @property
    def depth(self) -> int:
        return int(self.tokens.shape[0])

    @property
    def width(self) -> int:
        return int(self.tokens.shape[1])

    @property
    def is_pairwise(self) -> bool:
        """Whether an edge depends on the candidate before it."""
        return int(self.edges.shape[1]) > 1

    @classmethod
    def marginal(cls, tokens: ArrayLike, logp: ArrayLike, vocab_size: int) -> "Lattice":
        """Make a lattice from log-probs ``logp`` [D, K] that ignore the candidate before.

        Raises ``InvalidInput`` for wrong shapes, ids outside the vocabulary or repeated within a
        position, NaN and positive log-probs. Minus infinity is a candidate that cannot be.
        """
        ids = _check_tokens(tokens, vocab_size)
        values = _check_logp(logp, ids.shape, "logp")
        return cls(ids, values[0], values[1:, None, :])

    @classmethod
    def pairwise(
        cls, tokens: ArrayLike, first: ArrayLike, edges: ArrayLike, vocab_size: int
    ) -> "Lattice":
        """Make a lattice from ``first`` [K] and ``edges`` [D - 1, K (before), K (candidate)].

        Raises as ``marginal`` does.
        """
        ids = _check_tokens(tokens, vocab_size)
        depth, width = ids.shape
        return cls(
            ids,
            _check_logp(first, (width,), "first"),
            _check_logp(edges, (depth - 1, width, width), "edges"),
        )

    def row(self, position: int, before: int) -> NDArray[np.float64]:
        """Log-probs [K] at ``position`` after candidate ``before`` (ignored at position 0)."""
        if position == 0:
            return self.first
        table = self.edges[position - 1]
        chosen: NDArray[np.float64] = table[before if len(table) > 1 else 0]
        return chosen


def _check_tokens(tokens: ArrayLike, vocab_size: int) -> NDArray[np.int64]:
    ids = np.asarray(tokens)
    if ids.ndim != 2 or 0 in ids.shape or not np.issubdtype(ids.dtype, np.integer):
        raise InvalidInput(
            f"candidate ids have shape {ids.shape} and type {ids.dtype}.",
            hint="Give integers [positions, candidates], at least one of each.",
        )
    if ids.min() < 0 or ids.max() >= vocab_size:
        bad = ids[(ids < 0) | (ids >= vocab_size)].flat[0]
        raise InvalidInput(
            f"candidate id {bad} lies outside the vocabulary of {vocab_size}.",
            hint="Does the drafter use the target's tokenizer?",
        )
    ordered = np.sort(ids, axis=1)
    repeats = ordered[:, 1:] == ordered[:, :-1]
    if repeats.any():
        position = int(repeats.any(axis=1).argmax())
        raise InvalidInput(
            f"candidate id {ordered[:, 1:][repeats].flat[0]} is repeated at position {position}.",
            hint="Candidates of one position must differ.",
        )
    return ids.astype(np.int64, copy=False)


def _check_logp(logp: ArrayLike, shape: tuple[int, ...], name: str) -> NDArray[np.float64]:
    values = np.asarray(logp, dtype=np.float64)
    if values.shape != shape:
        raise InvalidInput(f"{name} has shape {values.shape}, the candidates need {shape}.")
    if values.size == 0:
        return values
    top = values.max()
    if np.isnan(top):
        raise InvalidInput(f"{name} holds NaN.", hint="Check the drafter's weights and dtype.")
    if top > _ROUNDING:
        raise InvalidInput(
            f"{name} holds {top:.6g}, and a log-prob is never above 0.",
            hint="Pass log-softmax values, not logits.",
        )
    return np.minimum(values, 0.0) if top > 0 else values
