"""Error rates and power of the audit, drawn from recorded runs (``record``).

``run`` judges 1000 draws of 240 requests without replacement from each recorded system, by both
rules, as a final would. Draws from one record overlap, so their spread understates the spread over
new prompts; what they show is how often this verdict depends on which requests were taken.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import stats

from specpilot.errors import InvalidInput
from specpilot.harness.token_forcing.policy import Policy
from specpilot.harness.token_forcing.recorded import RecordedRun, RecordedSystem, load_run
from specpilot.harness.token_forcing.rules import Units, rate_rule, unexplained_p
from specpilot.harness.token_forcing.task import accuracy_change
from specpilot.home import home

__all__ = ["Counts", "acceptance", "counts", "run"]

DRAWS = 1000
REQUESTS = 240
SHARES = (0.05, 0.1, 0.25, 0.5)
SEED = 20_260_806
FOUND = 0.99

Ints = npt.NDArray[np.int64]


class Counts:
    """Per request of one system, in the order of stock's prompts, all [requests] int64."""

    def __init__(self, system: RecordedSystem, run: RecordedRun, prompts: Sequence[str]) -> None:
        place = {p: i for i, p in enumerate(system.prompts)}
        order = np.array([place[p] for p in prompts])
        near_tie, large = run.calibration.near_tie, run.calibration.large
        self.tokens = system.lengths[order]
        self.mismatches = system.per_request(system.margins > near_tie)[order]
        events = system.margins > large
        self.events = system.per_request(events)[order]
        self.unexplained = system.per_request(events & system.unexplained(near_tie))[order]

    def mixed(self, other: "Counts", share: float) -> "Counts":
        """``other``'s requests in an evenly spread ``share``, own ones elsewhere."""
        chosen = np.floor(np.arange(len(self.tokens)) * share + share) > np.floor(
            np.arange(len(self.tokens)) * share
        )
        mixed = object.__new__(Counts)
        for name in ("tokens", "mismatches", "events", "unexplained"):
            setattr(mixed, name, np.where(chosen, getattr(other, name), getattr(self, name)))
        return mixed


def counts(run: RecordedRun) -> dict[str, Counts]:
    """Count every system on the prompts that all share. Raises ``InvalidInput`` without stock."""
    if "stock" not in run.systems:
        raise InvalidInput("The recorded run holds no system 'stock'.")
    shared = set.intersection(*(set(s.prompts) for s in run.systems.values()))
    prompts = [p for p in run.systems["stock"].prompts if p in shared]
    return {name: Counts(system, run, prompts) for name, system in run.systems.items()}


def acceptance(
    stock: Counts,
    system: Counts,
    policy: Policy,
    *,
    draws: int = DRAWS,
    requests: int = REQUESTS,
    seed: int = SEED,
) -> npt.NDArray[np.bool_]:
    """Judge ``draws`` samples of ``requests`` without replacement: [draws] accepted or not.

    The audit of up to ``policy.audit_limit`` events is drawn as the audit samples: without
    replacement from the draw's events.
    """
    rng = np.random.default_rng(seed)
    total = len(stock.tokens)
    if total < requests:
        raise InvalidInput(f"{total} recorded requests, {requests} are drawn.")
    accepted = np.empty(draws, dtype=bool)
    for d in range(draws):
        at = rng.choice(total, requests, replace=False)
        found = Units(
            tuple(map(str, at)),
            system.tokens[at],
            system.mismatches[at],
            system.events[at],
            stock.tokens[at],
            stock.mismatches[at],
            stock.events[at],
        )
        audited, left = _audit(rng, system, at, policy.audit_limit)
        stock_audited, stock_left = _audit(rng, stock, at, policy.audit_limit)
        p = unexplained_p(
            found,
            audited=audited,
            unexplained=left,
            stock_audited=stock_audited,
            stock_unexplained=stock_left,
        )
        rate = rate_rule(found, **policy.rate())
        accepted[d] = rate.status == "pass" and p >= policy.event_level
    return accepted


def _audit(rng: np.random.Generator, system: Counts, at: Ints, limit: int) -> tuple[int, int]:
    events, bad = int(system.events[at].sum()), int(system.unexplained[at].sum())
    audited = min(events, limit)
    return audited, int(rng.hypergeometric(bad, events - bad, audited)) if audited else 0


def _result(name: str, hits: int, draws: int, note: str) -> dict[str, Any]:
    interval = stats.binomtest(hits, draws).proportion_ci(0.95)
    return {
        "id": f"forcing.{name}",
        "value": hits / draws,
        "low": float(interval.low),
        "high": float(interval.high),
        "unit": "share of draws",
        "note": note,
    }


def run(folder: Path | None = None, draws: int = DRAWS) -> list[dict[str, Any]]:
    """Judge a recorded run: by default ``$SPECPILOT_FORCING_RUN``, else ``forcing/`` of the state
    directory. Raises ``NotFound`` where nothing is recorded."""
    recorded = load_run(
        folder or Path(os.environ.get("SPECPILOT_FORCING_RUN") or home() / "forcing")
    )
    found = counts(recorded)
    stock = found["stock"]
    requests = min(REQUESTS, len(stock.tokens))
    policy = Policy()
    note = (
        f"{draws} draws of {requests} of {len(stock.tokens)} recorded requests without "
        f"replacement ({recorded.facts['deployment']}, {recorded.facts['dtype']}); low and high: "
        "Clopper-Pearson 95 % as if draws were independent"
    )

    def rejected(system: Counts) -> int:
        judged = acceptance(stock, system, policy, draws=draws, requests=requests)
        return draws - int(judged.sum())

    results = []
    if "lossless" in found:
        hits = draws - rejected(found["lossless"])
        results.append(_result("lossless_accepted", hits, draws, note))
    honest = {n: draws - rejected(c) for n, c in found.items() if n.startswith("honest ")}
    results += [
        _result(f"accepted.{n.replace(' ', '_')}", hits, draws, note) for n, hits in honest.items()
    ]
    if honest:
        worst = min(honest, key=lambda n: honest[n])
        results.append(
            _result("honest_numerics_accepted", honest[worst], draws, f"worst: {worst}; {note}")
        )
    faults = {float(n.removeprefix("bias ")): n for n in found if n.startswith("bias ")}
    power = {bias: rejected(found[name]) for bias, name in sorted(faults.items())}
    results += [_result(f"rejected.bias_{b:g}", hits, draws, note) for b, hits in power.items()]
    if 2.0 in power:
        results.append(_result("fault_rejected", power[2.0], draws, f"bias 2; {note}"))
        results += [
            _result(
                f"rejected.bias_2.requests_{share:g}",
                rejected(stock.mixed(found[faults[2.0]], share)),
                draws,
                f"bias 2 in a share {share:g} of the requests; {note}",
            )
            for share in SHARES
        ]
    reliable = [b for b in power if all(power[x] >= FOUND * draws for x in power if x >= b)]
    if reliable:
        results.append(
            {
                "id": "forcing.smallest_fault",
                "value": min(reliable),
                "unit": "logits",
                "note": f"smallest recorded bias rejected in {FOUND:.0%} of the draws; {note}",
            }
        )
    for name in recorded.answers:
        if name != "stock":
            change = accuracy_change(recorded.answers, name)
            results.append(
                {
                    "id": f"forcing.task_accuracy_change.{name.replace(' ', '_')}",
                    "value": change.points,
                    "low": change.low,
                    "high": change.high,
                    "unit": "percentage points",
                    "note": f"exact match of {change.questions} completions, against stock; low "
                    "and high: paired 95 % interval",
                }
            )
    ratios = recorded.facts.get("scoring_over_prefill") or []
    if ratios:
        results.append(
            {
                "id": "forcing.scoring_over_prefill",
                "value": float(np.median(ratios)),
                "low": min(ratios),
                "high": max(ratios),
                "unit": "ratio",
                "repeats": list(ratios),
                "note": "median over texts; low and high: smallest and largest",
            }
        )
    return results
