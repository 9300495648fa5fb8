"""Token forcing: is every emitted token the one that stock would emit, up to rounding?"""

from specpilot.harness.token_forcing.audit import audit
from specpilot.harness.token_forcing.calibration import Calibration, calibrate
from specpilot.harness.token_forcing.failures import AuditFailure
from specpilot.harness.token_forcing.margins import ids_digest, token_digest
from specpilot.harness.token_forcing.policy import Policy
from specpilot.harness.token_forcing.scorer import Scorer
from specpilot.harness.token_forcing.selftest import Fault
from specpilot.harness.token_forcing.verdict import Verdict

__all__ = [
    "AuditFailure",
    "Calibration",
    "Fault",
    "Policy",
    "Scorer",
    "Verdict",
    "audit",
    "calibrate",
    "ids_digest",
    "token_digest",
]
