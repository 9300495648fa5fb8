"""A deployment on disk: ``deployment.json``, strict, and its way into a ``Deployment``."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from specpilot.errors import InvalidInput
from specpilot.harness.engines.settings import PROTECTED
from specpilot.types import Deployment, Regime

__all__ = ["parse_deployment", "to_json"]

Id = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]
Name = Annotated[str, StringConstraints(min_length=1, max_length=200)]
Setting = str | int | float | bool
RESERVED = PROTECTED - {"device"}
"""What no deployment sets under ``stock`` or ``launch``: models and dtype have fields of their own,
and an overlay would let stock be made slow, or read folders of the controller's for its systems."""


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class RegimeFile(Strict):
    requests: int = Field(default=1, ge=1, le=4096)
    prompt_tokens: int = Field(default=128, ge=1)
    output_tokens: int = Field(default=128, ge=1)
    temperature: float = Field(default=0.0, ge=0.0, le=100.0)


class DeploymentFile(Strict):
    id: Id
    title: Name
    engine: Literal["reference", "sglang", "mock"]
    target: Name
    drafter: Name | None = None
    drafter_kind: Name | None = None
    hardware: Name
    dtype: Literal["float32", "bfloat16", "float64"]
    regime: RegimeFile = RegimeFile()
    workload: Name
    stock: dict[str, Setting] = {}
    launch: dict[str, Setting] = {}


def parse_deployment(raw: str | bytes | dict[str, Any], where: str, folder: Path) -> Deployment:
    """Validate a deployment. Relative model paths count from ``folder``.

    Raises ``InvalidInput`` that names ``where`` and the first wrong field.
    """
    try:
        if isinstance(raw, dict):
            file = DeploymentFile.model_validate(raw)
        else:
            file = DeploymentFile.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"])) or "the whole file"
        raise InvalidInput(
            f"{where}: {field}: {first['msg']} (got {str(first['input'])[:80]!r}).",
            hint=f"Fields: {', '.join(DeploymentFile.model_fields)}.",
        ) from error
    if (file.drafter is None) != (file.drafter_kind is None):
        raise InvalidInput(f"{where}: give drafter and drafter_kind, or neither.")
    for group, settings in (("stock", file.stock), ("launch", file.launch)):
        if reserved := sorted(RESERVED & settings.keys()):
            raise InvalidInput(f"{where}: {group} may not set {reserved[0]!r}.")
    return Deployment(
        id=file.id,
        title=file.title,
        engine=file.engine,
        target=str((folder / file.target).absolute()),
        drafter=None if file.drafter is None else str((folder / file.drafter).absolute()),
        drafter_kind=file.drafter_kind,
        hardware=file.hardware,
        dtype=file.dtype,
        regime=Regime(**file.regime.model_dump()),
        workload=file.workload,
        stock=dict(file.stock),
        launch=dict(file.launch),
    )


def to_json(deployment: Deployment) -> str:
    """The file that ``parse_deployment`` reads back to an equal deployment."""
    file = DeploymentFile(
        **{
            name: getattr(deployment, name)
            for name in DeploymentFile.model_fields
            if name != "regime"
        },
        regime=RegimeFile(
            requests=deployment.regime.requests,
            prompt_tokens=deployment.regime.prompt_tokens,
            output_tokens=deployment.regime.output_tokens,
            temperature=deployment.regime.temperature,
        ),
    )
    return file.model_dump_json(indent=2) + "\n"
