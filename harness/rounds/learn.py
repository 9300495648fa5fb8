"""Write what a closed round measured to the memory: gains, losses, each with its receipt.

What was measured is read from the receipts, never from the patches, which their owner may have
edited since. Writing twice changes nothing, so whoever sees the final first may do it.
"""

from typing import Any

from specpilot.errors import NotFound
from specpilot.harness.controller.protocol import FinalView, RoundView, TrialView
from specpilot.harness.rounds.knowledge import open_memory
from specpilot.harness.rounds.situation import Situation
from specpilot.memory.distill import Distilled, Outcome, distill
from specpilot.types import ReceiptRef

__all__ = ["learn"]

_FORCING = {"pass": "pass", "fail": "fail"}


def learn(view: RoundView) -> Distilled:
    """Distil a round with its final into memory entries. Raises ``NotFound`` before the final.

    The mock engine's speeds are made up: a round on it teaches nothing.
    """
    if view.final is None:
        raise NotFound(f"Round {view.round} had no final yet.", hint="Call final_start first.")
    situation = Situation.of(view.deployment, stock=view.stock)
    if situation.deployment.engine == "mock":
        return Distilled()
    outcomes = [outcome for trial in view.trials if (outcome := _of_trial(situation, trial))]
    if (final := _of_final(situation, view.final)) is not None:
        outcomes.append(final)
    with open_memory() as store:
        return distill(store, outcomes, run=view.round)


def _of_trial(situation: Situation, trial: TrialView) -> Outcome | None:
    """A measured trial, for what it added; one that failed to run says nothing of a mechanism."""
    added = tuple((use.id, use.params) for use in trial.uses if use.added)
    if trial.gain is None or trial.lower_bound is None or not added:
        return None
    gain, low = 1 + trial.gain / 100, 1 + trial.lower_bound / 100
    return Outcome(
        mechanisms=added,
        facts=situation.facts,
        gain=gain,
        low=low,
        high=gain * gain / low,  # the interval is symmetric in logarithms
        confidence=0.9,
        baseline="stock" if trial.against == "stock" else "previous",
        retry_when=_retry(trial.verdict),
        promoted=trial.verdict == "promoted",
        samples=None,
        tau_before=trial.tokens_per_pass.get(trial.against),
        tau_after=trial.tokens_per_pass.get("candidate"),
        **_common(situation, trial),
    )


def _of_final(situation: Situation, final: FinalView) -> Outcome | None:
    speedup = final.speedups.get("final_over_stock")
    if speedup is None or not final.uses:
        return None
    return Outcome(
        mechanisms=tuple((use.id, use.params) for use in final.uses),
        facts=situation.facts,
        gain=speedup["value"],
        low=speedup["low"],
        high=speedup["high"],
        confidence=0.95,
        baseline="stock",
        retry_when=_retry(final.verdict),
        promoted=final.verdict == "promoted",
        samples=final.requests,
        tau_before=final.tokens_per_pass.get("stock"),
        tau_after=final.tokens_per_pass.get("final"),
        **_common(situation, final),
    )


def _common(situation: Situation, receipt: TrialView | FinalView) -> dict[str, Any]:
    deployment = situation.deployment
    status = (receipt.forcing or {}).get("status", "not_run")
    return {
        "receipt": ReceiptRef(receipt.receipt.seq, receipt.receipt.hash, receipt.receipt.kind),
        "forcing": _FORCING.get(status, "not_run"),
        "reason": receipt.reason,
        "workload": deployment.workload,
        "hardware": situation.model.hardware.name if situation.model else deployment.hardware,
        "engine": deployment.engine,
        "isolation": f"tier {receipt.isolation.tier}: {receipt.isolation.title}"[:60],
    }


def _retry(verdict: str) -> str:
    if verdict == "promoted":
        return ""
    return "The machine, engine version, drafter, regime or the parameters change."
