"""How real kernels run: a step's time from its bytes and FLOPs with measured efficiencies.

A floor says what is possible, this says what to expect before anyone has run the system. The two
priors come from figures that were not fitted to what they predict: the bandwidth that the paper's
one-row GEMM reaches on an H100, and a constant latency for each kernel. Time on the host is not in
it: an engine that stalls between kernels is slower than predicted, and that is its overhead.
"""

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from specpilot.harness.cost_model.drafters import DrafterShape
from specpilot.harness.cost_model.floors import step_floor, total_ms
from specpilot.harness.cost_model.hardware import FLOP_EFFICIENCY, Efficiency, load_hardware
from specpilot.harness.cost_model.shapes import ModelShape
from specpilot.types import Hardware, Regime

__all__ = ["KernelPrior", "anchors", "expected_step_ms", "gpu_prior"]


@cache
def anchors() -> dict[str, float]:
    """Return the public figures by id (``anchors.json``, which names their sources)."""
    resource = files("specpilot.harness.cost_model") / "anchors.json"
    table: dict[str, Any] = json.loads(resource.read_text("utf-8"))
    return {row["id"]: float(row["value"]) for row in table["paper"] + table["kernel_priors"]}


@dataclass(frozen=True, slots=True)
class KernelPrior:
    """What kernels reach: shares of bandwidth and peak, and a constant latency for each (us)."""

    efficiency: Efficiency
    launch_us: float
    source: str


def gpu_prior() -> KernelPrior:
    """The prior for data-centre GPUs under a CUDA graph: 85 % of bandwidth, 3 us a kernel."""
    known = anchors()
    seconds = known["paper.h100.gemm_ms.rows1"] * 1e-3
    peak = load_hardware("H100-SXM5-80GB").bandwidth_gbs
    reached = known["paper.27b.ar_step_gb"] / seconds / peak
    return KernelPrior(
        Efficiency(bytes=reached, flops=FLOP_EFFICIENCY),
        known["launch_us"],
        "one-row GEMM on an H100 (SpecPilot paper); kernel latency of AIConfigurator",
    )


def expected_step_ms(
    shape: ModelShape,
    drafter: DrafterShape | None,
    hardware: Hardware,
    regime: Regime,
    rows: int,
    *,
    block: int = 0,
    prior: KernelPrior | None = None,
) -> float:
    """Return the expected time in ms of a step: a draft of ``block`` rows, a pass over ``rows``.

    Arguments and errors as ``step_floor``. ``prior`` None is ``gpu_prior``.
    """
    prior = prior or gpu_prior()
    parts = step_floor(
        shape, drafter, hardware, regime, rows, block=block, efficiency=prior.efficiency
    )
    kernels = shape.kernels
    if drafter is not None and block > 0:
        kernels += drafter.passes(block) * drafter.body.kernels
    return total_ms(parts) + kernels * prior.launch_us * 1e-3
