"""The frozen types that all parts share. Standard library only."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Deployment", "Hardware", "ReceiptRef", "Regime", "StepShares"]


@dataclass(frozen=True, slots=True)
class Regime:
    """How a deployment is used: what makes a mechanism pay or not.

    ``requests`` is the number of requests in flight, lengths are in tokens, ``temperature`` 0
    means greedy.
    """

    requests: int = 1
    prompt_tokens: int = 128
    output_tokens: int = 128
    temperature: float = 0.0

    @property
    def serving(self) -> Literal["single", "batched"]:
        return "single" if self.requests == 1 else "batched"


@dataclass(frozen=True, slots=True)
class Hardware:
    """One accelerator or CPU. Peaks are dense, in TFLOP/s by dtype; bandwidth is in GB/s (1e9)."""

    name: str
    arch: str
    memory_gb: float
    bandwidth_gbs: float
    peak_tflops: Mapping[str, float]
    smem_per_block_kb: float | None = None
    confidence: str = "C"
    source: str = ""
    calibrated: bool = False


@dataclass(frozen=True, slots=True)
class Deployment:
    """What is optimised: engine, models, hardware, dtype, regime, workload and stock's arguments.

    ``target`` and ``drafter`` are absolute paths of Hugging Face folders. ``stock`` holds the
    engine settings of the stock arm (reference engine: ``speculation``, ``block``, ...).
    ``launch`` holds further launch arguments that both arms share.
    """

    id: str
    title: str
    engine: Literal["reference", "sglang", "mock"]
    target: str
    drafter: str | None
    drafter_kind: str | None
    hardware: str
    dtype: Literal["float32", "bfloat16", "float64"]
    regime: Regime
    workload: str
    stock: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    launch: Mapping[str, str | int | float | bool] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepShares:
    """Shares of a decode step's time by component. They sum to 1."""

    weights: float = 0.0
    lm_head: float = 0.0
    attention: float = 0.0
    gdn: float = 0.0
    drafter: float = 0.0
    overhead: float = 0.0


@dataclass(frozen=True, slots=True)
class ReceiptRef:
    """A record of the controller's ledger, by position and hash (sha256, hex)."""

    seq: int
    hash: str
    kind: str
