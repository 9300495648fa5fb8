"""kill -9 at each step of the protocol: no promotion, the set stays burned, the round resumes."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from specpilot.errors import Conflict, EngineFailure
from specpilot.harness import patches
from specpilot.harness.controller import protocol as p
from specpilot.harness.controller.client import ControllerClient, ensure_running

OWNER = "tester"
PATIENCE_S = 90.0


@pytest.fixture
def state(
    specpilot_home: Path, quick_deployment: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """A state directory whose controller is ended afterwards, and a folder for its systems."""
    folder = specpilot_home.parent / "systems"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    yield specpilot_home
    client = ensure_running(specpilot_home)
    os.kill(client.hello().pid, signal.SIGTERM)
    wait_until(lambda: not (specpilot_home / "controller" / "controller.sock").exists())


@pytest.fixture
def fast(tmp_path: Path) -> str:
    made = patches.create(tmp_path, "fast", "fast", launch_args={"tokens_per_pass": 6})
    return str(made.folder)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.02)


def ledger_text(state: Path) -> str:
    return (state / "ledger" / "ledger.jsonl").read_text()


def kill_when(state: Path, client: ControllerClient, text: str) -> None:
    """Kill the controller as soon as its ledger holds ``text``, and wait until all is gone."""
    pid = client.hello().pid
    wait_until(lambda: text in ledger_text(state))
    os.kill(pid, signal.SIGKILL)
    client.close()
    wait_until(lambda: not systems_of(state))


def systems_of(state: Path) -> list[int]:
    """Controllers and systems under test of this state that still run."""
    mark = bytes(state.parent)
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and (
                mark in (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
            ):
                found.append(int(entry.name))
    return found


def finish(client: ControllerClient, job: str) -> p.JobView:
    view = client.job_status(job)
    while view.state in ("queued", "running"):
        view = client.job_status(job, wait_s=30.0, seen=view.version)
    return view


STEPS = [
    pytest.param('"purpose":"noise"', "trial", id="while noise is measured"),
    pytest.param('"kind":"noise"', "trial", id="before calibration", marks=pytest.mark.slow),
    pytest.param('"kind":"calibration"', "trial", id="after calibration", marks=pytest.mark.slow),
    pytest.param('"purpose":"trial t01"', "trial", id="while timed", marks=pytest.mark.slow),
    pytest.param('"kind":"burn"', "final", id="after burning the set", marks=pytest.mark.slow),
    pytest.param('"purpose":"final', "final", id="in the final", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("text", "kind"), STEPS)
def test_a_killed_controller_promotes_nothing_and_resumes(
    state: Path, fast: str, text: str, kind: str
) -> None:
    client = ensure_running(state)
    round_id = client.round_open("quick", OWNER).round
    if kind == "trial":
        job = client.trial_start(round_id, OWNER, [fast]).job
    else:
        job = client.final_start(round_id, OWNER).job
    kill_when(state, client, text)

    client = ensure_running(state)
    assert client.job_status(job).state == "interrupted"
    assert client.ledger_verify().ok
    view = client.round_status(round_id)
    assert (view.state, view.best, view.trials, view.final) == ("open", [], [], None)
    assert view.sealed_left == (2 if kind == "final" else 3)
    assert '"kind":"aborted"' in ledger_text(state)

    if text == '"purpose":"noise"':
        client.close()
        return  # what follows is the same after every step; once is enough outside the slow tests
    resumed = finish(client, client.trial_start(round_id, OWNER, [fast]).job)
    assert resumed.state == "done", resumed.message
    assert client.round_status(round_id).best == ["fast"]
    client.close()


def test_a_stopped_controller_ends_its_systems_and_exits(state: Path, fast: str) -> None:
    client = ensure_running(state)
    round_id = client.round_open("quick", OWNER).round
    job = client.trial_start(round_id, OWNER, [fast]).job
    view = client.job_status(job)
    while view.message != "timing":
        view = client.job_status(job, wait_s=30.0, seen=view.version)
    os.kill(client.hello().pid, signal.SIGTERM)
    wait_until(lambda: not systems_of(state))
    client = ensure_running(state)
    assert client.job_status(job).state in ("cancelled", "interrupted")
    assert client.ledger_verify().ok


def test_two_clients_that_start_a_controller_share_one(state: Path) -> None:
    first, second = ensure_running(state), ensure_running(state)
    assert first.hello().pid == second.hello().pid


def test_a_controller_ends_when_nobody_needs_it(specpilot_home: Path) -> None:
    client = ensure_running(specpilot_home, idle_exit_s=0.2)
    pid = client.hello().pid
    client.close()
    wait_until(lambda: not Path(f"/proc/{pid}").exists() or zombie(pid))
    with pytest.raises(EngineFailure):
        ControllerClient(specpilot_home / "controller" / "controller.sock")


def zombie(pid: int) -> bool:
    return ") Z " in Path(f"/proc/{pid}/stat").read_text()


@pytest.mark.slow
def test_a_burned_out_round_says_so(state: Path) -> None:
    client = ensure_running(state)
    round_id = client.round_open("quick", OWNER).round
    for left in (2, 1, 0):
        client.final_start(round_id, OWNER)
        kill_when(state, client, f'"set":"sealed-{2 - left}"')
        client = ensure_running(state)
        assert client.round_status(round_id).sealed_left == left
    with pytest.raises(Conflict, match="burned all"):
        client.final_start(round_id, OWNER)
    client.close()
