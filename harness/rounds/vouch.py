"""Whether a memory row says what its receipt says.

A genuine receipt is not enough: a row could carry another record's figures, or none and the verdict
of another mechanism's audit. Compared are gain, interval, verdict, audit, deployment, engine,
isolation, sample size and τ; the names of workload and hardware are the writer's.
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
    """Whether a genuine receipt for a trial or final bears out what the row claims.

    A row without a figure claims nothing that a receipt could bear out, and the mock engine's
    speeds are made up.
    """
    if not reply.genuine or reply.view is None or row.deployment != reply.deployment:
        return False
    if reply.engine == "mock":
        return False
    if isinstance(row, Evidence):
        told = _evidence_told(row, reply, reply.view)
    else:
        promoted = reply.view.get("verdict") == "promoted"
        told = row.outcome.startswith("works") == promoted
    return told and bool(row.figures) and all(_borne_out(f, reply.view) for f in row.figures)


def _evidence_told(row: Evidence, reply: ReceiptReply, view: Mapping[str, Any]) -> bool:
    status = (view.get("forcing") or {}).get("status")
    tau = view.get("tokens_per_pass") or {}
    before, after = ("stock", "final") if "final" in tau else (view.get("against"), "candidate")
    isolation = view.get("isolation") or {}
    claims = (
        (row.scope, "system"),
        (row.forcing, status if status in ("pass", "fail") else "not_run"),
        (row.promoted, view.get("verdict") == "promoted"),
        (row.engine or reply.engine, reply.engine),
        (row.samples or view.get("requests"), view.get("requests")),
        (row.tau_before or tau.get(before), tau.get(before)),
        (row.tau_after or tau.get(after), tau.get(after)),
    )
    if row.isolation and row.isolation != f"tier {isolation.get('tier')}: {isolation.get('title')}":
        return False
    return all(claimed == found for claimed, found in claims)


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
    high = gain * gain / low if low > 0 else 0.0
    pairs = ((figure.value, gain), (figure.low, low), (figure.high, high))
    return all(x is not None and abs(x - found) <= _ROUNDING for x, found in pairs)
