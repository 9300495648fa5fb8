"""What clients may see of the ledger's records: verdicts, rounded bounds, reasons.

Times and outputs of single prompts stay with the controller, so that no loop can learn the sealed
prompts, or the noise of one measurement, by asking often.
"""

from collections.abc import Mapping
from typing import Any

from specpilot.harness.controller.ledger import Record
from specpilot.harness.controller.protocol import (
    FinalView,
    IsolationBody,
    ReceiptBody,
    RoundView,
    TrialView,
)
from specpilot.harness.controller.rounds import Round
from specpilot.harness.controller.snapshots import Snapshots

__all__ = ["audit_view", "final_view", "record_view", "round_view", "trial_view"]


def percent(fraction: float) -> float:
    """Round a gain to 0.1 %: the most that an agent learns of a bound."""
    return round(100 * fraction, 1)


def trial_view(record: Record) -> TrialView:
    body = record.body
    return TrialView(
        trial=body["trial"],
        verdict=body["verdict"],
        reason=body["reason"],
        patches=[patch["id"] for patch in body["patches"]],
        uses=body.get("uses", []),
        against=body["against"],
        confirmed=len(body.get("measured", ())) > 1,
        forcing=forcing_view(body.get("forcing")),
        isolation=IsolationBody(**body["isolation"]),
        receipt=receipt_view(record),
        **_numbers(body, {"a": body["against"], "b": "candidate"}),
        gain=_gain(body),
    )


def final_view(record: Record) -> FinalView:
    body = record.body
    measured = body.get("measured")
    return FinalView(
        round=body["round"],
        verdict=body["verdict"],
        reason=body["reason"],
        set=body["set"],
        sealed=body["sealed"],
        patches=[patch["id"] for patch in body["patches"]],
        uses=body.get("uses", []),
        requests=measured[-1]["requests"]["b"] if measured else None,
        tokens=measured[-1]["tokens"]["b"] if measured else None,
        speedups=body.get("speedups", {}),
        forcing=forcing_view(body.get("forcing")),
        token_sha256=body.get("token_sha256"),
        isolation=IsolationBody(**body["isolation"]),
        receipt=receipt_view(record),
        **_numbers(body, {"ar": "ar", "a": "stock", "b": "final"}),
    )


def audit_view(record: Record) -> dict[str, Any]:
    return {
        "trial": record.body["trial"],
        "forcing": forcing_view(record.body["forcing"]),
        "token_sha256": record.body["token_sha256"],
        "receipt": receipt_view(record).model_dump(),
    }


def record_view(record: Record) -> dict[str, Any] | None:
    """Return what a receipt says, for those kinds that are receipts."""
    match record.kind:
        case "trial":
            return trial_view(record).model_dump()
        case "final":
            return final_view(record).model_dump()
        case "audit":
            return audit_view(record)
    return None


def round_view(round_: Round, snapshots: Snapshots) -> RoundView:
    best = [snapshots.get(sha256) for sha256 in round_.best]
    left = len(round_.sealed) - len(round_.burned)
    noise = list(round_.noise.values())
    return RoundView(
        round=round_.id,
        deployment=round_.deployment,
        state="open" if round_.open else "closed",
        stock=stock_settings(round_),
        best=[patch.id for patch in best],
        best_folders=[str(patch.folder) for patch in best],
        best_trial=round_.best_trial,
        trials=[trial_view(record) for record in round_.trials],
        final=None if round_.final is None else final_view(round_.final),
        sealed_left=left,
        noise_percent=100 * noise[-1].of_mean(noise[-1].cycles) if noise else None,
        next=_next(round_, left),
        receipt=receipt_view(round_.opened),
    )


def stock_settings(round_: Round) -> dict[str, Any]:
    """Return stock's settings in this round: the deployment's, with the block that was chosen."""
    chosen = {} if round_.stock_block is None else {"block": round_.stock_block}
    return {**round_.opened.body["deployment"]["stock"], **chosen}


def receipt_view(record: Record) -> ReceiptBody:
    return ReceiptBody(seq=record.seq, hash=record.hash, kind=record.kind)


def forcing_view(verdict: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return an audit's verdict in short: what is claimed, on how much, with which coverage."""
    if verdict is None:
        return None
    rate, events = verdict["rate"] or {}, verdict["events"] or {}
    bound = rate.get("bound") or {}
    return {
        "status": verdict["status"],
        "reasons": list(verdict["reasons"]),
        "requests": verdict["requests"],
        "tokens": verdict["tokens"],
        "identical": verdict["identical"],
        "mismatches": rate.get("mismatches"),
        "stock_mismatches": rate.get("stock_mismatches"),
        "rate_upper": bound.get("upper"),
        "rate_limit": rate.get("limit"),
        "coverage": verdict["coverage"],
        "events": events.get("events"),
        "token_sha256": verdict["token_sha256"],
    }


def _numbers(body: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    measured = body.get("measured")
    if not measured:
        return {}
    last = measured[-1]
    decision = last["decision"]
    numbers: dict[str, Any] = {
        key: {name: last[key][arm] for arm, name in names.items()}
        for key in ("tokens_per_s", "tokens_per_pass")
    }
    if decision is not None:
        numbers |= {
            "lower_bound": percent(decision["lower"]),
            "threshold": percent(decision["threshold"]),
            "diverged": decision["diverged"],
        }
    return numbers


def _gain(body: Mapping[str, Any]) -> float | None:
    measured = body.get("measured")
    decision = measured[-1]["decision"] if measured else None
    return percent(decision["gain"]) if decision else None


def _next(round_: Round, sealed_left: int) -> str:
    if not round_.open:
        return "The round is closed; open another to go on."
    if not sealed_left:
        return "All sealed sets are burned; open another round."
    if not round_.trials:
        return "Make a patch with mechanism_apply and measure it with trial_start."
    if not round_.best:
        return "Nothing was promoted yet: try another patch, or end with final_start."
    return "Try a patch on top of the best stack, or end with final_start."
