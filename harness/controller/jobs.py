"""Jobs: one at a time on this machine, kept in SQLite so that a client can come back for them.

A job that ran when the controller was killed is ``interrupted``: it promoted nothing, and its
owner starts it again. The ledger, not this table, says what was measured.
"""

import contextlib
import json
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, Protocol

from specpilot.errors import NotFound, SpecPilotError
from specpilot.harness.controller.measure import Cancelled
from specpilot.harness.controller.protocol import ErrorBody, JobState, JobView

__all__ = ["JobKind", "Jobs", "Task", "error_body"]

JobKind = Literal["trial", "final", "audit"]
_FINISHED = ("done", "failed", "cancelled", "interrupted")
CANCEL_S = 20.0
_SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (
  job TEXT PRIMARY KEY, kind TEXT NOT NULL, round TEXT NOT NULL, state TEXT NOT NULL,
  version INTEGER NOT NULL, message TEXT NOT NULL, done INTEGER NOT NULL, planned INTEGER NOT NULL,
  result TEXT, error TEXT, created REAL NOT NULL, updated REAL NOT NULL
)
"""


class Task(Protocol):
    """What a job runs; ``kill`` ends its systems at once, from another thread."""

    def run(self) -> Mapping[str, Any]: ...

    def kill(self) -> None: ...


Make = Callable[[str, threading.Event, Callable[[str, int, int], None]], Task]


def error_body(error: BaseException) -> ErrorBody:
    """Return an error as clients see it. One that we did not raise on purpose shows its type."""
    if isinstance(error, SpecPilotError):
        known = next(c.__name__ for c in type(error).__mro__ if c.__module__ == "specpilot.errors")
        return ErrorBody(type=known, message=str(error), hint=error.hint)
    return ErrorBody(
        type="CheckFailed", message=f"The controller failed: {type(error).__name__}: {error}."
    )


class Jobs:
    """The table and the one worker. Safe for threads."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        self._db.row_factory = sqlite3.Row
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute(_SCHEMA)
        self._changed = threading.Condition()
        self._cancels: dict[str, threading.Event] = {}
        self._tasks: dict[str, Task] = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="job")
        self._db.execute(
            "UPDATE jobs SET state='interrupted', version=version+1, message=?, updated=? "
            "WHERE state IN ('queued','running')",
            ("The controller ended in the middle of it; start it again.", time.time()),
        )

    def start(self, kind: JobKind, round_id: str, make: Make) -> str:
        """Queue a job and return its id. ``make`` builds the task when its turn comes."""
        job = f"j{secrets.token_hex(5)}"
        now = time.time()
        with self._changed:
            self._db.execute(
                "INSERT INTO jobs VALUES (?,?,?,'queued',0,'waiting for its turn',0,0,"
                "NULL,NULL,?,?)",
                (job, kind, round_id, now, now),
            )
            self._cancels[job] = threading.Event()
        self._pool.submit(self._run, job, make)
        return job

    def get(self, job: str, wait_s: float = 0.0, seen: int = -1) -> JobView:
        """Return a job's state; wait up to ``wait_s`` while its version is ``seen`` or less."""
        deadline = time.monotonic() + wait_s
        with self._changed:
            while True:
                view = self._view(job)
                left = deadline - time.monotonic()
                if view.version > seen or view.state in _FINISHED or left <= 0:
                    return view
                self._changed.wait(left)

    def active(self, round_id: str) -> list[JobView]:
        with self._changed:
            rows = self._db.execute(
                "SELECT job FROM jobs WHERE round=? AND state IN ('queued','running')", (round_id,)
            ).fetchall()
            return [self._view(row["job"]) for row in rows]

    def count(self, kind: JobKind, round_id: str) -> int:
        """Return how many jobs of a kind a round has had."""
        with self._changed:
            row = self._db.execute(
                "SELECT count(*) FROM jobs WHERE kind=? AND round=?", (kind, round_id)
            ).fetchone()
        return int(row[0])

    def busy(self) -> bool:
        with self._changed:
            return bool(self._cancels)

    def cancel(self, job: str) -> JobView:
        """Stop a job and its systems. One that has finished stays as it is."""
        view = self.get(job)
        if view.state in _FINISHED:
            return view
        with self._changed:
            cancel, task = self._cancels.get(job), self._tasks.get(job)
        if cancel is not None:
            cancel.set()
        if task is not None:
            task.kill()
        deadline = time.monotonic() + CANCEL_S
        while view.state not in _FINISHED and time.monotonic() < deadline:
            view = self.get(job, deadline - time.monotonic(), view.version)
        return view

    def close(self) -> None:
        """Cancel everything and wait for it."""
        with self._changed:
            jobs = list(self._cancels)
        for job in jobs:
            self.cancel(job)
        self._pool.shutdown()
        self._db.close()

    def _run(self, job: str, make: Make) -> None:
        cancel = self._cancels[job]
        try:
            if cancel.is_set():
                raise Cancelled("The job was cancelled before it began.")
            self._update(job, state="running", message="starting")
            task = make(
                job,
                cancel,
                lambda message, done, planned: self._progress(job, message, done, planned),
            )
            with self._changed:
                self._tasks[job] = task
            if cancel.is_set():
                raise Cancelled("The job was cancelled before it began.")
            result = task.run()
            self._finish(job, "done", "done", result=json.dumps(result))
        except BaseException as error:  # a worker must report every end of a job
            if cancel.is_set():
                self._finish(job, "cancelled", "cancelled; nothing of it counts")
            else:
                body = error_body(error)
                self._finish(job, "failed", body.message, error=body.model_dump_json())

    def _finish(self, job: str, state: JobState, message: str, **columns: str) -> None:
        with self._changed:
            self._cancels.pop(job, None)
            self._tasks.pop(job, None)
        self._update(job, state=state, message=message, **columns)

    def _progress(self, job: str, message: str, done: int, planned: int) -> None:
        self._update(job, message=message, done=done, planned=planned)

    def _update(self, job: str, **columns: str | int) -> None:
        names = ", ".join(f"{name}=?" for name in columns)
        with self._changed:
            with contextlib.suppress(sqlite3.ProgrammingError):  # closed while a job was ending
                self._db.execute(
                    f"UPDATE jobs SET {names}, version=version+1, updated=? WHERE job=?",
                    (*columns.values(), time.time(), job),
                )
            self._changed.notify_all()

    def _view(self, job: str) -> JobView:
        row = self._db.execute("SELECT * FROM jobs WHERE job=?", (job,)).fetchone()
        if row is None:
            raise NotFound(f"There is no job {job!r}.")
        fields = {name: value for name, value in dict(row).items() if name in JobView.model_fields}
        for name in ("result", "error"):
            if fields[name] is not None:
                fields[name] = json.loads(fields[name])
        return JobView.model_validate(fields)
