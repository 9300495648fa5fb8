"""The transfer plan: what to try on a deployment, in which order, and what is missing for it.

The plan promises nothing. A predicted gain comes from the caller's cost model or, where it has no
opinion, from reports elsewhere shrunk toward no effect and discounted by how far the regime is
away. Measured negative results that match this deployment pull an entry down and are named.
"""

import itertools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from specpilot.errors import InvalidInput, SpecPilotError
from specpilot.memory.cards import Card, headline
from specpilot.memory.columns import Columns, Floats, grade_value
from specpilot.memory.facts import FACTS, read_facts
from specpilot.memory.regime import EXACT, FIELDS, GENERAL, UNKNOWN
from specpilot.memory.retrieval import (
    DEFAULT_WEIGHTS,
    Hit,
    bottleneck_factor,
    conflicts,
    hit_of,
    regime_match,
)
from specpilot.memory.schema import Entry
from specpilot.types import StepShares

if TYPE_CHECKING:
    from specpilot.memory.store import MemoryStore

__all__ = ["PatchIdea", "PlanStep", "PortPlan", "Predictor", "plan_port"]

Predictor = Callable[[str, Mapping[str, Any]], float | None]
"""``predict(mechanism_id, params)``: speedup over the current best, or None for no opinion."""

_MAX_PATCHES: Final = 12
_NOT_OF_SPEED: Final = ("correctness", "measurement")
_NEGATIVE_MATCH: Final = 0.75
_KERNEL_SHARE: Final = 0.5
_UNMET: Final = 0.4

_CHEAPEST: Final = {
    "tokens": "Exact replay of recorded lattices: ranks and rejects in seconds, never promotes.",
    "batching": "One timing run at this request count over a few row counts, before any code.",
    "weights": "A microbenchmark of the GEMM at this deployment's shapes and row counts.",
    "lm_head": "A microbenchmark of the LM head at the rows of the exact pass.",
    "attention": "A microbenchmark of verify attention at this context length and row count.",
    "gdn": "A microbenchmark of the GDN verify kernel at this row count and request count.",
    "drafter": "A profile of the step: the mechanism can save at most the drafter's share.",
    "overhead": "A profile of the step: host gaps and launches are visible there.",
}


@dataclass(frozen=True, slots=True)
class PatchIdea:
    """A mechanism of this project with parameters to try, and the predicted speedup or None."""

    mechanism: str
    params: dict[str, Any]
    predicted: float | None
    entry: str


@dataclass(frozen=True, slots=True)
class PlanStep:
    """One mechanism. ``predicted`` is a speedup over the current best; ``basis`` says whose.

    ``variants`` name entries that refine the mechanism: other kernels, formats or rules for it.
    """

    entry: str
    title: str
    status: str
    bottleneck: str
    predicted: float
    basis: str
    evidence: str
    met: tuple[str, ...]
    unmet: tuple[str, ...]
    unknown: tuple[str, ...]
    requires: tuple[str, ...]
    conflicts: tuple[str, ...]
    warnings: tuple[str, ...]
    porting: tuple[str, ...]
    untested: tuple[str, ...]
    cheapest_evidence: str
    patches: tuple[PatchIdea, ...]
    variants: tuple[str, ...]
    blocked: bool


@dataclass(frozen=True, slots=True)
class PortPlan:
    """Steps to take in order, steps that cannot be taken here, and what nobody knows yet.

    ``patches`` are the concrete things to try, best first. ``unknown_facts`` are worth finding out:
    preconditions wait for them.
    """

    steps: tuple[PlanStep, ...]
    blocked: tuple[PlanStep, ...]
    patches: tuple[PatchIdea, ...]
    negatives: tuple[Hit, ...]
    unknown_facts: tuple[str, ...]
    facts: dict[str, Any]


def plan_port(
    store: "MemoryStore",
    facts: Mapping[str, Any],
    shares: StepShares | None = None,
    predict: Predictor | None = None,
    *,
    gap: Mapping[str, float] | None = None,
    stack: tuple[str, ...] = (),
    limit: int = 8,
) -> PortPlan:
    """Plan what to port to a deployment with these facts and this measured gap.

    ``gap`` holds the factors ``tokens``, ``kernel`` and ``overhead`` (at least 1) between the
    current system and its ceiling; ``stack`` names entries already in the system. Raises
    InvalidInput for unknown or contradictory facts and a malformed gap.
    """
    if not 1 <= limit <= 20:
        raise InvalidInput(f"limit is {limit}; a plan has 1 to 20 steps.")
    pull = _gap_weights(gap)
    known = read_facts(facts, shares)
    columns = store.columns()
    if not len(columns):
        return PortPlan((), (), (), (), (), known)
    match = regime_match(columns, known, DEFAULT_WEIGHTS)
    worth = match * bottleneck_factor(columns, shares, DEFAULT_WEIGHTS)
    candidates = [
        int(at) for at in np.argsort(-worth, kind="stable")
        if columns.cards[at].kind == "mechanism"
        and columns.cards[at].bottleneck not in _NOT_OF_SPEED
        and "theory" not in columns.cards[at].tags
        and columns.cards[at].status not in ("refuted", "retracted", "superseded")
        and columns.cards[at].id not in stack
    ][: 8 * limit]  # fmt: skip
    ranked = []
    for at in candidates:
        step = _step(store, columns, at, min(1.0, float(match[at])), known, predict, stack)
        ranked.append((_priority(step, float(worth[at]), pull), step))
    ranked = _lower_unsupported(ranked)
    ranked.sort(key=lambda pair: -pair[0])
    open_steps = _fold_variants(columns, [step for _, step in ranked if not step.blocked])
    steps = _with_requirements(open_steps[:limit], open_steps)
    blocked = [step for _, step in ranked if step.blocked][:limit]
    ideas = [idea for step in steps for idea in step.patches]
    ideas.sort(key=lambda idea: -(idea.predicted or 0.0))
    return PortPlan(
        steps=tuple(steps),
        blocked=tuple(blocked),
        patches=tuple(ideas[:_MAX_PATCHES]),
        negatives=_negatives(columns, match, known, {step.entry for step in steps}),
        unknown_facts=_unknown_facts(columns, steps, known),
        facts=known,
    )


def _step(
    store: "MemoryStore", columns: Columns, at: int, match: float, facts: Mapping[str, Any],
    predict: Predictor | None, stack: tuple[str, ...],
) -> PlanStep:  # fmt: skip
    entry = store.get(columns.cards[at].id)
    verdicts = [(p, p.holds(facts)) for p in entry.preconditions]
    negatives = _matching_negatives(columns, entry, facts)
    patches = _patches(entry, facts, predict)
    predicted, basis = _expected(columns.cards[at], match, entry, facts, patches)
    worst = min((effect for _, effect in negatives), default=0.0)
    if worst < 0 and basis != "measured here" and math.log(predicted) > worst:
        predicted, basis = math.exp(worst), "a matching negative result"
    unknown = tuple(f"{p} ({p.why})" for p, verdict in verdicts if verdict is None)
    return PlanStep(
        entry=entry.id,
        title=entry.title,
        status=entry.status,
        bottleneck=entry.bottleneck,
        predicted=round(predicted, 3),
        basis=basis,
        evidence=_evidence(entry),
        met=tuple(str(p) for p, verdict in verdicts if verdict),
        unmet=tuple(f"{p} ({p.why})" for p, verdict in verdicts if verdict is False),
        unknown=unknown,
        requires=tuple(
            f"{link.other}{' (in the stack)' if link.other in stack else ''}"
            + (f": {link.note}" if link.note else "")
            for link in entry.interactions if link.relation == "requires"
        ),
        conflicts=tuple(conflicts(columns, stack).get(at, ())),
        warnings=tuple(text for text, _ in negatives),
        porting=_porting(columns, entry, facts),
        untested=_untested(columns, entry, facts),
        cheapest_evidence=_cheapest(entry, unknown, facts),
        patches=patches,
        variants=(),
        blocked=any(verdict is False and p.hard for p, verdict in verdicts),
    )  # fmt: skip


def _expected(
    card: Card, match: float, entry: Entry, facts: Mapping[str, Any],
    patches: tuple[PatchIdea, ...],
) -> tuple[float, str]:  # fmt: skip
    here = [t.gain for t in entry.transfers if t.deployment == facts.get("deployment") and t.gain]
    if here:
        return here[-1].value, "measured here"
    opinions = [idea.predicted for idea in patches if idea.predicted is not None]
    if opinions:
        return max(opinions), "the cost model"
    unmet = sum(p.holds(facts) is False for p in entry.preconditions)
    gain = math.exp(card.effect * match * _UNMET**unmet)
    basis = "reports elsewhere, shrunk and discounted by the regime"
    if card.effect == 0:
        basis = "unknown: no report isolates it"
    if card.kernel:
        share = float(facts.get(f"share_{card.bottleneck}", _KERNEL_SHARE))
        gain = 1 / (1 - share + share / gain)
        basis = f"a kernel's reports, shrunk, over {share:.0%} of the step"
    return gain, basis


def _patches(
    entry: Entry, facts: Mapping[str, Any], predict: Predictor | None
) -> tuple[PatchIdea, ...]:
    made = entry.implementation
    if made is None or (made.engines and facts.get("engine") not in (None, *made.engines)):
        return ()
    names = sorted(made.params)
    ideas = []
    for values in itertools.islice(
        itertools.product(*(made.params[name] for name in names)), _MAX_PATCHES
    ):
        params = dict(zip(names, values, strict=True))
        ideas.append(PatchIdea(made.mechanism, params, _opinion(predict, made.mechanism, params),
                               entry.id))  # fmt: skip
    return tuple(sorted(ideas, key=lambda idea: -(idea.predicted or 0.0)))


def _opinion(predict: Predictor | None, mechanism: str, params: Mapping[str, Any]) -> float | None:
    if predict is None:
        return None
    try:
        value = predict(mechanism, params)
    except SpecPilotError:
        return None
    if value is None or not math.isfinite(value) or value <= 0:
        return None
    return round(float(value), 4)


def _priority(step: PlanStep, worth: float, pull: Mapping[str, float]) -> float:
    """Order by expected log gain; ties and holes by regime, share and gap."""
    gain = math.log(max(step.predicted, 1e-3)) * pull.get(step.bottleneck, 1.0)
    if step.conflicts:
        gain -= 0.1
    gain -= 0.08 * len(step.unknown) + 0.05 * len(step.unmet) + 0.02 * len(step.porting)
    return gain + 0.1 * worth + (0.1 if step.patches else 0.0)


def _gap_weights(gap: Mapping[str, float] | None) -> dict[str, float]:
    """Return, by bottleneck, how much of the log gap its term holds, as a factor 0.5 to 1.5."""
    if gap is None:
        return {}
    for term, factor in gap.items():
        if term not in ("tokens", "kernel", "overhead"):
            raise InvalidInput(f"Unknown gap term {term!r}.", hint="tokens, kernel, overhead.")
        if not (math.isfinite(factor) and factor > 0):
            raise InvalidInput(f"The gap's {term} factor is {factor}; it must be above 0.")
    logs = {term: max(0.0, math.log(factor)) for term, factor in gap.items()}
    total = sum(logs.values())
    if total == 0:
        return {}
    share = {term: value / total for term, value in logs.items()}
    terms = {"tokens": "tokens", "batching": "tokens", "lm_head": "kernel", "attention": "kernel",
             "gdn": "kernel", "drafter": "kernel", "overhead": "overhead"}  # fmt: skip
    return {where: 0.5 + share.get(term, 0.0) for where, term in terms.items()}


def _matching_negatives(
    columns: Columns, entry: Entry, facts: Mapping[str, Any]
) -> list[tuple[str, float]]:
    """Return negative results on this entry that hold in this regime: text and log effect."""
    incoming = columns.incoming.get(entry.id, {})
    found = []
    for relation in ("conflicts_with", "refines", "contradicts"):
        for id in incoming.get(relation, ()):
            card = columns.cards[columns.by_id[id]]
            if card.kind != "negative_result" or card.status == "retracted":
                continue
            grades = [grade_value(name, card.regime[name], facts) for name in card.regime]
            agreement = float(np.exp(np.mean(np.log(grades)))) if grades else GENERAL
            if agreement >= _NEGATIVE_MATCH and EXACT in grades and min(grades) >= UNKNOWN:
                effect = card.effect if relation == "conflicts_with" else 0.0
                found.append((f"{card.id}: {card.claim}", effect))
    return found[:4]


def _porting(columns: Columns, entry: Entry, facts: Mapping[str, Any]) -> tuple[str, ...]:
    arch = facts.get("gpu_arch")
    if arch is None:
        return ("The GPU architecture is unknown: say gpu_arch to learn what needs porting.",)
    lines = [port.needs for port in entry.ports if arch in port.gpu_arch]
    seen = entry.applies_when.gpu_arch
    if seen and arch not in seen:
        lines.append(f"Reported on {', '.join(seen)}; nothing measured on {arch}.")
        notes = [
            f"{card.id}: {card.claim}" for card in columns.cards
            if card.kind == "hardware_note" and "porting" in card.tags
            and arch in card.regime.get("gpu_arch", ())
        ]  # fmt: skip
        lines += notes[:3]
    return tuple(lines)


def _untested(columns: Columns, entry: Entry, facts: Mapping[str, Any]) -> tuple[str, ...]:
    regime = entry.applies_when.model_dump(mode="json", exclude_defaults=True)
    lines = []
    for name in FIELDS:
        if name in regime and name in facts and grade_value(name, regime[name], facts) < GENERAL:
            shown = regime[name]
            if isinstance(shown, list):
                joint = " to " if isinstance(shown[0], int | float) else ", "
                shown = joint.join(f"{item}" for item in shown)
            lines.append(f"{name}: reported for {shown}, here {facts[name]}")
    for id in columns.incoming.get(entry.id, {}).get("refines", ()):
        card = columns.cards[columns.by_id[id]]
        if card.kind == "untested_regime" and card.status == "proposed":
            lines.append(f"{card.id}: {card.claim}")
    return tuple(lines[:6])


def _cheapest(entry: Entry, unknown: tuple[str, ...], facts: Mapping[str, Any]) -> str:
    missing = [p.field for p in entry.preconditions if p.hard and p.holds(facts) is None]
    first = f"Find out {', '.join(dict.fromkeys(missing))} first. " if missing else ""
    return first + _CHEAPEST.get(entry.bottleneck, "A short timing run.")


def _evidence(entry: Entry) -> str:
    figure = headline(entry)
    receipts = sum(row.receipt is not None for row in entry.evidence)
    shown = f"{figure}" if figure else "no figure"
    row = next((r for r in entry.evidence if r.figures and r.figures[0] == figure), None)
    where = f" on {row.hardware}, {row.regime or row.workload}" if row else ""
    if row is not None and row.receipt is not None:
        return f"{shown}{where} (receipt {row.receipt.seq}, audit {row.forcing})"
    source = f" ({row.source})" if row and row.source else ""
    return f"{shown}{where}{source}; {receipts} receipts"


def _lower_unsupported(ranked: list[tuple[float, PlanStep]]) -> list[tuple[float, PlanStep]]:
    """Lower steps whose requirement cannot be taken here, and warn: some need it only in part."""
    blocked = {step.entry: step for _, step in ranked if step.blocked}
    result = []
    for priority, step in ranked:
        missing = [text for text in step.requires if re.split(r"[: ]", text)[0] in blocked]
        warnings = tuple(
            f"requires {text}; not possible here: "
            + "; ".join(blocked[re.split(r"[: ]", text)[0]].unmet)
            for text in missing if "(in the stack)" not in text
        )  # fmt: skip
        result.append((priority - 0.15 * len(warnings),
                       replace(step, warnings=step.warnings + warnings)))  # fmt: skip
    return result


def _fold_variants(columns: Columns, steps: list[PlanStep]) -> list[PlanStep]:
    """Drop steps that only refine another open step, and name them there instead."""
    names = {step.entry for step in steps}
    variants: dict[str, list[str]] = {}
    for step in steps:
        if step.patches:
            continue
        for relation, other in columns.cards[columns.by_id[step.entry]].links:
            if relation == "refines" and other in names:
                variants.setdefault(other, []).append(f"{step.entry}: {step.title}")
                names.discard(step.entry)
                break
    return [
        replace(step, variants=tuple(variants.get(step.entry, ())[:6]))
        for step in steps if step.entry in names
    ]  # fmt: skip


def _with_requirements(steps: list[PlanStep], available: list[PlanStep]) -> list[PlanStep]:
    """Put what a step requires before it, also where it would not have made the list itself."""
    by_entry = {step.entry: step for step in available}
    ordered: dict[str, PlanStep] = {}

    def take(step: PlanStep, above: frozenset[str]) -> None:
        for text in step.requires:
            other = re.split(r"[: ]", text)[0]
            if other in by_entry and other not in above:
                take(by_entry[other], above | {step.entry})
        ordered.setdefault(step.entry, step)

    for step in steps:
        take(step, frozenset({step.entry}))
    return list(ordered.values())


def _negatives(
    columns: Columns, match: Floats, facts: Mapping[str, Any], planned: set[str]
) -> tuple[Hit, ...]:
    """Return the three negative results on speed nearest to this regime, those on steps first."""
    scored = []
    for at, card in enumerate(columns.cards):
        if card.kind != "negative_result" or card.bottleneck in _NOT_OF_SPEED:
            continue
        grades = [grade_value(name, value, facts) for name, value in card.regime.items()]
        if grades.count(EXACT) > len(grades) / 2:
            linked = any(other in planned for _, other in card.links)
            scored.append((float(match[at]) + (0.3 if linked else 0.0), at))
    scored.sort(key=lambda pair: -pair[0])
    return tuple(hit_of(columns, at, float(match[at]), facts) for _, at in scored[:3])


def _unknown_facts(
    columns: Columns, steps: list[PlanStep], facts: Mapping[str, Any]
) -> tuple[str, ...]:
    waiting: dict[str, int] = {}
    for step in steps:
        for raw in columns.cards[columns.by_id[step.entry]].preconditions:
            if raw[0] not in facts:
                waiting[raw[0]] = waiting.get(raw[0], 0) + 1
    ordered = sorted(waiting, key=lambda name: (-waiting[name], name))
    return tuple(f"{name}: {FACTS[name].meaning}" for name in ordered)
