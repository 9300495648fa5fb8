"""The numbers that an audit is judged by, written to the ledger before the round."""

from dataclasses import asdict, dataclass
from typing import Any

from specpilot.errors import InvalidInput
from specpilot.harness.token_forcing.events import AUDIT_LIMIT
from specpilot.harness.token_forcing.intervals import AFFECTED_RATE
from specpilot.harness.token_forcing.rules import MINIMUM_REQUESTS

__all__ = ["Policy"]


@dataclass(frozen=True, slots=True)
class Policy:
    """Limits and levels of both rules.

    ``rate_limit``: allowed mismatch rate above stock. ``rate_level``: nominal one-sided level of
    its bound (0.975 covers about 95 %). ``affected_rate``: see ``zero_bound``. ``event_level``:
    of the unexplained events after the audit. ``stock_rate_limit``: a stock arm that mismatches
    its own scorer more often voids the audit. ``minimum_requests``: 30 at least.
    """

    rate_limit: float = 0.005
    rate_level: float = 0.975
    affected_rate: float = AFFECTED_RATE
    event_level: float = 0.005
    audit_limit: int = AUDIT_LIMIT
    stock_rate_limit: float = 0.03
    minimum_requests: int = MINIMUM_REQUESTS

    def __post_init__(self) -> None:
        shares = (self.rate_limit, self.affected_rate, self.event_level, self.stock_rate_limit)
        if not all(0 < share < 1 for share in shares) or not 0.5 < self.rate_level < 1:
            raise InvalidInput(f"Not a policy: limits and levels are shares of one ({self}).")
        if self.minimum_requests < MINIMUM_REQUESTS:
            raise InvalidInput(
                f"minimum_requests is {self.minimum_requests}, at least {MINIMUM_REQUESTS} is "
                "needed: below it no interval has its coverage."
            )

    def rate(self) -> dict[str, Any]:
        """The arguments of ``rate_rule``."""
        return {
            "limit": self.rate_limit,
            "level": self.rate_level,
            "affected_rate": self.affected_rate,
            "minimum": self.minimum_requests,
        }

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
