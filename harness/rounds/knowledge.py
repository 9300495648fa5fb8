"""The memory as rounds and servers open it: the user's store, the shipped entries, a verifier."""

from specpilot.harness.controller.client import ensure_running
from specpilot.home import home
from specpilot.memory.schema import Evidence, Transfer
from specpilot.memory.seeding import load_seeds
from specpilot.memory.store import MemoryStore

__all__ = ["open_memory"]


def open_memory() -> MemoryStore:
    """Open ``$SPECPILOT_HOME/memory.sqlite`` with the shipped entries up to date.

    A receipt counts only if the controller's ledger holds it, byte for byte.
    """
    store = MemoryStore(home() / "memory.sqlite", verifier=_vouched)
    load_seeds(store)
    return store


def _vouched(evidence: Evidence | Transfer) -> bool:
    if evidence.receipt is None:
        return False
    receipt = evidence.receipt.ref
    with ensure_running() as controller:
        return controller.receipt_check(receipt.seq, receipt.hash, receipt.kind).genuine
