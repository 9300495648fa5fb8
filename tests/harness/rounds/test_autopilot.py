"""The autopilot on scripted tools: what it measures, what it stacks, how it goes on."""

from collections.abc import Mapping
from typing import Any

import pytest

from specpilot.errors import EngineFailure, InvalidInput, SpecPilotError
from specpilot.harness.rounds import autopilot, report

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def idea(rows: int, predicted: float | None) -> dict[str, Any]:
    use = {"id": "best_first_tree", "params": {"rows": rows}}
    return {"mechanisms": [use], "predicted": predicted, "entries": ["best-first-tree"]}


IDEAS = [idea(32, 1.1), idea(16, 1.4), idea(24, 1.3), idea(8, 1.05), idea(12, 1.2), idea(64, 0.7)]
FINAL = {
    "round": "r1", "verdict": "promoted", "reason": "Significant.", "set": "s0", "sealed": True,
    "patches": ["best-first-tree-r16"], "requests": 48, "tokens": 2688, "lower_bound": 20.1,
    "threshold": 1.4, "diverged": False, "token_sha256": "0" * 64,
    "tokens_per_s": {"ar": 100.0, "stock": 200.0, "final": 250.0},
    "tokens_per_pass": {"ar": 1.0, "stock": 3.0, "final": 4.0},
    "speedups": {
        "final_over_ar": {"value": 2.5, "low": 2.4, "high": 2.6},
        "final_over_stock": {"value": 1.25, "low": 1.2, "high": 1.3},
        "stock_over_ar": {"value": 2.0, "low": 1.9, "high": 2.1},
    },
    "forcing": {"status": "pass", "requests": 48, "tokens": 2688, "mismatches": 0,
                "stock_mismatches": 0, "coverage": 0.95},
    "isolation": {"tier": 1, "title": "landlock"},
    "receipt": {"seq": 9, "hash": "f" * 64, "kind": "final"},
}  # fmt: skip


class Screen:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def step(self, title: str) -> None:
        self.lines.append(title)

    def update(self, done: int, planned: int, message: str) -> None:
        pass

    def say(self, line: str) -> None:
        self.lines.append(line)


class Scripted:
    """Tools that promote a patch when the script says so."""

    def __init__(self, promote: set[str], trials: list[dict[str, Any]] | None = None) -> None:
        self.promote = promote
        self.trials = trials or []
        self.best: list[str] = []
        self.final: dict[str, Any] | None = None
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.fail: set[str] = set()

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        self.calls.append((tool, dict(arguments)))
        return getattr(self, tool)(**arguments)

    def deployment_describe(self, deployment: str) -> dict[str, Any]:
        return {
            "title": "T", "target": {"parameters": 7e6, "architecture": "hybrid-gdn"},
            "dtype": "float32", "regime": {"serving": "single", "requests": 1},
            "stock": {"speculation": "chain", "block": 8}, "profilable": False,
        }  # fmt: skip

    def plan_port(self, deployment: str) -> dict[str, Any]:
        return {"patches": IDEAS}

    def round_start(self, deployment: str) -> dict[str, Any]:
        return {"round": "r1", "isolation": "tier 1: landlock"}

    def round_status(self, round: str) -> dict[str, Any]:
        return {"round": round, "deployment": "pico", "best": self.best, "trials": self.trials,
                "final": self.final, "isolation": "tier 1: landlock",
                "noise_percent": 0.2}  # fmt: skip

    def mechanism_apply(self, round: str, patch: str, **_: Any) -> dict[str, Any]:
        return {"patch": patch}

    def trial_start(self, round: str, patches: list[str]) -> dict[str, Any]:
        if patches[-1] in self.fail:
            raise EngineFailure("the server died.")
        return {"job": "+".join(patches)}

    def final_start(self, round: str, allow_unsealed: bool) -> dict[str, Any]:
        self.final = FINAL
        return {"job": "final"}

    def job_status(self, job: str, wait_s: float) -> dict[str, Any]:
        done = {"job": job, "kind": "trial", "state": "done", "done": 1, "planned": 1,
                "message": "", "learned": ["best-first-tree"]}  # fmt: skip
        if job == "final":
            return {**done, "result": FINAL}
        patches = job.split("+")
        verdict = "promoted" if patches[-1] in self.promote else "rejected"
        if verdict == "promoted":
            self.best = patches
        trial = {"trial": f"t{len(self.trials)}", "patches": patches, "verdict": verdict,
                 "reason": "R.", "gain": 3.0, "lower_bound": 2.0, "threshold": 1.4,
                 "against": "stock", "tokens_per_pass": {"candidate": 4.0}, "forcing": None,
                 "receipt": {"seq": 1, "hash": "a" * 64, "kind": "trial"}}  # fmt: skip
        self.trials.append(trial)
        return {**done, "result": trial}


def rows(chosen: list[Mapping[str, Any]]) -> list[int]:
    return [each["mechanisms"][0]["params"]["rows"] for each in chosen]


def test_it_measures_the_best_predicted_and_a_tree_of_stocks_rows() -> None:
    assert rows(autopilot.choose(IDEAS, {"speculation": "chain", "block": 8})) == [16, 8]
    assert rows(autopilot.choose(IDEAS, {"speculation": "chain", "block": 24})) == [16, 24]


async def test_a_stack_is_one_patch_of_two_mechanisms() -> None:
    tools = Scripted(set())
    stack = idea(16, 1.5)
    stack["mechanisms"].append({"id": "pairwise_selector", "params": {"enabled": True}})
    tools.plan_port = lambda deployment: {"patches": [*IDEAS, stack]}  # type: ignore[method-assign]
    await autopilot.drive(tools, "pico", Screen())
    made = [a for name, a in tools.calls if name == "mechanism_apply"]
    assert made[0]["patch"] == "best-first-tree-r16-and-pairwise-selector"
    assert [use["id"] for use in made[0]["mechanisms"]] == ["best_first_tree", "pairwise_selector"]


def test_a_plan_with_nothing_to_try_is_an_error() -> None:
    with pytest.raises(InvalidInput, match="no patch"):
        autopilot.choose([], {})


async def test_a_round_ends_with_one_final_and_what_was_learned() -> None:
    tools = Scripted({"best-first-tree-r16"})
    finished = await autopilot.drive(tools, "pico", Screen())
    started = [a["patches"] for name, a in tools.calls if name == "trial_start"]
    assert started == [[f"best-first-tree-r{count}"] for count in (16, 8)]
    assert [name for name, _ in tools.calls].count("final_start") == 1
    assert finished.learned == ["best-first-tree"]
    text = report.markdown({**vars(finished), "ceiling": None})
    assert "promoted" in text
    assert "2.50 [2.40, 2.60]" in text


async def test_a_trial_that_fails_does_not_end_the_round() -> None:
    tools = Scripted({"best-first-tree-r16"})
    tools.fail = {"best-first-tree-r8"}
    finished = await autopilot.drive(tools, "pico", Screen())
    assert len(finished.failures) == 1
    assert "the server died" in finished.failures[0]
    assert finished.status["best"] == ["best-first-tree-r16"]


async def test_a_resumed_round_keeps_its_trials() -> None:
    first = Scripted(set())
    await first.call("trial_start", {"round": "r1", "patches": ["best-first-tree-r8"]})
    await first.call("job_status", {"job": "best-first-tree-r8", "wait_s": 0})
    tools = Scripted(set(), first.trials)
    await autopilot.drive(tools, "pico", Screen(), resume="r1")
    assert "round_start" not in [name for name, _ in tools.calls]
    started = [a["patches"] for name, a in tools.calls if name == "trial_start"]
    assert ["best-first-tree-r8"] not in started
    assert len(started) == 1


async def test_resuming_a_round_of_another_deployment_is_refused() -> None:
    with pytest.raises(SpecPilotError, match="is on pico"):
        await autopilot.drive(Scripted(set()), "mock", Screen(), resume="r1")


def test_results_have_the_fixed_ids() -> None:
    status = {"round": "r1", "deployment": "pico", "final": FINAL, "trials": []}
    rows = report.results({"status": status, "seconds": 100.0, "isolation": "tier 1: landlock"})
    assert {"run.pico.speedup_over_ar", "run.pico.speedup_over_stock", "run.pico.seconds"} <= {
        row["id"] for row in rows
    }
