"""Benchmark of the tree policies on this CPU: time to build a tree from a 16 x 16 lattice."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from specpilot.mechanisms.trees import policies
from specpilot.mechanisms.trees.lattice import Lattice
from specpilot.mechanisms.trees.tree import Tree

__all__ = ["run", "synthetic_lattice"]

DEPTH = WIDTH = 16
VOCAB = 4096
REPEATS, BUILDS = 15, 100


def synthetic_lattice(seed: int, *, sharp: float = 3.0) -> Lattice:
    """A pairwise lattice of 16 positions x 16 candidates with normal scores."""
    rng = np.random.default_rng(seed)

    def rows(*shape: int) -> np.ndarray:
        z = rng.standard_normal((*shape, WIDTH)) * sharp
        return z - np.log(np.exp(z).sum(-1, keepdims=True) + np.e)

    tokens = np.stack([rng.permutation(VOCAB)[:WIDTH] for _ in range(DEPTH)])
    return Lattice.pairwise(tokens, rows(), rows(DEPTH - 1, WIDTH), VOCAB)


def _milliseconds(build: Callable[[Lattice], Tree]) -> list[float]:
    lattices = [synthetic_lattice(seed) for seed in range(BUILDS)]
    repeats = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        for lattice in lattices:
            build(lattice)
        repeats.append((time.perf_counter() - start) * 1e3 / BUILDS)
    return repeats


def run() -> list[dict[str, Any]]:
    """Return results in the benchmark format: milliseconds a tree of 64 drafts."""
    measured = {
        "trees.build_ms.cpu64": lambda lattice: policies.best_first(lattice, 0, 65),
        "trees.build_ms.eagle2.cpu64": lambda lattice: policies.eagle2(lattice, 0, 65),
        "trees.build_ms.ddtree.cpu64": lambda lattice: policies.ddtree(lattice, 0, 65),
    }
    results = []
    for name, build in measured.items():
        repeats = _milliseconds(build)
        results.append(
            {
                "id": name,
                "value": round(statistics.median(repeats), 4),
                "low": round(min(repeats), 4),
                "high": round(max(repeats), 4),
                "unit": "ms",
                "repeats": [round(x, 4) for x in repeats],
                "note": f"64 drafts from a 16 x 16 pairwise lattice; mean of {BUILDS} lattices a "
                "repeat, low and high are the extremes",
            }
        )
    return results
