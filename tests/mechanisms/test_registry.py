"""Mechanisms are listed and checked without torch, and their defaults are stock."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from specpilot.errors import InvalidInput, NotFound, Unsupported
from specpilot.mechanisms import registry
from specpilot.mechanisms.base import Mechanism, ParamSpec
from specpilot.types import Deployment, Regime


def deployment(**changes: object) -> Deployment:
    fields = {
        "id": "d",
        "title": "D",
        "engine": "reference",
        "target": "/target",
        "drafter": "/drafter",
        "drafter_kind": "dflash",
        "hardware": "cpu",
        "dtype": "float32",
        "regime": Regime(),
        "workload": "w",
    }
    return Deployment(**{**fields, **changes})  # type: ignore[arg-type]


def test_listing_mechanisms_loads_no_torch() -> None:
    code = (
        "import sys; from specpilot.mechanisms import registry; registry.all_mechanisms(); "
        "print('torch' in sys.modules)"
    )
    out = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == "False"


@pytest.mark.parametrize("mechanism", registry.all_mechanisms(), ids=lambda m: m.id)
def test_defaults_are_off_on_every_engine(mechanism: Mechanism) -> None:
    for engine in mechanism.render:
        assert mechanism.settings(engine, {}) == {}


def test_best_first_tree_gives_the_settings_of_a_tree_engine() -> None:
    tree = registry.get("best_first_tree")
    assert tree.settings("reference", {"rows": 32, "top_k": 8}) == {
        "speculation": "tree",
        "rows": 32,
        "block": 16,
        "top_k": 8,
    }


def test_best_first_tree_needs_a_block_drafter_on_an_engine_that_has_it() -> None:
    tree = registry.get("best_first_tree")
    assert tree.applies_to(deployment()).ok
    for changes, word in (
        ({"drafter": None, "drafter_kind": None}, "names none"),
        ({"drafter_kind": "eagle3"}, "whole block"),
        ({"engine": "elsewhere"}, "runs on elsewhere"),
    ):
        answer = tree.applies_to(deployment(**changes))
        assert not answer.ok
        assert any(word in reason for reason in answer.reasons)


@pytest.mark.parametrize(
    ("params", "word"),
    [
        ({"rows": 7}, "8 to 64"),
        ({"rows": 65}, "8 to 64"),
        ({"rows": 32.0}, "takes int"),
        ({"rows": True}, "takes int"),
        ({"depth": 3}, "no parameter"),
    ],
)
def test_parameters_outside_their_range_are_refused(params: dict, word: str) -> None:
    with pytest.raises(InvalidInput, match=word):
        registry.get("best_first_tree").settings("reference", params)


def test_a_parameter_is_checked_by_type_choices_and_bounds() -> None:
    mode = ParamSpec("off", "which way", choices=("off", "fast"))
    assert mode.check("mode", "fast") == "fast"
    with pytest.raises(InvalidInput, match="'off', 'fast'"):
        mode.check("mode", "slow")
    share = ParamSpec(0.0, "a share", low=0.0, high=1.0)
    assert share.check("share", 1) == 1.0
    with pytest.raises(InvalidInput):
        share.check("share", float("nan"))


def test_unknown_names_say_what_exists() -> None:
    with pytest.raises(NotFound, match="best_first_tree"):
        registry.get("worst_first_tree")
    with pytest.raises(Unsupported, match="reference"):
        registry.get("best_first_tree").settings("abacus", {"rows": 8})


def test_w12_needs_bf16_weights(tmp_path: Path) -> None:
    w12 = registry.get("w12")
    assert w12.settings("reference", {"weights": "w12"}) == {"weights": "w12"}
    for dtype, ok in ((torch.bfloat16, True), (torch.float32, False)):
        weight = torch.zeros(256, 256, dtype=dtype)
        save_file({"layers.0.up_proj.weight": weight}, tmp_path / "model.safetensors")
        answer = w12.applies_to(deployment(target=str(tmp_path)))
        assert answer.ok is ok
        assert ok or "is F32" in answer.reasons[0]
    (tmp_path / "model.safetensors").write_bytes(b"x")
    assert "truncated" in w12.applies_to(deployment(target=str(tmp_path))).reasons[0]
    assert not w12.applies_to(deployment(engine="mock")).ok


def test_the_pairwise_selector_needs_one_trained_for_the_drafter(tmp_path: Path) -> None:
    selector = registry.get("pairwise_selector")
    assert selector.settings("reference", {"enabled": True}) == {"selector": True}
    here = deployment(drafter=str(tmp_path))
    assert "none in" in selector.applies_to(here).reasons[0]
    (tmp_path / "selector").mkdir()
    (tmp_path / "selector" / "config.json").write_text("{}")
    assert selector.applies_to(here).ok
    own = deployment(drafter=str(tmp_path), drafter_kind="dflash2")
    assert "of its own" in selector.applies_to(own).reasons[0]
    assert "names none" in selector.applies_to(deployment(drafter=None)).reasons[0]
