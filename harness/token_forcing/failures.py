"""Why an audit could not be carried out: typed, so that no missing value turns into a pass."""

from typing import Literal, get_args

from specpilot.errors import CheckFailed

__all__ = ["AuditFailure", "FailureKind", "FAILURE_KINDS"]

FailureKind = Literal[
    "arms_differ",
    "empty_output",
    "ids_outside_vocabulary",
    "logprobs_inconsistent",
    "logprobs_missing",
    "logprobs_nan",
    "logprobs_positive",
    "manifest_differs",
    "prompt_differs",
    "scorer_failed",
    "tokens_differ",
    "truncated_output",
]
FAILURE_KINDS: tuple[str, ...] = get_args(FailureKind)


class AuditFailure(CheckFailed):
    """An audit met input that it cannot judge. ``kind`` says which; the audit then fails.

    ``request`` is the position of the request in its arm, or None where the failure is not about
    one request.
    """

    def __init__(
        self, kind: FailureKind, message: str, *, request: int | None = None, hint: str = ""
    ) -> None:
        super().__init__(message, hint=hint)
        self.kind: FailureKind = kind
        self.request = request
