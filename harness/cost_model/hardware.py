"""What a machine can do: dense peaks and memory bandwidth, from the table or by calibration.

Knows no CPUs: a CPU's bandwidth depends on cores, cache and neighbours, so it is measured
(``calibrate``). Never guesses: an unknown name is an error that says how to add the machine.
"""

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from specpilot.errors import InvalidInput, NotFound
from specpilot.home import home
from specpilot.types import Hardware

__all__ = ["Efficiency", "achievable", "known_hardware", "load_hardware"]

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]

BYTE_EFFICIENCY = 0.90
"""Share of peak bandwidth at which a kernel counts as being at its floor (SpecPilot paper)."""
FLOP_EFFICIENCY = 0.60
"""Share of the dense peak at which a kernel counts as being at its floor (SpecPilot paper)."""


class _Row(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str
    aliases: tuple[str, ...] = ()
    arch: str
    memory_gb: Positive
    bandwidth_gbs: Positive
    peak_tflops: dict[str, Positive]
    smem_per_block_kb: Positive | None = None
    confidence: str = Field(pattern="^[AB]$")
    source: str = Field(min_length=1)


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid")
    about: str = ""
    rows: tuple[_Row, ...]


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of a machine's bandwidth and dense peak that kernels reach, each in (0, 1]."""

    bytes: float
    flops: float


def achievable(hardware: Hardware) -> Efficiency:
    """Return the shares at which a floor is taken.

    The paper's 90 % of bandwidth and 60 % of dense peak discount datasheet figures that no kernel
    reaches. A calibrated machine's figures were reached, so a floor takes them whole.
    """
    return (
        Efficiency(1.0, 1.0)
        if hardware.calibrated
        else Efficiency(BYTE_EFFICIENCY, FLOP_EFFICIENCY)
    )


def user_table() -> Path:
    """Where a person adds machines of their own, in the format of the shipped table."""
    return home() / "hardware.json"


def _parse(text: str, where: str) -> tuple[_Row, ...]:
    try:
        return _Table.model_validate(json.loads(text)).rows
    except (json.JSONDecodeError, ValidationError) as error:
        raise InvalidInput(
            f"the hardware table {where} does not parse: {error}.",
            hint="Each row needs name, arch, memory_gb, bandwidth_gbs, peak_tflops, confidence "
            "(A or B) and source.",
        ) from error


@cache
def _shipped() -> tuple[_Row, ...]:
    resource = files("specpilot.harness.cost_model") / "hardware.json"
    return _parse(resource.read_text("utf-8"), "hardware.json of specpilot")


def _rows() -> tuple[_Row, ...]:
    own = user_table()
    return (_parse(own.read_text("utf-8"), str(own)) if own.exists() else ()) + _shipped()


def known_hardware() -> tuple[str, ...]:
    """Names that ``load_hardware`` takes, a person's own rows first; "cpu" comes by calibration."""
    return tuple(row.name for row in _rows())


def _key(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())


def load_hardware(name: str, deployment: str | None = None) -> Hardware:
    """Return a machine by its name or an alias, case and punctuation aside (``"H200"``).

    ``"cpu"``, and any other name once it has been calibrated, comes from the calibration of
    ``deployment`` (the newest one if None). Measured figures win over the table.

    Raises:
        NotFound: the name is in no table and was not calibrated; the message says what to do.
    """
    from specpilot.harness.cost_model.calibrate import load_calibration

    found = load_calibration(deployment)
    if found is not None and _key(found.hardware.name) == _key(name):
        return found.hardware
    if _key(name) == "cpu":
        whose = f"deployment {deployment!r}" if deployment else "any deployment"
        raise NotFound(
            f"this CPU has not been calibrated for {whose}.",
            hint="Run calibrate for the deployment (a few seconds): CPUs are measured, never "
            "looked up.",
        )
    for row in _rows():
        if _key(name) in {_key(row.name), *map(_key, row.aliases)}:
            return Hardware(
                name=row.name,
                arch=row.arch,
                memory_gb=row.memory_gb,
                bandwidth_gbs=row.bandwidth_gbs,
                peak_tflops=dict(row.peak_tflops),
                smem_per_block_kb=row.smem_per_block_kb,
                confidence=row.confidence,
                source=row.source,
            )
    raise NotFound(
        f"hardware {name!r} is not in the table; known: {', '.join(known_hardware())}.",
        hint=f"Add a row with dense peaks to {user_table()} (format: the shipped hardware.json), "
        "or calibrate on the machine itself.",
    )
