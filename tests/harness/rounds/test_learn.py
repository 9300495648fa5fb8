"""What a round teaches is what its receipts say, whatever its folder holds by then."""

from pathlib import Path
from typing import Any

import pytest

from specpilot.harness.controller.protocol import FinalView, RoundView, TrialView
from specpilot.harness.rounds import learn as learning
from specpilot.memory.store import MemoryStore

ISOLATION = {"tier": 1, "title": "landlock"}
TREE = {"id": "best_first_tree", "params": {"rows": 16}, "added": True}
NGRAM = {"id": "ngram_tree", "params": {}, "added": True}


def receipt(seq: int, kind: str) -> dict[str, Any]:
    return {"seq": seq, "hash": f"{seq:064x}", "kind": kind}


def trial(seq: int, uses: list[dict[str, Any]], **changes: Any) -> TrialView:
    view = {
        "trial": f"t{seq}", "verdict": "promoted", "reason": "Measured.", "patches": ["any"],
        "uses": uses, "gain": 25.0, "lower_bound": 20.0, "threshold": 2.0, "against": "stock",
        "forcing": {"status": "pass"}, "isolation": ISOLATION, "receipt": receipt(seq, "trial"),
    }  # fmt: skip
    return TrialView.model_validate(view | changes)


def final(seq: int, uses: list[dict[str, Any]]) -> FinalView:
    return FinalView.model_validate(
        {
            "round": "r1", "verdict": "promoted", "reason": "Measured.", "set": "sealed-0",
            "sealed": True, "patches": ["any"], "uses": uses, "requests": 48,
            "speedups": {"final_over_stock": {"value": 1.25, "low": 1.2, "high": 1.3}},
            "forcing": {"status": "pass"}, "isolation": ISOLATION, "receipt": receipt(seq, "final"),
        }
    )  # fmt: skip


def round_of(trials: list[TrialView], last: FinalView, deployment: str = "pico") -> RoundView:
    return RoundView.model_validate(
        {
            "round": "r1", "deployment": deployment, "state": "closed",
            "best": [], "best_folders": [],
            "best_trial": None, "trials": trials, "final": last, "sealed_left": 2,
            "noise_percent": 0.1, "next": "", "receipt": receipt(0, "round_open"),
        }
    )  # fmt: skip


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "memory.sqlite"
    monkeypatch.setenv("SPECPILOT_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(
        learning, "open_memory", lambda: MemoryStore(path, verifier=lambda row: True)
    )
    return path


def test_mechanisms_come_from_the_receipt_without_the_rounds_folder(memory: Path) -> None:
    learning.learn(round_of([trial(1, [TREE])], final(2, [TREE])))
    with MemoryStore(memory) as store:
        entry = store.get("best-first-tree")
    assert entry.status == "validated"
    assert entry.implementation is not None
    assert entry.implementation.params == {"rows": (16,)}


def test_a_gain_over_the_best_is_not_credited_to_what_the_best_had(memory: Path) -> None:
    stacked = trial(1, [TREE | {"added": False}, NGRAM], against="best")
    written = learning.learn(round_of([stacked], final(2, [TREE, NGRAM])))
    assert set(written.proposed) == {"best-first-tree", "ngram-tree"}
    with MemoryStore(memory) as store:
        tree = store.get("best-first-tree")
    figures = [row.figures[0].metric for row in tree.evidence]
    assert figures == ["speedup_over_stock"]


def test_a_patch_without_mechanisms_does_not_stop_the_others(memory: Path) -> None:
    written = learning.learn(round_of([trial(1, []), trial(3, [TREE])], final(2, [])))
    assert written.proposed == ("best-first-tree",)


def test_a_round_on_made_up_speeds_teaches_nothing(memory: Path) -> None:
    written = learning.learn(round_of([trial(1, [TREE])], final(2, [TREE]), "mock"))
    assert (written.revised, written.proposed) == ((), ())
