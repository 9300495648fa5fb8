"""Settings: one model for flags, deployments and launches."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specpilot.errors import InvalidInput, Unsupported
from specpilot.harness.deployments import registry
from specpilot.harness.engines.launch import launch_spec
from specpilot.harness.engines.settings import (
    MODELS,
    MockSettings,
    ReferenceSettings,
    check,
    known_settings,
    parse_args,
    to_flags,
)
from specpilot.types import Deployment, Regime

CHAIN = {"target": "/t", "drafter": "/d", "speculation": "chain", "block": 8, "dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("engine", "values"),
    [
        ("mock", {}),
        ("mock", {"delay_ms": 2.5, "speculation": "tree", "rows": 24, "nonce": "abc"}),
        ("reference", {"target": "/t"}),
        ("reference", CHAIN | {"fp32_logits": True, "max_running": 3, "context": 64}),
    ],
)
def test_flags_lead_back_to_the_same_settings(engine: str, values: dict[str, Any]) -> None:
    settings = check(engine, values)
    assert parse_args(MODELS[engine], "prog", to_flags(settings)) == settings


@pytest.mark.parametrize(
    ("engine", "values", "words"),
    [
        ("reference", {}, "needs the setting 'target'"),
        ("reference", {"target": "/t", "warp": 9}, "no setting 'warp'. Settings: .*speculation"),
        ("reference", {"target": "/t", "dtype": "int4"}, "dtype"),
        ("reference", {"target": "/t", "block": 1}, "block.*2 to 64"),
        ("reference", {"target": "/t", "block": "8"}, "block"),
        ("reference", {"target": "/t", "speculation": "chain"}, "'chain' needs a drafter"),
        ("reference", CHAIN | {"rows": 16}, "chain of block 8 has 8 rows, not 16"),
        ("mock", {"delay_ms": float("nan")}, "delay_ms"),
    ],
)
def test_wrong_settings_are_named(engine: str, values: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        check(engine, values)


def test_an_engine_that_cannot_be_launched_is_unsupported() -> None:
    with pytest.raises(Unsupported, match=r"'sglang'.*mock, reference"):
        check("sglang", {})


def test_a_wrong_command_line_ends_with_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["--port", "x"], ["--warp", "9"], ["--port", "70000"], ["--delay", "2"]):
        with pytest.raises(SystemExit) as ended:
            parse_args(MockSettings, "prog", argv)
        assert ended.value.code == 2
    assert "70000" in capsys.readouterr().err


def test_the_help_explains_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_args(ReferenceSettings, "prog", ["--help"])
    shown = capsys.readouterr().out
    for name in known_settings("reference"):
        assert "--" + name.replace("_", "-") in shown


def reference() -> Deployment:
    return Deployment(
        "d", "D", "reference", "/t", "/d", "block", "cpu", "bfloat16", Regime(), "mock",
        stock={"speculation": "chain", "block": 8}, launch={"threads": 2, "context": 512},
    )  # fmt: skip


def test_roles_change_what_they_must_and_no_more(tmp_path: Path) -> None:
    stock, candidate, scorer, ar = (
        launch_spec(reference(), settings, role, 4000, run_dir=tmp_path).settings
        for role, settings in (
            ("stock", {}),
            ("candidate", {"speculation": "tree", "rows": 24, "block": 16}),
            ("scorer", {}),
            ("ar", {}),
        )
    )
    assert stock["speculation"] == "chain" and stock["block"] == 8 and stock["context"] == 512
    assert candidate == stock | {"speculation": "tree", "rows": 24, "block": 16}
    assert ar == stock | {"speculation": "none", "drafter": ""}
    assert scorer == ar | {"fp32_logits": True}
    assert {s["dtype"] for s in (stock, candidate, scorer, ar)} == {"bfloat16"}


def test_a_launch_is_complete_and_unlike_any_other(tmp_path: Path) -> None:
    first, second = (
        launch_spec(reference(), {}, "stock", 4000, run_dir=tmp_path) for _ in range(2)
    )
    assert first.nonce != second.nonce
    assert first.argv[:4] == (sys.executable, "-P", "-m", "specpilot.harness.engines.reference")
    assert first.base_url == "http://127.0.0.1:4000" and first.cwd == str(tmp_path)
    assert first.env["OMP_NUM_THREADS"] == "2" and first.env["HOME"] == str(tmp_path)


def test_threads_and_unknown_settings_are_checked(tmp_path: Path) -> None:
    broken = replace(reference(), launch={"threads": 0})
    with pytest.raises(InvalidInput, match="threads"):
        launch_spec(broken, {}, "stock", 4000, run_dir=tmp_path)
    with pytest.raises(InvalidInput, match="no setting 'wings'"):
        launch_spec(registry.load("mock"), {"wings": 2}, "stock", 4000, run_dir=tmp_path)
