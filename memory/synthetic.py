"""Synthetic memories of any size, to measure search where no real memory is that large yet.

Entries are variations of the shipped ones: regimes are drawn anew and words are mixed, so
that columns and index have realistic variety. They are labelled as synthetic.
"""

import random
from collections.abc import Iterator

from specpilot.memory.schema import Entry, canonical, read_entry
from specpilot.memory.seeding import read_seeds
from specpilot.memory.store import MemoryStore

__all__ = ["fill", "synthetic_entries"]

_FIELDS = {
    "gpu_arch": ("sm_80", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "gfx942", "cpu"),
    "target_arch": ("dense", "moe", "hybrid-gdn", "hybrid-kda", "hybrid-mamba"),
    "weight_dtype": ("bf16", "fp16", "fp8", "int8", "int4"),
    "drafter": ("dflash", "dflash2", "dspark", "eagle3", "mtp", "ngram", "suffix"),
    "workload": ("math", "code", "chat", "agent"),
}


def synthetic_entries(count: int, seed: int = 0) -> Iterator[Entry]:
    """Yield ``count`` entries that differ in id, title, regime and figures."""
    rng = random.Random(seed)
    models = read_seeds()
    words = sorted({word for entry in models for word in entry.body.split() if word.isalpha()})
    for number in range(count):
        model = models[number % len(models)]
        regime = {
            name: tuple(rng.sample(values, rng.randint(1, 2)))
            for name, values in _FIELDS.items() if rng.random() < 0.6
        }  # fmt: skip
        low = rng.choice((1, 1, 8, 16))
        regime["requests"] = (low, low * rng.choice((1, 2, 4)))  # type: ignore[assignment]
        text = " ".join(rng.sample(words, 40))
        entry = model.model_copy(
            update={
                "id": f"synthetic-{number}",
                "title": f"Synthetic {number}: {model.title}"[:80],
                "body": f"{model.body[:1500]} {text}"[:2000],
                "applies_when": model.applies_when.model_copy(update=regime | {"serving": "any"}),
                "interactions": tuple(
                    link for link in model.interactions if link.relation == "refines"
                ),
            }
        )
        yield read_entry(canonical(entry))


def fill(store: MemoryStore, count: int, seed: int = 0) -> None:
    """Write synthetic entries in one transaction."""
    with store.transaction():
        for entry in synthetic_entries(count, seed):
            store.restore((entry,))
