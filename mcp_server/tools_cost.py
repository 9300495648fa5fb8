"""Tools of the cost model: ceiling and gap, what-ifs, profile, replay."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from specpilot.errors import InvalidInput
from specpilot.harness.deployments import registry
from specpilot.harness.rounds import work
from specpilot.harness.rounds.ideas import ideas
from specpilot.harness.rounds.knowledge import open_memory
from specpilot.harness.rounds.situation import Situation
from specpilot.mcp_server.tools_deployments import DeploymentId
from specpilot.mechanisms import registry as mechanisms
from specpilot.memory.transfer import plan_port as plan

__all__ = ["cost_ceiling", "cost_predict", "cost_profile", "plan_port", "replay_trees"]

Setting = str | int | float | bool


class FloorLine(BaseModel):
    component: str
    part: str
    bytes: float
    flops: float
    floor_ms: float
    bound: Literal["bytes", "flops"]


class GapReply(BaseModel):
    tokens: float = Field(description="tokens per pass of the best tree over stock's")
    kernel: float = Field(description="time in kernels over their floors")
    overhead: float = Field(description="step over time in kernels")
    whole: float
    largest: str = Field(description="where to work first")


class CeilingReply(BaseModel):
    deployment: str
    hardware: str
    ar_ms: float
    step_ms: float = Field(description="stock's step, measured")
    floor_ms: float = Field(description="floor of the ceiling's step")
    rows: int = Field(description="rows of the ceiling's exact pass")
    tokens_per_pass: float = Field(description="per exact target pass, bonus included")
    speedup_over_ar: float
    gap: GapReply
    floors: list[FloorLine]
    shares: dict[str, float] = Field(description="shares of stock's step by component, measured")


class PredictionReply(BaseModel):
    speculation: str
    block: int
    rows: int
    tokens_per_pass: float
    draft_ms: float
    pass_ms: float
    overhead_ms: float
    tokens_per_s: float
    speedup_over_ar: float
    speedup_over_stock: float | None
    basis: str
    notes: list[str]


class JobStarted(BaseModel):
    job: str = Field(description="follow it with job_status")


class ReplayLine(BaseModel):
    policy: str
    rows: int
    tokens_per_pass: float


class ReplayReply(BaseModel):
    deployment: str
    requests: int
    block: int
    oracle_tokens_per_pass: float = Field(description="target's token whenever in the top 16")
    policies: list[ReplayLine]
    note: str


class UseReply(BaseModel):
    id: str
    params: dict[str, Setting]


class IdeaReply(BaseModel):
    mechanisms: list[UseReply] = Field(description="as mechanism_apply takes them")
    predicted: float | None = Field(description="speedup over stock by the cost model")
    entries: list[str]


class PlanStepReply(BaseModel):
    entry: str
    title: str
    status: str
    bottleneck: str
    predicted: float
    basis: str
    evidence: str
    met: list[str]
    unmet: list[str]
    unknown: list[str]
    requires: list[str]
    conflicts: list[str]
    warnings: list[str]
    porting: list[str]
    untested: list[str]
    cheapest_evidence: str


class PlanReply(BaseModel):
    steps: list[PlanStepReply]
    blocked: list[PlanStepReply]
    patches: list[IdeaReply] = Field(description="single and stacked patches, best first")
    negatives: list[str]
    unknown_facts: list[str]


def cost_ceiling(deployment: DeploymentId) -> CeilingReply:
    """Say how far stock is from its ceiling and which term of the gap is largest. Profile first."""
    situation = Situation.of(deployment)
    model, profile = situation.require_model()
    best, gap = situation.ceiling(), situation.gap()
    shares = profile.shares
    return CeilingReply(
        deployment=deployment,
        hardware=model.hardware.name,
        ar_ms=best.ar_ms,
        step_ms=profile.step_ms,
        floor_ms=best.floor_ms,
        rows=best.rows,
        tokens_per_pass=best.tokens_per_pass,
        speedup_over_ar=best.speedup_over_ar,
        gap=GapReply(
            tokens=gap.tokens,
            kernel=gap.kernel,
            overhead=gap.overhead,
            whole=gap.whole,
            largest=gap.largest,
        ),
        floors=[
            FloorLine(
                component=floor.component,
                part=floor.part,
                bytes=floor.bytes,
                flops=floor.flops,
                floor_ms=floor.floor_ms,
                bound=floor.bound,
            )
            for floor in best.floors
        ],
        shares={name: getattr(shares, name) for name in type(shares).__slots__},
    )


def cost_predict(
    deployment: DeploymentId,
    mechanism: Annotated[str | None, Field(description="mechanism id, see mechanism_list")] = None,
    params: Annotated[dict[str, Setting] | None, Field(description="its parameters")] = None,
    weight_format: Annotated[
        str | None, Field(description="what if the weights were w12, fp8, int4")
    ] = None,
) -> PredictionReply:
    """Predict what a mechanism or weight format would change, before building or running it."""
    situation = Situation.of(deployment)
    settings: dict[str, Setting] = {}
    if mechanism is not None:
        found = mechanisms.get(mechanism)
        settings = found.settings(situation.deployment.engine, dict(params or {}))
    elif params:
        raise InvalidInput("params belong to a mechanism.", hint="Name it with mechanism.")
    prediction = situation.predict(settings, weight_format)
    return PredictionReply.model_validate(
        {
            name: getattr(prediction, name)
            for name in PredictionReply.model_fields
            if name != "notes"
        }
        | {"notes": list(prediction.notes)}
    )


def cost_profile(deployment: DeploymentId) -> JobStarted:
    """Measure a deployment here: pass times, stock's step by component, tree replay. A job."""
    registry.load(deployment)
    return JobStarted(job=work.start("profile", {"deployment": deployment}).job)


def replay_trees(deployment: DeploymentId) -> ReplayReply:
    """Show tokens per pass of chains and best-first trees, replayed on recorded lattices."""
    _, profile = Situation.of(deployment).require_model()
    policies = {"chain": profile.chain} | {
        f"best_first on block {block}": points for block, points in profile.tree.items()
    }
    lines = [
        ReplayLine(policy=name, rows=rows, tokens_per_pass=tokens)
        for name, points in policies.items()
        for rows, tokens in points.items()
    ]
    return ReplayReply(
        deployment=deployment,
        requests=profile.requests,
        block=profile.block,
        oracle_tokens_per_pass=profile.oracle_tokens_per_pass,
        policies=lines,
        note="Replay ranks and rejects; only a trial promotes.",
    )


def plan_port(
    deployment: DeploymentId,
    stack: Annotated[
        list[str] | None, Field(description="memory entries already in the system")
    ] = None,
    limit: Annotated[int, Field(ge=1, le=20)] = 8,
) -> PlanReply:
    """Plan what to try on a deployment and in which order, from memory, cost model and gap."""
    situation = Situation.of(deployment)
    factors = None
    if situation.model is not None and situation.profile is not None:
        gap = situation.gap()
        factors = {name: max(1.0, getattr(gap, name)) for name in ("tokens", "kernel", "overhead")}
    with open_memory() as store:
        found = plan(
            store,
            situation.facts,
            situation.shares,
            situation.predict_mechanism,
            gap=factors,
            stack=tuple(stack or ()),
            limit=limit,
        )
    return PlanReply(
        steps=[_step(step) for step in found.steps],
        blocked=[_step(step) for step in found.blocked],
        patches=[
            IdeaReply(
                mechanisms=[UseReply(id=name, params=dict(params)) for name, params in idea.uses],
                predicted=idea.predicted,
                entries=list(idea.entries),
            )
            for idea in ideas(situation, found.patches)
        ],
        negatives=[f"{hit.id}: {hit.claim}" for hit in found.negatives],
        unknown_facts=list(found.unknown_facts),
    )


def _step(step: Any) -> PlanStepReply:
    return PlanStepReply.model_validate(
        {
            name: list(value) if isinstance(value := getattr(step, name), tuple) else value
            for name in PlanStepReply.model_fields
        }
    )
