"""Sampled text: keyed requests are audited exactly, others by tests of law with stated power."""

import numpy as np
import pytest
from scipy import stats

from specpilot.errors import InvalidInput, Unsupported
from specpilot.harness.token_forcing import AuditFailure, audit, keyed, sampling
from specpilot.harness.token_forcing.keyed import Keyed, keyed_margins
from specpilot.harness.token_forcing.sampling import (
    LawTest,
    SamplingLaw,
    chi_square,
    detectable_effect,
    holm,
    law_suite,
    tokens_for_bias,
)
from specpilot.mechanisms.trees.acceptance import keyed_noise


@pytest.mark.parametrize(
    ("law", "listed"),
    [
        *((SamplingLaw(t), listed) for t in (0.7, 1.0) for listed in (8, 32, 128)),
        (SamplingLaw(1.3, top_k=20), 20),
        (SamplingLaw(1.3, top_k=20), 128),
    ],
)
def test_a_keyed_request_has_no_margin_against_its_own_noise(
    law, listed, prompts, new_model, scorer, monkeypatch
) -> None:
    """Whatever the list's length: tokens that the noise lifts from outside it are found."""
    monkeypatch.setattr(keyed, "LISTED", listed)
    top_k = law.top_k if law.top_k > 0 else 96
    outputs = [
        new_model().sample(p, 40, seed, keyed_noise, law.temperature, top_k)
        for seed, p in enumerate(prompts[:10])
    ]
    found = keyed_margins(outputs, range(10), scorer, law, keyed_noise)
    assert max(m.margins.max() for m in found) < 1e-4


def test_keyed_margins_are_exact_for_wrong_tokens(prompts, new_model, scorer, monkeypatch) -> None:
    monkeypatch.setattr(keyed, "LISTED", 8)
    model = new_model()
    output = model.sample(prompts[0], 40, 3, keyed_noise, bias=3.0)
    found = keyed_margins([output], [3], scorer, SamplingLaw(), keyed_noise)[0]
    ids = [*output.prompt_ids, *output.output_ids]
    for i, margin in enumerate(found.margins):
        scores = model.logits(ids, 6 + i) + keyed_noise(3, 6 + i, 96)
        assert margin == pytest.approx(scores.max() - scores[ids[6 + i]], abs=1e-4)
        assert found.top_ids[i, 0] == scores.argmax()
    assert found.margins.max() > 0.5


def test_a_keyed_audit_passes_the_same_noise_and_fails_another(
    prompts, new_model, scorer, calibration
) -> None:
    seeds = tuple(range(60))
    how = Keyed(SamplingLaw(), keyed_noise, seeds, seeds)
    stock = [new_model().sample(p, 64, s, keyed_noise) for s, p in enumerate(prompts)]
    biased = [new_model().sample(p, 64, s, keyed_noise, bias=0.5) for s, p in enumerate(prompts)]
    other = [new_model().sample(p, 64, s + 1, keyed_noise) for s, p in enumerate(prompts)]
    assert audit(stock, stock, scorer, calibration, keyed=how).status == "pass"
    assert audit(stock, biased, scorer, calibration, keyed=how).status == "fail"
    assert audit(stock, other, scorer, calibration, keyed=how).status == "fail"


def test_a_keyed_audit_wants_a_seed_for_each_request(stock, scorer, calibration) -> None:
    how = Keyed(SamplingLaw(), keyed_noise, (1,), (1,))
    assert audit(stock, stock, scorer, calibration, keyed=how).failure == "arms_differ"


@pytest.fixture(scope="module")
def sampled(prompts, new_model):
    return {
        bias: [
            new_model().sample(p, 64, s + 100, keyed_noise, 0.8, bias=bias)
            for s, p in enumerate(prompts)
        ]
        for bias in (0.0, 0.3, 2.0)
    }


def test_the_law_suite_accepts_the_law_and_rejects_a_bias(sampled, scorer) -> None:
    law = SamplingLaw(0.8)
    honest = law_suite(sampled[0.0], scorer, law)
    assert not honest.rejected
    assert honest.tokens == 60 * 64 and honest.left_out == 0
    assert 0.1 < honest.smallest_bias < 0.3
    for bias in (0.3, 2.0):
        found = law_suite(sampled[bias], scorer, law)
        assert found.rejected
        strongest = min(found.tests, key=lambda t: t.p)
        assert strongest.name == "ids divisible by 7"


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_a_wrong_temperature_is_rejected(sampled, scorer, temperature) -> None:
    assert law_suite(sampled[0.0], scorer, SamplingLaw(temperature)).rejected


def test_the_law_holds_on_a_cut_list_too(sampled, scorer, monkeypatch) -> None:
    monkeypatch.setattr(sampling, "LISTED", 12)
    found = law_suite(sampled[0.0], scorer, SamplingLaw(0.8))
    assert not found.rejected and found.left_out > 0
    assert law_suite(sampled[0.3], scorer, SamplingLaw(0.8)).rejected


def test_few_sampled_tokens_are_refused(sampled, scorer) -> None:
    with pytest.raises(AuditFailure, match="too few"):
        law_suite(sampled[0.0][:2], scorer, SamplingLaw(0.8))


@pytest.mark.parametrize(
    ("bias", "tokens"), [(2.0, 13), (0.5, 341), (0.1, 10_155), (0.02, 263_329)]
)
def test_the_z_tests_power_is_the_known_one(bias: float, tokens: int) -> None:
    assert tokens_for_bias(bias) == tokens


def test_the_detectable_effect_is_the_known_one() -> None:
    """Two samples of 9,200 over 200 degrees of freedom find w = 0.11: one-sample n / 2."""
    assert detectable_effect(4600, 200) == pytest.approx(0.11, abs=0.005)


def test_chi_square_is_calibrated_and_merges_small_cells() -> None:
    rng = np.random.default_rng(1)
    law = rng.dirichlet(np.full(60, 0.3))
    p = [chi_square(rng.multinomial(400, law), law).p for _ in range(400)]
    assert stats.kstest(p, "uniform").pvalue > 0.001
    shifted = law * np.where(np.arange(60) % 7, 1.0, np.e**2)
    assert chi_square(rng.multinomial(400, shifted / shifted.sum()), law).p < 1e-6


def test_chi_square_agrees_with_scipy_where_no_cell_is_small() -> None:
    found = chi_square([30, 50, 20], [0.25, 0.5, 0.25])
    known = stats.chisquare([30, 50, 20], [25, 50, 25])
    assert (found.statistic, found.p) == pytest.approx((known.statistic, known.pvalue))
    with pytest.raises(InvalidInput):
        chi_square([1, 2], [0.5, 0.6])


def test_holm_steps_down() -> None:
    tests = [LawTest(str(i), 0.0, p) for i, p in enumerate((0.03, 0.01, 0.04))]
    assert [t.adjusted_p for t in holm(tests)] == pytest.approx([0.06, 0.03, 0.06])


def test_laws_that_cannot_be_audited_are_refused() -> None:
    with pytest.raises(Unsupported, match="top_p"):
        SamplingLaw(top_p=0.9)
    with pytest.raises(Unsupported, match="top_k"):
        SamplingLaw(top_k=500)
    with pytest.raises(InvalidInput, match="Greedy"):
        SamplingLaw(temperature=0.0)


@pytest.mark.slow
def test_the_law_suite_keeps_its_error_rate(new_model, scorer) -> None:
    """At level 0.05 about one of twenty honest runs is rejected: at most 20 of 200 (99.9 %)."""
    rng = np.random.default_rng(8)
    rejected = 0
    for run in range(200):
        outputs = [
            new_model().sample(
                tuple(rng.integers(0, 96, 6).tolist()), 60, 50 * run + r, keyed_noise
            )
            for r in range(10)
        ]
        rejected += law_suite(outputs, scorer, SamplingLaw(), level=0.05).rejected
    assert rejected <= 20
