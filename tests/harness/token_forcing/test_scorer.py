"""Batches, memory and thresholds of the scorer and of calibration."""

from dataclasses import replace

import numpy as np
import pytest

from specpilot.errors import CheckFailed, InvalidInput
from specpilot.harness.token_forcing import AuditFailure, Calibration, Scorer, calibrate
from specpilot.harness.token_forcing.calibration import gap_changes
from specpilot.harness.token_forcing.margins import RequestMargins


def test_a_long_output_is_scored_alone_and_batches_stay_bounded(new_model, new_scorer) -> None:
    model = new_model()
    outputs = [model.generate((1, 2, 3), n) for n in (4096, 50, 50, 50, 50)]
    calls = []
    scorer = new_scorer(model, calls=calls)
    scorer.batch_tokens = 110
    scored = scorer.margins(outputs)
    assert calls == [4099, 106, 106]
    assert [m.tokens for m in scored] == [4096, 50, 50, 50, 50]
    assert all((m.margins == 0).all() for m in scored)


def test_margins_are_logit_differences(new_model, new_scorer) -> None:
    model = new_model()
    output = model.generate((5, 9), 8, bias=3.0)
    scored = new_scorer(model).margins([output], top=4)[0]
    ids = [*output.prompt_ids, *output.output_ids]
    for i, margin in enumerate(scored.margins):
        logits = model.logits(ids, 2 + i)
        assert margin == pytest.approx(logits.max() - logits[ids[2 + i]], abs=1e-4)
        assert scored.top_ids[i].tolist() == np.argsort(-logits)[:4].tolist()


def test_single_tokens_are_scored_in_their_context(new_model, new_scorer) -> None:
    model = new_model()
    logits = model.logits((4, 7, 1), 3)
    found = new_scorer(model).token_margins([((4, 7, 1), 13), ((4, 7, 1), int(logits.argmax()))])
    assert found == pytest.approx([logits.max() - logits[13], 0.0], abs=1e-4)


def test_calibration_finds_the_size_of_the_noise(stock, scorer, new_model, new_scorer) -> None:
    variants = {"batch": new_scorer(new_model(noise=0.05, key=9))}
    found = calibrate(stock, scorer, variants)
    # The gap of two logits moves by N(0, 0.05 sqrt 2); its 99.9 % two-sided quantile is 3.29 sd.
    assert found.near_tie == pytest.approx(3.29 * 0.05 * 2**0.5, rel=0.15)
    assert found.large == pytest.approx(4 * found.near_tie)
    assert [v.name for v in found.variants] == ["decode", "batch"]


def test_exact_engines_get_the_floor(calibration) -> None:
    assert (calibration.near_tie, calibration.large) == (1e-3, 0.5)


def test_calibration_survives_the_ledger(calibration) -> None:
    assert Calibration.from_dict(calibration.to_dict()) == calibration
    with pytest.raises(InvalidInput, match="Not a calibration"):
        Calibration.from_dict({"near_tie": 0.1})
    with pytest.raises(InvalidInput, match="no thresholds"):
        Calibration.from_dict({**calibration.to_dict(), "near_tie": 0.0})


def test_calibration_refuses_few_tokens(stock, scorer) -> None:
    with pytest.raises(CheckFailed, match="too few"):
        calibrate(stock[:10], scorer, {})


def test_calibration_refuses_a_scorer_of_another_model(stock, new_model, new_scorer) -> None:
    with pytest.raises(CheckFailed, match="no rounding"):
        calibrate(stock, new_scorer(new_model(noise=1.0)), {})


def test_a_token_outside_the_listed_ones_counts_with_the_last_margin() -> None:
    def request(ids: list[int], gaps: list[float]) -> RequestMargins:
        return RequestMargins(
            "p",
            np.zeros(1, np.float32),
            np.array([ids], np.int32),
            np.array([gaps], np.float32),
        )

    change = gap_changes(request([1, 2, 3], [0, 0.5, 1]), request([1, 7, 3], [0, 0.8, 0.9]))
    assert change == pytest.approx([0.4])


def test_a_prompt_without_tokens_is_refused(stock, scorer: Scorer) -> None:
    with pytest.raises(AuditFailure, match="no prompt"):
        scorer.margins([replace(stock[0], prompt_ids=())])
