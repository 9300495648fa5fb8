"""Generate and score systems of a deployment once, for ``bench`` to judge many times.

    python -P -m specpilot.harness.token_forcing.record --deployment pico --folder DIR

Records stock, a lossless system (``--lossless``: engine settings, by default a tree), the same with
the paper's fault at several biases, and honest numerics: plain decoding and another batch size.
Each also answers ``--questions`` short completions (``task``). Systems run one after the other,
then the scorer; a folder that already holds a system keeps it, so an interrupted run goes on
where it stopped.
"""

import argparse
import contextlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import specpilot
from specpilot.harness.deployments import registry
from specpilot.harness.deployments.health import read_config
from specpilot.harness.deployments.workload import load_workload
from specpilot.harness.engines.client import EngineClient, Generation, SamplingParams
from specpilot.harness.engines.launch import Role
from specpilot.harness.token_forcing import task
from specpilot.harness.token_forcing.calibration import Calibration, calibrate
from specpilot.harness.token_forcing.events import events_of, margins_under
from specpilot.harness.token_forcing.faulty import write_overlay
from specpilot.harness.token_forcing.recorded import (
    CALIBRATION,
    RUN,
    TASK,
    RecordedSystem,
    load_system,
    save_system,
)
from specpilot.harness.token_forcing.scorer import Scorer
from specpilot.harness.token_forcing.servers import serving
from specpilot.types import Deployment

__all__ = ["Plan", "System", "default_systems", "record"]

BIASES = (0.1, 0.25, 0.5, 1.0, 2.0)
STRIDE = 7
EVENT_FLOOR = 0.25
"""Variants score tokens from this margin on, whatever threshold the calibration finds."""
PROMPT_KEY = b"specpilot forcing record"
TIMED_TEXTS = 12


@dataclass(frozen=True, slots=True)
class System:
    """A system to record. ``running`` requests are in flight at once; ``bias`` 0 is no fault."""

    name: str
    role: Role
    settings: Mapping[str, Any]
    running: int
    bias: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What to record: ``requests`` outputs of ``tokens`` a system, the fault after ``after``, and
    ``questions`` short completions of stock, the lossless and the most faulty system."""

    deployment: Deployment
    requests: int
    tokens: int
    after: int
    systems: tuple[System, ...]
    questions: int = 0


def default_systems(lossless: Mapping[str, Any], running: int) -> tuple[System, ...]:
    """Stock, the lossless system, its faulty versions, plain decoding and another batch size."""
    faulty = (System(f"bias {bias:g}", "candidate", lossless, running, bias) for bias in BIASES)
    return (
        System("stock", "stock", {}, running),
        System("lossless", "candidate", lossless, running),
        *faulty,
        System("honest plain decoding", "ar", {}, running),
        System("honest batch size", "stock", {}, max(running // 4, 1)),
    )


def record(plan: Plan, folder: Path) -> None:
    """Write ``plan``'s systems, calibration and facts into ``folder``, with progress on screen.

    The calibration is made on the first 64 stock outputs. On a BF16 deployment the same weights in
    FP32 are a variant: for the thresholds, and to explain events.
    """
    folder.mkdir(parents=True, exist_ok=True)
    deployment = plan.deployment
    workload = load_workload(deployment.workload, deployment.regime.prompt_tokens)
    prompts = workload.prompts("open", plan.requests, PROMPT_KEY)
    outputs = {s.name: _outputs(plan, s, prompts, folder) for s in plan.systems}
    _answers(plan, folder)
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(serving(deployment, "scorer", {}))
        vocab_size = int(read_config(Path(deployment.target))["vocab_size"])
        scorer = Scorer(client, vocab_size)
        variants: dict[str, Scorer] = {}
        if deployment.dtype == "bfloat16":
            exact = stack.enter_context(serving(replace(deployment, dtype="float32"), "scorer", {}))
            variants["float32"] = Scorer(exact, vocab_size)
        calibration = calibrate(outputs["stock"][:64], scorer, variants)
        _write(folder / CALIBRATION, calibration.to_dict())
        for name, found in outputs.items():
            if not (folder / f"{name}.npz").is_file():
                save_system(folder, _scored(name, found, scorer, variants, calibration))
                print(f"scored {name}", flush=True)
        facts = {
            "deployment": deployment.id,
            "dtype": deployment.dtype,
            "requests": plan.requests,
            "prompt_tokens": deployment.regime.prompt_tokens,
            "tokens": plan.tokens,
            "fault": {"stride": STRIDE, "after": plan.after},
            "systems": {
                s.name: {"role": s.role, "settings": dict(s.settings), "running": s.running}
                for s in plan.systems
            },
            "specpilot": specpilot.__version__,
            "scoring_over_prefill": _scoring_cost(client, outputs["stock"][:TIMED_TEXTS]),
        }
    _write(folder / RUN, facts)


@contextlib.contextmanager
def _running(deployment: Deployment, system: System, after: int) -> Iterator[EngineClient]:
    """Start ``system``, its fault from output token ``after`` on."""
    settings = {**system.settings, "max_running": system.running}
    with tempfile.TemporaryDirectory(prefix="specpilot-fault-") as folder:
        if system.bias:
            settings["overlay"] = str(
                write_overlay(
                    Path(folder), deployment.engine, bias=system.bias, stride=STRIDE, after=after
                )
            )
        with serving(deployment, system.role, settings) as client:
            yield client


def _answers(plan: Plan, folder: Path) -> None:
    """Let stock, the lossless and the most faulty system answer the task's questions."""
    if not plan.questions or (folder / TASK).is_file():
        return
    asked = task.questions(plan.deployment, plan.questions)
    worst = max(plan.systems, key=lambda s: s.bias)
    answers = {}
    for system in plan.systems:
        if system.name in ("stock", "lossless") or (system is worst and system.bias):
            with _running(plan.deployment, system, task.AFTER) as client:
                answers[system.name] = task.right_answers(client, asked, system.running)
    _write(folder / TASK, answers)


def _outputs(
    plan: Plan, system: System, prompts: Sequence[tuple[int, ...]], folder: Path
) -> list[Generation]:
    """Generate one system's outputs, or take them from its file of an earlier run."""
    kept = folder / f"{system.name}.npz"
    if kept.is_file():
        found = load_system(kept)
        ends = np.cumsum(found.lengths)
        cuts = np.split(found.tokens, ends[:-1])
        return [
            Generation(p, tuple(o.tolist()), 0.0, 0.0, 0.0, "length")
            for p, o in zip(prompts, cuts, strict=True)
        ]
    params = SamplingParams(max_new_tokens=plan.tokens, ignore_eos=True)
    started = time.perf_counter()
    with (
        _running(plan.deployment, system, plan.after) as client,
        ThreadPoolExecutor(system.running) as pool,
    ):
        outputs = list(pool.map(lambda p: client.generate(p, params), prompts))
    seconds = time.perf_counter() - started
    print(f"generated {system.name}: {len(outputs)} requests in {seconds:.0f} s", flush=True)
    return outputs


def _scored(
    name: str,
    outputs: Sequence[Generation],
    scorer: Scorer,
    variants: Mapping[str, Scorer],
    calibration: Calibration,
) -> RecordedSystem:
    margins = scorer.margins(outputs)
    floor = min(EVENT_FLOOR, calibration.large)
    starts = np.concatenate(([0], np.cumsum([m.tokens for m in margins])))
    events = events_of(outputs, margins, floor)
    smallest = np.full(len(events), np.inf, dtype=np.float32)
    for variant in variants.values():
        smallest = np.minimum(smallest, margins_under(variant, events, outputs))
    return RecordedSystem(
        name=name,
        prompts=tuple(m.prompt for m in margins),
        lengths=np.array([m.tokens for m in margins], dtype=np.int64),
        tokens=np.concatenate([np.array(o.output_ids, dtype=np.int32) for o in outputs]),
        margins=np.concatenate([m.margins for m in margins]),
        event_at=np.array([starts[e.request] + e.position for e in events], dtype=np.int64),
        event_margins=smallest,
    )


def _scoring_cost(client: EngineClient, outputs: Sequence[Generation]) -> list[float]:
    """Seconds to score a text over seconds to prefill it (one new token), in turn, by text."""
    one = SamplingParams(max_new_tokens=1, ignore_eos=True)

    def seconds(work: Callable[[], object]) -> float:
        client.flush()
        started = time.perf_counter()
        work()
        return time.perf_counter() - started

    ratios = []
    for output in outputs:
        ids, start = (*output.prompt_ids, *output.output_ids)[:-1], len(output.prompt_ids)
        plain = seconds(partial(client.generate, ids, one))
        ratios.append(seconds(partial(client.score, ids, start, 1)) / plain)
    return ratios


def _write(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--deployment", default="pico")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--after", type=int, default=128)
    parser.add_argument("--questions", type=int, default=1000)
    parser.add_argument("--running", type=int, default=32)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"))
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--lossless", type=json.loads, default={"speculation": "tree", "rows": 16})
    options = parser.parse_args()
    deployment = registry.load(options.deployment)
    if options.dtype:
        deployment = replace(deployment, dtype=options.dtype)
    if options.device:
        deployment = replace(deployment, launch={**deployment.launch, "device": options.device})
    systems = default_systems(options.lossless, options.running)
    plan = Plan(
        deployment, options.requests, options.tokens, options.after, systems, options.questions
    )
    record(plan, options.folder)


if __name__ == "__main__":
    main()
