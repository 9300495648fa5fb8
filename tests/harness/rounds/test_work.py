"""Jobs in worker processes: their states are files, and nothing is left behind."""

import json
import time
from pathlib import Path

import pytest

from specpilot.errors import InvalidInput, NotFound
from specpilot.harness.rounds import work


def job(folder: Path, name: str, kind: str) -> Path:
    path = folder / "jobs" / name
    path.mkdir(parents=True)
    described = {"kind": kind, "arguments": {"x": "1"}, "pid": 2**22 + 1, "started": "0"}
    (path / "job.json").write_text(json.dumps(described))
    (path / "progress.json").write_text(json.dumps({"done": 0, "planned": 1, "message": "m"}))
    (path / "log").write_text("Segmentation fault")
    return path


def test_a_worker_reports_and_leaves_a_result(specpilot_home: Path) -> None:
    path = job(specpilot_home, "w-t-1", "t")

    def task(arguments, report, folder):
        report(1, 3, "half way")
        return {"got": arguments["x"]}

    assert work.run_worker(path, {"t": task}) == 0
    found = work.status("w-t-1")
    assert (found.state, found.done, found.result) == ("done", 1, {"got": "1"})


def test_an_error_of_ours_is_the_jobs_message(specpilot_home: Path) -> None:
    path = job(specpilot_home, "w-t-2", "t")

    def task(arguments, report, folder):
        raise InvalidInput("no such thing.")

    assert work.run_worker(path, {"t": task}) == 1
    found = work.status("w-t-2")
    assert (found.state, found.message) == ("failed", "no such thing.")


def test_a_worker_that_died_shows_the_end_of_its_log(specpilot_home: Path) -> None:
    job(specpilot_home, "w-t-3", "t")
    found = work.status("w-t-3")
    assert found.state == "failed"
    assert "Segmentation fault" in found.message


def test_a_job_that_cannot_run_fails_with_its_reason() -> None:
    started = work.start("profile", {"deployment": "mock"})
    found = work.status(started.job, wait_s=60)
    assert found.state == "failed"
    assert "mock" in found.message


def test_a_running_job_is_cancelled(specpilot_home: Path) -> None:
    started = work.start("profile", {"deployment": "mock"})
    cancelled = work.cancel(started.job)
    assert cancelled.state in ("cancelled", "failed")
    deadline = time.monotonic() + 10
    pid = json.loads((specpilot_home / "jobs" / started.job / "job.json").read_text())["pid"]
    while work._started(pid) is not None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert work._started(pid) is None


@pytest.mark.parametrize("name", ["w-nope", "../w-x", "j-1"])
def test_an_unknown_job_is_not_found(name: str) -> None:
    with pytest.raises(NotFound, match="no job"):
        work.status(name)
