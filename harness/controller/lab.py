"""One job on one round: measure noise, try a candidate, run the sealed final, audit tokens.

This is the protocol: what is written down before what is run, what is compared with what, and what
a verdict needs. Every path that does not end in all checks passed ends in "not promoted" with a
reason; a promotion is one ledger record, written last.
"""

import contextlib
import os
import platform
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import specpilot
from specpilot.errors import CheckFailed, NotFound, Unsupported
from specpilot.harness import patches, token_forcing
from specpilot.harness.controller.design import Design, Phase, default_design
from specpilot.harness.controller.isolation import Tier
from specpilot.harness.controller.ledger import Ledger, Record
from specpilot.harness.controller.measure import (
    ArmFailure,
    Cancelled,
    Measurement,
    Progress,
    measure,
)
from specpilot.harness.controller.models import check_unchanged
from specpilot.harness.controller.outputs import load_outputs, save_outputs
from specpilot.harness.controller.receipts import (
    idle_mechanisms,
    judge,
    measured_body,
    paired_outputs,
    promotes,
    result_body,
    speedups,
)
from specpilot.harness.controller.rounds import Noise, Round, Rounds
from specpilot.harness.controller.sanity import InsaneOutput
from specpilot.harness.controller.sealed import Prompt, PromptBook
from specpilot.harness.controller.snapshots import Snapshots
from specpilot.harness.controller.statistics import estimate
from specpilot.harness.controller.stock import (
    PROMPTS,
    blocks_to_try,
    choose,
    time_blocks,
    with_block,
)
from specpilot.harness.controller.systems import Running, Starter, SystemSpec
from specpilot.harness.deployments.health import read_config
from specpilot.harness.deployments.workload import load_workload
from specpilot.harness.engines.client import Generation
from specpilot.harness.engines.launch import Role
from specpilot.harness.patches import Patch
from specpilot.types import Deployment, Regime

__all__ = ["Lab", "Work", "as_deployment", "prompt_book"]

CANDIDATE, FINAL, STOCK, AR = "candidate", "final", "stock", "ar"


@dataclass(frozen=True, slots=True)
class Lab:
    """What all jobs share: the ledger, the secret, the isolation tier, the controller's folder."""

    ledger: Ledger
    rounds: Rounds
    snapshots: Snapshots
    secret: bytes
    tier: Tier
    folder: Path

    def isolation(self) -> dict[str, Any]:
        return {"tier": int(self.tier), "title": self.tier.title}

    def check_final(self, *, allow_unsealed: bool) -> None:
        """Raise ``Unsupported`` if a final would not be sealed and was not allowed to be."""
        if self.tier is Tier.NONE and not allow_unsealed:
            raise Unsupported(
                "A sealed final needs an isolation tier of 1 or more; this machine offers none.",
                hint="Pass allow_unsealed to run it all the same; its receipt will say so.",
            )


def as_deployment(body: Mapping[str, Any]) -> Deployment:
    """Rebuild a round's deployment from its opening record: it cannot change in mid-round."""
    return Deployment(**{**body, "regime": Regime(**body["regime"])})


def prompt_book(deployment: Deployment, secret: bytes, round_id: str) -> PromptBook:
    """Return the prompts of a round: cuts of its workload at the regime's prompt length."""
    workload = load_workload(deployment.workload, deployment.regime.prompt_tokens)
    return PromptBook(workload.prompts, secret, round_id)


class Work:
    """One job's work on one round. ``kill`` ends its systems from another thread."""

    def __init__(
        self,
        lab: Lab,
        round_: Round,
        job: str,
        cancelled: threading.Event,
        progress: Progress,
    ) -> None:
        self._lab = lab
        self._round = round_
        self._job = job
        self._cancelled = cancelled
        self._progress = progress
        self._deployment = with_block(
            as_deployment(round_.opened.body["deployment"]), round_.stock_block
        )
        self._book = prompt_book(self._deployment, lab.secret, round_.id)
        self._vocab_size = int(read_config(Path(self._deployment.target))["vocab_size"])
        timeout = default_design(self._deployment, "trial", 0).request_timeout_s
        self._starter = Starter(self._deployment, lab.tier, timeout)

    def kill(self) -> None:
        self._starter.kill()

    def trial(self, trial: str, stack: Sequence[Patch]) -> Record:
        """Measure ``stack`` against the round's current best and write the trial's receipt.

        A candidate that passes is measured once more on fresh prompts if it is not the round's
        first, because the best of several measurements is overstated; the second one counts.
        Then its timed tokens are audited against those of the current best.
        """
        self._round.check_open(self._round.owner)  # a final may have run while this job waited
        best = [self._lab.snapshots.get(each) for each in self._round.best]
        systems = [
            self._system("best" if best else STOCK, best),
            self._system(CANDIDATE, stack),
        ]
        common = self._common(systems, stack) | {"trial": trial}
        self._prepare()
        measured: list[Measurement] = []
        try:
            with self._starter.running(systems) as (a, b):
                measured.append(self._measure(f"trial {trial}", a, b))
                if promotes(measured[0]) and self._round.trials:
                    measured.append(self._measure(f"confirmation {trial}", a, b))
        except (ArmFailure, InsaneOutput) as failure:
            return self._failed("trial", common, failure)
        outputs = paired_outputs(measured)
        save_outputs(self._outputs_path(trial), outputs)
        forcing = self._audit(outputs, open_prompts=True) if promotes(measured[-1]) else None
        self._check_counts()
        verdict, reason = judge(measured[-1].decision, forcing, idle_mechanisms(stack, measured))
        return self._lab.ledger.append(
            "trial", common | result_body(measured, verdict, reason, forcing)
        )

    def final(self, *, allow_unsealed: bool) -> Record:
        """Measure the round's best stack against stock on a sealed set, with AR beside them.

        The set is burned before anything else. Raises ``Unsupported`` at isolation tier 0 unless
        ``allow_unsealed``, and the receipt then says that the final was not sealed.
        """
        self._lab.check_final(allow_unsealed=allow_unsealed)
        sealed = self._round.next_sealed()
        number = self._round.sealed.index(sealed)
        self._prepare()
        self._write("burn", {"set": sealed.id, "sha256": sealed.sha256})
        self._lab.ledger.anchor()
        prompts = self._book.unseal(self._round.sealed, number)
        stack = [self._lab.snapshots.get(each) for each in self._round.best]
        systems = [
            self._system(STOCK, []),
            self._system(FINAL, stack),
            SystemSpec(AR, "ar", {}),
        ]
        common = self._common(systems, stack) | {
            "set": sealed.id,
            "sealed": self._lab.tier is not Tier.NONE,
        }
        try:
            with self._starter.running(systems) as (a, b, ar):
                measured = self._measure(f"final {sealed.id}", a, b, ar, iter(prompts))
        except (ArmFailure, InsaneOutput) as failure:
            return self._failed("final", common, failure, arm=FINAL)
        outputs = paired_outputs([measured])
        save_outputs(self._outputs_path(sealed.id), outputs)
        forcing = self._audit(outputs, open_prompts=False)
        self._check_counts()
        verdict, reason = judge(measured.decision, forcing, idle_mechanisms(stack, [measured]))
        if not stack:
            verdict, reason = "rejected", "Nothing was promoted in this round: stock is the final."
        body = result_body([measured], verdict, reason, forcing) | {"speedups": speedups(measured)}
        record = self._lab.ledger.append("final", common | body)
        self._lab.ledger.anchor()
        return record

    def audit(self, trial: str) -> Record:
        """Audit the kept tokens of a trial that timing alone rejected, or audit them once more."""
        receipt = next((t for t in self._round.trials if t.body["trial"] == trial), None)
        if receipt is None:
            raise NotFound(f"Round {self._round.id} has no finished trial {trial!r}.")
        if not receipt.body.get("measured"):
            raise NotFound(f"Trial {trial} has no timed outputs: {receipt.body['reason']}")
        outputs = load_outputs(self._outputs_path(trial))
        if token_forcing.token_digest(outputs["b"]) != receipt.body["token_sha256"]:
            raise CheckFailed(f"The kept outputs of trial {trial} are not those that were timed.")
        self._prepare()
        forcing = self._audit(outputs, open_prompts=True)
        self._check_counts()
        return self._write(
            "audit",
            {
                "trial": trial,
                "forcing": forcing.to_dict(),
                "token_sha256": receipt.body["token_sha256"],
                "isolation": self._lab.isolation(),
            },
        )

    def _prepare(self) -> None:
        """Measure once for the round what all its verdicts need: stock, noise, audit thresholds."""
        if self._round.stock_block is None and (blocks := blocks_to_try(self._deployment)):
            self._choose_stock(blocks)
        design = self._design("trial", "noise")
        if self._round.calibration is not None and design.shape() in self._round.noise:
            return
        stock = self._system(STOCK, [])
        again = SystemSpec("stock again", "stock", stock.settings)
        self._write_design("noise", design, [stock, again])
        with self._starter.running([stock, again]) as (a, b):
            result = self._measure_with(design, a, b, None, self._fresh("noise", design), None)
        self._check_counts()
        found = estimate(result.log_ratios)
        noise = {"shape": design.shape(), "sd": found.sd, "cycles": found.n, "mean": found.mean}
        self._write("noise", noise | {"measured": measured_body(result)})
        self._progress("calibrating token forcing", 0, 1)
        with self._scorer() as scorer:
            calibration = token_forcing.calibrate(result.a, scorer, {})
        self._check_counts()
        policy = token_forcing.Policy()
        self._write(
            "calibration", {"calibration": calibration.to_dict(), "policy": policy.to_dict()}
        )
        self._round = self._lab.rounds.get(self._round.id)

    def _choose_stock(self, blocks: Sequence[int]) -> None:
        """Time stock's chain at each block on fresh prompts and make the fastest one stock."""
        design = self._design("trial", "stock")
        systems = [
            SystemSpec(f"chain {b}", "stock", dict(with_block(self._deployment, b).stock))
            for b in blocks
        ]
        self._write_design("stock", design, systems)
        prompts = list(self._book.fresh(f"{self._job} stock", PROMPTS + 1))
        with self._starter.running(systems) as running:
            arms = {block: each.arm for block, each in zip(blocks, running, strict=True)}

            def time(some: Sequence[Prompt]) -> dict[int, list[float]]:
                return time_blocks(
                    arms,
                    some,
                    tokens=design.tokens,
                    vocab_size=self._vocab_size,
                    cancelled=self._cancelled,
                )

            self._progress("choosing stock's block", 0, 1)
            time(prompts[:1])  # warms up
            seconds = time(prompts[1:])
        self._check_counts()
        block = choose(seconds)
        timed = {str(each): seconds[each] for each in blocks}
        self._write("stock", {"block": block, "s_per_token": timed})
        self._round = self._lab.rounds.get(self._round.id)
        self._deployment = with_block(self._deployment, block)

    def _measure(
        self,
        purpose: str,
        a: Running,
        b: Running,
        ar: Running | None = None,
        prompts: Iterator[Prompt] | None = None,
    ) -> Measurement:
        design = self._design("final" if ar is not None else "trial", purpose)
        self._write_design(purpose, design, [each.spec for each in (a, b, ar) if each])
        return self._measure_with(
            design, a, b, ar, prompts or self._fresh(purpose, design), self._noise(design)
        )

    def _measure_with(
        self,
        design: Design,
        a: Running,
        b: Running,
        ar: Running | None,
        prompts: Iterator[Prompt],
        noise: float | None,
    ) -> Measurement:
        warmup = list(self._book.fresh("warmup", design.warmup_requests))
        return measure(
            a.arm,
            b.arm,
            design,
            prompts,
            warmup,
            noise=noise,
            vocab_size=self._vocab_size,
            ar=ar.arm if ar else None,
            cancelled=self._cancelled,
            progress=self._progress,
        )

    def _noise(self, design: Design) -> float:
        noise: Noise | None = self._round.noise.get(design.shape())
        if noise is None:
            raise CheckFailed("The noise of this design was not measured.")
        return noise.of_mean(design.cycles)

    def _audit(
        self, outputs: Mapping[str, Sequence[Generation]], *, open_prompts: bool
    ) -> token_forcing.Verdict:
        if self._round.calibration is None:
            raise CheckFailed("Token forcing was not calibrated.")
        calibration = token_forcing.Calibration.from_dict(self._round.calibration)
        self._progress("token forcing", 0, 1)
        with self._scorer() as scorer:
            return token_forcing.audit(
                outputs["a"],
                outputs["b"],
                scorer,
                calibration,
                prompt_digests={token_forcing.ids_digest(g.prompt_ids) for g in outputs["a"]},
                timed_digest=token_forcing.token_digest(outputs["b"]),
                open_prompts=open_prompts,
                progress=lambda done, total: self._progress("token forcing", done, total),
            )

    @contextlib.contextmanager
    def _scorer(self) -> Iterator[token_forcing.Scorer]:
        """Start stock without speculation and with FP32 logits; it runs after the arms ended."""
        with self._starter.running([SystemSpec("scorer", "scorer", {})]) as (scorer,):
            yield token_forcing.Scorer(scorer.client, self._vocab_size)

    def _system(self, name: str, stack: Sequence[Patch]) -> SystemSpec:
        role: Role = "candidate" if stack else "stock"
        return SystemSpec(name, role, patches.resolve(self._deployment, stack))

    def _design(self, phase: Phase, purpose: str) -> Design:
        """Return the round's design for a phase, with a secret seed of its own."""
        return default_design(self._deployment, phase, self._book.seed(f"{self._job} {purpose}"))

    def _fresh(self, purpose: str, design: Design) -> Iterator[Prompt]:
        return self._book.fresh(f"{self._job} {purpose}", design.prompts_needed)

    def _check_counts(self) -> None:
        """Raise unless what was measured may count: not cancelled, and on the round's models."""
        if self._cancelled.is_set():
            raise Cancelled("The job was cancelled.")
        check_unchanged(self._deployment, self._round.opened.body.get("models"))

    def _outputs_path(self, name: str) -> Path:
        return self._lab.folder / "outputs" / self._round.id / f"{name}.json"

    def _write(self, kind: str, body: Mapping[str, Any]) -> Record:
        return self._lab.ledger.append(kind, {"round": self._round.id, "job": self._job, **body})

    def _write_design(self, purpose: str, design: Design, systems: Sequence[SystemSpec]) -> None:
        self._write(
            "design",
            {
                "purpose": purpose,
                "design": design.record(),
                "systems": {each.name: dict(each.settings) for each in systems},
                "isolation": self._lab.isolation(),
            },
        )

    def _common(self, systems: Sequence[SystemSpec], stack: Sequence[Patch]) -> dict[str, Any]:
        """Return what a receipt says about the systems, whatever came of them."""
        against = list(self._round.best) if systems[0].name != STOCK else []
        return {
            "round": self._round.id,
            "job": self._job,
            "deployment": self._deployment.id,
            "engine": self._deployment.engine,
            "against": systems[0].name,
            "against_stack": against,
            "stack": [patch.sha256 for patch in stack],
            "patches": [{"id": patch.id, "title": patch.title} for patch in stack],
            "uses": [
                {"id": use.id, "params": dict(use.params), "added": patch.sha256 not in against}
                for patch in stack
                for use in patch.mechanisms
            ],
            "settings": {each.name: dict(each.settings) for each in systems},
            "isolation": self._lab.isolation(),
            "machine": {"node": platform.machine(), "cores": len(os.sched_getaffinity(0))},
            "version": specpilot.__version__,
        }

    def _failed(
        self,
        kind: str,
        common: Mapping[str, Any],
        failure: ArmFailure | InsaneOutput,
        arm: str = CANDIDATE,
    ) -> Record:
        """Record that the candidate failed.

        A failure of another system is nobody's result, nor is that of a system which a cancel ended
        or whose model files were changed.
        """
        if failure.arm != arm:
            raise failure
        self._check_counts()
        which = str(failure.kind) if isinstance(failure, InsaneOutput) else "engine_failure"
        body = {"verdict": "failed", "failure": which, "reason": str(failure)}
        return self._lab.ledger.append(kind, {**common, **body})
