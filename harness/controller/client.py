"""A thin client of the controller: asks, waits, and raises the errors that the controller reports.

``ensure_running`` starts a controller in the background if none answers. The newest ledger head
that any client of this process saw is kept, and a ledger that went back behind it is refused.
"""

import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from pydantic import BaseModel

import specpilot.errors
from specpilot.errors import CheckFailed, EngineFailure, SpecPilotError
from specpilot.harness.controller import protocol as p
from specpilot.harness.controller.paths import EXIT_TAKEN, short_path, socket_path
from specpilot.home import home

__all__ = ["ControllerClient", "ensure_running"]

START_S = 20.0
ANSWER_S = 90.0
Model = TypeVar("Model", bound=BaseModel)
_NOTHING_SEEN = p.HeadBody(seq=-1, hash="")
_heads: dict[Path, p.HeadBody] = {}
_heads_lock = threading.Lock()


class ControllerClient:
    """One connection to a controller; safe for threads, which take turns.

    Raises ``EngineFailure`` where no controller answers.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.head = _heads.get(path, _NOTHING_SEEN)  # whatever answers from now on is newer
        self._lock = threading.Lock()
        self._ids = itertools.count(1)
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(ANSWER_S)
        try:
            with short_path(path) as name:
                self._socket.connect(name)
        except OSError as error:
            self._socket.close()
            raise EngineFailure(
                f"No controller answers at {path}: {error.strerror}.",
                hint="Start one with `specpilot controller`.",
            ) from error
        self._lines = self._socket.makefile("rb")

    def __enter__(self) -> "ControllerClient":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._lines.close()
        self._socket.close()

    def hello(self) -> p.HelloReply:
        return self._ask("hello", p.Hello(), p.HelloReply)

    def round_open(self, deployment: str, owner: str) -> p.RoundView:
        return self._ask("round_open", p.RoundOpen(deployment=deployment, owner=owner), p.RoundView)

    def round_status(self, round_id: str) -> p.RoundView:
        return self._ask("round_status", p.RoundStatus(round=round_id), p.RoundView)

    def round_list(self) -> list[p.RoundView]:
        return self._ask("round_list", p.RoundList(), p.RoundListReply).rounds

    def trial_start(self, round_id: str, owner: str, patches: list[str]) -> p.JobRef:
        ask = p.TrialStart(round=round_id, owner=owner, patches=patches)
        return self._ask("trial_start", ask, p.JobRef)

    def final_start(self, round_id: str, owner: str, *, allow_unsealed: bool = False) -> p.JobRef:
        ask = p.FinalStart(round=round_id, owner=owner, allow_unsealed=allow_unsealed)
        return self._ask("final_start", ask, p.JobRef)

    def forcing_check(self, round_id: str, owner: str, trial: str) -> p.JobRef:
        ask = p.ForcingCheck(round=round_id, owner=owner, trial=trial)
        return self._ask("forcing_check", ask, p.JobRef)

    def job_status(self, job: str, wait_s: float = 0.0, seen: int = -1) -> p.JobView:
        """Return a job's state; waits up to ``wait_s`` <= 60 for a version after ``seen``."""
        return self._ask("job_status", p.JobStatus(job=job, wait_s=wait_s, seen=seen), p.JobView)

    def job_cancel(self, job: str) -> p.JobView:
        return self._ask("job_cancel", p.JobCancel(job=job), p.JobView)

    def ledger_verify(self) -> p.LedgerReply:
        """Check the ledger, also against the newest head that this client saw."""
        expect = self.head if self.head.seq >= 0 else None
        return self._ask("ledger_verify", p.LedgerVerify(expect=expect), p.LedgerReply)

    def receipt_check(self, seq: int, hash_: str, kind: str) -> p.ReceiptReply:
        ask = p.ReceiptCheck(seq=seq, hash=hash_, kind=kind)
        return self._ask("receipt_check", ask, p.ReceiptReply)

    def _ask(self, method: str, params: BaseModel, model: type[Model]) -> Model:
        return model.model_validate(self.call(method, params.model_dump(mode="json")))

    def call(self, method: str, params: Mapping[str, Any]) -> dict[str, Any]:
        """Send one request and return its result; raises what the controller reports."""
        with self._lock:
            number = next(self._ids)
            line = json.dumps({"id": number, "method": method, "params": dict(params)})
            try:
                self._socket.sendall(line.encode() + b"\n")
                answer = self._lines.readline()
            except OSError as error:
                raise EngineFailure(f"The controller at {self.path} is gone: {error}.") from error
            if not answer:
                raise EngineFailure(f"The controller at {self.path} ended without an answer.")
            reply = p.Reply.model_validate_json(answer)
            if reply.result is not None:
                self._witness(reply.head)
        if reply.error is not None:
            raise _as_error(reply.error)
        if reply.id != number or reply.result is None:
            raise EngineFailure(f"The controller answered request {reply.id} instead of {number}.")
        return reply.result

    def _witness(self, head: p.HeadBody) -> None:
        if head.seq < self.head.seq:
            raise CheckFailed(
                f"The ledger went back from record {self.head.seq} to {head.seq}.",
                hint="Run `specpilot ledger verify`.",
            )
        if head.seq == self.head.seq >= 0 and head.hash != self.head.hash:
            raise CheckFailed(
                f"The ledger's record {head.seq} was replaced by another one.",
                hint="Run `specpilot ledger verify`.",
            )
        self.head = head
        with _heads_lock:
            if head.seq > _heads.get(self.path, _NOTHING_SEEN).seq:
                _heads[self.path] = head


def ensure_running(state: Path | None = None, *, idle_exit_s: float = 900.0) -> ControllerClient:
    """Return a client of the controller of ``state`` (default: ``home()``); start one if needed.

    The controller runs in a session of its own and ends after ``idle_exit_s`` seconds in which
    nobody asked anything. Where ``SPECPILOT_CONTROLLER`` names the socket of a controller that
    runs as a service, that one is used and none is started. Raises ``EngineFailure`` with the end
    of its log if it does not start.
    """
    if service := os.environ.get("SPECPILOT_CONTROLLER"):
        return ControllerClient(Path(service))
    state = state or home()
    path = socket_path(state)
    if (client := _reach(path)) is not None:
        return client
    log = state / "controller" / "controller.log"
    log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    command = [sys.executable, "-P", "-m", "specpilot.harness.controller"]
    command += ["--home", str(state), "--idle-exit-s", str(idle_exit_s)]
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd="/",
            env={name: os.environ[name] for name in _PASSED_ON if name in os.environ},
            start_new_session=True,
        )
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if (client := _reach(path)) is not None:
            return client
        if process.poll() not in (None, 0, EXIT_TAKEN):
            break
        time.sleep(0.05)
    tail = log.read_text(encoding="utf-8", errors="replace")[-1000:].strip()
    raise EngineFailure(f"The controller did not start. Its log ({log}) ends:\n{tail}")


def _reach(path: Path) -> ControllerClient | None:
    """Return a client of a controller that answers; one that is just ending does not."""
    client = None
    try:
        client = ControllerClient(path)
        client.hello()
    except EngineFailure:
        if client is not None:
            client.close()
        return None
    return client


_PASSED_ON = (
    "CUDA_HOME",
    "CUDA_VISIBLE_DEVICES",
    "HOME",
    "LANG",
    "LD_LIBRARY_PATH",
    "PATH",
    "TMPDIR",
)


def _as_error(body: p.ErrorBody) -> SpecPilotError:
    kind = getattr(specpilot.errors, body.type, SpecPilotError)
    error: SpecPilotError = kind(body.message)
    error.hint = body.hint
    return error
