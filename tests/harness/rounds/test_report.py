"""The report of a round says what was measured, and of what failed that nothing was."""

from typing import Any

from rich.console import Console

from specpilot.harness.rounds import report

RECEIPT = {"seq": 1, "hash": "a" * 64, "kind": "final"}
MEASURED: dict[str, Any] = {
    "verdict": "promoted", "reason": "The gain is significant.", "set": "sealed-0", "sealed": True,
    "patches": ["tree"], "requests": 48, "lower_bound": 12.5, "threshold": 1.4,
    "tokens_per_s": {"ar": 100.0, "stock": 200.0, "final": 250.0},
    "tokens_per_pass": {"ar": 1.0, "stock": 3.0, "final": 4.0},
    "speedups": {"final_over_stock": {"value": 1.25, "low": 1.2, "high": 1.3}},
    "forcing": None, "receipt": RECEIPT,
}  # fmt: skip
FAILED = MEASURED | {
    "verdict": "failed", "reason": "The final system failed.", "requests": None,
    "lower_bound": None, "threshold": None,
    "tokens_per_s": {}, "tokens_per_pass": {}, "speedups": {},
}  # fmt: skip
TRIAL = {
    "trial": "t01", "patches": ["tree"], "verdict": "failed", "gain": None, "lower_bound": None,
    "threshold": None, "tokens_per_pass": {}, "forcing": None, "receipt": RECEIPT,
}  # fmt: skip


def round_with(final: dict[str, Any]) -> dict[str, Any]:
    status = {"round": "r1", "deployment": "pico", "final": final, "trials": [TRIAL],
              "noise_percent": 0.2}  # fmt: skip
    return {"status": status, "ceiling": None, "isolation": "tier 1: landlock", "learned": [],
            "failures": [], "seconds": 9.0}  # fmt: skip


def test_a_final_is_told_with_bound_threshold_and_noise() -> None:
    text = report.markdown(round_with(MEASURED))
    assert "48 requests an arm on the sealed set `sealed-0`" in text
    assert "Lower bound 12.5 %, needed 1.4 % (A/A noise 0.20 %)" in text
    assert "| final | 250.0 | 4.00 |  | 1.25 [1.20, 1.30] |" in text


def test_what_failed_shows_no_figures() -> None:
    text = report.markdown(round_with(FAILED))
    assert "Nothing was timed on the sealed set" in text
    assert "None" not in text
    assert {row["id"] for row in report.results(round_with(FAILED))} == {
        "run.pico.seconds", "run.pico.promoted",
    }  # fmt: skip
    Console(quiet=True).print(report.closing_table(round_with(FAILED)["status"]))
