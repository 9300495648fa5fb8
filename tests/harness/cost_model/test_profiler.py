"""The profiler: exclusive times, joined with floors, and nothing left behind."""

import json
import types
from dataclasses import replace

import pytest

from specpilot.errors import InvalidInput, NotFound
from specpilot.harness.cost_model import profiler
from specpilot.harness.cost_model.floors import ComponentFloor
from specpilot.harness.cost_model.profiler import Hook, Timer, installed, profile_steps


class Clock:
    """A clock that moves only when work is done: real sleeps are noisy on a busy machine."""

    def __init__(self) -> None:
        self.now = 0.0

    def work(self, ms: float) -> None:
        self.now += ms / 1e3


@pytest.fixture
def clock(monkeypatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(profiler, "perf_counter", lambda: made.now)
    return made


def engine(clock: Clock) -> types.SimpleNamespace:
    """A step of 2 ms overhead, 4 + 2 ms in a layer, 1 + 6 ms in the drafter."""
    made = types.SimpleNamespace()

    def linear() -> None:
        clock.work(4)

    def layer() -> None:
        clock.work(2)
        made.linear()

    def draft() -> None:
        clock.work(1)
        made.layer()

    def step() -> None:
        clock.work(2)
        made.layer()
        made.draft()

    made.linear, made.layer, made.draft, made.step = linear, layer, draft, step
    return made


def hooks(made: types.SimpleNamespace) -> list[Hook]:
    return [
        Hook(made, "linear", None),
        Hook(made, "layer", "gdn", "gdn"),
        Hook(made, "draft", "drafter", "propose"),
    ]


FLOORS = [
    ComponentFloor("weights", "gdn_in", 1.0, 0.0, 1.5, 0.0),
    ComponentFloor("weights", "gdn_out", 1.0, 0.0, 0.5, 0.0),
    ComponentFloor("gdn", "state", 1.0, 0.0, 1.0, 0.0),
]


def test_times_are_exclusive_and_go_to_the_component_that_owns_them(clock: Clock) -> None:
    made = engine(clock)
    found = profile_steps(lambda: made.step(), hooks(made), FLOORS, title="made", steps=5, warm=1)
    rows = {row.component: row for row in found.rows}
    assert rows["weights"].ms == pytest.approx(4)  # the drafter's product is not here
    assert rows["gdn"].ms == pytest.approx(2)
    assert rows["drafter"].ms == pytest.approx(7)
    assert rows["overhead"].ms == pytest.approx(2)
    assert found.step_ms == found.plain_step_ms == pytest.approx(15)
    assert sum(row.ms for row in found.rows) == pytest.approx(15)
    assert rows["weights"].floor_ms == 2.0
    assert rows["weights"].ratio == pytest.approx(rows["weights"].ms / 2.0)
    assert rows["drafter"].ratio is None
    shares = found.shares()
    assert shares.drafter == pytest.approx(rows["drafter"].share)
    assert shares.overhead == pytest.approx(rows["overhead"].share, abs=1e-6)
    assert found.kernels_ms == pytest.approx(found.step_ms - rows["overhead"].ms)


def test_off_there_is_nothing_to_pay_for(clock: Clock) -> None:
    made = engine(clock)
    before = dict(vars(made))
    with installed(hooks(made), Timer()):
        assert vars(made)["linear"] is not before["linear"]
    assert vars(made) == before
    with pytest.raises(RuntimeError), installed(hooks(made), Timer()):
        raise RuntimeError("the step died")
    assert vars(made) == before
    with pytest.raises(InvalidInput, match="gone"):
        wrong = [Hook(made, "linear", None), Hook(made, "gone", "gdn")]
        profile_steps(lambda: None, wrong, (), title="made", steps=1)
    assert vars(made) == before


def test_the_reference_engine_is_profiled_and_left_as_it_was(tiny, prompts, tmp_path) -> None:
    import torch.nn.functional as functional

    from specpilot.harness.cost_model.reference import (
        calibrate_deployment,
        profile_deployment,
        reference_hooks,
    )

    with pytest.raises(NotFound, match="calibrated"):
        profile_deployment(tiny, {}, prompts)
    calibrate_deployment(tiny, seconds=0.005, rows=(1, 8, 16), blocks=(8,))
    before = {(h.owner, h.name): vars(h.owner)[h.name] for h in reference_hooks()}
    linear = functional.linear
    two = replace(tiny, regime=replace(tiny.regime, requests=2))
    for settings, has_drafter in (({"speculation": "tree", "rows": 12}, True),
                                  ({"speculation": "none"}, False)):  # fmt: skip
        found = profile_deployment(two, settings, prompts, steps=4)
        assert {row.part for row in found.rows if row.component == "weights"} == {
            "attention", "gdn", "mlp"
        }  # fmt: skip
        components = {row.component for row in found.rows if row.ms > 0}
        assert {"weights", "lm_head", "attention", "gdn", "overhead"} <= components
        assert ("drafter" in components) == has_drafter
        assert all(row.share < 1 for row in found.rows)
        for row in found.rows:
            if row.component in ("weights", "lm_head", "attention"):
                assert row.floor_ms > 0 and row.ratio is not None
    assert functional.linear is linear
    assert before == {(h.owner, h.name): vars(h.owner)[h.name] for h in reference_hooks()}
    assert json.loads(found.to_json())["rows"]
    pytest.importorskip("matplotlib")
    found.picture(tmp_path / "step.svg")
    assert "<svg" in (tmp_path / "step.svg").read_text()[:2000]
    assert found.table().row_count == len(found.rows)
