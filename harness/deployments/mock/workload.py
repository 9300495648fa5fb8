"""The mock workload: token ids of the mock's vocabulary, pseudo-random and the same everywhere."""

import random
from collections.abc import Sequence
from functools import cache

__all__ = ["shard"]

TOKENS = 50_000
SEEDS = {"open": 11, "sealed": 12}


@cache
def shard(split: str) -> Sequence[int]:
    """50 000 ids of 1..511 (0 is EOS)."""
    rng = random.Random(SEEDS[split])
    return tuple(rng.randrange(1, 512) for _ in range(TOKENS))
