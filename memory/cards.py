"""The card of an entry: what ranking and a result line need, without the body.

Cards are derived: they are stored beside the head revision so that a store of 20 000 entries
opens without parsing 20 000 bodies, and are rebuilt when their layout changes.
"""

import json
import math
from dataclasses import asdict, dataclass
from typing import Any, Final

from specpilot.memory.figures import Figure
from specpilot.memory.regime import FIELDS
from specpilot.memory.schema import Entry
from specpilot.memory.text import INSTRUCTION_LIKE

__all__ = ["CARD_VERSION", "Card", "card_of", "headline", "search_text"]

CARD_VERSION: Final = 3
_PRIOR_SIGMA: Final = 0.25
_REPORT_SIGMA: Final = 0.15


@dataclass(frozen=True, slots=True)
class Card:
    """``gain`` is the headline figure as text; ``effect`` the shrunk log speedup (0: unknown) of a
    system, or of one kernel where ``kernel`` says so."""

    id: str
    revision: int
    kind: str
    status: str
    title: str
    claim: str
    bottleneck: str
    tags: tuple[str, ...]
    regime: dict[str, Any]
    preconditions: tuple[tuple[str, str, Any, str, bool], ...]
    gain: str
    effect: float
    kernel: bool
    receipts: int
    sources: int
    links: tuple[tuple[str, str], ...]
    mechanism: str
    suspicious: bool

    def dump(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"), ensure_ascii=False)

    @staticmethod
    def load(text: str) -> "Card":
        raw = json.loads(text)
        for name in ("tags", "preconditions", "links"):
            raw[name] = tuple(tuple(x) if isinstance(x, list) else x for x in raw[name])
        return Card(**raw)


def card_of(entry: Entry) -> Card:
    """Derive the card of an entry."""
    figure = headline(entry)
    effect, kernel = _shrunk_effect(entry)
    regime = entry.applies_when.model_dump(mode="json", exclude_defaults=True)
    return Card(
        id=entry.id,
        revision=entry.revision,
        kind=entry.kind,
        status=entry.status,
        title=entry.title,
        claim=entry.claim,
        bottleneck=entry.bottleneck,
        tags=entry.tags,
        regime={field: regime[field] for field in FIELDS if field in regime},
        preconditions=tuple(
            (p.field, p.op, p.value, p.why, p.hard) for p in entry.preconditions
        ),
        gain=str(figure) if figure else "",
        effect=effect,
        kernel=kernel,
        receipts=sum(row.receipt is not None for row in entry.evidence),
        sources=len(entry.sources),
        links=tuple((link.relation, link.other) for link in entry.interactions),
        mechanism=entry.implementation.mechanism if entry.implementation else "",
        suspicious=any(
            INSTRUCTION_LIKE.search(text)
            for text in (entry.title, entry.claim, entry.body, *(n.text for n in entry.notes))
        ),
    )  # fmt: skip


def headline(entry: Entry) -> Figure | None:
    """Return the figure to show: the newest with a receipt, else the first that is reported."""
    with_receipt = [row.figures[0] for row in entry.evidence if row.receipt and row.figures]
    if with_receipt:
        return with_receipt[-1]
    return next((row.figures[0] for row in entry.evidence if row.figures), None)


def _shrunk_effect(entry: Entry) -> tuple[float, bool]:
    """Return the mean log speedup of evidence and transfers shrunk to 0, and whether of a kernel.

    Each observation weighs by its variance (an assumed one where no interval is given); the prior
    is no effect. Speedups over AR are left out: they do not isolate the mechanism. A gain measured
    together with other entries counts in equal parts. Kernel figures count only where no system
    was timed.
    """
    rows = [(row.figures[0], 1 + len(row.together_with), row.scope) for row in entry.evidence
            if row.figures and _isolates(row.figures[0])]  # fmt: skip
    rows += [(t.gain, 1, "system") for t in entry.transfers if t.gain and _isolates(t.gain)]
    kernel = bool(rows) and all(scope == "kernel" for _, _, scope in rows)
    observations = [
        (math.log(figure.value) / parts, _sigma(figure))
        for figure, parts, scope in rows
        if kernel or scope == "system"
    ]
    observations += [
        (0.0, _REPORT_SIGMA)
        for transfer in entry.transfers
        if transfer.outcome in ("no_gain", "fails") and transfer.gain is None
    ]
    precision = 1 / _PRIOR_SIGMA**2 + sum(1 / sigma**2 for _, sigma in observations)
    return sum(effect / sigma**2 for effect, sigma in observations) / precision, kernel


def _isolates(figure: Figure) -> bool:
    return figure.is_speedup and figure.metric != "speedup_over_ar"


def _sigma(figure: Figure) -> float:
    if figure.confidence and figure.low and figure.high and figure.low > 0:
        return max(0.01, math.log(figure.high / figure.low) / 4)
    return _REPORT_SIGMA


def search_text(entry: Entry) -> tuple[str, str, str, str]:
    """Return (title, claim, body, tags) as the full-text index sees them, regime words included."""
    regime = entry.applies_when
    words = [*entry.tags, entry.kind, entry.bottleneck, entry.id, *regime.target_family,
             *regime.target_arch, *regime.weight_dtype, *regime.drafter, *regime.gpu_arch,
             *regime.engine, *regime.workload]  # fmt: skip
    words += [str(source) for source in entry.sources]
    words += [row.hardware for row in entry.evidence]
    remarks = [
        entry.retry_when or "",
        entry.risk or "",
        *(port.needs for port in entry.ports),
        *(note.text for note in entry.notes),
    ]
    return entry.title, entry.claim, " ".join([entry.body, *remarks]), " ".join(words)
