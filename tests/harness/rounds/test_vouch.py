"""A memory row counts only for what its receipt says."""

import json
from typing import Any

import pytest

from specpilot.harness.controller.protocol import ReceiptReply
from specpilot.harness.rounds.vouch import matches
from specpilot.memory.schema import Evidence, Transfer

RECEIPT = {"seq": 3, "hash": "a" * 64, "kind": "final"}
FINAL = {
    "against": "stock",
    "forcing": {"status": "pass"},
    "speedups": {"final_over_stock": {"value": 1.25, "low": 1.2, "high": 1.3}},
}
TRIAL = {"against": "stock", "forcing": {"status": "pass"}, "gain": 25.0, "lower_bound": 20.0}


def evidence(**changes: Any) -> Evidence:
    figure = {"metric": "speedup_over_stock", "value": 1.25, "unit": "x", "low": 1.2, "high": 1.3,
              "confidence": 0.95} | changes.pop("figure", {})  # fmt: skip
    row = {
        "figures": [figure], "baseline": "stock", "workload": "pico", "hardware": "cpu",
        "receipt": RECEIPT, "deployment": "pico", "forcing": "pass",
    }  # fmt: skip
    return Evidence.model_validate_json(json.dumps(row | changes))


def reply(view: dict[str, Any] | None = None, **changes: Any) -> ReceiptReply:
    return ReceiptReply(**{"genuine": True, "deployment": "pico", "view": view or FINAL, **changes})


@pytest.mark.parametrize("view", [FINAL, TRIAL])
def test_a_row_that_repeats_its_receipt_is_vouched_for(view: dict[str, Any]) -> None:
    assert matches(evidence(), reply(view))


@pytest.mark.parametrize(
    "figure",
    [
        {"value": 1.29},
        {"low": 1.24},
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
    assert not matches(evidence(forcing="not_run"), reply())


def test_a_forged_receipt_or_one_of_another_kind_is_refused() -> None:
    assert not matches(evidence(), ReceiptReply(genuine=False))
    assert not matches(evidence(), ReceiptReply(genuine=True, deployment="pico", view=None))


def test_a_transfers_gain_is_compared_too() -> None:
    gain = {"metric": "speedup_over_stock", "value": 1.25, "unit": "x", "low": 1.2, "high": 1.3,
            "confidence": 0.9}  # fmt: skip
    row = {"deployment": "pico", "outcome": "works", "gain": gain, "receipt": RECEIPT}
    inflated = {**row, "gain": {**gain, "value": 1.28}}
    assert matches(Transfer.model_validate_json(json.dumps(row)), reply(TRIAL))
    assert not matches(Transfer.model_validate_json(json.dumps(inflated)), reply(TRIAL))
