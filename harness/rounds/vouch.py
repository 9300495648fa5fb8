"""Whether a memory row says what its receipt says: gain, interval, audit and deployment.

A genuine receipt is not enough: a row could carry another record's figures. What the ledger holds
is compared with every claim of the row.
"""

from collections.abc import Callable, Mapping
from typing import Any

from specpilot.harness.controller.client import ensure_running
from specpilot.harness.controller.protocol import ReceiptReply
from specpilot.memory.figures import Figure
from specpilot.memory.schema import Evidence, Transfer
from specpilot.types import ReceiptRef

__all__ = ["matches", "vouched"]

_ROUNDING = 6e-4  # trials show gains in steps of 0.1 %
_EXACT = 1e-9
Check = Callable[[ReceiptRef], ReceiptReply]


def vouched(row: Evidence | Transfer) -> bool:
    """Ask the controller for the row's receipt and compare; False for anything that differs."""
    if row.receipt is None:
        return False
    ref = row.receipt.ref
    with ensure_running() as controller:
        reply = controller.receipt_check(ref.seq, ref.hash, ref.kind)
    return matches(row, reply)


def matches(row: Evidence | Transfer, reply: ReceiptReply) -> bool:
    """Whether a genuine receipt for a trial or final bears out everything that the row claims."""
    if not reply.genuine or reply.view is None or row.deployment != reply.deployment:
        return False
    figures: tuple[Figure, ...]
    if isinstance(row, Evidence):
        status = (reply.view.get("forcing") or {}).get("status")
        if row.forcing != (status if status in ("pass", "fail") else "not_run"):
            return False
        figures = row.figures
    else:
        figures = (row.gain,) if row.gain is not None else ()
    return all(_borne_out(figure, reply.view) for figure in figures)


def _borne_out(figure: Figure, view: Mapping[str, Any]) -> bool:
    name = {"speedup_over_stock": "final_over_stock", "speedup_over_ar": "final_over_ar"}
    speedups = view.get("speedups") or {}
    if (key := name.get(figure.metric)) in speedups:
        measured = speedups[key]
        claimed = {"value": figure.value, "low": figure.low, "high": figure.high}
        return all(
            claim is not None and abs(claim - measured[part]) <= _EXACT
            for part, claim in claimed.items()
        )
    against = {"stock": "speedup_over_stock", "best": "speedup_over_previous"}
    if figure.metric != against.get(view.get("against", "")) or view.get("gain") is None:
        return False
    if figure.low is None or view.get("lower_bound") is None:
        return False
    gain, low = 1 + view["gain"] / 100, 1 + view["lower_bound"] / 100
    return bool(abs(figure.value - gain) <= _ROUNDING and abs(figure.low - low) <= _ROUNDING)
