"""Tools about deployments: what can be optimised, what it is, and how to register another."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from specpilot.harness.deployments import registry
from specpilot.harness.rounds.situation import Situation
from specpilot.types import Deployment

__all__ = ["DeploymentId", "deployment_add", "deployment_describe", "deployment_list"]

DeploymentId = Annotated[str, Field(description="deployment id, such as pico", max_length=64)]
Setting = str | int | float | bool


class RegimeReply(BaseModel):
    requests: int
    prompt_tokens: int
    output_tokens: int
    temperature: float
    serving: Literal["single", "batched"]


class DeploymentLine(BaseModel):
    id: str
    title: str
    engine: str
    hardware: str
    regime: RegimeReply


class DeploymentList(BaseModel):
    deployments: list[DeploymentLine]


class ModelReply(BaseModel):
    architecture: str
    parameters: int
    bytes_per_step: int = Field(description="weight bytes that one pass over one row reads")
    layers: dict[str, int]


class DeploymentReply(DeploymentLine):
    dtype: str
    drafter_kind: str | None
    target: ModelReply
    drafter: ModelReply | None
    stock: dict[str, Setting]
    workload: str
    profilable: bool = Field(description="cost_profile can measure it on this machine")
    profiled: bool = Field(description="measured on this machine by cost_profile")
    facts: dict[str, Setting] = Field(description="what regimes and preconditions are matched with")


def deployment_list() -> DeploymentList:
    """List deployments that can be optimised. Start here when you do not know an id."""
    return DeploymentList(deployments=[_line(registry.load(i)) for i in registry.list_ids()])


def deployment_describe(deployment: DeploymentId) -> DeploymentReply:
    """Describe one deployment: shapes, hardware, stock settings, regime, facts, health."""
    situation = Situation.of(deployment)
    found = situation.deployment
    return DeploymentReply(
        **_line(found).model_dump(),
        dtype=found.dtype,
        drafter_kind=found.drafter_kind,
        target=ModelReply(**situation.target_summary()),
        drafter=ModelReply(**summary) if (summary := situation.drafter_summary()) else None,
        stock=dict(found.stock),
        workload=found.workload,
        profilable=found.engine == "reference",
        profiled=situation.profile is not None,
        facts=dict(situation.facts),
    )


def deployment_add(
    definition: Annotated[
        dict[str, Any],
        Field(
            description="id, title, engine, target (folder), drafter, drafter_kind, hardware, "
            "dtype, regime, workload, stock, launch"
        ),
    ],
) -> DeploymentLine:
    """Register a deployment; its folders, weights and configs are checked first."""
    return _line(registry.add(definition))


def _line(deployment: Deployment) -> DeploymentLine:
    regime = deployment.regime
    return DeploymentLine(
        id=deployment.id,
        title=deployment.title,
        engine=deployment.engine,
        hardware=deployment.hardware,
        regime=RegimeReply(
            requests=regime.requests,
            prompt_tokens=regime.prompt_tokens,
            output_tokens=regime.output_tokens,
            temperature=regime.temperature,
            serving=regime.serving,
        ),
    )
