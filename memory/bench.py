"""Timings and counts of the memory: search at 200 and 20 000 entries, reading one, the seeds.

``specpilot bench memory`` writes them. Searches run in one thread on warm columns, questions and
facts mixed; the 20 000 entries are synthetic.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from specpilot.memory.evaluate import evaluation_results
from specpilot.memory.seeding import load_seeds, read_seeds
from specpilot.memory.store import MemoryStore
from specpilot.memory.synthetic import fill
from specpilot.types import StepShares

__all__ = ["QUESTIONS", "run"]

QUESTIONS: Final[tuple[tuple[str, dict[str, Any]], ...]] = (
    ("verify trees on a hybrid target without state snapshots", {"gpu_arch": "sm_120"}),
    ("what did not work with batching in FP8", {"requests": 24, "gpu_arch": "sm_90"}),
    ("lossless compression of BF16 weights", {"weight_dtype": "bf16", "requests": 1}),
    ("", {"gpu_arch": "sm_90", "requests": 1, "drafter": "dflash2", "weight_dtype": "bf16"}),
    ("admit prompts while speculating", {"engine": "sglang", "requests": 32}),
    ("sampling at temperature one, is it lossless", {}),
    ("long context drops acceptance", {"context_tokens": 32_000, "drafter": "mtp"}),
    ("", {"engine": "reference", "gpu_arch": "cpu", "requests": 1, "drafter": "block"}),
)
_SHARES = StepShares(weights=0.7, lm_head=0.06, attention=0.06, gdn=0.06, drafter=0.07,
                     overhead=0.05)  # fmt: skip


def run(rounds: int = 25, large: int = 20_000) -> list[dict[str, Any]]:
    """Return benchmark results: latencies in ms, counts, and the evaluation where labels exist."""
    results = [_count("memory.entries", len(read_seeds()), "shipped entries")]
    with tempfile.TemporaryDirectory() as folder:
        with MemoryStore(Path(folder) / "small.sqlite") as store:
            load_seeds(store)
            results.append(_timed("memory.search_p95_ms.200", _searches(store), rounds,
                                  f"{len(store)} shipped entries, one thread, warm"))  # fmt: skip
            ids = store.ids()
            gets = [partial(store.get, id) for id in ids]
            results.append(_timed("memory.get_p95_ms", gets, 3, "one entry by id"))
        with MemoryStore(Path(folder) / "large.sqlite") as store:
            fill(store, large)
            results.append(_timed(f"memory.search_p95_ms.{large}", _searches(store), rounds,
                                  "synthetic entries, one thread, warm"))  # fmt: skip
    return results + evaluation_results()


def _searches(store: MemoryStore) -> list[Callable[[], Any]]:
    return [partial(store.search, query, facts=facts, shares=_SHARES) for query, facts in QUESTIONS]


def _timed(id: str, calls: Sequence[Callable[[], Any]], rounds: int, note: str) -> dict[str, Any]:
    for call in calls:
        call()
    spent = []
    for _ in range(rounds):
        for call in calls:
            started = time.perf_counter()
            call()
            spent.append((time.perf_counter() - started) * 1e3)
    spent.sort()
    p95 = spent[int(0.95 * (len(spent) - 1))]
    return {"id": id, "value": p95, "low": spent[0], "high": spent[-1], "unit": "ms",
            "repeats": [statistics.median(spent)],
            "note": f"{note}; p95 of {len(spent)} calls, low and high are min and max, "
                    "repeats holds the median"}  # fmt: skip


def _count(id: str, value: int, note: str) -> dict[str, Any]:
    return {"id": id, "value": value, "low": value, "high": value, "unit": "entries",
            "repeats": [], "note": note}  # fmt: skip
