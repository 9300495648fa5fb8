"""Recorded runs: written by servers once, judged many times, with known rates and power."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from specpilot.errors import InvalidInput, NotFound
from specpilot.harness.deployments import registry
from specpilot.harness.token_forcing import Calibration, bench
from specpilot.harness.token_forcing.policy import Policy
from specpilot.harness.token_forcing.record import Plan, System, default_systems, record
from specpilot.harness.token_forcing.recorded import (
    RecordedRun,
    RecordedSystem,
    load_run,
    load_system,
    save_system,
)
from specpilot.harness.token_forcing.task import accuracy_change

CALIBRATION = Calibration(0.1, 0.5, 0.999, 4096, ())


def system(name: str, rate: float, large: float, requests: int = 400, explained: float = 0.0):
    """Mismatches at ``rate``, a share ``large`` of them events, some explained by a variant."""
    rng = np.random.default_rng([len(name), requests])
    tokens = 128 * requests
    margins = np.where(rng.random(tokens) < rate, 0.2, 0.0).astype(np.float32)
    margins[(margins > 0) & (rng.random(tokens) < large)] = 0.9
    events = np.flatnonzero(margins > 0.5)
    return RecordedSystem(
        name=name,
        prompts=tuple(f"p{i}" for i in range(requests)),
        lengths=np.full(requests, 128),
        tokens=np.zeros(tokens, np.int32),
        margins=margins,
        event_at=events,
        event_margins=np.where(rng.random(len(events)) < explained, 0.05, 0.9).astype(np.float32),
    )


def recorded(*systems: RecordedSystem) -> RecordedRun:
    facts = {"deployment": "synthetic", "dtype": "none", "scoring_over_prefill": [1.1, 1.2, 1.15]}
    return RecordedRun(CALIBRATION, facts, {s.name: s for s in systems})


def save(run: RecordedRun, folder: Path) -> None:
    (folder / "calibration.json").write_text(json.dumps(run.calibration.to_dict()))
    (folder / "run.json").write_text(json.dumps(run.facts))
    for each in run.systems.values():
        save_system(folder, each)


def test_the_benchmark_reports_acceptance_power_and_cost(tmp_path: Path) -> None:
    run = recorded(
        system("stock", 0.005, 0.0),
        system("lossless", 0.005, 0.02, explained=1.0),
        system("honest batch size", 0.005, 0.0),
        system("bias 0.1", 0.006, 0.0),
        system("bias 2", 0.023, 0.5),
    )
    save(run, tmp_path)
    found = {r["id"]: r["value"] for r in bench.run(tmp_path, draws=60)}
    assert found["forcing.lossless_accepted"] >= 0.95
    assert found["forcing.honest_numerics_accepted"] >= 0.95
    assert found["forcing.fault_rejected"] == found["forcing.rejected.bias_2"] == 1.0
    assert found["forcing.rejected.bias_0.1"] < 0.5
    assert found["forcing.smallest_fault"] == 2.0
    assert found["forcing.scoring_over_prefill"] == 1.15
    shares = [found[f"forcing.rejected.bias_2.requests_{s:g}"] for s in bench.SHARES]
    assert shares == sorted(shares) and shares[-1] == 1.0


def test_unexplained_events_alone_reject_in_the_draws() -> None:
    run = recorded(system("stock", 0.0, 0.0), system("few but wrong", 0.002, 1.0))
    found = bench.counts(run)
    judged = bench.acceptance(found["stock"], found["few but wrong"], Policy(), draws=20)
    assert not judged.any()
    honest = recorded(system("stock", 0.0, 0.0), system("few but wrong", 0.002, 1.0, explained=1))
    found = bench.counts(honest)
    judged = bench.acceptance(found["stock"], found["few but wrong"], Policy(), draws=20)
    assert judged.all()


def test_draws_are_paired_by_prompt_whatever_the_order() -> None:
    stock, other = system("stock", 0.01, 0.0), system("other", 0.01, 0.0)
    turned = replace(
        other, prompts=other.prompts[::-1], margins=other.margins.reshape(400, -1)[::-1].ravel()
    )
    straight = bench.counts(recorded(stock, other))["other"]
    assert (bench.counts(recorded(stock, turned))["other"].mismatches == straight.mismatches).all()


def test_a_benchmark_without_a_record_says_how_to_make_one() -> None:
    with pytest.raises(NotFound, match=r"token_forcing\.record"):
        bench.run()


def test_damaged_records_are_refused(tmp_path: Path) -> None:
    save(recorded(system("stock", 0.01, 0.1)), tmp_path)
    (tmp_path / "stock.npz").write_bytes((tmp_path / "stock.npz").read_bytes()[:300])
    with pytest.raises(InvalidInput, match="no recorded system"):
        load_run(tmp_path)
    whole = system("stock", 0.01, 0.1)
    with pytest.raises(InvalidInput, match="contradicts"):
        replace(whole, lengths=whole.lengths[:-1])


@pytest.mark.slow
def test_recording_runs_servers_and_goes_on_where_it_stopped(tmp_path: Path, capsys) -> None:
    deployment = registry.load("mock")
    deployment = replace(deployment, launch={**deployment.launch, "delay_ms": 0.0, "row_ms": 0.0})
    noise = {"noise": 0.02, "noise_seed": 2}
    systems = (
        System("stock", "stock", {"noise": 0.02, "noise_seed": 1}, 4),
        System("lossless", "candidate", noise, 4),
        System("bias 2", "candidate", noise, 4, bias=2.0),
    )
    plan = Plan(deployment, requests=40, tokens=60, after=20, systems=systems, questions=5)
    record(plan, tmp_path)
    assert capsys.readouterr().out.count("generated") == 3
    found = {r["id"]: r["value"] for r in bench.run(tmp_path, draws=5)}
    assert found["forcing.lossless_accepted"] == found["forcing.fault_rejected"] == 1.0
    assert found["forcing.scoring_over_prefill"] > 0
    assert -100 <= found["forcing.task_accuracy_change.bias_2"] <= 0
    faulty = load_system(tmp_path / "bias 2.npz")
    late = np.tile(np.arange(60) >= 20, 40)
    assert faulty.margins[~late].max() < 0.5 < faulty.margins[late].max()
    (tmp_path / "lossless.npz").unlink()
    record(plan, tmp_path)
    assert capsys.readouterr().out.count("generated") == 1


def test_accuracy_changes_by_question_with_a_paired_interval() -> None:
    answers = {"stock": [True] * 60 + [False] * 40, "worse": [True] * 56 + [False] * 44}
    change = accuracy_change(answers, "worse")
    assert (change.points, change.questions) == (pytest.approx(-4.0), 100)
    assert change.low == pytest.approx(-4 - 1.98422 * 19.6946 / 10, abs=1e-3)
    same = accuracy_change(answers, "stock")
    assert (same.low, same.points, same.high) == (0.0, 0.0, 0.0)
    with pytest.raises(InvalidInput, match="cannot be paired"):
        accuracy_change({"stock": [True], "worse": []}, "worse")


def test_the_default_record_holds_stock_faults_and_honest_numerics() -> None:
    names = [s.name for s in default_systems({"speculation": "tree"}, 32)]
    assert names[:2] == ["stock", "lossless"]
    assert [n for n in names if n.startswith("bias")] == [
        f"bias {b:g}" for b in (0.1, 0.25, 0.5, 1.0, 2.0)
    ]
    assert sum(n.startswith("honest") for n in names) == 2
