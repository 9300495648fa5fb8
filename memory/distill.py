"""What a round learned, written through the same door as everything else.

A promoted gain becomes evidence and a transfer on the entry of its mechanism, and validates it when
the audit passed. What was measured and did not pay becomes a transfer there and a negative result
with its reason and a condition for a retry. Outcomes are receipts; nothing is written without one.
"""

import datetime as dt
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from specpilot.errors import Conflict, InvalidInput, NotFound
from specpilot.memory.facts import read_facts
from specpilot.memory.schema import Change, Entry, Evidence, Transfer, parse, read_entry
from specpilot.memory.store import MemoryStore
from specpilot.types import ReceiptRef

__all__ = ["Distilled", "Outcome", "distill"]

_ATTEMPTS: Final = 8


@dataclass(frozen=True, slots=True)
class Outcome:
    """One measured patch or stack: mechanisms with parameters, gain with interval, receipt, audit.

    ``gain`` is a speedup over ``baseline``; ``reason`` says why it was or was not promoted in one
    sentence; ``retry_when`` says what would make a loss worth another try.
    """

    mechanisms: tuple[tuple[str, Mapping[str, Any]], ...]
    facts: Mapping[str, Any]
    gain: float
    low: float
    high: float
    confidence: float
    baseline: Literal["stock", "previous"]
    receipt: ReceiptRef
    forcing: Literal["pass", "fail", "not_run"]
    promoted: bool
    reason: str
    workload: str
    hardware: str
    retry_when: str = ""
    engine: str = ""
    isolation: str = ""
    samples: int | None = None
    tau_before: float | None = None
    tau_after: float | None = None


@dataclass(frozen=True, slots=True)
class Distilled:
    """Ids of entries that were revised and proposed."""

    revised: tuple[str, ...] = ()
    proposed: tuple[str, ...] = ()


@dataclass
class _Writing:
    store: MemoryStore
    run: str
    author: str
    day: dt.date
    revised: list[str] = field(default_factory=list)
    proposed: list[str] = field(default_factory=list)

    @property
    def provenance(self) -> dict[str, Any]:
        return {"author": self.author, "origin": "round", "run": self.run,
                "created": self.day.isoformat()}  # fmt: skip


def distill(
    store: MemoryStore,
    outcomes: Sequence[Outcome],
    *,
    run: str,
    author: str = "SpecPilot controller",
    day: dt.date | None = None,
) -> Distilled:
    """Write the outcomes of a round to memory; return what was revised and proposed.

    Raises CheckFailed for a receipt that the store's verifier refuses, InvalidInput for an outcome
    without a deployment or mechanism. Writing the same outcome again changes nothing.
    """
    writing = _Writing(store, run, author, day or dt.datetime.now(dt.UTC).date())
    for outcome in outcomes:
        facts = read_facts(outcome.facts)
        if "deployment" not in facts or not outcome.mechanisms:
            raise InvalidInput("An outcome names its deployment and at least one mechanism.")
        entries = {mechanism: _entry_of(store, mechanism) for mechanism, _ in outcome.mechanisms}
        for mechanism, params in outcome.mechanisms:
            partners = [e.id for m, e in entries.items() if m != mechanism and e is not None]
            _on_mechanism(writing, outcome, facts, mechanism, params, partners)
        if not outcome.promoted:
            _as_negative(writing, outcome, facts, [e.id for e in entries.values() if e])
    return Distilled(tuple(dict.fromkeys(writing.revised)), tuple(writing.proposed))


def _on_mechanism(
    writing: _Writing, outcome: Outcome, facts: Mapping[str, Any], mechanism: str,
    params: Mapping[str, Any], partners: list[str],
) -> None:  # fmt: skip
    note = _describe(((mechanism, params),))
    transfer = {
        "deployment": facts["deployment"],
        "outcome": "works" if outcome.promoted else
                   "fails" if outcome.forcing == "fail" else "no_gain",
        "gain": _figure(outcome),
        "receipt": _receipt(outcome),
        "note": note[:240],
        "when": writing.day.isoformat(),
    }  # fmt: skip
    for _ in range(_ATTEMPTS):
        entry = _entry_of(writing.store, mechanism)
        if entry is None:
            _propose_mechanism(writing, outcome, facts, mechanism, params)
            return
        rows: tuple[Transfer | Evidence, ...] = (*entry.transfers, *entry.evidence)
        if any(row.receipt and row.receipt.hash == outcome.receipt.hash for row in rows):
            return
        change: dict[str, Any] = {"transfers": [transfer], "provenance": writing.provenance}
        if outcome.promoted:
            change["evidence"] = [_evidence(outcome, facts) | {"together_with": partners[:8]}]
            if outcome.forcing == "pass" and entry.status == "proposed":
                change["status"] = "validated"
        try:
            writing.store.revise(entry.id, entry.revision, parse(Change, change, "change"))
        except Conflict:
            continue
        writing.revised.append(entry.id)
        return
    raise Conflict(f"The entry of {mechanism} kept changing under {_ATTEMPTS} attempts.")


def _propose_mechanism(
    writing: _Writing, outcome: Outcome, facts: Mapping[str, Any], mechanism: str,
    params: Mapping[str, Any],
) -> None:  # fmt: skip
    slug = mechanism.replace("_", "-")
    verdict = "gained" if outcome.promoted else "did not gain"
    entry = {
        "id": slug,
        "kind": "mechanism",
        "status": "validated" if outcome.promoted and outcome.forcing == "pass" else "proposed",
        "title": f"{mechanism} as measured on {facts['deployment']}"[:80],
        "claim": f"{_describe(((mechanism, params),))} {verdict} {outcome.gain:.3f}x over "
                 f"{outcome.baseline} on {facts['deployment']}."[:240],
        "body": "Written from a round's receipts; the mechanism's own description says how it "
                f"works. {outcome.reason}"[:2000],
        "bottleneck": "tokens",
        "applies_when": _regime(facts),
        "evidence": [_evidence(outcome, facts)],
        "implementation": {
            "mechanism": mechanism,
            "params": {name: [value] for name, value in params.items()},
        },
        "provenance": writing.provenance,
    }  # fmt: skip
    writing.store.propose(read_entry(entry))
    writing.proposed.append(slug)


def _as_negative(
    writing: _Writing, outcome: Outcome, facts: Mapping[str, Any], about: list[str]
) -> None:
    what = _describe(outcome.mechanisms)
    key = json.dumps([what, facts["deployment"], outcome.baseline], sort_keys=True)
    name = re.sub(r"[^a-z0-9]+", "-", f"{facts['deployment']}-{outcome.mechanisms[0][0]}".lower())
    id = f"{name.strip('-')[:48].strip('-')}-{hashlib.sha256(key.encode()).hexdigest()[:8]}"
    loss = outcome.high < 1
    for _ in range(_ATTEMPTS):
        try:
            known = writing.store.get(id)
        except NotFound:
            entry = {
                "id": id,
                "kind": "negative_result",
                "title": f"{outcome.mechanisms[0][0]} {'lost' if loss else 'was not promoted'} on "
                         f"{facts['deployment']}"[:80],
                "claim": f"{what} measured {outcome.gain:.3f}x [{outcome.low:.3f}, "
                         f"{outcome.high:.3f}] over {outcome.baseline} on "
                         f"{facts['deployment']}."[:240],
                "body": f"Measured by the controller, not promoted. Why: {outcome.reason}"[:2000],
                "bottleneck": "correctness" if outcome.forcing == "fail" else "tokens",
                "applies_when": _regime(facts),
                "evidence": [_evidence(outcome, facts)],
                "interactions": [{"other": other, "relation": "refines"} for other in about],
                "retry_when": (outcome.retry_when or "The engine or the machine changes.")[:240],
                "provenance": writing.provenance,
            }  # fmt: skip
            try:
                writing.store.propose(read_entry(entry))
            except Conflict:
                continue
            writing.proposed.append(id)
            return
        if any(row.receipt and row.receipt.hash == outcome.receipt.hash for row in known.evidence):
            return
        change = {"evidence": [_evidence(outcome, facts)], "provenance": writing.provenance}
        try:
            writing.store.revise(id, known.revision, parse(Change, change, "change"))
        except Conflict:
            continue
        writing.revised.append(id)
        return
    raise Conflict(f"The entry {id} kept changing under {_ATTEMPTS} attempts.")


def _entry_of(store: MemoryStore, mechanism: str) -> Entry | None:
    """Return the oldest mechanism entry that this mechanism of the project implements."""
    for card in store.columns().cards:
        if card.kind == "mechanism" and card.mechanism == mechanism:
            return store.get(card.id)
    return None


def _figure(outcome: Outcome) -> dict[str, Any]:
    return {"metric": f"speedup_over_{outcome.baseline}", "value": outcome.gain, "unit": "x",
            "low": outcome.low, "high": outcome.high, "confidence": outcome.confidence}  # fmt: skip


def _receipt(outcome: Outcome) -> dict[str, Any]:
    ref = outcome.receipt
    return {"seq": ref.seq, "hash": ref.hash, "kind": ref.kind}


def _evidence(outcome: Outcome, facts: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "figures": [_figure(outcome)],
        "baseline": outcome.baseline,
        "workload": outcome.workload,
        "hardware": outcome.hardware,
        "receipt": _receipt(outcome),
        "deployment": facts["deployment"],
        "samples": outcome.samples,
        "tau_before": outcome.tau_before,
        "tau_after": outcome.tau_after,
        "forcing": outcome.forcing,
        "promoted": outcome.promoted and outcome.forcing == "pass",
        "engine": outcome.engine,
        "isolation": outcome.isolation,
        "regime": _describe(outcome.mechanisms)[:160],
    }


def _regime(facts: Mapping[str, Any]) -> dict[str, Any]:
    regime: dict[str, Any] = {}
    if "serving" in facts:
        regime["serving"] = facts["serving"]
    if "requests" in facts:
        regime["requests"] = [facts["requests"], facts["requests"]]
    for name in ("target_family", "target_arch", "weight_dtype", "drafter", "gpu_arch", "engine"):
        if name in facts:
            regime[name] = [facts[name]]
    return regime


def _describe(mechanisms: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    return " + ".join(
        name + (f"({', '.join(f'{k}={v}' for k, v in sorted(params.items()))})" if params else "")
        for name, params in mechanisms
    )
