"""One round without a language model: a dumb, honest driver that every agent has to beat.

It knows the system only through MCP tools, like any client: profile, gap, transfer plan, a handful
of trials, the sealed final, memory. It measures what the plan ranks highest and one tree with as
many rows as stock, and builds each candidate on the current best where the mechanisms differ.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from specpilot.errors import EngineFailure, InvalidInput, SpecPilotError

__all__ = ["Progress", "Round", "Tools", "drive"]

MAX_TRIALS = 2
WAIT_S = 20.0


class Tools(Protocol):
    """The MCP client: calls a tool and returns its structured result."""

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> dict[str, Any]: ...


class Progress(Protocol):
    """What a person sees while the round goes on."""

    def step(self, title: str) -> None: ...

    def update(self, done: int, planned: int, message: str) -> None: ...

    def say(self, line: str) -> None: ...


@dataclass(frozen=True)
class Round:
    """A finished round: what the tools said, in order, and how long it took in seconds."""

    deployment: dict[str, Any]
    ceiling: dict[str, Any] | None
    plan: dict[str, Any]
    status: dict[str, Any]
    isolation: str
    learned: list[str]
    seconds: float
    failures: list[str] = field(default_factory=list)


async def drive(
    tools: Tools, deployment: str, progress: Progress, *, resume: str | None = None
) -> Round:
    """Carry out one round and return it. A round that promotes nothing is a good round.

    ``resume`` goes on with an open round: patches and trials that exist are kept.
    Raises ``SpecPilotError`` when a step itself fails (not when a patch does).
    """
    began = time.monotonic()
    progress.step("describe the deployment")
    described = await tools.call("deployment_describe", {"deployment": deployment})
    progress.say(_sentence(described))
    progress.step("profile it on this machine")
    ceiling = await _gap(tools, progress, deployment) if described["profilable"] else None
    progress.step("plan from memory")
    plan = await tools.call("plan_port", {"deployment": deployment})
    ideas = choose(plan["patches"], described["stock"])
    for idea in ideas:
        progress.say(f"  {_name(idea)}: predicted {_times(idea['predicted'])} over stock")
    round_id, isolation = await _open(tools, progress, deployment, resume)
    failures = await _trials(tools, progress, round_id, ideas)
    progress.step("sealed final against stock, with AR beside it")
    status = await tools.call("round_status", {"round": round_id})
    learned: list[str] = []
    if status["final"] is None:
        unsealed = isolation.startswith("tier 0")
        job = await tools.call("final_start", {"round": round_id, "allow_unsealed": unsealed})
        learned = (await _job(tools, progress, job))["learned"]
        status = await tools.call("round_status", {"round": round_id})
    return Round(
        deployment=described,
        ceiling=ceiling,
        plan=plan,
        status=status,
        isolation=isolation,
        learned=learned,
        seconds=time.monotonic() - began,
        failures=failures,
    )


def choose(
    patches: Sequence[Mapping[str, Any]], stock: Mapping[str, Any]
) -> list[Mapping[str, Any]]:
    """Pick what to measure, best predicted first, and one tree of as many rows as stock's block.

    Raises ``InvalidInput`` if the plan has nothing concrete to try.
    """
    if not patches:
        raise InvalidInput(
            "The plan names no patch that could be tried on this deployment.",
            hint="Look at plan_port's blocked steps and mechanism_list's reasons.",
        )
    ranked = sorted(patches, key=lambda idea: -(idea["predicted"] or 0.0))
    chosen = ranked[:MAX_TRIALS]
    equal = [idea for idea in ranked if _rows(idea) == stock.get("block")]
    if equal and not any(idea in equal for idea in chosen):
        chosen[-1] = equal[0]
    return chosen


def _rows(idea: Mapping[str, Any]) -> int | None:
    rows = (use["params"].get("rows") for use in idea["mechanisms"])
    return next((each for each in rows if each is not None), None)


async def _gap(tools: Tools, progress: Progress, deployment: str) -> dict[str, Any]:
    await _job(tools, progress, await tools.call("cost_profile", {"deployment": deployment}))
    ceiling = await tools.call("cost_ceiling", {"deployment": deployment})
    progress.say(_gap_sentence(ceiling))
    return ceiling


async def _open(
    tools: Tools, progress: Progress, deployment: str, resume: str | None
) -> tuple[str, str]:
    progress.step("open the round")
    if resume is None:
        opened = await tools.call("round_start", {"deployment": deployment})
        progress.say(f"round {opened['round']}, isolation {opened['isolation']}")
        return opened["round"], opened["isolation"]
    status = await tools.call("round_status", {"round": resume})
    if status["deployment"] != deployment:
        raise InvalidInput(f"Round {resume} is on {status['deployment']}, not {deployment}.")
    progress.say(f"round {resume} goes on after {len(status['trials'])} trials")
    return resume, status["isolation"]


async def _trials(
    tools: Tools, progress: Progress, round_id: str, ideas: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Measure each idea that has no trial yet; return what failed, as text."""
    failures: list[str] = []
    made: dict[str, set[str]] = {}
    for number, idea in enumerate(ideas, start=1):
        name = _name(idea)
        made[name] = {use["id"] for use in idea["mechanisms"]}
        status = await tools.call("round_status", {"round": round_id})
        if any(name in trial["patches"] for trial in status["trials"]):
            continue
        progress.step(f"trial {number} of {len(ideas)}: {name}")
        try:
            await _patch(tools, round_id, name, idea)
            base = [best for best in status["best"] if not made.get(best, set()) & made[name]]
            started = await tools.call("trial_start", {"round": round_id, "patches": [*base, name]})
            result = (await _job(tools, progress, started))["result"]
        except SpecPilotError as error:
            failures.append(f"{name}: {error}")
            progress.say(f"{name} failed: {error}")
            continue
        progress.say(f"{name}: {result['verdict']}. {result['reason']}")
    return failures


async def _patch(tools: Tools, round_id: str, name: str, idea: Mapping[str, Any]) -> None:
    try:
        await tools.call(
            "mechanism_apply",
            {
                "round": round_id,
                "patch": name,
                "title": json.dumps(idea["mechanisms"], sort_keys=True)[:200],
                "mechanisms": idea["mechanisms"],
            },
        )
    except SpecPilotError as error:
        if "exists" not in str(error):  # made before this round was interrupted
            raise


async def _job(tools: Tools, progress: Progress, started: Mapping[str, Any]) -> dict[str, Any]:
    """Follow a job to its end. Raises ``EngineFailure`` unless it is done."""
    while True:
        status = await tools.call("job_status", {"job": started["job"], "wait_s": WAIT_S})
        progress.update(status["done"], status["planned"], status["message"])
        if status["state"] not in ("queued", "running"):
            break
    if status["state"] != "done":
        raise EngineFailure(f"{status['kind']} {status['state']}: {status['message']}")
    return status


def _name(idea: Mapping[str, Any]) -> str:
    """``best-first-tree-b8-r12-and-pairwise-selector``: a switch that is on needs no value."""
    parts = []
    for use in idea["mechanisms"]:
        params = sorted(use["params"].items())
        values = [f"{key[0]}{value}" for key, value in params if value is not True]
        parts.append("-".join([use["id"], *values]).lower().replace("_", "-"))
    return "-and-".join(parts)[:64]


def _sentence(described: Mapping[str, Any]) -> str:
    target, regime = described["target"], described["regime"]
    return (
        f"{described['title']}: {target['parameters'] / 1e6:.1f} M parameters "
        f"({target['architecture']}), {described['dtype']}, {regime['serving']} request"
        f"{'' if regime['requests'] == 1 else 's'}, stock {described['stock']}"
    )


def _gap_sentence(ceiling: Mapping[str, Any]) -> str:
    gap = ceiling["gap"]
    return (
        f"ceiling {ceiling['speedup_over_ar']:.2f}x AR; stock is {gap['whole']:.2f}x below it: "
        f"tokens {gap['tokens']:.2f} x kernels {gap['kernel']:.2f} x overhead "
        f"{gap['overhead']:.2f}; largest: {gap['largest']}"
    )


def _times(value: float | None) -> str:
    return "no opinion" if value is None else f"{value:.2f}x"
