"""A memory row counts only for what its receipt says."""

import json
from typing import Any

import pytest

from specpilot.harness.controller.protocol import ReceiptReply
from specpilot.harness.rounds.vouch import matches
from specpilot.memory.schema import Evidence, Transfer

RECEIPT = {"seq": 3, "hash": "a" * 64, "kind": "final"}
FINAL = {
    "verdict": "promoted",
    "forcing": {"status": "pass"},
    "speedups": {"final_over_stock": {"value": 1.25, "low": 1.2, "high": 1.25 * 1.25 / 1.2}},
    "requests": 48,
    "tokens_per_pass": {"ar": 1.0, "stock": 3.0, "final": 4.0},
    "isolation": {"tier": 1, "title": "landlock"},
}
TRIAL = {
    "verdict": "promoted",
    "against": "stock",
    "forcing": {"status": "pass"},
    "gain": 25.0,
    "lower_bound": 20.0,
    "tokens_per_pass": {"stock": 3.0, "candidate": 4.0},
    "isolation": {"tier": 1, "title": "landlock"},
}


def evidence(**changes: Any) -> Evidence:
    figure = {"metric": "speedup_over_stock", "value": 1.25, "unit": "x", "low": 1.2,
              "high": 1.25 * 1.25 / 1.2, "confidence": 0.95}  # fmt: skip
    figure |= changes.pop("figure", {})
    row = {
        "figures": [figure], "baseline": "stock", "workload": "pico", "hardware": "cpu",
        "receipt": RECEIPT, "deployment": "pico", "forcing": "pass", "promoted": True,
        "engine": "reference", "isolation": "tier 1: landlock", "tau_before": 3.0, "tau_after": 4.0,
    }  # fmt: skip
    return Evidence.model_validate_json(json.dumps(row | changes))


def reply(view: dict[str, Any] | None = None, **changes: Any) -> ReceiptReply:
    known = {"genuine": True, "deployment": "pico", "engine": "reference", "view": view or FINAL}
    return ReceiptReply(**{**known, **changes})


@pytest.mark.parametrize("view", [FINAL, TRIAL])
def test_a_row_that_repeats_its_receipt_is_vouched_for(view: dict[str, Any]) -> None:
    assert matches(evidence(), reply(view))


@pytest.mark.parametrize(
    "figure",
    [
        {"value": 1.29},
        {"low": 1.24},
        {"high": 1.5},
        {"metric": "speedup_over_ar"},
        {"metric": "speedup_over_previous"},
    ],
)
@pytest.mark.parametrize("view", [FINAL, TRIAL])
def test_an_inflated_gain_on_a_true_receipt_is_refused(
    view: dict[str, Any], figure: dict[str, Any]
) -> None:
    assert not matches(evidence(figure=figure), reply(view))


def test_another_deployment_or_audit_is_refused() -> None:
    assert not matches(evidence(deployment="other"), reply())
    assert not matches(evidence(), reply({**FINAL, "forcing": {"status": "fail"}}))
    assert not matches(evidence(), reply({**FINAL, "forcing": None}))
    assert not matches(evidence(forcing="not_run", promoted=False), reply())


@pytest.mark.parametrize("view", [FINAL, TRIAL])
@pytest.mark.parametrize(
    "changes",
    [
        {"figures": [], "promoted": False},
        {"samples": 240},
        {"tau_after": 5.0},
        {"engine": "sglang"},
        {"isolation": "tier 3: user"},
        {"scope": "kernel"},
    ],
)
def test_a_claim_that_the_receipt_does_not_hold_is_refused(
    view: dict[str, Any], changes: dict[str, Any]
) -> None:
    row = evidence()
    assert not matches(row.model_copy(update=changes), reply(view))


@pytest.mark.parametrize("view", [FINAL, TRIAL])
def test_a_rejection_vouches_for_no_promotion(view: dict[str, Any]) -> None:
    rejected = reply({**view, "verdict": "rejected"})
    assert not matches(evidence(), rejected)
    assert matches(evidence(promoted=False), rejected)


def test_a_forged_receipt_or_one_of_another_kind_is_refused() -> None:
    assert not matches(evidence(), ReceiptReply(genuine=False))
    assert not matches(evidence(), ReceiptReply(genuine=True, deployment="pico", view=None))


def test_the_mock_engine_vouches_for_nothing() -> None:
    assert not matches(evidence(engine="mock"), reply(engine="mock"))


def test_a_transfers_gain_is_compared_too() -> None:
    gain = {"metric": "speedup_over_stock", "value": 1.25, "unit": "x", "low": 1.2,
            "high": 1.25 * 1.25 / 1.2, "confidence": 0.9}  # fmt: skip
    row = {"deployment": "pico", "outcome": "works", "gain": gain, "receipt": RECEIPT}
    inflated = {**row, "gain": {**gain, "value": 1.28}}
    assert matches(Transfer.model_validate_json(json.dumps(row)), reply(TRIAL))
    assert not matches(Transfer.model_validate_json(json.dumps(inflated)), reply(TRIAL))
    for view in (FINAL, TRIAL):
        rejected = reply({**view, "verdict": "rejected"})
        assert not matches(Transfer.model_validate_json(json.dumps(row)), rejected)
    assert not matches(Transfer.model_validate_json(json.dumps(row | {"gain": None})), reply(TRIAL))
