"""Long work in a process of its own, followed through files: started, watched, cancelled.

A job is a folder ``$SPECPILOT_HOME/jobs/<id>`` with ``job.json`` (what and when), ``progress.json``
(written by the worker, replaced whole), ``result.json`` or ``error.json`` at the end, and a log. It
outlives the server that started it; a worker that died without a result shows as failed. Trials
and finals are not here: the controller runs those.
"""

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from specpilot.errors import NotFound, SpecPilotError
from specpilot.home import home

__all__ = ["Work", "WorkState", "cancel", "is_work", "run_worker", "start", "status"]

WorkState = Literal["running", "done", "failed", "cancelled"]
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Work:
    """Where a job stands. ``done`` of ``planned`` count what ``message`` says."""

    job: str
    kind: str
    state: WorkState
    done: int
    planned: int
    message: str
    result: Mapping[str, Any] | None = None


def is_work(job: str) -> bool:
    """Whether ``job`` is an id of this module (the controller's have another form)."""
    return job.startswith("w-")


def start(kind: str, arguments: Mapping[str, str]) -> Work:
    """Start the worker module ``specpilot.harness.rounds.worker`` on a new job."""
    job = f"w-{kind}-{secrets.token_hex(4)}"
    folder = _folder(job)
    folder.mkdir(parents=True)
    _write(folder / "progress.json", {"done": 0, "planned": 1, "message": "starting"})
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "specpilot.harness.rounds.worker", str(folder)],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd=folder,
        )  # fmt: skip
    described = {"kind": kind, "arguments": dict(arguments), "pid": process.pid}
    _write(folder / "job.json", {**described, "started": _started(process.pid)})
    return status(job)


def status(job: str, wait_s: float = 0.0) -> Work:
    """Return a job's state, waiting up to ``wait_s`` seconds while it is running."""
    deadline = time.monotonic() + wait_s
    while True:
        found = _read(job)
        if found.state != "running" or time.monotonic() >= deadline:
            return found
        time.sleep(_POLL_S)


def cancel(job: str) -> Work:
    """End a running job and everything that it started. A finished one stays as it is."""
    folder = _existing(job)
    if _read(job).state == "running":
        _write(folder / "error.json", {"state": "cancelled", "message": "cancelled"})
        described = json.loads((folder / "job.json").read_text("utf-8"))
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(described["pid"], signal.SIGKILL)
    return _read(job)


Task = Callable[[Mapping[str, str], Callable[[int, int, str], None], Path], Mapping[str, Any]]


def run_worker(folder: Path, tasks: Mapping[str, Task]) -> int:
    """Carry out the job in ``folder`` in this process; the exit status is 0 if it succeeded."""
    described = _wait_for(folder / "job.json")

    def report(done: int, planned: int, message: str) -> None:
        _write(folder / "progress.json", {"done": done, "planned": planned, "message": message})

    try:
        result = tasks[described["kind"]](described["arguments"], report, folder)
    except SpecPilotError as error:
        _write(folder / "error.json", {"state": "failed", "message": str(error)})
        return 1
    _write(folder / "result.json", dict(result))
    return 0


def _read(job: str) -> Work:
    folder = _existing(job)
    described = json.loads((folder / "job.json").read_text("utf-8"))
    progress = json.loads((folder / "progress.json").read_text("utf-8"))
    alive = _started(described["pid"]) == described["started"]  # asked before the files are read
    state: WorkState = "running"
    result = None
    if (folder / "error.json").exists():
        error = json.loads((folder / "error.json").read_text("utf-8"))
        state, progress["message"] = error["state"], error["message"]
    elif (folder / "result.json").exists():
        state, result = "done", json.loads((folder / "result.json").read_text("utf-8"))
    elif not alive:
        tail = (folder / "log").read_text("utf-8", "replace")[-400:].strip()
        state = "failed"
        progress["message"] = f"the worker ended without a result; its log ends: {tail}"
    return Work(
        job, described["kind"], state, progress["done"], progress["planned"],
        progress["message"], result,
    )  # fmt: skip


def _existing(job: str) -> Path:
    folder = _folder(job)
    if not is_work(job) or Path(job).name != job or not (folder / "job.json").exists():
        raise NotFound(
            f"There is no job {job[:80]!r}.", hint="Jobs are named in their start's reply."
        )
    return folder


def _folder(job: str) -> Path:
    return home() / "jobs" / job


def _started(pid: int) -> str | None:
    """Start time of a live process in clock ticks: a pid alone may have been given out again."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text("ascii", "replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] == "Z" else fields[19]


def _wait_for(path: Path) -> Any:
    deadline = time.monotonic() + 10
    while not path.exists():
        if time.monotonic() > deadline:
            raise NotFound(f"{path} was not written.")
        time.sleep(0.02)
    return json.loads(path.read_text("utf-8"))


def _write(path: Path, value: Mapping[str, Any]) -> None:
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    draft.write_text(json.dumps(value) + "\n", "utf-8")
    draft.replace(path)
