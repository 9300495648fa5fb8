"""Measure a deployment on this machine: pass times, where a step goes, what trees would accept.

Three things that everything later rests on: a calibration (bandwidth, matrix rate, time of a pass
by rows and of a draft), the stock step by component, and τ by rows for the chain and the best-first
tree, replayed on lattices recorded at every position of open prompts. Reading a profile needs no
torch; measuring one runs the engine in the calling process.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError

from specpilot.errors import InvalidInput
from specpilot.harness.cost_model.ceiling import AcceptanceProfile
from specpilot.harness.deployments.workload import load_workload
from specpilot.home import home
from specpilot.mechanisms.trees.selector import PAIRWISE_SELECTOR
from specpilot.types import Deployment, StepShares

if TYPE_CHECKING:
    from specpilot.harness.cost_model.traces import Trace

__all__ = ["CHAIN_ROWS", "TREE_ROWS", "DeploymentProfile", "load_profile", "measure_profile"]

CHAIN_ROWS = (2, 4, 6, 8, 12, 16)
TREE_ROWS = (8, 12, 16, 24, 32, 48, 64)
TREE_BLOCKS = (8, 16)
PROMPTS = 8

Report = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class DeploymentProfile:
    """What ``measure_profile`` found. τ of the chain by rows, of the best-first tree by block and
    rows; times in ms; ``parts`` is the step by component. ``pairwise_chain`` and ``pairwise_tree``
    are τ with the drafter's pairwise selector, empty where it has none.

    ``step_ms`` is the stock step without timers, ``kernels_ms`` what of it lies in kernels.
    """

    deployment: str
    taken_at: str
    chain: dict[int, float]
    tree: dict[int, dict[int, float]]
    oracle_tokens_per_pass: float
    requests: int
    block: int
    step_ms: float
    kernels_ms: float
    shares: StepShares
    parts: tuple[dict[str, Any], ...]
    pairwise_chain: dict[int, float] = field(default_factory=dict)
    pairwise_tree: dict[int, dict[int, float]] = field(default_factory=dict)

    def acceptance(self) -> dict[str, AcceptanceProfile]:
        source = f"replay on {self.requests} open prompts"
        points = {"chain": self.chain, "pairwise_chain": self.pairwise_chain}
        points |= {f"tree.{block}": tree for block, tree in self.tree.items()}
        points |= {f"pairwise_tree.{block}": tree for block, tree in self.pairwise_tree.items()}
        return {k: AcceptanceProfile.of(found, source) for k, found in points.items() if found}

    @property
    def best_tree(self) -> AcceptanceProfile:
        """The tree on the drafter's longest block: no other block accepts more."""
        return self.acceptance()[f"tree.{self.block}"]


class _SharesFile(BaseModel):
    model_config = ConfigDict(extra="forbid")
    weights: float
    lm_head: float
    attention: float
    gdn: float
    drafter: float
    overhead: float


class _ProfileFile(BaseModel):
    model_config = ConfigDict(extra="forbid")
    deployment: str
    taken_at: str
    chain: dict[int, float]
    tree: dict[int, dict[int, float]]
    oracle_tokens_per_pass: float
    requests: int
    block: int
    step_ms: float
    kernels_ms: float
    shares: _SharesFile
    parts: tuple[dict[str, Any], ...]
    pairwise_chain: dict[int, float] = {}
    pairwise_tree: dict[int, dict[int, float]] = {}


def profile_path(deployment: str) -> Path:
    return home() / "profiles" / f"{deployment}.json"


def load_profile(deployment: str) -> DeploymentProfile | None:
    """Return the stored profile of a deployment, or None. Raises ``InvalidInput`` if broken."""
    path = profile_path(deployment)
    if not path.exists():
        return None
    try:
        file = _ProfileFile.model_validate_json(path.read_text("utf-8"))
    except (ValidationError, UnicodeDecodeError) as error:
        raise InvalidInput(
            f"the profile {path} does not parse: {error}.", hint="Delete it and profile again."
        ) from error
    values = {name: getattr(file, name) for name in _ProfileFile.model_fields}
    return DeploymentProfile(**{**values, "shares": StepShares(**file.shares.model_dump())})


def save_profile(profile: DeploymentProfile) -> Path:
    path = profile_path(profile.deployment)
    path.parent.mkdir(parents=True, exist_ok=True)
    values = {name: getattr(profile, name) for name in _ProfileFile.model_fields}
    shares = {name: getattr(profile.shares, name) for name in _SharesFile.model_fields}
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    draft.write_text(json.dumps({**values, "shares": shares}, indent=1) + "\n", "utf-8")
    draft.replace(path)
    return path


def measure_profile(deployment: Deployment, report: Report, folder: Path) -> DeploymentProfile:
    """Calibrate, profile stock, record lattices on open prompts, replay; store and return it.

    ``folder`` receives the trace and the picture of the step. ``report(done, planned, message)``
    tells progress. Raises ``Unsupported`` for an engine that does not run in this process.
    """
    from specpilot.harness.cost_model import reference, replay, traces

    planned = 4
    report(0, planned, "calibrating bandwidth, matrix rate and pass times")
    calibration = reference.calibrate_deployment(deployment)
    workload = load_workload(deployment.workload, deployment.regime.prompt_tokens)
    prompts = workload.prompts("open", PROMPTS, b"profile")
    report(1, planned, "timing stock's step by component")
    step = reference.profile_deployment(deployment, {}, prompts, calibration=calibration)
    step.picture(folder / "step.png")
    report(2, planned, f"recording lattices on {len(prompts)} open prompts")
    block = max(calibration.draft_ms)

    def recorded(name: str, selector: bool) -> traces.Trace:
        path = folder / name
        tokens = deployment.regime.output_tokens
        reference.record_lattices(
            deployment, prompts, path, output_tokens=tokens, block=block, selector=selector
        )
        return traces.read_trace(path)

    trace = recorded("lattices.jsonl.gz", selector=False)
    paired = None
    if PAIRWISE_SELECTOR.applies_to(deployment).ok:
        paired = recorded("pairwise_lattices.jsonl.gz", selector=True)
    report(3, planned, "replaying tree policies")
    chain, tree = _replayed(trace, block)
    pairwise_chain, pairwise_tree = _replayed(paired, block) if paired else ({}, {})
    profile = DeploymentProfile(
        deployment=deployment.id,
        taken_at=datetime.now(UTC).isoformat(timespec="seconds"),
        chain=chain,
        tree=tree,
        oracle_tokens_per_pass=replay.oracle(trace).tokens_per_pass,
        requests=len(prompts),
        block=block,
        step_ms=step.plain_step_ms,
        kernels_ms=step.kernels_ms * step.plain_step_ms / step.step_ms,
        shares=step.shares(),
        parts=tuple(
            {"component": row.component, "part": row.part, "ms": row.ms, "floor_ms": row.floor_ms}
            for row in step.rows
        ),
        pairwise_chain=pairwise_chain,
        pairwise_tree=pairwise_tree,
    )
    save_profile(profile)
    report(planned, planned, "done")
    return profile


def _replayed(trace: "Trace", block: int) -> tuple[dict[int, float], dict[int, dict[int, float]]]:
    """τ of the chain by rows, and of the best-first tree by block and rows."""
    from specpilot.harness.cost_model.replay import replay
    from specpilot.mechanisms.trees import policies

    chain_rows = [rows for rows in CHAIN_ROWS if rows <= block]
    chain = {r: replay(trace, policies.chain, r).tokens_per_pass for r in chain_rows}
    tree = {
        b: {r: replay(trace, policies.best_first, r, block=b).tokens_per_pass for r in TREE_ROWS}
        for b in {*TREE_BLOCKS, block}
        if b <= block
    }
    return chain, tree
