"""Large-margin events and their audit: would stock under some honest numerics emit the token?"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specpilot.harness.token_forcing.margins import RequestMargins, TimedOutput
from specpilot.harness.token_forcing.scorer import Scorer

__all__ = ["Event", "events_of", "margins_under", "unexplained"]

AUDIT_LIMIT = 200
SAMPLE_SEED = 20_260_804


@dataclass(frozen=True, slots=True)
class Event:
    """An output token that the scorer puts far below its best one. ``margin`` in logits."""

    request: int
    position: int
    token: int
    margin: float


def events_of(
    outputs: Sequence[TimedOutput], margins: Sequence[RequestMargins], threshold: float
) -> list[Event]:
    """Return the tokens whose margin exceeds ``threshold``, in order."""
    return [
        Event(r, i, output.output_ids[i], float(request.margins[i]))
        for r, (output, request) in enumerate(zip(outputs, margins, strict=True))
        for i in np.flatnonzero(request.margins > threshold).tolist()
    ]


def margins_under(
    variant: Scorer, events: Sequence[Event], outputs: Sequence[TimedOutput]
) -> npt.NDArray[np.float32]:
    """Return each event's margin under ``variant``, [events] fp32.

    Tokens of the text itself are read from one pass over their request; others (of an injected
    fault) are scored one by one in their context.
    """
    found = np.empty(len(events), dtype=np.float32)
    written = {i for i, e in enumerate(events) if e.token == _output(e, outputs)[e.position]}
    requests = sorted({events[i].request for i in written})
    texts = variant.margins([outputs[r] for r in requests])
    by_request = dict(zip(requests, texts, strict=True))
    for i in written:
        found[i] = by_request[events[i].request].margins[events[i].position]
    other = [i for i in range(len(events)) if i not in written]
    contexts = [
        (
            (*outputs[e.request].prompt_ids, *_output(e, outputs)[: e.position]),
            e.token,
        )
        for e in (events[i] for i in other)
    ]
    found[other] = variant.token_margins(contexts)
    return found


def _output(event: Event, outputs: Sequence[TimedOutput]) -> Sequence[int]:
    return outputs[event.request].output_ids


def unexplained(
    events: Sequence[Event],
    outputs: Sequence[TimedOutput],
    variants: Mapping[str, Scorer],
    near_tie: float,
    limit: int = AUDIT_LIMIT,
) -> tuple[int, int]:
    """Audit up to ``limit`` events (a seeded sample of more) and return (audited, unexplained).

    Explained is an event whose token some variant of stock puts first or within ``near_tie`` of
    it, given the same context. Without variants nothing is explained.
    """
    chosen = list(events)
    if len(chosen) > limit:
        rng = np.random.default_rng(SAMPLE_SEED)
        chosen = [chosen[i] for i in sorted(rng.choice(len(chosen), limit, replace=False))]
    left = chosen
    for variant in variants.values():
        margins = margins_under(variant, left, outputs)
        left = [e for e, margin in zip(left, margins, strict=True) if margin > near_tie]
    return len(chosen), len(left)
