"""Shared builders: an entry, a receipt that the test's ledger knows, an empty store."""

import copy
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from specpilot.memory.schema import Evidence
from specpilot.memory.seeding import load_seeds
from specpilot.memory.store import MemoryStore

GOOD_HASH = "a" * 64

_ENTRY: dict[str, Any] = {
    "id": "narrow-tree",
    "kind": "mechanism",
    "title": "A narrow tree beats the chain on a small CPU",
    "claim": "Twelve rows in a best-first tree gained 1.12x over the best chain on two CPU cores.",
    "body": "Rows are cheap up to about twelve on this machine, so siblings are nearly free there.",
    "bottleneck": "tokens",
    "tags": ["trees"],
    "applies_when": {"serving": "single", "gpu_arch": ["cpu"]},
    "evidence": [
        {
            "source": {"kind": "paper", "ref": "SpecPilot paper", "where": "Figure 6"},
            "figures": [{"metric": "speedup_over_stock", "value": 1.12, "unit": "x"}],
            "baseline": "stock chain",
            "workload": "one lattice",
            "hardware": "2 CPU cores",
        }
    ],
    "provenance": {"author": "a test", "origin": "person", "created": "2026-11-29"},
}


@pytest.fixture
def raw() -> Callable[..., dict[str, Any]]:
    """Build an entry as a mapping; keyword arguments replace top-level fields."""

    def build(**changes: Any) -> dict[str, Any]:
        return copy.deepcopy(_ENTRY) | changes

    return build


@pytest.fixture
def measured() -> Callable[..., dict[str, Any]]:
    """Build an evidence row with a receipt that the test's ledger accepts."""

    def build(**changes: Any) -> dict[str, Any]:
        row = {
            "receipt": {"seq": 7, "hash": GOOD_HASH, "kind": "final"},
            "deployment": "pico",
            "forcing": "pass",
            "promoted": True,
            "figures": [
                {"metric": "speedup_over_stock", "value": 1.2, "unit": "x",
                 "low": 1.15, "high": 1.25, "confidence": 0.95}
            ],
            "baseline": "stock",
            "workload": "sealed prompts",
            "hardware": "2 CPU cores",
        }  # fmt: skip
        return row | changes

    return build


def in_ledger(evidence: Evidence) -> bool:
    """The test's ledger knows one hash and the gain that it says."""
    receipt = evidence.receipt
    return receipt is not None and receipt.hash == GOOD_HASH and evidence.figures[0].value == 1.2


@pytest.fixture
def store(tmp_path: Path) -> Iterator[MemoryStore]:
    with MemoryStore(tmp_path / "memory.sqlite", verifier=in_ledger) as opened:
        yield opened


@pytest.fixture(scope="session")
def seeded_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A memory with all shipped entries, made once: copy it, do not write to it."""
    path = tmp_path_factory.mktemp("memory") / "seeded.sqlite"
    with MemoryStore(path) as store:
        load_seeds(store)
        with store.database.read() as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return path


@pytest.fixture
def seeded(seeded_file: Path, tmp_path: Path) -> Iterator[MemoryStore]:
    path = Path(shutil.copy(seeded_file, tmp_path / "seeded.sqlite"))
    with MemoryStore(path, verifier=in_ledger) as opened:
        yield opened
