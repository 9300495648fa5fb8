"""The memory as rounds and servers open it: the user's store, the shipped entries, a verifier."""

from functools import cache
from pathlib import Path

from specpilot.harness.rounds.vouch import vouched
from specpilot.home import home
from specpilot.memory.retrieval import VectorScores
from specpilot.memory.seeding import load_seeds
from specpilot.memory.semantic.client import SemanticClient
from specpilot.memory.store import MemoryStore

__all__ = ["open_memory", "vectors"]

STORE = "memory.sqlite"


def open_memory() -> MemoryStore:
    """Open ``$SPECPILOT_HOME/memory.sqlite`` with the shipped entries up to date.

    A receipt counts only if the controller's ledger holds it and bears out what the row claims.
    """
    store = MemoryStore(home() / STORE, verifier=vouched)
    load_seeds(store)
    return store


def vectors() -> VectorScores:
    """Search by meaning, where the optional packages are installed; answers None until ready."""
    return _client(str(home() / STORE)).scores


@cache
def _client(path: str) -> SemanticClient:
    return SemanticClient(Path(path))
