"""What a receipt says about a measurement, and the verdict that it leads to.

Pure functions from measurements and audits to plain JSON values for the ledger.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Literal

from specpilot.harness import patches, token_forcing
from specpilot.harness.controller.measure import Measurement
from specpilot.harness.controller.promotion import Decision
from specpilot.harness.controller.statistics import estimate, interval
from specpilot.harness.engines.client import Generation
from specpilot.harness.patches import Patch

__all__ = [
    "Verdict",
    "idle_mechanisms",
    "judge",
    "measured_body",
    "paired_outputs",
    "promotes",
    "result_body",
    "speedups",
]

Verdict = Literal["promoted", "rejected", "failed"]


def promotes(measured: Measurement) -> bool:
    return measured.decision is not None and measured.decision.outcome == "promote"


def idle_mechanisms(stack: Sequence[Patch], measured: Sequence[Measurement]) -> list[str]:
    """Return the mechanisms of ``stack`` whose counter never moved in the timed outputs."""
    outputs = [output for each in measured for output in each.b]
    return [
        mechanism
        for mechanism, counter in patches.counters(list(stack)).items()
        if not any(_number(output.meta.get(counter)) > 0 for output in outputs)
    ]


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else 0.0


def judge(
    decision: Decision | None, forcing: token_forcing.Verdict | None, idle: Sequence[str]
) -> tuple[Verdict, str]:
    """Combine timing, audit and the mechanisms' own counters into one verdict with its reason."""
    if decision is None:
        return "rejected", "No decision was reached."
    if decision.outcome != "promote":
        return "rejected", decision.reason
    if idle:
        return "rejected", f"The gain is not its own: {', '.join(idle)} never ran."
    if forcing is None or forcing.status != "pass":
        why = "it did not run" if forcing is None else " ".join(forcing.reasons)
        status = "missing" if forcing is None else forcing.status
        return "rejected", f"{decision.reason} Token forcing: {status}: {why}"
    return "promoted", decision.reason


def paired_outputs(measured: Sequence[Measurement]) -> dict[str, list[Generation]]:
    return {
        "a": [output for each in measured for output in each.a],
        "b": [output for each in measured for output in each.b],
    }


def result_body(
    measured: Sequence[Measurement],
    verdict: Verdict,
    reason: str,
    forcing: token_forcing.Verdict | None,
) -> dict[str, Any]:
    """Return the part of a receipt that says what was found. The last measurement counts."""
    return {
        "verdict": verdict,
        "reason": reason,
        "failure": None,
        "measured": [measured_body(each) for each in measured],
        "token_sha256": token_forcing.token_digest(paired_outputs(measured)["b"]),
        "forcing": None if forcing is None else forcing.to_dict(),
    }


def measured_body(measured: Measurement) -> dict[str, Any]:
    arms = {"a": measured.a, "b": measured.b, "ar": measured.ar}
    letters = {"a": "A", "b": "B", "ar": "R"}
    decision = measured.decision
    return {
        "seed": measured.design.seed,
        "cycles": [asdict(cycle) for cycle in measured.cycles],
        "repeated": measured.repeated,
        "diverged": measured.diverged,
        "requests": {arm: len(outputs) for arm, outputs in arms.items()},
        "tokens": {arm: sum(len(g.output_ids) for g in outputs) for arm, outputs in arms.items()},
        "tokens_per_s": {arm: measured.tokens_per_s(letters[arm]) for arm in arms},
        "tokens_per_pass": {arm: _tokens_per_pass(outputs) for arm, outputs in arms.items()},
        "token_sha256": {arm: token_forcing.token_digest(outputs) for arm, outputs in arms.items()},
        "decision": None if decision is None else _decision(decision),
    }


def _decision(decision: Decision) -> dict[str, Any]:
    return {
        "outcome": decision.outcome,
        "cycles": decision.estimate.n,
        "gain": decision.estimate.gain,
        "lower": decision.lower,
        "threshold": decision.threshold,
        "noise": decision.noise,
        "diverged": decision.diverged,
        "reason": decision.reason,
    }


def _tokens_per_pass(outputs: Sequence[Generation]) -> float | None:
    """Return tokens per exact pass by the servers' own count: information, never a score."""
    passes = [g.meta.get("spec_verify_ct") for g in outputs]
    counted = [n for n in passes if isinstance(n, int) and not isinstance(n, bool) and n > 0]
    if not outputs or len(counted) < len(outputs):
        return None
    return sum(len(g.output_ids) for g in outputs) / sum(counted)


def speedups(measured: Measurement) -> dict[str, dict[str, float]]:
    """Return the three ratios of speed with two-sided 95 % intervals over the cycles."""
    cycles = measured.cycles
    logs: dict[str, list[float | None]] = {
        "final_over_stock": [cycle.log_ratio for cycle in cycles],
        "final_over_ar": [cycle.ar_over_b for cycle in cycles],
        "stock_over_ar": [cycle.ar_over_a for cycle in cycles],
    }
    found = {}
    for name, values in logs.items():
        est = estimate([value for value in values if value is not None])
        low, high = interval(est)
        found[name] = {"value": 1.0 + est.gain, "low": low, "high": high}
    return found
