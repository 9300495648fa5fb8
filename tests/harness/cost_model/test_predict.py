"""What-ifs: tokens per ms under other settings, from calibrated or modelled times."""

import json
from dataclasses import replace

import pytest

from specpilot.errors import InvalidInput, Unsupported
from specpilot.harness.cost_model import AcceptanceProfile
from specpilot.harness.cost_model.calibrate import Calibration
from specpilot.harness.cost_model.predict import (
    CostModel,
    best_tree_rows,
    predict,
    row_price_ms,
    two_level,
)
from specpilot.types import Deployment, Hardware, Regime

from .configs27b import DRAFTER_27B, TARGET_27B

CPU = Hardware("cpu", "x86_64", 16.0, 20.0, {"bf16": 10.0}, calibrated=True, source="test")
TAU = {
    "chain": AcceptanceProfile.of({4: 2.4, 8: 3.0, 16: 3.1}, "test"),
    "tree": AcceptanceProfile.of({8: 3.2, 16: 3.9, 32: 4.3, 64: 4.5}, "test"),
}


@pytest.fixture
def deployment(tmp_path) -> Deployment:
    for name, config in (("target", TARGET_27B), ("drafter", DRAFTER_27B)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    return Deployment(
        id="h200", title="27B on an H200", engine="sglang", target=str(tmp_path / "target"),
        drafter=str(tmp_path / "drafter"), drafter_kind="dflash", hardware="H200",
        dtype="bfloat16", regime=Regime(1, 128, 256), workload="none",
        stock={"speculation": "chain", "block": 8},
    )  # fmt: skip


def calibrated(deployment: Deployment) -> CostModel:
    times = {1: 10.0, 8: 11.0, 16: 12.0, 32: 16.0, 64: 26.0}
    found = Calibration("h200", CPU, "bfloat16", pass_ms=times, draft_ms={8: 2.0, 16: 3.0})
    return CostModel.of(deployment, found)


def test_a_calibrated_prediction_is_tokens_over_measured_times(deployment: Deployment) -> None:
    model = calibrated(deployment)
    found = predict(
        deployment, {"speculation": "tree", "block": 16, "rows": 16}, acceptance=TAU, model=model,
        overhead_ms=1.0,
    )  # fmt: skip
    assert found.basis == "calibrated"
    assert found.step_ms == pytest.approx(3.0 + 12.0 + 1.0)
    assert found.tokens_per_s == pytest.approx(3.9 / 16.0 * 1e3)
    assert found.speedup_over_ar == pytest.approx(3.9 * 10 / 16)
    stock = 3.0 / (2.0 + 11.0 + 1.0)
    assert found.speedup_over_stock == pytest.approx(3.9 / 16.0 / stock)


def test_a_selector_is_predicted_by_its_own_acceptance(deployment: Deployment) -> None:
    model = calibrated(deployment)
    paired = TAU | {
        "pairwise_chain": AcceptanceProfile.of({8: 3.3}, "test"),
        "pairwise_tree.16": AcceptanceProfile.of({16: 4.4}, "test"),
    }
    tree = {"speculation": "tree", "block": 16, "rows": 16, "selector": True}
    for settings, tokens in (({"selector": True}, 3.3), (tree, 4.4), ({"selector": False}, 3.0)):
        found = predict(deployment, settings, acceptance=paired, model=model)
        assert found.tokens_per_pass == tokens
        stock = 3.0 / (2.0 + 11.0)
        assert found.speedup_over_stock == pytest.approx(tokens / found.step_ms / stock)
    with pytest.raises(InvalidInput, match="pairwise_tree on a block of 16"):
        predict(deployment, tree, acceptance=TAU, model=model)
    ar = {"speculation": "none", "selector": True}
    assert predict(deployment, ar, acceptance=TAU, model=model).tokens_per_pass == 1.0


def test_stock_predicted_against_itself_is_one(deployment: Deployment) -> None:
    for model in (calibrated(deployment), CostModel.of(deployment)):
        found = predict(deployment, {}, acceptance=TAU, model=model)
        assert found.speedup_over_stock == pytest.approx(1.0)
    ar = predict(deployment, {"speculation": "none"}, acceptance={}, model=model)
    assert ar.speedup_over_ar == pytest.approx(1.0)
    assert ar.speedup_over_stock is None


def test_without_calibration_times_are_modelled(deployment: Deployment) -> None:
    found = predict(deployment, {"speculation": "none"}, acceptance=TAU)
    assert found.basis == "modelled"
    assert found.step_ms == pytest.approx(14.86, rel=0.10)  # measured on an H200
    assert found.draft_ms == 0.0


def test_w12_saves_the_bytes_it_does_not_read(deployment: Deployment) -> None:
    plain = predict(deployment, {"speculation": "none"}, acceptance={})
    packed = predict(deployment, {"speculation": "none"}, acceptance={}, weight_format="w12")
    # The paper measures 1.19 to 1.28 for AR with one request.
    assert 1.19 < plain.step_ms / packed.step_ms < 1.32
    assert packed.speedup_over_ar == pytest.approx(plain.step_ms / packed.step_ms)
    model = calibrated(deployment)
    ratio = model.with_weights("w12").pass_ms(8) / model.pass_ms(8)
    assert 0.75 < ratio < 0.80
    with pytest.raises(Unsupported, match="w13"):
        predict(deployment, {}, acceptance=TAU, weight_format="w13")


def test_the_tree_grows_as_long_as_rows_pay(deployment: Deployment) -> None:
    model = calibrated(deployment)
    assert best_tree_rows(model, TAU["tree"], block=16, rows=(8, 16, 32, 64)) == 16
    cheap = replace(model, calibration=replace(model.calibration, pass_ms={1: 10.0, 64: 10.1}))
    assert best_tree_rows(cheap, TAU["tree"], block=16, rows=(8, 16, 32, 64)) == 64


def test_a_row_costs_more_where_passes_are_bound_by_flops(deployment: Deployment) -> None:
    model = CostModel.of(deployment)
    sizes = (8, 16, 32, 64, 256, 512, 1024)
    few = row_price_ms(model.pass_ms, 8, sizes)
    many = row_price_ms(model.pass_ms, 512, sizes)
    assert 0 < few < many
    with pytest.raises(InvalidInput, match="1024"):
        row_price_ms(model.pass_ms, 1024, sizes)


def test_batching_makes_rows_of_each_request_dearer(deployment: Deployment) -> None:
    def cost_of_a_tree(requests: int) -> float:
        crowd = replace(deployment, regime=replace(deployment.regime, requests=requests))
        model = CostModel.of(crowd)
        return model.pass_ms(24) / model.pass_ms(1)

    assert cost_of_a_tree(1) < 1.1 < 1.5 < cost_of_a_tree(24)


def test_calibrated_passes_of_several_requests_take_their_rows(deployment: Deployment) -> None:
    crowd = replace(deployment, regime=replace(deployment.regime, requests=4))
    one, four = calibrated(deployment), calibrated(crowd)
    assert four.basis == "calibrated"
    assert four.pass_ms(8) == one.pass_ms(32) == 16.0
    assert one.pass_ms(32) < four.pass_ms(32)  # 128 rows were never timed: as the floor grows
    assert four.draft_ms(8) > one.draft_ms(8) == 2.0


@pytest.mark.parametrize(
    ("tau", "agreement", "q_ms", "gain"),
    [(3, 0.987, 2 / 3, 1.152), (3, 0.987, 0.5, 1.268), (5, 0.987, 2 / 3, 1.130),
     (5, 0.95, 2 / 3, 0.992), (5, 0.90, 0.5, 0.917), (7, 0.987, 0.5, 1.219)],
)  # fmt: skip
def test_two_levels_gain_what_the_closed_form_says(
    tau: float, agreement: float, q_ms: float, gain: float
) -> None:
    found = two_level(tau, agreement, draft_ms=0.08, q_ms=q_ms, exact_ms=1.0)
    assert found.gain == pytest.approx(gain, abs=1e-3)
    assert found.tokens_per_pass < 2 * tau


def test_two_levels_rise_smoothly_with_tau_and_refuse_nonsense() -> None:
    tokens = [
        two_level(t, 0.98, draft_ms=0.1, q_ms=0.5, exact_ms=1).tokens_per_pass
        for t in (3.0, 3.4, 3.9, 4.0, 4.1)
    ]
    assert tokens == sorted(tokens)
    with pytest.raises(InvalidInput, match="agreement"):
        two_level(3, 1.2, draft_ms=0.1, q_ms=0.5, exact_ms=1)
    with pytest.raises(InvalidInput, match="tokens_per_pass"):
        two_level(0.5, 0.9, draft_ms=0.1, q_ms=0.5, exact_ms=1)


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"speculation": "medusa"}, "medusa"),
        ({"speculation": "tree", "rows": -3}, "rows"),
        ({"speculation": "chain", "block": 8, "rows": 9}, "rows"),
        ({"speculation": "chain", "block": "8"}, "block"),
    ],
)
def test_settings_that_no_engine_runs_are_refused(
    deployment: Deployment, settings: dict, what: str
) -> None:
    with pytest.raises((InvalidInput, Unsupported), match=what):
        predict(deployment, settings, acceptance=TAU)


def test_tau_on_a_shorter_block_is_taken_where_it_is_known(deployment: Deployment) -> None:
    on_8 = AcceptanceProfile.of({16: 3.5}, "block 8")
    for block, tokens in ((8, 3.5), (16, 3.9)):
        settings = {"speculation": "tree", "block": block, "rows": 16}
        found = predict(deployment, settings, acceptance={**TAU, "tree.8": on_8})
        assert found.tokens_per_pass == tokens


def test_tau_is_never_made_up(deployment: Deployment) -> None:
    with pytest.raises(InvalidInput, match="tokens_per_pass of a tree"):
        predict(deployment, {"speculation": "tree"}, acceptance={"chain": TAU["chain"]})
    with pytest.raises(InvalidInput, match="drafter"):
        predict(replace(deployment, drafter=None), {}, acceptance=TAU)
