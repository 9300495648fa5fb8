"""The reference engine under the cost model: calibration, profile and recorded lattices.

Loads a deployment's models in this process, without a server. Imports torch when called.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specpilot.errors import InvalidInput, Unsupported
from specpilot.harness.cost_model.calibrate import (
    BLOCKS,
    ROWS,
    Calibration,
    calibrate,
    require_calibration,
    save_calibration,
)
from specpilot.harness.cost_model.floors import step_floor
from specpilot.harness.cost_model.predict import CostModel, read_settings
from specpilot.harness.cost_model.profiler import Hook, Profile, profile_steps
from specpilot.harness.cost_model.shapes import ModelShape
from specpilot.harness.cost_model.traces import TraceHeader, TraceWriter
from specpilot.types import Deployment

__all__ = [
    "Bench",
    "calibrate_deployment",
    "profile_deployment",
    "record_lattices",
    "reference_hooks",
]

_ACCEPTED = 3  # drafts committed a pass while calibrating: the order of what drafters reach
_TOP_K = 16
Prompts = Sequence[Sequence[int]]


def _need_torch(deployment: Deployment) -> None:
    if deployment.engine != "reference":
        raise Unsupported(
            f"deployment {deployment.id!r} runs on {deployment.engine}; only the reference engine "
            "runs in this process.",
            hint="Measure it through its server instead.",
        )
    try:
        import torch
    except ImportError as error:
        raise Unsupported(
            "running an engine here needs torch.", hint="Install the extra: specpilot[engine]."
        ) from error
    # As many threads as the deployment's servers get: see engines.launch.
    torch.set_num_threads(int(deployment.launch.get("threads", len(os.sched_getaffinity(0)))))


def reference_hooks() -> tuple[Hook, ...]:
    """What the profiler wraps in the reference engine."""
    import torch.nn.functional as functional

    from specpilot.harness.engines.reference.drafter import BlockDrafter
    from specpilot.harness.engines.reference.gdn import GdnLayer
    from specpilot.harness.engines.reference.layers import Attention, Mlp
    from specpilot.harness.engines.reference.target import Target

    return (
        Hook(Target, "decode", "activations"),
        Hook(Target, "verify", "activations"),
        Hook(Target, "commit", "gdn", "commit"),
        Hook(Target, "logits", "lm_head"),
        Hook(GdnLayer, "__call__", "gdn", "gdn"),
        Hook(Attention, "__call__", "attention", "attention"),
        Hook(Mlp, "__call__", "activations", "mlp"),
        Hook(BlockDrafter, "propose", "drafter", "propose"),
        Hook(BlockDrafter, "extend", "drafter", "extend"),
        Hook(functional, "linear", None),
    )


@dataclass
class Bench:
    """One request of a deployment, prefilled, whose passes and drafts can be run at will.

    Rows are committed at the same length again and again, so a bench runs as long as it likes.
    """

    target: Any
    drafter: Any
    pool: Any
    length: int
    features: Any
    vocab: int

    @staticmethod
    def of(deployment: Deployment, *, context: int | None = None) -> "Bench":
        """Load the models and prefill ``context`` random tokens (None: the regime's mean context).

        Raises ``Unsupported`` for a deployment of another engine or without torch.
        """
        _need_torch(deployment)
        import torch

        from specpilot.harness.engines.reference.drafter import BlockDrafter, Place
        from specpilot.harness.engines.reference.target import Target

        regime = deployment.regime
        length = context or max(1, regime.prompt_tokens + regime.output_tokens // 2)
        room = length + max(ROWS) + 1
        dtype = getattr(torch, deployment.dtype)
        with torch.inference_mode():
            target = Target(Path(deployment.target), dtype, max_positions=room)
            drafter = None
            if deployment.drafter is not None:
                drafter = BlockDrafter(Path(deployment.drafter), target, room)
                target.capture = drafter.capture
                drafter.allocate(1, room)
            pool = target.pool(1, room)
            vocab = target.config.vocab_size
            ids = torch.randint(0, vocab, (length,), generator=torch.Generator().manual_seed(0))
            output = target.prefill(ids, pool, 0, 0)
            features = None
            if drafter is not None:
                assert output.features is not None
                features = output.features[0]
                drafter.extend(features, [Place(0, 0, length)])
        return Bench(target, drafter, pool, length, features, vocab)

    def run_pass(self, rows: int) -> None:
        """What a step spends on the target: verify (decode for one row), head, argmax, commit."""
        import torch

        from specpilot.harness.engines.reference.sampling import likeliest
        from specpilot.mechanisms.trees.tree import Tree

        with torch.inference_mode():
            if rows == 1:
                ids = torch.zeros(1, dtype=torch.int64)
                output = self.target.decode(ids, self.pool, [self.length])
                likeliest(self.target.logits(output.hidden)).tolist()
                return
            tokens = [i % self.vocab for i in range(rows)]
            tree = Tree.of(tokens, _parents(rows), vocab_size=self.vocab)
            verified = self.target.verify([tree], self.pool, [self.length])
            likeliest(self.target.logits(verified.output.hidden)).tolist()
            deepest = max(range(rows), key=lambda n: tree.depth[n])
            path = tree.path(deepest)[: _ACCEPTED + 1]
            self.target.commit(verified, self.pool, [path])

    def run_draft(self, block: int) -> None:
        """One draft of ``block`` rows, and the context of the tokens that a pass accepts."""
        import torch

        from specpilot.harness.engines.reference.drafter import Place

        if self.drafter is None:
            raise InvalidInput("the deployment has no drafter to time.")
        with torch.inference_mode():
            count = min(_ACCEPTED + 1, self.length)
            place = Place(0, self.length - count, count)
            self.drafter.extend(self.features[-count:], [place])
            self.drafter.propose([0], [self.length], block, min(_TOP_K, self.vocab))


def _parents(rows: int) -> list[int]:
    """Parents of a tree like those that best-first builds: a spine, and siblings along it."""
    spine = max(2, rows // 2)
    siblings = (
        [0] * (rows - spine) if spine == 2 else [i % (spine - 1) for i in range(rows - spine)]
    )
    return [-1, *range(spine - 1), *siblings]


def calibrate_deployment(
    deployment: Deployment,
    *,
    seconds: float = 0.15,
    rows: Sequence[int] = ROWS,
    blocks: Sequence[int] = BLOCKS,
) -> Calibration:
    """Calibrate the machine and the deployment's passes and draft, and store the result.

    Takes ``seconds`` for each row count and block, and the time to load the models. Blocks longer
    than the drafter was trained for are left out.
    """
    bench = Bench.of(deployment)
    weights = ModelShape.from_config(deployment.target, dtype=deployment.dtype).weight_bytes()
    run_draft = None
    if bench.drafter is not None:
        run_draft = bench.run_draft
        blocks = [b for b in blocks if b <= bench.drafter.config.block]
    calibration = calibrate(
        deployment.id,
        dtype=deployment.dtype,
        working_set_mb=max(1.0, weights / 1e6),
        run_pass=bench.run_pass,
        run_draft=run_draft,
        rows=rows,
        blocks=blocks,
        seconds=seconds,
    )
    save_calibration(calibration)
    return calibration


def _engine(deployment: Deployment, settings: Mapping[str, Any]) -> Any:
    from specpilot.harness.engines import settings as engine_settings
    from specpilot.harness.engines.reference.engine import ReferenceEngine

    merged = {
        "target": deployment.target,
        "drafter": deployment.drafter or "",
        "dtype": deployment.dtype,
        **deployment.stock,
        **deployment.launch,
        **settings,
    }
    merged.pop("threads", None)
    return ReferenceEngine(engine_settings.check("reference", merged))  # type: ignore[arg-type]


def profile_deployment(
    deployment: Deployment,
    settings: Mapping[str, Any],
    prompts: Prompts,
    *,
    steps: int = 20,
    calibration: Calibration | None = None,
) -> Profile:
    """Profile the engine's step under ``settings`` (merged onto stock) on ``prompts``.

    As many requests run as the regime says; finished ones are replaced between steps. Floors are
    taken on the calibrated machine (``calibration`` None: the stored one, ``NotFound`` if none).
    """
    _need_torch(deployment)
    if not prompts:
        raise InvalidInput("field 'prompts' is empty; a profile needs at least one prompt.")
    from specpilot.harness.engines.backend import GenerateRequest

    calibration = calibration or require_calibration(deployment.id)
    model = CostModel.of(deployment, calibration)
    speculation, block, rows = read_settings({**deployment.stock, **settings})
    engine = _engine(deployment, settings)
    wanted = min(deployment.regime.requests, engine.settings.max_running)
    number = 0

    def prepare() -> None:
        nonlocal number
        while len(engine.running) < wanted or not all(r.prefilled for r in engine.running):
            if not engine.waiting and len(engine.running) < wanted:
                prompt = tuple(prompts[number % len(prompts)])
                room = engine.context_length - len(prompt)
                output = min(room, max(2, deployment.regime.output_tokens))
                engine.add(GenerateRequest(f"profile-{number}", prompt, output, ignore_eos=True))
                number += 1
            engine.step()

    regime = replace(deployment.regime, requests=wanted)
    drafter = model.drafter if speculation != "none" else None
    floors = step_floor(model.target, drafter, model.hardware, regime, rows, block=block)
    title = f"{deployment.id}, {speculation}" + (f" of {rows} rows" if rows > 1 else "")
    return profile_steps(
        engine.step, reference_hooks(), floors, title=title, steps=steps, prepare=prepare
    )


def record_lattices(
    deployment: Deployment,
    prompts: Prompts,
    path: Path,
    *,
    output_tokens: int,
    settings: Mapping[str, Any] | None = None,
    block: int | None = None,
    top_k: int = _TOP_K,
    selector: bool = False,
) -> float:
    """Run ``prompts`` greedily and record a lattice for every cycle; return the run's live τ.

    Without ``settings`` the engine takes one token a pass and drafts at every position, so that
    every policy can be replayed exactly (the returned τ is 1 then). With settings, cycles are
    those of that policy: this is how replay is compared with live runs. ``selector`` records the
    pairwise lattices of the drafter's selector.
    """
    _need_torch(deployment)
    from specpilot.harness.engines.backend import GenerateRequest

    every = settings is None
    chosen: dict[str, Any] = {"top_k": top_k}
    if selector:
        chosen["selector"] = True
    if block is not None:
        chosen["block"] = block
    chosen |= {"speculation": "tree", "rows": 1} if settings is None else settings
    engine = _engine(deployment, chosen)
    if engine.drafter is None:
        raise InvalidInput(f"deployment {deployment.id!r} drafts nothing under these settings.")
    header = TraceHeader(
        deployment=deployment.id,
        drafter=deployment.drafter_kind or "dflash",
        vocab_size=engine.vocab_size,
        block=engine.settings.block,
        policy=engine.settings.speculation,
        rows=engine.rows,
        every_position=every,
    )
    outputs: dict[str, list[int]] = {}
    passes = 0
    with TraceWriter(path, header) as writer:

        def on_cycle(rid: str, lattice: Any, tree: Any, walk: Any) -> None:
            nonlocal passes
            output = outputs.setdefault(rid, [tree.tokens[0]])
            writer.cycle(rid, len(output) - 1, tree.tokens[0], lattice)
            output.extend(walk.emitted)
            passes += 1

        engine.on_cycle = on_cycle
        for i, prompt in enumerate(prompts):
            engine.add(GenerateRequest(f"r{i}", tuple(prompt), output_tokens))
        while engine.has_work():
            engine.step()
        for rid, output in outputs.items():
            writer.output(rid, output)
    if not passes:
        raise InvalidInput("no cycle was recorded: give more output_tokens or longer prompts.")
    return sum(len(output) - 1 for output in outputs.values()) / passes
