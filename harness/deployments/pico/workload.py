"""The pico workload: held-out Python code as token ids, which training never saw.

``heldout.npz`` holds two shards of whole files, ``open`` and ``sealed``, that share no file
(``corpus.json`` lists them; ``THIRD_PARTY.txt`` has their licences).
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np

__all__ = ["shard"]


@cache
def shard(split: str) -> Sequence[int]:
    """All token ids of ``open`` or ``sealed``, file after file, each closed by end-of-text (0)."""
    with np.load(Path(__file__).with_name("heldout.npz"), allow_pickle=False) as shards:
        return tuple(shards[split].tolist())
