"""The controller's service: the only one that starts systems, sees prompts, keeps time, writes.

One process, one Unix socket, typed messages. Everything that decides lies here or below, so that a
client (the MCP server, a shell) can ask and wait and nothing else. State is the ledger; the job
table only says how far a job got.
"""

import fcntl
import hashlib
import hmac
import os
import secrets
import shutil
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

import specpilot
from specpilot.errors import CheckFailed, Conflict, InvalidInput, NotFound, Unsupported
from specpilot.harness import patches
from specpilot.harness.controller import protocol as p
from specpilot.harness.controller.design import default_design
from specpilot.harness.controller.isolation import Tier, available_tier
from specpilot.harness.controller.jobs import JobKind, Jobs, error_body
from specpilot.harness.controller.lab import Lab, Work, as_deployment, prompt_book
from specpilot.harness.controller.ledger import Head, Ledger, Record
from specpilot.harness.controller.models import stamp
from specpilot.harness.controller.paths import short_path
from specpilot.harness.controller.rounds import SEALED_SETS, Rounds
from specpilot.harness.controller.snapshots import Snapshots
from specpilot.harness.controller.stock import check_stock
from specpilot.harness.controller.telemetry import descendants
from specpilot.harness.controller.views import (
    audit_view,
    final_view,
    record_view,
    round_view,
    trial_view,
)
from specpilot.harness.deployments import registry
from specpilot.harness.deployments.health import check_health
from specpilot.types import ReceiptRef

__all__ = ["Server", "Service"]

MAX_LINE_BYTES = 1 << 20
Params = TypeVar("Params", bound=BaseModel)


class Service:
    """The methods of the protocol on one state directory.

    Raises ``Conflict`` if another controller has that directory.
    """

    def __init__(self, home: Path) -> None:
        self.home = home
        self.folder = home / "controller"
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = _hold(self.folder / "lock")
        key = _key(self.folder / "key")
        self.ledger = Ledger(home / "ledger" / "ledger.jsonl", _derive(key, "ledger"))
        self.rounds = Rounds(self.ledger)
        self.jobs = Jobs(self.folder / "jobs.sqlite")
        tier, self._why_not_higher = self._find_tier()
        self.lab = Lab(
            ledger=self.ledger,
            rounds=self.rounds,
            snapshots=Snapshots(self.folder / "patches"),
            secret=_derive(key, "prompts"),
            tier=tier,
            folder=self.folder,
        )
        self._methods: dict[str, Callable[[Mapping[str, Any]], BaseModel]] = {
            "hello": self._method(p.Hello, self.hello),
            "round_open": self._method(p.RoundOpen, self.round_open),
            "round_status": self._method(p.RoundStatus, self.round_status),
            "round_list": self._method(p.RoundList, self.round_list),
            "trial_start": self._method(p.TrialStart, self.trial_start),
            "final_start": self._method(p.FinalStart, self.final_start),
            "forcing_check": self._method(p.ForcingCheck, self.forcing_check),
            "job_status": self._method(p.JobStatus, self.job_status),
            "job_cancel": self._method(p.JobCancel, self.job_cancel),
            "ledger_verify": self._method(p.LedgerVerify, self.ledger_verify),
            "receipt_check": self._method(p.ReceiptCheck, self.receipt_check),
        }
        self._starting = threading.Lock()
        for design in self.rounds.unfinished():
            self._abort(design.body, "The controller ended in the middle of it.")

    def handle(self, line: bytes) -> bytes:
        """Answer one request line with one reply line. Never raises."""
        number = 0
        result, error = None, None
        try:
            request = p.Request.model_validate_json(line)
            number = request.id
            if request.method not in self._methods:
                raise NotFound(
                    f"There is no method {request.method!r}.",
                    hint=f"Methods: {', '.join(sorted(self._methods))}.",
                )
            result = self._methods[request.method](request.params).model_dump(mode="json")
        except ValidationError as wrong:
            error = error_body(InvalidInput(f"Not a request: {_first(wrong)}."))
        except Exception as failure:  # whatever happens, the client gets an answer
            error = error_body(failure)
        head = self.ledger.head
        reply = p.Reply(
            id=number, result=result, error=error, head=p.HeadBody(seq=head.seq, hash=head.hash)
        )
        return reply.model_dump_json().encode() + b"\n"

    def close(self) -> None:
        self.jobs.close()
        self.ledger.anchor()
        self.ledger.close()
        os.close(self._lock)

    def hello(self, _: p.Hello) -> p.HelloReply:
        return p.HelloReply(
            version=specpilot.__version__,
            protocol=p.PROTOCOL,
            pid=os.getpid(),
            home=str(self.home),
            ledger=str(self.ledger.path),
            isolation=p.IsolationBody(
                tier=int(self.lab.tier),
                title=self.lab.tier.title,
                why_not_higher=dict(self._why_not_higher),
            ),
        )

    def round_open(self, ask: p.RoundOpen) -> p.RoundView:
        deployment = registry.load(ask.deployment)
        if problems := check_health(deployment).problems:
            raise InvalidInput(f"{deployment.id} cannot be measured: {problems[0]}")
        check_stock(deployment)
        if deployment.regime.temperature > 0:
            raise Unsupported(
                f"{deployment.id} samples at temperature {deployment.regime.temperature:g}; rounds "
                "audit greedy text only.",
                hint="Register it at temperature 0; token_forcing.equivalence tests sampled text.",
            )
        round_id = self.rounds.new_id()
        size = default_design(deployment, "final", 0).prompts_needed
        sealed = prompt_book(deployment, self.lab.secret, round_id).commit(SEALED_SETS, size)
        self.ledger.append(
            "round_open",
            {
                "round": round_id,
                "owner": ask.owner,
                "deployment": asdict(deployment),
                "models": stamp(deployment),
                "sealed": [asdict(each) for each in sealed],
                "isolation": self.lab.isolation(),
            },
        )
        self.ledger.anchor()
        return self._round_view(round_id)

    def round_status(self, ask: p.RoundStatus) -> p.RoundView:
        return self._round_view(ask.round)

    def round_list(self, _: p.RoundList) -> p.RoundListReply:
        return p.RoundListReply(rounds=[self._round_view(each.id) for each in self.rounds.all()])

    def trial_start(self, ask: p.TrialStart) -> p.JobRef:
        with self._starting:
            round_ = self.rounds.get(ask.round)
            round_.check_open(ask.owner)
            stack = [self.lab.snapshots.take(Path(folder)) for folder in ask.patches]
            if tuple(patch.sha256 for patch in stack) == round_.best:
                raise Conflict("This stack is the round's current best already.")
            patches.resolve(as_deployment(round_.opened.body["deployment"]), stack)
            trial = f"t{self.jobs.count('trial', ask.round) + 1:02d}"
            job = self._start("trial", ask.round, lambda work: work.trial(trial, stack))
        return p.JobRef(job=job, trial=trial)

    def final_start(self, ask: p.FinalStart) -> p.JobRef:
        with self._starting:
            round_ = self.rounds.get(ask.round)
            round_.check_open(ask.owner)
            if active := self.jobs.active(ask.round):
                raise Conflict(
                    f"Round {ask.round} is busy with the {active[0].kind} {active[0].job}.",
                    hint="Wait for it, or cancel it.",
                )
            round_.next_sealed()
            self.lab.check_final(allow_unsealed=ask.allow_unsealed)
            allow = ask.allow_unsealed
            job = self._start("final", ask.round, lambda work: work.final(allow_unsealed=allow))
        return p.JobRef(job=job)

    def forcing_check(self, ask: p.ForcingCheck) -> p.JobRef:
        round_ = self.rounds.get(ask.round)
        if ask.owner != round_.owner:
            round_.check_open(ask.owner)
        job = self._start("audit", ask.round, lambda work: work.audit(ask.trial))
        return p.JobRef(job=job, trial=ask.trial)

    def job_status(self, ask: p.JobStatus) -> p.JobView:
        return self.jobs.get(ask.job, ask.wait_s, ask.seen)

    def job_cancel(self, ask: p.JobCancel) -> p.JobView:
        return self.jobs.cancel(ask.job)

    def ledger_verify(self, ask: p.LedgerVerify) -> p.LedgerReply:
        expected = [Head(ask.expect.seq, ask.expect.hash)] if ask.expect else []
        found = self.ledger.verify(*expected)
        problem = found.problem
        return p.LedgerReply(
            path=str(found.path),
            ok=found.ok,
            records=found.records,
            head=p.HeadBody(seq=found.head.seq, hash=found.head.hash),
            problem=problem.explanation if problem else None,
            problem_kind=problem.kind if problem else None,
            problem_line=problem.line if problem else None,
        )

    def receipt_check(self, ask: p.ReceiptCheck) -> p.ReceiptReply:
        try:
            record = self.ledger.find(ReceiptRef(ask.seq, ask.hash, ask.kind))
        except NotFound:
            return p.ReceiptReply(genuine=False)
        return p.ReceiptReply(
            genuine=True,
            deployment=record.body.get("deployment"),
            engine=record.body.get("engine"),
            view=record_view(record),
        )

    def _start(self, kind: JobKind, round_id: str, action: Callable[[Work], Record]) -> str:
        def make(
            job: str, cancelled: threading.Event, progress: Callable[[str, int, int], None]
        ) -> _Task:
            work = Work(self.lab, self.rounds.get(round_id), job, cancelled, progress)
            return _Task(
                work, action, lambda reason: self._abort({"round": round_id, "job": job}, reason)
            )

        return self.jobs.start(kind, round_id, make)

    def _abort(self, body: Mapping[str, Any], reason: str) -> None:
        self.ledger.append(
            "aborted", {"round": body.get("round"), "job": body.get("job"), "reason": reason}
        )

    def _round_view(self, round_id: str) -> p.RoundView:
        return round_view(self.rounds.get(round_id), self.lab.snapshots)

    def _find_tier(self) -> tuple[Tier, Mapping[str, str]]:
        secrets_ = [self.folder, self.folder / "key", self.ledger.path, self.ledger.path.parent]
        with tempfile.TemporaryDirectory(prefix="specpilot-probe-") as work:
            return available_tier(secrets_, Path(work))

    @staticmethod
    def _method(
        model: type[Params], method: Callable[[Params], BaseModel]
    ) -> Callable[[Mapping[str, Any]], BaseModel]:
        def call(params: Mapping[str, Any]) -> BaseModel:
            try:
                asked = model.model_validate(dict(params))
            except ValidationError as error:
                raise InvalidInput(f"{model.__name__}: {_first(error)}.") from error
            return method(asked)

        return call


class _Task:
    """A job's work with its end written to the ledger, whatever it is."""

    def __init__(
        self, work: Work, action: Callable[[Work], Record], abort: Callable[[str], None]
    ) -> None:
        self._work = work
        self._action = action
        self._abort = abort

    def run(self) -> Mapping[str, Any]:
        try:
            record = self._action(self._work)
        except BaseException as error:
            self._abort(f"{type(error).__name__}: {error}")
            raise
        match record.kind:
            case "trial":
                return trial_view(record).model_dump(mode="json")
            case "final":
                return final_view(record).model_dump(mode="json")
        return audit_view(record)

    def kill(self) -> None:
        self._work.kill()


class Server:
    """Serves a ``Service`` on a Unix socket, a thread for each client.

    Only the controller's user may connect, and the members of ``group`` if one is given.
    """

    def __init__(
        self,
        service: Service,
        path: Path,
        idle_exit_s: float | None = None,
        group: str | None = None,
    ) -> None:
        self.path = path
        self._service = service
        self._idle_exit_s = idle_exit_s
        self._stopping = threading.Event()
        self._clients = 0
        self._last_used = time.monotonic()
        self._count = threading.Lock()
        path.unlink(missing_ok=True)  # the lock says that no other controller serves it
        self._socket = socket.socket(socket.AF_UNIX)
        with short_path(path) as name:
            self._socket.bind(name)
        path.chmod(0o600)
        if group is not None:
            shutil.chown(path, group=group)
            path.chmod(0o660)
        self._socket.listen(64)
        self._socket.settimeout(0.5)

    def serve(self) -> None:
        """Serve until ``stop``, or until nobody asked anything for ``idle_exit_s``."""
        while not self._stopping.is_set():
            try:
                connection, _ = self._socket.accept()
            except TimeoutError:
                if self._idle():
                    break
                continue
            except OSError:
                break
            threading.Thread(target=self._client, args=(connection,), daemon=True).start()
        self._socket.close()
        self.path.unlink(missing_ok=True)

    def stop(self) -> None:
        self._stopping.set()

    def _idle(self) -> bool:
        if self._idle_exit_s is None or self._service.jobs.busy():
            return False
        with self._count:
            return not self._clients and time.monotonic() - self._last_used > self._idle_exit_s

    def _client(self, connection: socket.socket) -> None:
        with self._count:
            self._clients += 1
        try:
            with connection, connection.makefile("rb") as lines:
                connection.settimeout(None)
                if refusal := _refusal(connection):
                    connection.sendall(refusal)
                    return
                while line := lines.readline(MAX_LINE_BYTES):
                    if not line.endswith(b"\n"):
                        return
                    connection.sendall(self._service.handle(line))
        except OSError:
            return
        finally:
            with self._count:
                self._clients -= 1
                self._last_used = time.monotonic()


def _refusal(connection: socket.socket) -> bytes | None:
    """Refuse a client that is a system under test: Landlock does not govern Unix sockets."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid, _, _ = struct.unpack("3i", credentials)
    if pid not in descendants(os.getpid()):
        return None
    error = p.ErrorBody(type="Conflict", message="Systems under test have no access.")
    head = p.HeadBody(seq=-1, hash="")
    return p.Reply(id=0, error=error, head=head).model_dump_json().encode() + b"\n"


def _first(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in first["loc"]) or "the message"
    return f"{place}: {first['msg']} (got {str(first['input'])[:80]!r})"


def _hold(path: Path) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        raise Conflict(
            f"Another controller uses {path.parent}.", hint="Use it, or end it first."
        ) from error
    return fd


def _key(path: Path) -> bytes:
    """Read the controller's secret, made on first use; refuse one that others can read."""
    if not path.exists():
        fd, temporary = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(fd, "wb") as file:
            file.write(secrets.token_hex(32).encode())
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    if path.stat().st_mode & 0o077:
        raise CheckFailed(f"{path} can be read by others.", hint=f"Run chmod 600 {path}.")
    key = path.read_bytes().strip()
    if len(key) != 64:
        raise CheckFailed(f"{path} is damaged: it has {len(key)} characters instead of 64.")
    return key


def _derive(key: bytes, purpose: str) -> bytes:
    return hmac.new(key, purpose.encode(), hashlib.sha256).digest()
