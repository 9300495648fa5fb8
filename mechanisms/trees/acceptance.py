"""Acceptance rules: from an exact pass's distributions to emitted tokens with the target's law.

A rule gets the verified tree and the target's distribution at every node (after the whole sampling
pipeline: penalties, temperature, top-k, top-p, in the order of plain decoding) and returns a
``Walk``. Which rule fits how the drafts came about:

- ``greedy`` and ``sample_and_walk``: any tree, however made; what is emitted is the target's own.
- ``keyed_walk``: any tree; equal to plain decoding with the same seed, token by token.
- ``chain_ratio``: a chain whose drafts were sampled from exactly the ``q`` that is passed, with its
  length fixed before the drafts were seen (Leviathan et al., arXiv 2211.17192; Chen et al.,
  arXiv 2302.01318).
- ``recursive_rejection``: a tree whose siblings were drawn one after the other, without
  replacement, from exactly the ``q`` that is passed (SpecInfer, arXiv 2305.09781; Sequoia,
  arXiv 2402.12374).

Distributions are float64 arrays [..., vocabulary] that sum to 1. Randomness comes from a ``Coin``,
so tests can walk through every outcome with its exact probability.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specpilot.errors import CheckFailed, InvalidInput
from specpilot.mechanisms.trees.tree import Tree

__all__ = [
    "Coin",
    "RandomCoin",
    "Walk",
    "chain_ratio",
    "draw_children",
    "greedy",
    "keyed_choice",
    "keyed_noise",
    "keyed_walk",
    "recursive_rejection",
    "sample_and_walk",
    "walk",
]

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Walk:
    """An accepted root path and what it emits.

    ``path`` holds nodes from the anchor on: exactly these are committed to the target's state.
    ``emitted`` holds the accepted drafts and then the bonus token, which becomes the next anchor;
    it is as long as ``path``.
    """

    path: tuple[int, ...]
    emitted: tuple[int, ...]

    def first(self, count: int) -> "Walk":
        """Cut to the first ``count`` emitted tokens: at a stop token or the length limit."""
        return Walk(self.path[:count], self.emitted[:count])


class Coin(Protocol):
    """A source of independent random decisions."""

    def accept(self, chance: float) -> bool:
        """True with probability ``min(1, chance)``; never at ``chance`` 0."""

    def draw(self, weights: Floats) -> int:
        """An index with probability proportional to ``weights`` [n]; never one of weight 0."""


class RandomCoin:
    """Decisions from a numpy generator."""

    def __init__(self, generator: np.random.Generator) -> None:
        self._generator = generator

    def accept(self, chance: float) -> bool:
        return bool(self._generator.random() < chance)  # strict: 0 must not pass at u = 0

    def draw(self, weights: Floats) -> int:
        bounds = np.cumsum(weights)
        u = self._generator.random() * bounds[-1]
        return int(min(np.searchsorted(bounds, u, side="right"), np.flatnonzero(weights)[-1]))


def walk(tree: Tree, choose: Callable[[int], int]) -> Walk:
    """Walk down from the anchor; ``choose(node)`` is the target's next token after a node."""
    node, path, emitted = 0, [0], []
    while True:
        token = choose(node)
        emitted.append(token)
        child = tree.children[node].get(token)
        if child is None:
            return Walk(tuple(path), tuple(emitted))
        node = child
        path.append(node)


def greedy(tree: Tree, argmax: Sequence[int]) -> Walk:
    """Accept while the target's argmax is a child. ``argmax`` has one token id a node."""
    return walk(tree, lambda node: int(argmax[node]))


def sample_and_walk(tree: Tree, p: Floats, coin: Coin) -> Walk:
    """Sample the target's token at each node reached and follow it while it is a child.

    ``p`` [rows, vocabulary]. Lossless for any tree, since the emitted tokens are plain samples.
    """
    return walk(tree, lambda node: coin.draw(p[node]))


def keyed_noise(seed: int, position: int, vocab_size: int) -> Floats:
    """Gumbel noise [vocabulary] of one position of one request, float64.

    Counter-based (Philox): the noise depends on seed, absolute position and token id alone, so
    plain decoding and any verification of the same request see the same (Daliri, Musco and Suresh,
    arXiv 2408.07978).
    """
    if position < 0:
        raise InvalidInput(f"an absolute position is never negative, got {position}.")
    key = np.array([seed % 2**64, position], dtype=np.uint64)
    uniform = np.random.Generator(np.random.Philox(key=key)).random(vocab_size)
    noise: Floats = -np.log(np.maximum(-np.log1p(-uniform), 2.0**-54))
    return noise


def keyed_choice(log_p: Floats, seed: int, position: int) -> int:
    """Sample from ``log_p`` [vocabulary] with the noise of ``position``: argmax of the sum."""
    return int(np.argmax(log_p + keyed_noise(seed, position, log_p.shape[-1])))


def keyed_walk(tree: Tree, log_p: Floats, seed: int, anchor_position: int) -> Walk:
    """``sample_and_walk`` with keyed noise: the token after a node at depth d has the noise of
    position ``anchor_position + d + 1``.

    ``log_p`` [rows, vocabulary]. Emits what plain decoding with ``keyed_choice`` emits.
    """
    return walk(
        tree,
        lambda node: keyed_choice(log_p[node], seed, anchor_position + tree.depth[node] + 1),
    )


def _residual(p: Floats, q: Floats) -> Floats:
    """``(p - q)_+`` scaled to sum 1: the law of the token after a rejection."""
    rest = np.maximum(p - q, 0.0)
    total = float(rest.sum())
    if total > 0.0:
        rest /= total
        return rest
    if np.abs(p - q).max() > 1e-9:
        raise CheckFailed(
            f"a draft was rejected where q covers all of p (sums {p.sum():.6g}, {q.sum():.6g}).",
            hint="Pass distributions that sum to 1, q the one that the draft was sampled from.",
        )
    return p  # p equals q up to rounding, and so does the law


def _chance(p: float, q: float, token: int) -> float:
    if not q > 0.0:
        raise CheckFailed(
            f"token {token} was drafted with probability {q:.6g} under q.",
            hint="q must be the distribution that the draft was sampled from.",
        )
    return p / q


def chain_ratio(drafts: Sequence[int], q: Floats, p: Floats, coin: Coin) -> Walk:
    """Accept draft d with probability ``min(1, p/q)``; emit from the residual on rejection.

    ``drafts`` D tokens, ``q`` [D, vocabulary] what each was sampled from, ``p`` [D + 1, vocabulary]
    with row d the target's law of draft d. Path nodes count along the chain. Raises ``CheckFailed``
    when a draft could not have come from ``q``.
    """
    emitted: list[int] = []
    for d, token in enumerate(drafts):
        if not coin.accept(_chance(float(p[d, token]), float(q[d, token]), token)):
            emitted.append(coin.draw(_residual(p[d], q[d])))
            return Walk(tuple(range(d + 1)), tuple(emitted))
        emitted.append(int(token))
    emitted.append(coin.draw(p[len(drafts)]))
    return Walk(tuple(range(len(drafts) + 1)), tuple(emitted))


def draw_children(q: Floats, count: int, coin: Coin) -> tuple[int, ...]:
    """Draw up to ``count`` distinct tokens one after the other from ``q`` [vocabulary]."""
    left = q.copy()
    drawn: list[int] = []
    while len(drawn) < count and left.sum() > 0.0:
        drawn.append(coin.draw(left))
        left[drawn[-1]] = 0.0
    return tuple(drawn)


def recursive_rejection(tree: Tree, q: Floats, p: Floats, coin: Coin) -> Walk:
    """Offer each node's children in drawing order; the rejected leave target and drafter laws.

    ``q`` and ``p`` [rows, vocabulary]: at each node, what its children were drawn from without
    replacement (``draw_children``) and the target's law. The number of children must be fixed
    before they are drawn. Raises ``CheckFailed`` when a child could not have come from ``q``.
    """
    node, path, emitted = 0, [0], []
    while True:
        law, left = p[node], q[node].copy()
        for token, child in tree.children[node].items():
            left /= left.sum()
            if coin.accept(_chance(float(law[token]), float(left[token]), token)):
                emitted.append(token)
                path.append(child)
                node = child
                break
            law = _residual(law, left)
            left[token] = 0.0
        else:
            emitted.append(coin.draw(law))
            return Walk(tuple(path), tuple(emitted))
