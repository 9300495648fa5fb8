"""The errors of SpecPilot: one base class, few kinds.

A message says what was wrong, with which value, and what to do next. ``hint`` carries the last
part when a caller wants to show it apart.
"""

__all__ = [
    "CheckFailed",
    "Conflict",
    "EngineFailure",
    "InvalidInput",
    "NotFound",
    "SpecPilotError",
    "Unsupported",
]


class SpecPilotError(Exception):
    """Base of every error that SpecPilot raises on purpose."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(f"{message} {hint}".rstrip())
        self.hint = hint


class InvalidInput(SpecPilotError):
    """A value that a caller gave is malformed, out of range or contradicts another one."""


class NotFound(SpecPilotError):
    """A named thing (deployment, mechanism, GPU, entry, round, job) does not exist."""


class Unsupported(SpecPilotError):
    """The request is well formed, but this engine, architecture or machine cannot do it."""


class Conflict(SpecPilotError):
    """The request lost a race or meets a resource in use: revision, port, open round."""


class EngineFailure(SpecPilotError):
    """A system under test did not start, died, hung or answered with something unusable."""


class CheckFailed(SpecPilotError):
    """A check of honesty did not pass or could not run: receipt, ledger, audit, floor."""
