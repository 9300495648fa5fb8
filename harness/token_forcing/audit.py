"""The losslessness audit: score both arms, apply both rules, test the test, give a verdict.

Never passes by default: what cannot be judged fails with a reason, and a verdict whose self-test
does not work is void.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from specpilot.harness.token_forcing.calibration import Calibration
from specpilot.harness.token_forcing.events import events_of, unexplained
from specpilot.harness.token_forcing.failures import AuditFailure
from specpilot.harness.token_forcing.inputs import check_lengths, check_prompts
from specpilot.harness.token_forcing.keyed import Keyed, keyed_margins
from specpilot.harness.token_forcing.margins import (
    RequestMargins,
    TimedOutput,
    ids_digest,
    token_digest,
)
from specpilot.harness.token_forcing.policy import Policy
from specpilot.harness.token_forcing.rules import (
    EventVerdict,
    RateVerdict,
    event_rule,
    rate_rule,
    units,
)
from specpilot.harness.token_forcing.scorer import Progress, Scorer
from specpilot.harness.token_forcing.selftest import Fault, SelfTest, self_test
from specpilot.harness.token_forcing.verdict import Mismatch, Status, Verdict

__all__ = ["audit", "judge"]

TOP = 20
"""Logits listed by position on stock's text; the self-test picks the faulty tokens from them."""
FIRST_MISMATCHES = 20


def audit(
    stock: Sequence[TimedOutput],
    system: Sequence[TimedOutput],
    scorer: Scorer,
    calibration: Calibration,
    *,
    variants: Mapping[str, Scorer] | None = None,
    policy: Policy | None = None,
    fault: Fault | None = None,
    keyed: Keyed | None = None,
    manifest: Mapping[str, Any] | None = None,
    prompt_digests: Collection[str] | None = None,
    timed_digest: str | None = None,
    max_new_tokens: int | None = None,
    stop_token_ids: Collection[int] | None = None,
    open_prompts: bool = False,
    progress: Progress | None = None,
) -> Verdict:
    """Judge whether ``system`` emitted the tokens of the stock system, up to rounding.

    ``stock`` and ``system`` are the timed outputs on the same prompts: greedy, or sampled with
    ``keyed`` noise and then audited the same way. ``variants`` are scorers of stock under other
    legitimate numerics; they explain large-margin events of greedy text. Checked where given:
    ``manifest`` against the scorer's server info, ``prompt_digests`` (``ids_digest`` of the
    recorded prompts), ``timed_digest`` (``token_digest`` of the timed system outputs),
    ``max_new_tokens`` and ``stop_token_ids`` against truncation. Where mismatches lie is told for
    ``open_prompts`` only. ``progress`` counts scored tokens, prompts included.

    Bad input gives a verdict of status ``fail`` with its ``failure`` kind; nothing is raised.
    """
    policy, fault = policy or Policy(), fault or Fault()
    verdict = Verdict(
        status="fail",
        reasons=(),
        failure=None,
        requests=len(system),
        tokens=sum(len(o.output_ids) for o in system),
        identical=_identical(stock, system),
        token_sha256=token_digest(system),
        stock_token_sha256=token_digest(stock),
        rate=None,
        events=None,
        self_test=None,
        calibration=calibration,
        policy=policy,
    )
    try:
        if timed_digest is not None and timed_digest != verdict.token_sha256:
            raise AuditFailure(
                "tokens_differ",
                f"The audited tokens hash to {verdict.token_sha256[:12]}, the timed ones to "
                f"{timed_digest[:12]}.",
                hint="Audit the very outputs that were timed.",
            )
        check_prompts(stock, system, prompt_digests)
        for name, arm in (("stock", stock), ("system", system)):
            check_lengths(name, arm, max_new_tokens, stop_token_ids)
        if manifest is not None:
            scorer.check_manifest(manifest)
        if keyed is not None:
            variants = {}
        stock_margins, margins = _score(stock, system, scorer, keyed, progress)
        return judge(
            verdict, stock, stock_margins, system, margins, variants or {}, fault, open_prompts
        )
    except AuditFailure as failure:
        return replace(verdict, failure=failure.kind, reasons=(str(failure),))


def judge(
    verdict: Verdict,
    stock: Sequence[TimedOutput],
    stock_margins: Sequence[RequestMargins],
    system: Sequence[TimedOutput],
    margins: Sequence[RequestMargins],
    variants: Mapping[str, Scorer],
    fault: Fault,
    open_prompts: bool,
) -> Verdict:
    """Complete ``verdict`` by applying the rules to scored margins."""
    calibration, policy = verdict.calibration, verdict.policy
    near_tie, large = calibration.near_tie, calibration.large
    found = units(stock_margins, margins, near_tie, large)
    rate = rate_rule(found, **policy.rate())
    stock_audited, stock_left = unexplained(
        events_of(stock, stock_margins, large), stock, variants, near_tie, policy.audit_limit
    )
    audited, left = unexplained(
        events_of(system, margins, large), system, variants, near_tie, policy.audit_limit
    )
    events = event_rule(
        found,
        audited=audited,
        unexplained=left,
        stock_audited=stock_audited,
        stock_unexplained=stock_left,
        level=policy.event_level,
    )
    tested = self_test(
        stock, stock_margins, calibration, variants, policy, fault, stock_audited, stock_left
    )
    status, reasons = _decide(rate, events, tested, policy)
    return replace(
        verdict,
        status=status,
        reasons=reasons,
        rate=rate,
        events=events,
        self_test=tested,
        first_mismatches=_first_mismatches(system, margins, near_tie) if open_prompts else (),
    )


def _decide(
    rate: RateVerdict, events: EventVerdict, tested: SelfTest, policy: Policy
) -> tuple[Status, tuple[str, ...]]:
    broken = []
    if rate.status == "fail" and rate.bound is not None:
        broken.append(
            f"Rate rule: up to {rate.bound.upper:.2%} of tokens above stock, limit "
            f"{rate.limit:.2%}."
        )
    if events.status == "fail":
        broken.append(
            f"Event rule: {events.unexplained} of {events.audited} audited large-margin events "
            f"unexplained, stock {events.stock_unexplained} of {events.stock_audited}."
        )
    if rate.requests < policy.minimum_requests:
        few = f"{rate.requests} requests, at least {policy.minimum_requests} are needed."
        return ("fail" if events.status == "fail" else "not_enough"), (*broken, few)
    void = _void_reasons(rate, tested, policy)
    if void:
        return "void", (*void, *broken)
    if broken:
        return "fail", tuple(broken)
    if rate.status == "not_enough":
        assert rate.bound is not None
        return "not_enough", (
            f"No mismatch in {rate.requests} requests bounds the rate by {rate.bound.upper:.2%} "
            f"only, limit {rate.limit:.2%}. Add requests.",
        )
    return "pass", ()


def _void_reasons(rate: RateVerdict, tested: SelfTest, policy: Policy) -> tuple[str, ...]:
    reasons = []
    if rate.bound is not None and rate.bound.stock_rate > policy.stock_rate_limit:
        reasons.append(
            f"Stock itself mismatches the scorer in {rate.bound.stock_rate:.2%} of its tokens: "
            "the scorer does not hold stock's model or numerics."
        )
    if tested.rate.status != "fail" and tested.events.status != "fail":
        reasons.append(
            f"Self-test: a bias of {tested.fault.bias:g} on every {tested.fault.stride}th id "
            f"after token {tested.after} was not rejected. Use more or longer outputs."
        )
    if tested.stock_rate.status != "pass":
        reasons.append("Self-test: stock does not pass against itself. Use more requests.")
    return tuple(reasons)


def _score(
    stock: Sequence[TimedOutput],
    system: Sequence[TimedOutput],
    scorer: Scorer,
    keyed: Keyed | None,
    progress: Progress | None,
) -> tuple[list[RequestMargins], list[RequestMargins]]:
    """Score both arms; what the system wrote word for word like stock is scored once."""
    stock_seeds = keyed.stock_seeds if keyed else (0,) * len(stock)
    seeds = keyed.system_seeds if keyed else (0,) * len(system)
    if len(stock_seeds) != len(stock) or len(seeds) != len(system):
        raise AuditFailure(
            "arms_differ",
            f"{len(stock_seeds)} and {len(seeds)} seeds for {len(stock)} stock and {len(system)} "
            "system outputs.",
        )

    def key(output: TimedOutput, seed: int) -> tuple[str, str, int]:
        return ids_digest(output.prompt_ids), ids_digest(output.output_ids), seed

    known = set(map(key, stock, stock_seeds))
    fresh = [(o, s) for o, s in zip(system, seeds, strict=True) if key(o, s) not in known]
    fresh_outputs, fresh_seeds = [o for o, _ in fresh], [s for _, s in fresh]
    size = [sum(len(o.prompt_ids) + len(o.output_ids) for o in a) for a in (stock, fresh_outputs)]

    def margins(
        outputs: Sequence[TimedOutput], seeds: Sequence[int], top: int, offset: int
    ) -> list[RequestMargins]:
        def shifted(done: int, _: int) -> None:
            if progress is not None:
                progress(offset + done, sum(size))

        if keyed is not None:
            return keyed_margins(outputs, seeds, scorer, keyed.law, keyed.noise, shifted)
        return scorer.margins(outputs, top=top, progress=shifted)

    stock_margins = margins(stock, stock_seeds, TOP, 0)
    by_key = dict(zip(map(key, stock, stock_seeds), stock_margins, strict=True))
    scored = margins(fresh_outputs, fresh_seeds, 1, size[0])
    by_key |= zip(map(key, fresh_outputs, fresh_seeds), scored, strict=True)
    return stock_margins, [by_key[key(o, s)] for o, s in zip(system, seeds, strict=True)]


def _identical(stock: Sequence[TimedOutput], system: Sequence[TimedOutput]) -> int:
    known = {(tuple(o.prompt_ids), tuple(o.output_ids)) for o in stock}
    return sum((tuple(o.prompt_ids), tuple(o.output_ids)) in known for o in system)


def _first_mismatches(
    system: Sequence[TimedOutput], margins: Sequence[RequestMargins], near_tie: float
) -> tuple[Mismatch, ...]:
    """The first mismatch of each request that has one, at most ``FIRST_MISMATCHES`` of them."""
    found: list[Mismatch] = []
    for r, (output, request) in enumerate(zip(system, margins, strict=True)):
        where = np.flatnonzero(request.margins > near_tie)
        if len(where) and len(found) < FIRST_MISMATCHES:
            i = int(where[0])
            found.append(
                Mismatch(
                    r,
                    i,
                    int(output.output_ids[i]),
                    int(request.top_ids[i, 0]),
                    float(request.margins[i]),
                )
            )
    return tuple(found)
