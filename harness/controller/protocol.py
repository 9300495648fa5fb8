"""What clients and the controller say to each other: one JSON object a line, typed.

A request names a method and its parameters; the reply carries the result or an error, and always
the ledger's head, so that every client holds a witness of what the ledger was.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = [
    "PROTOCOL",
    "ErrorBody",
    "FinalStart",
    "FinalView",
    "ForcingCheck",
    "HeadBody",
    "Hello",
    "HelloReply",
    "IsolationBody",
    "JobCancel",
    "JobRef",
    "JobState",
    "JobStatus",
    "JobView",
    "LedgerReply",
    "LedgerVerify",
    "ReceiptBody",
    "ReceiptCheck",
    "ReceiptReply",
    "Reply",
    "Request",
    "RoundList",
    "RoundListReply",
    "RoundOpen",
    "RoundStatus",
    "RoundView",
    "TrialStart",
    "TrialView",
    "UseBody",
]

PROTOCOL = 1

Name = Annotated[str, Field(min_length=1, max_length=200)]
Owner = Annotated[str, Field(min_length=1, max_length=200)]


class Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Request(Message):
    """One line from a client. ``params`` are those of the method's message."""

    id: int
    method: str
    params: dict[str, Any] = {}


class ErrorBody(Message):
    """An error: ``type`` is the name of its class in ``specpilot.errors``."""

    type: str
    message: str
    hint: str = ""


class HeadBody(Message):
    """The ledger's last record when the reply was written; seq -1 in an empty ledger."""

    seq: int
    hash: str


class Reply(Message):
    id: int
    result: dict[str, Any] | None = None
    error: ErrorBody | None = None
    head: HeadBody


class IsolationBody(Message):
    """The tier of the systems under test, and why no higher one is available here."""

    tier: int
    title: str
    why_not_higher: dict[str, str] = {}


class Hello(Message):
    """Who is there?"""


class HelloReply(Message):
    version: str
    protocol: int
    pid: int
    home: str
    ledger: str
    isolation: IsolationBody


class RoundOpen(Message):
    """Open a round on a deployment. ``owner`` is a name that the client keeps to itself."""

    deployment: Name
    owner: Owner


class RoundStatus(Message):
    round: Name


class RoundList(Message):
    """All rounds of this controller, oldest first."""


class ReceiptBody(Message):
    """A record of the ledger, by number, hash and kind."""

    seq: int
    hash: str
    kind: str


class UseBody(Message):
    """A mechanism of a measured stack; ``added``: the compared system did not have its patch."""

    id: str
    params: dict[str, str | int | float | bool] = {}
    added: bool


class TrialView(Message):
    """What an agent may know of a trial. ``lower_bound`` and ``threshold`` are gains in percent,
    rounded to 0.1."""

    trial: str
    verdict: Literal["promoted", "rejected", "failed"]
    reason: str
    patches: list[str]
    uses: list[UseBody] = []
    gain: float | None = None
    lower_bound: float | None = None
    threshold: float | None = None
    diverged: bool | None = None
    against: str
    tokens_per_s: dict[str, float | None] = {}
    tokens_per_pass: dict[str, float | None] = {}
    forcing: dict[str, Any] | None = None
    confirmed: bool = False
    isolation: IsolationBody
    receipt: ReceiptBody


class FinalView(Message):
    """The final: everything that a closing table needs, and nothing about single prompts.

    ``tokens_per_s`` and ``tokens_per_pass`` have the keys ``ar``, ``stock`` and ``final``;
    ``speedups`` maps ``final_over_stock``, ``final_over_ar`` and ``stock_over_ar`` to value, low
    and high (two-sided 95 %). ``sealed`` is false where isolation allowed no sealed final.
    """

    round: str
    verdict: Literal["promoted", "rejected", "failed"]
    reason: str
    set: str
    sealed: bool
    patches: list[str]
    uses: list[UseBody] = []
    requests: int | None = None
    tokens: int | None = None
    lower_bound: float | None = None
    threshold: float | None = None
    diverged: bool | None = None
    tokens_per_s: dict[str, float | None] = {}
    tokens_per_pass: dict[str, float | None] = {}
    speedups: dict[str, dict[str, float]] = {}
    forcing: dict[str, Any] | None = None
    token_sha256: str | None = None
    isolation: IsolationBody
    receipt: ReceiptBody


class RoundView(Message):
    """Where a round stands. ``stock`` holds stock's settings as chosen, ``best`` names the promoted
    stack's patches, ``next`` says what to do."""

    round: str
    deployment: str
    state: Literal["open", "closed"]
    stock: dict[str, Any] = {}
    best: list[str]
    best_folders: list[str]
    best_trial: str | None
    trials: list[TrialView]
    final: FinalView | None
    sealed_left: int
    noise_percent: float | None
    next: str
    receipt: ReceiptBody


class RoundListReply(Message):
    rounds: list[RoundView]


class TrialStart(Message):
    """Measure a stack of patch directories, in order, against the round's current best.

    The stack is the whole candidate: to build on the current best, put its patches first.
    """

    round: Name
    owner: Owner
    patches: Annotated[list[str], Field(min_length=1, max_length=20)]


class FinalStart(Message):
    """Run the round's sealed final. ``allow_unsealed`` lets it run at isolation tier 0."""

    round: Name
    owner: Owner
    allow_unsealed: bool = False


class ForcingCheck(Message):
    """Audit the tokens that a finished trial timed."""

    round: Name
    owner: Owner
    trial: Name


class JobRef(Message):
    """A job that was started; ``trial`` names the trial that it is, if it is one."""

    job: str
    trial: str | None = None


JobState = Literal["queued", "running", "done", "failed", "cancelled", "interrupted"]


class JobStatus(Message):
    """Where a job stands; waits up to ``wait_s`` seconds for a change after ``seen``."""

    job: Name
    wait_s: Annotated[float, Field(ge=0, le=60)] = 0.0
    seen: int = -1


class JobView(Message):
    """A job. ``version`` grows with every change; ``done`` of ``planned`` count steps of what
    ``message`` says."""

    job: str
    kind: Literal["trial", "final", "audit"]
    round: str
    state: JobState
    version: int
    message: str
    done: int
    planned: int
    result: dict[str, Any] | None = None
    error: ErrorBody | None = None


class JobCancel(Message):
    job: Name


class LedgerVerify(Message):
    """Check the whole ledger; ``expect`` is a head that the client saw earlier."""

    expect: HeadBody | None = None


class LedgerReply(Message):
    path: str
    ok: bool
    records: int
    head: HeadBody
    problem: str | None
    problem_kind: str | None
    problem_line: int | None


class ReceiptCheck(Message):
    """Whether the ledger holds this receipt; the reply tells what it says."""

    seq: int
    hash: str
    kind: str


class ReceiptReply(Message):
    genuine: bool
    deployment: str | None = None
    engine: str | None = None
    view: dict[str, Any] | None = None
