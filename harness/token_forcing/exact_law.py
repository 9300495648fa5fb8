"""Exact laws of acceptance rules on a toy target, by walking through every random outcome.

A rule decides through a ``Coin``; ``law_of`` replays it once for each sequence of decisions and
adds up probabilities. So a rule's law is known to rounding, without sampling.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np
import numpy.typing as npt

from specpilot.mechanisms.trees.acceptance import (
    Coin,
    Walk,
    chain_ratio,
    draw_children,
    recursive_rejection,
    sample_and_walk,
)
from specpilot.mechanisms.trees.tree import Tree

__all__ = ["RULES", "ToyModel", "emit", "law_of", "total_variation"]

Floats = npt.NDArray[np.float64]
Law = dict[tuple[int, ...], float]
CERTAIN = 1e-15


@dataclass
class Script:
    """A ``Coin`` that follows a list of decisions and notes what else could have been decided."""

    decisions: list[int]
    taken: list[tuple[int, list[float]]] = field(default_factory=list)

    def _decide(self, chances: Sequence[float]) -> int:
        at = len(self.taken)
        if at < len(self.decisions):
            choice = self.decisions[at]
        else:
            choice = next(i for i, chance in enumerate(chances) if chance > CERTAIN)
        self.taken.append((choice, list(chances)))
        return choice

    def accept(self, chance: float) -> bool:
        chance = min(1.0, chance)
        return self._decide([1.0 - chance, chance]) == 1

    def draw(self, weights: Floats) -> int:
        return self._decide((weights / weights.sum()).tolist())


def law_of(outcome: Callable[[Coin], tuple[int, ...]]) -> Law:
    """Return the law of ``outcome``: its value for each way in which its coin can fall."""
    law: Law = {}
    decisions: list[int] = []
    while True:
        script = Script(decisions)
        value = outcome(script)
        chance = float(np.prod([chances[choice] for choice, chances in script.taken]))
        law[value] = law.get(value, 0.0) + chance
        taken = script.taken
        while taken:
            choice, chances = taken.pop()
            later = [i for i in range(choice + 1, len(chances)) if chances[i] > CERTAIN]
            if later:
                decisions = [c for c, _ in taken] + [later[0]]
                break
        else:
            return law


def total_variation(a: Law, b: Law) -> float:
    """Half the sum of absolute differences."""
    return 0.5 * sum(abs(a.get(x, 0.0) - b.get(x, 0.0)) for x in a.keys() | b.keys())


class ToyModel:
    """Target ``p`` and drafter ``q`` over every context of up to ``length`` tokens."""

    def __init__(self, vocab_size: int, length: int, seed: int, sharpness: float = 1.5) -> None:
        rng = np.random.default_rng(seed)
        self.vocab_size, self.length = vocab_size, length
        self.p: dict[tuple[int, ...], Floats] = {}
        self.q: dict[tuple[int, ...], Floats] = {}
        for n in range(length + 1):
            for context in product(range(vocab_size), repeat=n):
                logits = sharpness * rng.standard_normal(vocab_size)
                drift = 1.5 * rng.standard_normal(vocab_size)
                self.p[context] = np.exp(logits) / np.exp(logits).sum()
                self.q[context] = np.exp(logits + drift) / np.exp(logits + drift).sum()

    def plain(self) -> Law:
        """The law of ``length`` tokens of plain decoding."""
        law: Law = {}
        for text in product(range(self.vocab_size), repeat=self.length):
            law[text] = float(np.prod([self.p[text[:i]][t] for i, t in enumerate(text)]))
        return law

    def tree(self, paths: Sequence[tuple[int, ...]]) -> tuple[Tree, list[tuple[int, ...]]]:
        """A tree of ``paths`` below an anchor, and each node's context."""
        contexts: list[tuple[int, ...]] = [(), *paths]
        tokens = [0, *(path[-1] for path in paths)]
        parents = [-1, *(contexts.index(path[:-1]) for path in paths)]
        return Tree.of(tokens, parents, vocab_size=self.vocab_size), contexts


Rule = Callable[[ToyModel, Coin], Walk]


def walk_any_tree(model: ToyModel, coin: Coin) -> Walk:
    """``sample_and_walk`` on the drafter's two best tokens at each of two depths."""
    first = np.argsort(-model.q[()])[:2].tolist()
    below = [(a, b) for a in first for b in np.argsort(-model.q[(a,)])[:2].tolist()]
    tree, contexts = model.tree([*((a,) for a in first), *below])
    return sample_and_walk(tree, np.stack([model.p[c] for c in contexts]), coin)


def sampled_chain(model: ToyModel, coin: Coin) -> Walk:
    """``chain_ratio`` on a chain of two tokens drawn from the drafter."""
    first = coin.draw(model.q[()])
    drafts = (first, coin.draw(model.q[(first,)]))
    contexts = [drafts[:d] for d in range(3)]
    q = np.stack([model.q[c] for c in contexts[:2]])
    return chain_ratio(drafts, q, np.stack([model.p[c] for c in contexts]), coin)


def drawn_tree(model: ToyModel, coin: Coin) -> Walk:
    """``recursive_rejection`` on two children drawn at the anchor and one below each."""
    first = draw_children(model.q[()], 2, coin)
    below = [(a, b) for a in first for b in draw_children(model.q[(a,)], 1, coin)]
    tree, contexts = model.tree([*((a,) for a in first), *below])
    q, p = (np.stack([law[c] for c in contexts]) for law in (model.q, model.p))
    return recursive_rejection(tree, q, p, coin)


RULES: dict[str, Rule] = {
    "sample and walk": walk_any_tree,
    "chain ratio": sampled_chain,
    "recursive rejection": drawn_tree,
}


def emit(model: ToyModel, rule: Rule, coin: Coin) -> tuple[int, ...]:
    """``length`` tokens: one cycle of ``rule``, then plain decoding."""
    text = list(rule(model, coin).emitted[: model.length])
    while len(text) < model.length:
        text.append(coin.draw(model.p[tuple(text)]))
    return tuple(text)
