"""Tools of a round: open it, try patches, run the sealed final, follow jobs, check the ledger.

The controller decides; these pass its answers on. When a final is seen finished, what the round
learned is written to memory.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from specpilot.errors import SpecPilotError
from specpilot.harness.controller.client import ControllerClient, ensure_running
from specpilot.harness.controller.protocol import FinalView, LedgerReply, RoundView, TrialView
from specpilot.harness.rounds import work
from specpilot.harness.rounds.folder import RoundFolder, open_round
from specpilot.harness.rounds.learn import learn
from specpilot.mcp_server.tools_deployments import DeploymentId

__all__ = [
    "final_start",
    "forcing_check",
    "job_cancel",
    "job_status",
    "ledger_verify",
    "round_start",
    "round_status",
    "trial_start",
]

RoundId = Annotated[str, Field(description="id from round_start", max_length=64)]
JobId = Annotated[str, Field(description="id from the reply that started the job", max_length=100)]


class RoundStarted(BaseModel):
    round: str
    folder: str = Field(description="patches and the report lie here")
    isolation: str
    next: str


class Started(BaseModel):
    job: str = Field(description="follow it with job_status")
    trial: str | None = None


class JobReply(BaseModel):
    job: str
    kind: str
    state: Literal["queued", "running", "done", "failed", "cancelled", "interrupted"]
    done: int
    planned: int
    message: str
    result: dict[str, Any] | None = None
    learned: list[str] = Field(default=[], description="memory entries written after a final")


class RoundReply(BaseModel):
    round: str
    deployment: str
    state: Literal["open", "closed"]
    stock: dict[str, Any] = Field(description="as the controller chose it on this machine")
    best: list[str]
    trials: list[TrialView]
    final: FinalView | None
    sealed_left: int
    noise_percent: float | None
    isolation: str
    next: str


def round_start(deployment: DeploymentId) -> RoundStarted:
    """Open a round on a deployment: sealed prompt sets are committed, trials can begin."""
    view, folder = open_round(deployment)
    with ensure_running() as controller:
        isolation = _isolation(controller)
    return RoundStarted(
        round=view.round,
        folder=str(folder.path),
        isolation=isolation,
        next=view.next,
    )


def round_status(round: RoundId) -> RoundReply:
    """Say where a round stands: best stack, trials, final, and what to do next."""
    with ensure_running() as controller:
        view = controller.round_status(round)
        isolation = _isolation(controller)
    names = set(RoundReply.model_fields) - {"isolation"}
    fields = {name: getattr(view, name) for name in names}
    return RoundReply.model_validate(fields | {"isolation": isolation})


def trial_start(
    round: RoundId,
    patches: Annotated[
        list[str],
        Field(description="names from mechanism_apply, the whole stack in order", min_length=1),
    ],
) -> Started:
    """Measure a patch, or a stack of patches, against the round's current best. A job."""
    folder = RoundFolder.of(round)
    with ensure_running() as controller:
        started = controller.trial_start(round, folder.owner, folder.patch_folders(patches))
    return Started(job=started.job, trial=started.trial)


def forcing_check(
    round: RoundId,
    trial: Annotated[str, Field(description="a finished trial, such as t01")],
) -> Started:
    """Audit the very tokens that a trial timed against stock, losslessness only. A job."""
    folder = RoundFolder.of(round)
    with ensure_running() as controller:
        started = controller.forcing_check(round, folder.owner, trial)
    return Started(job=started.job, trial=started.trial)


def final_start(
    round: RoundId,
    allow_unsealed: Annotated[
        bool, Field(description="run even where isolation allows no sealed final; it then says so")
    ] = False,
) -> Started:
    """Run the round's one sealed final: best stack against stock on unseen prompts. A job."""
    folder = RoundFolder.of(round)
    with ensure_running() as controller:
        started = controller.final_start(round, folder.owner, allow_unsealed=allow_unsealed)
    return Started(job=started.job)


def job_status(
    job: JobId,
    wait_s: Annotated[float, Field(ge=0, le=50, description="wait this long for the end")] = 0,
) -> JobReply:
    """Follow a job: waits up to wait_s seconds, then says how far it is or what came out."""
    if work.is_work(job):
        return _of_work(work.status(job, wait_s))
    with ensure_running() as controller:
        view = controller.job_status(job)
        if view.state in ("queued", "running") and wait_s:
            view = controller.job_status(job, wait_s, view.version)
        finished = controller.round_status(view.round) if _final_done(view) else None
    message = view.error.message if view.error else view.message
    learned: list[str] = []
    if finished is not None:
        try:
            learned = _learn(finished)
        except SpecPilotError as error:  # the final stands all the same
            message += f"; memory was not written: {error}"
    return JobReply(
        job=view.job,
        kind=view.kind,
        state=view.state,
        done=view.done,
        planned=view.planned,
        message=message,
        result=view.result,
        learned=learned,
    )


def job_cancel(job: JobId) -> JobReply:
    """Stop a job and everything that it started. What it measured so far is dropped."""
    if work.is_work(job):
        return _of_work(work.cancel(job))
    with ensure_running() as controller:
        view = controller.job_cancel(job)
    return JobReply(
        job=view.job,
        kind=view.kind,
        state=view.state,
        done=view.done,
        planned=view.planned,
        message=view.message,
    )


def ledger_verify() -> LedgerReply:
    """Check the ledger: hash chain, signatures, anchor; explains the first bad record."""
    with ensure_running() as controller:
        return controller.ledger_verify()


def _isolation(controller: ControllerClient) -> str:
    found = controller.hello().isolation
    return f"tier {found.tier}: {found.title}"


def _final_done(view: Any) -> bool:
    return bool(view.kind == "final" and view.state == "done")


def _learn(view: RoundView) -> list[str]:
    written = learn(view)
    return [*written.revised, *written.proposed]


def _of_work(found: work.Work) -> JobReply:
    return JobReply(
        job=found.job,
        kind=found.kind,
        state=found.state,
        done=found.done,
        planned=found.planned,
        message=found.message,
        result=dict(found.result) if found.result is not None else None,
    )
