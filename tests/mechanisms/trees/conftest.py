"""Random lattices for the tests of trees."""

from collections.abc import Callable

import numpy as np
import pytest

from specpilot.mechanisms.trees.lattice import Lattice

VOCAB = 50


def make(
    seed: int, depth: int, width: int, *, sharp: float = 1.5, pairwise: bool = True
) -> Lattice:
    """A lattice over ``VOCAB`` tokens with some mass outside its candidates."""
    rng = np.random.default_rng(seed)
    tokens = np.stack([rng.permutation(VOCAB)[:width] for _ in range(depth)])

    def rows(*shape: int) -> np.ndarray:
        z = rng.standard_normal((*shape, width)) * sharp
        mass = np.exp(z).sum(-1, keepdims=True) + np.e
        return z - np.log(mass)

    if pairwise:
        return Lattice.pairwise(tokens, rows(), rows(depth - 1, width), VOCAB)
    return Lattice.marginal(tokens, rows(depth), VOCAB)


@pytest.fixture
def random_lattice() -> Callable[..., Lattice]:
    return make
