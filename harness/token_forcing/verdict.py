"""The verdict of an audit: frozen, canonical as JSON, bound to the audited tokens by hash."""

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

from specpilot.harness.token_forcing.calibration import Calibration
from specpilot.harness.token_forcing.failures import FailureKind
from specpilot.harness.token_forcing.policy import Policy
from specpilot.harness.token_forcing.rules import EventVerdict, RateVerdict
from specpilot.harness.token_forcing.selftest import SelfTest

__all__ = ["Mismatch", "Status", "Verdict"]

Status = Literal["pass", "fail", "not_enough", "void"]


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A mismatch on an open prompt: the token emitted, the one stock puts first, their margin."""

    request: int
    position: int
    token: int
    stock_token: int
    margin: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """What an audit found about a system's very tokens.

    ``pass``: both rules hold and the self-test worked. ``fail``: a rule is broken, or the input
    could not be judged (``failure`` says which kind). ``not_enough``: too few requests.
    ``void``: the self-test did not work, so neither answer would mean anything.
    ``identical`` counts requests whose tokens equal stock's. ``token_sha256`` and
    ``stock_token_sha256`` are ``token_digest`` of the audited arms. ``first_mismatches`` is empty
    unless the prompts are open.
    """

    status: Status
    reasons: tuple[str, ...]
    failure: FailureKind | None
    requests: int
    tokens: int
    identical: int
    token_sha256: str
    stock_token_sha256: str
    rate: RateVerdict | None
    events: EventVerdict | None
    self_test: SelfTest | None
    calibration: Calibration
    policy: Policy
    first_mismatches: tuple[Mismatch, ...] = ()

    @property
    def coverage(self) -> float | None:
        """True coverage of the rate bound at this count; None under the smallest of the table."""
        return self.rate.coverage if self.rate else None

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers, for the ledger and for tools."""
        return {**asdict(self), "coverage": self.coverage}

    def canonical(self) -> str:
        """Canonical JSON: sorted keys, no spaces, no NaN. The same verdict is the same string."""
        return json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"), allow_nan=False)
