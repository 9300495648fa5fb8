"""Everything that is known of a deployment before a trial: shapes, facts, gap, predictions.

Joins the deployment's description with its machine, its profile on this machine (if it was taken)
and the mechanisms that exist. Measures nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from specpilot.errors import InvalidInput, NotFound
from specpilot.harness.cost_model.ceiling import Ceiling, Gap, ceiling, gap
from specpilot.harness.cost_model.drafters import DrafterShape
from specpilot.harness.cost_model.predict import CostModel, Prediction, predict
from specpilot.harness.cost_model.shapes import ModelShape
from specpilot.harness.deployments import registry
from specpilot.harness.rounds.profile import TREE_ROWS, DeploymentProfile, load_profile
from specpilot.mechanisms import registry as mechanisms
from specpilot.memory.facts import facts_of
from specpilot.types import Deployment, StepShares

__all__ = ["Situation"]

_WEIGHTS = {"float32": "fp32", "bfloat16": "bf16", "float64": "fp64"}


@dataclass(frozen=True)
class Situation:
    """A deployment with its cost model and, once profiled here, what was measured."""

    deployment: Deployment
    model: CostModel | None
    profile: DeploymentProfile | None

    @staticmethod
    def of(deployment_id: str, stock: Mapping[str, Any] | None = None) -> "Situation":
        """Load a deployment. Without a known or calibrated machine there is no cost model.

        ``stock`` are settings that a round's controller chose for stock, over the deployment's.
        """
        deployment = registry.load(deployment_id)
        if stock:
            deployment = replace(deployment, stock={**deployment.stock, **stock})
        try:
            model = CostModel.of(deployment) if deployment.engine != "mock" else None
        except NotFound:
            model = None
        return Situation(deployment, model, load_profile(deployment_id))

    @property
    def shares(self) -> StepShares | None:
        return self.profile.shares if self.profile else None

    @cached_property
    def target(self) -> ModelShape:
        if self.model is not None:
            return self.model.target
        return ModelShape.from_config(self.deployment.target, dtype=self.deployment.dtype)

    @cached_property
    def facts(self) -> dict[str, Any]:
        """Flat facts that the memory's regimes and preconditions are matched with."""
        tau = None
        if self.profile is not None and self.deployment.stock.get("speculation") == "chain":
            tau = self.profile.acceptance()["chain"].at(int(self.deployment.stock["block"]))
        shape = self.target if self.deployment.engine != "mock" else None
        return facts_of(
            self.deployment,
            self.model.hardware if self.model else None,
            self.shares,
            target_arch=_architecture(shape) if shape else None,
            target_params_b=shape.parameters / 1e9 if shape else None,
            weight_dtype=_WEIGHTS[self.deployment.dtype],
            tokens_per_pass=tau,
        )

    def target_summary(self) -> dict[str, Any]:
        if self.deployment.engine == "mock":
            return {"architecture": "mock", "parameters": 0, "bytes_per_step": 0, "layers": {}}
        return _summary(self.target)

    def drafter_summary(self) -> dict[str, Any] | None:
        drafter: DrafterShape | None = self.model.drafter if self.model else None
        return _summary(drafter.body) if drafter else None

    def require_model(self) -> tuple[CostModel, DeploymentProfile]:
        """Return the cost model and profile, or ``NotFound`` that says how to get them."""
        if self.model is None or self.profile is None:
            raise NotFound(
                f"Deployment {self.deployment.id!r} has not been profiled on this machine.",
                hint="Call cost_profile and wait for its job.",
            )
        return self.model, self.profile

    def overhead_ms(self) -> float:
        """Time of stock's step outside draft and exact pass, at least 0."""
        model, profile = self.require_model()
        stock = self.deployment.stock
        if stock.get("speculation") != "chain":
            return 0.0
        block = int(stock["block"])
        return max(0.0, profile.step_ms - model.draft_ms(block) - model.pass_ms(block))

    def predict(self, settings: Mapping[str, Any], weight_format: str | None = None) -> Prediction:
        """Predict the deployment under engine settings merged onto stock.

        Raises ``InvalidInput`` for packed weights on the reference engine: no model says what
        decoding them on a CPU costs.
        """
        if settings.get("weights", "plain") != "plain":
            raise InvalidInput(
                "the time of decoding packed weights on this engine is not modelled.",
                hint="Ask with weight_format for a GPU's kernels, or measure it in a trial.",
            )
        model, profile = self.require_model()
        return predict(
            self.deployment,
            settings,
            acceptance=profile.acceptance(),
            weight_format=weight_format,
            overhead_ms=self.overhead_ms(),
            model=model,
        )

    def predict_mechanism(self, mechanism: str, params: Mapping[str, Any]) -> float | None:
        """Speedup over stock that the cost model expects, None where it has no opinion."""
        if self.model is None or self.profile is None:
            return None
        found = mechanisms.get(mechanism)
        settings = found.settings(self.deployment.engine, dict(params))
        try:
            return self.predict(settings).speedup_over_stock
        except InvalidInput:
            return None

    def ceiling(self) -> Ceiling:
        """The best that one draft and one exact pass could do here, with the best tree replayed."""
        model, profile = self.require_model()
        if model.drafter is None:
            raise InvalidInput(f"deployment {self.deployment.id!r} drafts nothing: no ceiling.")
        return ceiling(
            model.target,
            model.drafter,
            model.hardware,
            self.deployment.regime,
            ar_ms=model.pass_ms(1),
            best_tree=profile.best_tree,
            block=profile.block,
            rows=TREE_ROWS,
        )

    def gap(self) -> Gap:
        """How far stock is from the ceiling, as token × kernel × overhead factors."""
        _, profile = self.require_model()
        block = int(self.deployment.stock.get("block", 1))
        return gap(
            self.ceiling(),
            tokens_per_pass=profile.acceptance()["chain"].at(block),
            kernels_ms=profile.kernels_ms,
            step_ms=profile.step_ms,
        )


def _architecture(shape: ModelShape) -> str:
    if shape.gdn is not None:
        return "hybrid-gdn"
    return "moe" if any(group.experts > 1 for group in shape.groups) else "dense"


def _summary(shape: ModelShape) -> dict[str, Any]:
    layers = {"attention": sum(kind.layers for kind in shape.attention)}
    if shape.gdn is not None:
        layers["gdn"] = shape.gdn.layers
    return {
        "architecture": _architecture(shape),
        "parameters": shape.parameters,
        "bytes_per_step": round(shape.weight_bytes()),
        "layers": layers,
    }
