"""Where the time of a step goes, and what the best system could do.

Bytes and FLOPs of every component from a config, floors on a machine, the ceiling and the gap to
it, calibration of the machine at hand, what-if predictions, exact replay and the profiler. Nothing
here imports torch; calibration and the profiler do when they run.
"""

from specpilot.harness.cost_model.ceiling import AcceptanceProfile, Ceiling, Gap, ceiling, gap
from specpilot.harness.cost_model.drafters import DrafterShape, read_drafter
from specpilot.harness.cost_model.floors import (
    ComponentFloor,
    step_floor,
    step_shares,
    total_ms,
)
from specpilot.harness.cost_model.hardware import load_hardware
from specpilot.harness.cost_model.shapes import ModelShape

__all__ = [
    "AcceptanceProfile",
    "Ceiling",
    "ComponentFloor",
    "DrafterShape",
    "Gap",
    "ModelShape",
    "ceiling",
    "gap",
    "load_hardware",
    "read_drafter",
    "step_floor",
    "step_shares",
    "total_ms",
]
