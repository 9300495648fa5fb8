"""What this machine and this engine really take: bandwidth, matrix rate, time of a pass by rows.

Runs in a few seconds and is stored with the deployment, so that floors and predictions on a laptop
rest on measured figures. Data is random: zeros run faster (less switching, and sparsity tricks).
Imports torch only when it measures. It measures an engine through two callables, a live server
through its client; it knows neither's insides.
"""

import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from specpilot.errors import InvalidInput, NotFound, Unsupported
from specpilot.home import home
from specpilot.types import Hardware

__all__ = [
    "BLOCKS",
    "ROWS",
    "Calibration",
    "calibrate",
    "calibration_path",
    "load_calibration",
    "measure_hardware",
    "save_calibration",
    "time_call_ms",
]

ROWS = (1, 4, 8, 16, 24, 32, 64)
"""Rows of the exact pass that a calibration times, anchor included."""
BLOCKS = (4, 8, 16)
"""Rows of the drafter's block that a calibration times, anchor included."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """Measured figures of one deployment on one machine. Times are medians in ms.

    ``pass_ms`` is the exact pass by rows, ``draft_ms`` the draft by block; both for one request.
    """

    deployment: str
    hardware: Hardware
    dtype: str
    pass_ms: Mapping[int, float] = field(default_factory=dict)
    draft_ms: Mapping[int, float] = field(default_factory=dict)
    taken_at: str = ""
    machine: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)

    def pass_at(self, rows: int) -> float:
        """Time of an exact pass over ``rows`` rows, in ms, interpolated between measured rows.

        Raises ``InvalidInput`` beyond the largest measured row count: no extrapolation.
        """
        return _interpolate(self.pass_ms, rows, "rows")

    def draft_at(self, block: int) -> float:
        """Time of a draft of ``block`` rows, in ms, interpolated between measured blocks."""
        return _interpolate(self.draft_ms, block, "block")


def _interpolate(points: Mapping[int, float], at: int, name: str) -> float:
    if not points:
        raise InvalidInput(
            f"the calibration has no time by {name}.", hint="Calibrate with the engine running."
        )
    known = sorted(points)
    if not 1 <= at <= known[-1]:
        raise InvalidInput(
            f"field {name!r} is {at}, outside the calibrated 1 to {known[-1]}.",
            hint="Calibrate with more points: nothing is extrapolated.",
        )
    if at <= known[0]:
        return points[known[0]]
    for low, high in pairwise(known):
        if at <= high:
            share = (at - low) / (high - low)
            return points[low] + share * (points[high] - points[low])
    raise AssertionError("at lies within the known points")


def time_call_ms(
    call: Callable[[], object], *, seconds: float = 0.15, warm: int = 2, least: int = 3
) -> float:
    """Return the median time of ``call`` in ms over as many calls as ``seconds`` allow."""
    return statistics.median(_times_ms(call, seconds, warm, least))


def _times_ms(call: Callable[[], object], seconds: float, warm: int, least: int) -> list[float]:
    for _ in range(warm):
        call()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < least or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    return times


def measure_hardware(
    name: str = "cpu",
    *,
    device: str = "cpu",
    dtypes: Sequence[str] = ("float32", "bfloat16"),
    working_set_mb: float = 256.0,
    seconds: float = 0.3,
) -> Hardware:
    """Measure read/copy bandwidth (GB/s) and matrix rate (TFLOP/s by dtype) of a torch device.

    ``working_set_mb`` should be the deployment's weights: a model that fits into the last cache
    runs at the cache's bandwidth, and a floor taken at that of memory would lie above it.

    Raises ``Unsupported`` if torch is missing or cannot use the device.
    """
    try:
        import torch
    except ImportError as error:
        raise Unsupported(
            "calibrating needs torch.", hint="Install the extra: specpilot[engine]."
        ) from error
    if working_set_mb <= 0:
        raise InvalidInput(f"field 'working_set_mb' is {working_set_mb}; it must be positive.")
    if device != "cpu" and not torch.cuda.is_available():
        raise Unsupported(f"torch cannot use {device!r} on this machine.", hint="Use 'cpu'.")

    def synchronise() -> None:
        if device != "cpu":
            torch.cuda.synchronize()

    def rate(call: Callable[[], Any], amount: float) -> float:
        def run() -> None:
            call()
            synchronise()

        # The best time, not the usual one: a peak that neighbours disturbed is no bound.
        return amount / (min(_times_ms(run, seconds, warm=3, least=5)) * 1e-3)

    generator = torch.Generator(device=device).manual_seed(0)
    width = 1024
    height = max(16, int(working_set_mb * 1e6 / (4 * width)))
    table = torch.rand(height, width, generator=generator, device=device)
    vector = torch.rand(width, generator=generator, device=device)
    target = torch.empty_like(table[: max(1, height // 2)])
    size = table.numel() * 4.0
    read = rate(lambda: torch.mv(table, vector), size)
    copied = rate(lambda: target.copy_(table[: target.shape[0]]), 2.0 * target.numel() * 4)
    peaks: dict[str, float] = {}
    side = 384 if device == "cpu" else 8192  # short enough to run undisturbed on a shared CPU
    for dtype in dtypes:
        a = torch.rand(side, side, generator=generator, device=device).to(getattr(torch, dtype))
        b = torch.rand(side, side, generator=generator, device=device).to(getattr(torch, dtype))
        short = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}
        peaks[short[dtype]] = rate(lambda a=a, b=b: a @ b, 2.0 * side**3) / 1e12  # type: ignore[misc]
    return Hardware(
        name=name,
        arch=platform.machine() if device == "cpu" else torch.cuda.get_device_name(),
        memory_gb=_memory_gb(),
        bandwidth_gbs=max(read, copied) / 1e9,
        peak_tflops=peaks,
        confidence="A",
        source=f"measured with torch {torch.__version__} on random data, working set "
        f"{working_set_mb:.0f} MB, {torch.get_num_threads()} threads",
        calibrated=True,
    )


def _memory_gb() -> float:
    try:
        for line in Path("/proc/meminfo").read_text("ascii").splitlines():
            if line.startswith("MemTotal"):
                return int(line.split()[1]) / 1e6
    except OSError:
        pass
    return 1.0


def calibrate(
    deployment: str,
    *,
    dtype: str = "float32",
    name: str = "cpu",
    device: str = "cpu",
    working_set_mb: float = 256.0,
    run_pass: Callable[[int], object] | None = None,
    run_draft: Callable[[int], object] | None = None,
    rows: Sequence[int] = ROWS,
    blocks: Sequence[int] = BLOCKS,
    seconds: float = 0.15,
) -> Calibration:
    """Measure the machine, and the engine through callables; a few seconds in all.

    ``run_pass(rows)`` runs one exact pass of one request over ``rows`` rows (anchor included) and
    returns when it is done; ``run_draft(block)`` runs one draft. A missing one leaves its part
    out. ``seconds`` is the time for each point. Nothing is written: see ``save_calibration``.
    """
    from importlib.metadata import version

    hardware = measure_hardware(
        name,
        device=device,
        dtypes=tuple(dict.fromkeys(("float32", "bfloat16", dtype))),
        working_set_mb=working_set_mb,
        seconds=seconds,
    )

    def times(run: Callable[[int], object] | None, points: Sequence[int]) -> dict[int, float]:
        if run is None:
            return {}
        return {n: time_call_ms(lambda n=n: run(n), seconds=seconds) for n in points}  # type: ignore[misc]

    return Calibration(
        deployment=deployment,
        hardware=hardware,
        dtype=dtype,
        pass_ms=times(run_pass, rows),
        draft_ms=times(run_draft, blocks),
        taken_at=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=platform.platform(),
        versions={"torch": version("torch"), "python": platform.python_version()},
    )


Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _HardwareFile(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str
    arch: str
    memory_gb: Positive
    bandwidth_gbs: Positive
    peak_tflops: dict[str, Positive]
    smem_per_block_kb: float | None = None
    confidence: str
    source: str
    calibrated: bool


class _CalibrationFile(BaseModel):
    """The JSON on disk; keys of the time tables are row counts as strings."""

    model_config = ConfigDict(extra="forbid")
    deployment: str
    hardware: _HardwareFile
    dtype: str
    pass_ms: dict[int, Positive]
    draft_ms: dict[int, Positive]
    taken_at: str
    machine: str
    versions: dict[str, str]


def calibration_path(deployment: str) -> Path:
    """Where the calibration of a deployment lies: ``$SPECPILOT_HOME/calibration/<id>.json``."""
    if not deployment or Path(deployment).name != deployment or deployment.startswith("."):
        raise InvalidInput(f"{deployment!r} is no deployment id.", hint="Use letters and digits.")
    return home() / "calibration" / f"{deployment}.json"


def save_calibration(calibration: Calibration) -> Path:
    """Write a calibration beside its deployment, replacing an older one, and return the path."""
    path = calibration_path(calibration.deployment)
    path.parent.mkdir(parents=True, exist_ok=True)
    hardware = {name: getattr(calibration.hardware, name) for name in _HardwareFile.model_fields}
    values = {name: getattr(calibration, name) for name in _CalibrationFile.model_fields}
    model = _CalibrationFile.model_validate({**values, "hardware": hardware})
    draft = path.with_suffix(".tmp")
    draft.write_text(model.model_dump_json(indent=2) + "\n", "utf-8")
    draft.replace(path)
    return path


def load_calibration(deployment: str | None = None) -> Calibration | None:
    """Return the calibration of a deployment (None: the newest of any), or None if there is none.

    Raises ``InvalidInput`` for a file that does not parse.
    """
    if deployment is not None:
        path = calibration_path(deployment)
        if not path.exists():
            return None
    else:
        found = sorted((home() / "calibration").glob("*.json"), key=lambda p: p.stat().st_mtime_ns)
        if not found:
            return None
        path = found[-1]
    try:
        model = _CalibrationFile.model_validate_json(path.read_text("utf-8"))
    except (ValidationError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InvalidInput(
            f"the calibration {path} does not parse: {error}.",
            hint="Delete it and calibrate again.",
        ) from error
    values = {name: getattr(model, name) for name in _CalibrationFile.model_fields}
    values["hardware"] = Hardware(**model.hardware.model_dump())
    return Calibration(**values)


def require_calibration(deployment: str) -> Calibration:
    """Return the calibration of a deployment; ``NotFound`` says how to make one."""
    found = load_calibration(deployment)
    if found is None:
        raise NotFound(
            f"deployment {deployment!r} has not been calibrated on this machine.",
            hint="Calibrate it: bandwidth, matrix rate and the time of a pass, a few seconds.",
        )
    return found
