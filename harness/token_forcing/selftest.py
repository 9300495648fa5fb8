"""The self-test of every audit: a known fault must be rejected, and stock must pass.

The fault is the SpecPilot paper's (Figure 4): a bias of 2 on the logits of every 7th vocabulary id
after N tokens. It is applied to the scorer's own logits on stock's text: at each position after N
the token that the faulty system would emit *there* is the argmax of the listed logits under the
bias, and its margin is known without generating anything.

What this shows: these rules, thresholds and counts, on these prompts, with the live scorer,
reject a system of that fault. What it does not show: that a faulty server's own text would look
like this (it drifts from stock's, and is judged on its own prefixes), nor that the path from
server to audit carries the tokens faithfully; the tests do both against a server that is launched
with the fault.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from specpilot.harness.token_forcing.calibration import Calibration
from specpilot.harness.token_forcing.events import Event, unexplained
from specpilot.harness.token_forcing.margins import RequestMargins, TimedOutput
from specpilot.harness.token_forcing.policy import Policy
from specpilot.harness.token_forcing.rules import (
    EventVerdict,
    RateVerdict,
    event_rule,
    rate_rule,
    units,
)
from specpilot.harness.token_forcing.scorer import Scorer

__all__ = ["Fault", "FaultyMargins", "SelfTest", "inject", "self_test"]


@dataclass(frozen=True, slots=True)
class Fault:
    """``bias`` logits on ids divisible by ``stride``, from output token ``after`` on.

    ``after`` None means half of the longest output, at most the paper's 2048.
    """

    bias: float = 2.0
    stride: int = 7
    after: int | None = None

    def start(self, longest: int) -> int:
        return min(2048, longest // 2) if self.after is None else self.after


@dataclass(frozen=True, slots=True)
class FaultyMargins:
    """A faulty system's margins and the tokens that it would emit, by request.

    ``certified`` is the share of positions under the fault where no unlisted token could have
    won. Where one could, a listed token stands in, whose margin is smaller: the fault is
    understated, never overstated.
    """

    margins: tuple[RequestMargins, ...]
    events: tuple[Event, ...]
    certified: float


def inject(
    fault: Fault, outputs: Sequence[TimedOutput], stock: Sequence[RequestMargins], large: float
) -> FaultyMargins:
    """Apply ``fault`` to the listed logits of ``stock`` (``top_ids``, ``top_margins``)."""
    start = fault.start(max(request.tokens for request in stock))
    faulty, events = [], []
    certain = touched = 0
    for r, (request, output) in enumerate(zip(stock, outputs, strict=True)):
        logits = -request.top_margins.astype(np.float64)
        biased = logits + fault.bias * (request.top_ids % fault.stride == 0)
        pick = biased.argmax(1)
        rows = np.arange(request.tokens)
        after = rows >= start
        sure = biased[rows, pick] >= logits[:, -1] + fault.bias
        certain += int((sure & after).sum())
        touched += int(after.sum())
        margins = np.where(after, request.top_margins[rows, pick], request.margins)
        tokens = np.where(after, request.top_ids[rows, pick], np.asarray(output.output_ids))
        faulty.append(
            RequestMargins(
                request.prompt, margins.astype(np.float32), request.top_ids, request.top_margins
            )
        )
        events += [
            Event(r, int(i), int(tokens[i]), float(margins[i]))
            for i in np.flatnonzero(margins > large)
        ]
    return FaultyMargins(tuple(faulty), tuple(events), certain / touched if touched else 1.0)


@dataclass(frozen=True, slots=True)
class SelfTest:
    """Whether the audit can tell a fault from stock. ``stock_rate`` judges stock against itself
    as if its repeat were independent, which is harder than a real pair of arms."""

    passed: bool
    fault: Fault
    after: int
    certified: float
    rate: RateVerdict
    events: EventVerdict
    stock_rate: RateVerdict


def self_test(
    outputs: Sequence[TimedOutput],
    stock: Sequence[RequestMargins],
    calibration: Calibration,
    variants: Mapping[str, Scorer],
    policy: Policy,
    fault: Fault,
    stock_audited: int,
    stock_unexplained: int,
) -> SelfTest:
    """Judge the injected fault, and stock against itself, by the audit's own rules.

    ``stock_audited`` and ``stock_unexplained`` are what the audit of stock's own events found.
    """
    faulty = inject(fault, outputs, stock, calibration.large)
    near_tie, large = calibration.near_tie, calibration.large
    found = units(stock, faulty.margins, near_tie, large)
    rate = rate_rule(found, **policy.rate())
    audited, left = unexplained(faulty.events, outputs, variants, near_tie, policy.audit_limit)
    events = event_rule(
        found,
        audited=audited,
        unexplained=left,
        stock_audited=stock_audited,
        stock_unexplained=stock_unexplained,
        level=policy.event_level,
    )
    own = rate_rule(units(stock, stock, near_tie, large), **policy.rate(), correlated=False)
    rejected = rate.status == "fail" or events.status == "fail"
    return SelfTest(
        passed=rejected and own.status == "pass",
        fault=fault,
        after=fault.start(max(request.tokens for request in stock)),
        certified=faulty.certified,
        rate=rate,
        events=events,
        stock_rate=own,
    )
