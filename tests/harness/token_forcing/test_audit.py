"""The audit end to end on a table model: who passes, who fails, and that nothing passes blind."""

import json
from dataclasses import replace

import pytest

from specpilot.errors import EngineFailure
from specpilot.harness.token_forcing import (
    Fault,
    Policy,
    Scorer,
    audit,
    calibrate,
    ids_digest,
    token_digest,
)


def test_a_lossless_system_passes_with_its_figures(stock, scorer, calibration) -> None:
    verdict = audit(stock, stock, scorer, calibration)
    assert (verdict.status, verdict.reasons) == ("pass", ())
    assert (verdict.requests, verdict.tokens, verdict.identical) == (60, 60 * 64, 60)
    assert verdict.token_sha256 == token_digest(stock)
    assert verdict.rate is not None and verdict.rate.mismatches == 0
    assert verdict.coverage is not None and verdict.coverage > 0.9


def test_words_that_equal_stocks_are_scored_once(stock, new_model, new_scorer, calibration) -> None:
    seen = []
    scorer = new_scorer(new_model(), calls=seen)
    audit(stock, stock, scorer, calibration)
    assert sum(seen) == sum(len(o.prompt_ids) + len(o.output_ids) for o in stock)


@pytest.mark.parametrize("bias", [2.0, 1.0, 0.5])
def test_a_biased_system_fails(bias, prompts, stock, new_model, scorer, calibration) -> None:
    faulty = [new_model().generate(p, 64, bias=bias, after=32) for p in prompts]
    verdict = audit(stock, faulty, scorer, calibration)
    assert verdict.status == "fail"
    assert verdict.failure is None
    assert verdict.rate is not None and verdict.rate.status == "fail"


def test_the_papers_fault_fails_the_event_rule_too(
    prompts, stock, new_model, scorer, calibration
) -> None:
    faulty = [new_model().generate(p, 64, bias=2.0, after=32) for p in prompts]
    events = audit(stock, faulty, scorer, calibration).events
    assert events is not None
    assert (events.status, events.audited, events.unexplained) == ("fail", 200, 200)


def test_near_tie_flips_alone_pass(prompts, new_model, new_scorer, scorer) -> None:
    """Two systems whose roundings differ write different texts, and both are honest."""
    stock = [new_model(noise=0.02, key=1).generate(p, 64) for p in prompts]
    system = [new_model(noise=0.02, key=2).generate(p, 64) for p in prompts]
    variants = {"other sums": new_scorer(new_model(noise=0.02, key=2))}
    calibration = calibrate(stock, scorer, variants)
    verdict = audit(stock, system, scorer, calibration, variants=variants)
    assert verdict.identical < 60
    assert verdict.status == "pass"


def test_events_that_a_variant_explains_do_not_fail(prompts, new_model, new_scorer, scorer) -> None:
    """Few large disturbances which stock's own variant shares: a wide variant, honest events."""
    wide = new_model(noise=0.35, key=5)
    stock = [new_model().generate(p, 64) for p in prompts]
    system = [wide.generate(p, 64) for p in prompts]
    calibration = replace(calibrate(stock, scorer, {}), near_tie=0.3, large=0.5)
    policy = Policy(rate_limit=0.2)
    blind = audit(stock, system, scorer, calibration, policy=policy)
    seeing = audit(
        stock, system, scorer, calibration, policy=policy, variants={"wide": new_scorer(wide)}
    )
    assert blind.events is not None and blind.events.status == "fail"
    assert seeing.events is not None and seeing.events.status == "pass"
    assert seeing.events.unexplained == 0 < seeing.events.events


def test_few_requests_are_not_enough(stock, scorer, calibration) -> None:
    verdict = audit(stock[:29], stock[:29], scorer, calibration)
    assert verdict.status == "not_enough"
    assert "at least 30" in verdict.reasons[0]


def test_few_requests_of_a_faulty_system_still_fail(
    prompts, stock, new_model, scorer, calibration
) -> None:
    faulty = [new_model().generate(p, 64, bias=2.0, after=32) for p in prompts[:20]]
    assert audit(stock[:20], faulty, scorer, calibration).status == "fail"


def test_a_self_test_that_finds_nothing_voids_the_verdict(stock, scorer, calibration) -> None:
    verdict = audit(stock, stock, scorer, calibration, fault=Fault(bias=1e-6))
    assert verdict.status == "void"
    assert "was not rejected" in verdict.reasons[0]


def test_a_scorer_of_another_model_voids_the_verdict(
    stock, new_model, new_scorer, calibration
) -> None:
    verdict = audit(stock, stock, new_scorer(new_model(noise=2.0)), calibration)
    assert verdict.status == "void"
    assert "Stock itself mismatches" in verdict.reasons[0]


def test_the_self_test_resembles_a_system_launched_with_the_fault(
    prompts, stock, new_model, scorer, calibration
) -> None:
    """The injected fault's mismatch rate is that of generated faulty text, within a fifth."""
    faulty = [new_model().generate(p, 64, bias=2.0, after=32) for p in prompts]
    real = audit(stock, faulty, scorer, calibration).rate
    tested = audit(stock, stock, scorer, calibration, fault=Fault(after=32)).self_test
    assert real and real.bound and tested and tested.rate.bound
    assert tested.certified == 1.0
    assert tested.rate.bound.rate == pytest.approx(real.bound.rate, rel=0.2)


def test_open_prompts_tell_where_and_sealed_ones_do_not(
    prompts, stock, new_model, scorer, calibration
) -> None:
    faulty = [new_model().generate(p, 64, bias=2.0, after=32) for p in prompts]
    assert audit(stock, faulty, scorer, calibration).first_mismatches == ()
    told = audit(stock, faulty, scorer, calibration, open_prompts=True).first_mismatches
    assert 0 < len(told) <= 20
    first = told[0]
    assert first.position >= 32
    assert faulty[first.request].output_ids[first.position] == first.token != first.stock_token


def test_the_verdict_is_canonical_json(stock, scorer, calibration) -> None:
    once = audit(stock, stock, scorer, calibration).canonical()
    assert once == audit(stock, stock, scorer, calibration).canonical()
    record = json.loads(once)
    assert record["status"] == "pass"
    assert record["calibration"]["near_tie"] == calibration.near_tie


def test_progress_reaches_the_end(prompts, stock, new_model, scorer, calibration) -> None:
    faulty = [new_model().generate(p, 64, bias=2.0) for p in prompts]
    seen = []
    audit(stock, faulty, scorer, calibration, progress=lambda d, t: seen.append((d, t)))
    assert seen[-1][0] == seen[-1][1] == 2 * 60 * 70
    assert seen == sorted(seen)


# Bad input: each fails with its own reason.


def failing(verdict) -> str:
    assert verdict.status == "fail"
    assert verdict.rate is None and len(verdict.reasons) == 1
    return verdict.failure


def test_ids_outside_the_vocabulary_fail(stock, scorer, calibration) -> None:
    wrong = [replace(stock[0], output_ids=(*stock[0].output_ids[:-1], 96)), *stock[1:]]
    assert failing(audit(stock, wrong, scorer, calibration)) == "ids_outside_vocabulary"


def test_an_empty_output_fails(stock, scorer, calibration) -> None:
    wrong = [replace(stock[0], output_ids=()), *stock[1:]]
    assert failing(audit(stock, wrong, scorer, calibration)) == "empty_output"


def test_empty_arms_fail(stock, scorer, calibration) -> None:
    assert failing(audit(stock, [], scorer, calibration)) == "arms_differ"


@pytest.mark.parametrize(
    "change",
    [
        {"finish_reason": "abort"},
        {"finish_reason": None},
        {"output_ids": (1, 2, 3)},
        {"output_ids": (1, 2, 3), "finish_reason": "stop"},
        {"output_ids": (1,) * 65},
    ],
    ids=["aborted", "unfinished", "short", "stopped at no stop token", "too long"],
)
def test_a_truncated_output_fails(change, stock, scorer, calibration) -> None:
    wrong = [replace(stock[0], **change), *stock[1:]]
    verdict = audit(stock, wrong, scorer, calibration, max_new_tokens=64, stop_token_ids={95})
    assert failing(verdict) == "truncated_output"


def test_an_output_that_stops_at_a_stop_token_is_whole(stock, scorer, calibration) -> None:
    ended = replace(stock[0], output_ids=stock[0].output_ids[:40], finish_reason="stop")
    both = [ended, *stock[1:]]
    stop = {ended.output_ids[-1]}
    verdict = audit(both, both, scorer, calibration, max_new_tokens=64, stop_token_ids=stop)
    assert verdict.status == "pass"


def test_a_prompt_that_was_not_recorded_fails(stock, scorer, calibration) -> None:
    recorded = {ids_digest(o.prompt_ids) for o in stock[1:]}
    verdict = audit(stock, stock, scorer, calibration, prompt_digests=recorded)
    assert failing(verdict) == "prompt_differs"


def test_arms_of_different_prompts_fail(stock, scorer, calibration) -> None:
    assert failing(audit(stock, stock[1:], scorer, calibration)) == "arms_differ"


def test_tokens_that_were_not_the_timed_ones_fail(stock, scorer, calibration) -> None:
    verdict = audit(stock, stock, scorer, calibration, timed_digest=token_digest(stock[::-1]))
    assert failing(verdict) == "tokens_differ"


@pytest.mark.parametrize("manifest", [{"model": "another"}, {"dtype": "float32"}])
def test_a_scorer_that_is_not_its_manifest_fails(manifest, stock, scorer, calibration) -> None:
    verdict = audit(stock, stock, scorer, calibration, manifest=manifest)
    assert failing(verdict) == "manifest_differs"


class Broken:
    """A scorer whose replies are changed on the way."""

    def __init__(self, client, change) -> None:
        self.client, self.change = client, change

    def score_batch(self, requests):
        return [self.change(result) for result in self.client.score_batch(requests)]

    def server_info(self):
        return self.client.server_info()


def raising(result):
    raise EngineFailure("the server went away.")


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda r: replace(r, logprobs=r.logprobs[:-1]), "logprobs_missing"),
        (lambda r: replace(r, logprobs=[None, *r.logprobs[1:]]), "logprobs_missing"),
        (lambda r: replace(r, top_logprobs=[[], *r.top_logprobs[1:]]), "logprobs_missing"),
        (lambda r: replace(r, top_logprobs=[]), "logprobs_missing"),
        (lambda r: replace(r, top_ids=[]), "logprobs_missing"),
        (lambda r: replace(r, logprobs=[float("nan"), *r.logprobs[1:]]), "logprobs_nan"),
        (lambda r: replace(r, logprobs=[float("-inf"), *r.logprobs[1:]]), "logprobs_nan"),
        (lambda r: replace(r, logprobs=[0.5, *r.logprobs[1:]]), "logprobs_positive"),
        (lambda r: replace(r, logprobs=[-1e-9] * len(r.logprobs)), "logprobs_inconsistent"),
        (raising, "scorer_failed"),
    ],
)
def test_unusable_scores_fail(change, kind, stock, scorer, calibration) -> None:
    broken = Scorer(Broken(scorer.client, change), scorer.vocab_size)
    assert failing(audit(stock, stock, broken, calibration)) == kind
