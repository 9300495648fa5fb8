"""Run a design: time two resident systems on the same fresh prompts, cycle after cycle.

The clock is this process's, from a request sent to its last token received; tokens are counted
here. Systems are known only by their HTTP client and the pid of their process tree. What a result
means is the promotion rule's affair.
"""

import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Protocol

from specpilot.errors import CheckFailed, EngineFailure, SpecPilotError
from specpilot.harness.controller.design import Design
from specpilot.harness.controller.promotion import Decision, decide, hopeless
from specpilot.harness.controller.sanity import (
    check_answers,
    check_busy,
    check_generation,
    check_idle,
)
from specpilot.harness.controller.telemetry import CpuSample, foreign_cores, sample_cpu
from specpilot.harness.engines.client import Generation, SamplingParams

__all__ = [
    "Arm",
    "ArmFailure",
    "Cancelled",
    "Cycle",
    "Engine",
    "Measurement",
    "Progress",
    "decision_at",
    "measure",
]

IDLE_FROM_S = 0.5
"""Idle seconds from which on an arm's CPU use is judged; the kernel counts in steps of 10 ms."""
Prompt = tuple[int, ...]
Progress = Callable[[str, int, int], None]
"""Called with (what is going on, cycles done, cycles planned)."""


class Engine(Protocol):
    """What a measurement needs of a system: ``EngineClient`` has it."""

    def generate(self, input_ids: Sequence[int], params: SamplingParams) -> Generation: ...

    def flush(self) -> None: ...


class Cancelled(SpecPilotError):
    """The job was cancelled; nothing that it measured counts."""


class ArmFailure(EngineFailure):
    """One of the systems did not start, died, hung or answered unusably. ``arm`` says which."""

    def __init__(self, arm: str, message: str) -> None:
        super().__init__(f"The {arm} system failed: {message}")
        self.arm = arm


@dataclass(frozen=True, slots=True)
class Arm:
    """One system under test. ``pid`` is the root of its process tree, under which its orphans are
    adopted; None in simulations."""

    name: str
    engine: Engine
    pid: int | None = None


@dataclass(frozen=True, slots=True)
class Cycle:
    """One cycle: its order, log(seconds of A / seconds of B), and what disturbed it.

    ``taken_cores``: cores that all but A used during A's blocks, less all but B during B's.

    Where an AR system was timed as well, ``ar_over_a`` and ``ar_over_b`` are the logs of its
    seconds over theirs on one of the cycle's two prompt sets.
    """

    order: str
    log_ratio: float
    ar_over_a: float | None
    ar_over_b: float | None
    foreign_cores: float
    taken_cores: float
    disturbed: bool


@dataclass(slots=True)
class Measurement:
    """Everything that was timed. Outputs are in the order of the prompts; ``a[i]`` and ``b[i]``
    served the same prompt. Cycles that were repeated are left out and counted in ``repeated``.
    """

    design: Design
    cycles: list[Cycle] = field(default_factory=list)
    a: list[Generation] = field(default_factory=list)
    b: list[Generation] = field(default_factory=list)
    ar: list[Generation] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys("ABR", 0.0))
    repeated: int = 0
    decision: Decision | None = None

    @property
    def log_ratios(self) -> list[float]:
        return [cycle.log_ratio for cycle in self.cycles]

    def tokens_per_s(self, letter: str) -> float | None:
        """Return the tokens per second of ``A``, ``B`` or ``R`` (AR) over the kept cycles."""
        outputs = {"A": self.a, "B": self.b, "R": self.ar}[letter]
        return len(outputs) * self.design.tokens / self.seconds[letter] if outputs else None

    @property
    def diverged(self) -> bool:
        """Whether any output of B differs from A's for the same prompt."""
        return any(x.output_ids != y.output_ids for x, y in zip(self.a, self.b, strict=True))


def measure(
    a: Arm,
    b: Arm,
    design: Design,
    prompts: Iterator[Prompt],
    warmup: Sequence[Prompt],
    *,
    noise: float | None,
    vocab_size: int,
    ar: Arm | None = None,
    cancelled: threading.Event | None = None,
    progress: Progress = lambda message, done, planned: None,
    sample: Callable[[Sequence[int]], CpuSample] = sample_cpu,
) -> Measurement:
    """Time ``b`` against ``a`` as ``design`` says and apply the promotion rule at its looks.

    ``prompts`` must yield ``design.prompts_needed`` fresh prompts; ``warmup`` comes from another
    pool and is served by every arm first, untimed. ``noise`` is the standard error of the A/A mean
    for the design's full number of cycles; None measures without deciding (the A/A run itself).
    ``ar`` is timed once a cycle for the speedup over AR and plays no part in the decision.

    Raises ``InsaneOutput`` for an impossible output, ``EngineFailure`` when a system fails and
    ``Cancelled`` when ``cancelled`` is set.
    """
    run = _Run(a, b, ar, design, vocab_size, cancelled or threading.Event(), sample)
    result = Measurement(design)
    for arm in run.arms:
        progress(f"warming up {arm.name}", 0, design.cycles)
        run.warm_up(arm, warmup)
    repeats_left = design.max_repeats
    for number, order in enumerate(design.orders()):
        if len(result.cycles) == design.cycles:
            break
        timed = run.cycle(number, order, prompts)
        disturbed = timed.cycle.foreign_cores > design.max_foreign_cores
        if disturbed and repeats_left:
            repeats_left -= 1
            result.repeated += 1
            continue
        _keep(result, timed, disturbed)
        check_answers(result.b, result.a, arm=b.name)
        check_answers(result.a, result.b, arm=a.name)
        run.check_cores()
        done = len(result.cycles)
        progress("timing", done, design.cycles)
        if noise is not None:
            result.decision = decision_at(
                design,
                result.log_ratios,
                noise,
                diverged=result.diverged,
                taken_cores=[cycle.taken_cores for cycle in result.cycles],
            )
            if result.decision is not None and result.decision.outcome != "continue":
                break
    return result


@dataclass(frozen=True, slots=True)
class _Block:
    """Outputs of one block, its mean log of seconds per token, and the seconds that it took."""

    outputs: list[Generation]
    log_s_per_token: float
    seconds: float


@dataclass(frozen=True, slots=True)
class _Timed:
    cycle: Cycle
    outputs: dict[str, list[Generation]]
    seconds: dict[str, float]


def decision_at(
    design: Design,
    log_ratios: Sequence[float],
    noise: float,
    *,
    diverged: bool,
    taken_cores: Sequence[float] = (),
) -> Decision | None:
    """Apply the rule if ``design`` reads the bound at this number of cycles."""
    decision = None
    if len(log_ratios) in design.futility:
        decision = hopeless(log_ratios, noise, diverged=diverged)
    if decision is None and len(log_ratios) in design.looks:
        decision = decide(
            log_ratios, design.looks, noise, diverged=diverged, taken_cores=taken_cores
        )
    return decision


def _cores(cpu_s: float, wall_s: float) -> float:
    return cpu_s / wall_s if wall_s > 0 else 0.0


def _keep(result: Measurement, timed: _Timed, disturbed: bool) -> None:
    result.cycles.append(replace(timed.cycle, disturbed=disturbed))
    result.a += timed.outputs["A"]
    result.b += timed.outputs["B"]
    result.ar += timed.outputs["R"]
    for letter, seconds in timed.seconds.items():
        result.seconds[letter] += seconds


class _Run:
    """One measurement under way: the arms by letter (A, B, R for AR) and their idle time."""

    def __init__(
        self,
        a: Arm,
        b: Arm,
        ar: Arm | None,
        design: Design,
        vocab_size: int,
        cancelled: threading.Event,
        sample: Callable[[Sequence[int]], CpuSample],
    ) -> None:
        self._by_letter = {"A": a, "B": b} | ({"R": ar} if ar is not None else {})
        self._design = design
        self._vocab_size = vocab_size
        self._cancelled = cancelled
        self._sample = sample
        self._pids = [arm.pid for arm in self.arms if arm.pid is not None]
        self._idle: dict[str, list[float]] = {letter: [0.0, 0.0] for letter in self._by_letter}
        self._busy_b = [0.0, 0.0]

    @property
    def arms(self) -> list[Arm]:
        return list(self._by_letter.values())

    def warm_up(self, arm: Arm, prompts: Sequence[Prompt]) -> None:
        for number, prompt in enumerate(prompts[: self._design.warmup_requests]):
            self._check(arm, self._request(arm, number, prompt), prompt)

    def cycle(self, number: int, order: str, prompts: Iterator[Prompt]) -> _Timed:
        """Run one cycle: four blocks of A and B, and one of AR at an end that alternates."""
        halves = [self._take(prompts), self._take(prompts)]
        blocks = [(letter, position // 2) for position, letter in enumerate(order)]
        if "R" in self._by_letter:
            first = number % 2 == 0
            blocks.insert(0 if first else len(blocks), ("R", 0 if first else 1))
        blocks_done: dict[tuple[str, int], _Block] = {}
        taken_s, wall_s = dict.fromkeys("ABR", 0.0), dict.fromkeys("ABR", 0.0)
        begin = before = self._sample([*self._pids, os.getpid()])
        for letter, half in blocks:
            arm = self._by_letter[letter]
            self._flush(arm)
            blocks_done[letter, half] = self._block(arm, halves[half], number, half)
            after = self._sample([*self._pids, os.getpid()])
            self._note_cores(letter, before, after)
            wall = after.at_s - before.at_s
            taken_s[letter] += wall * foreign_cores(before, after, os.getpid())
            taken_s[letter] += self._used_by_others(letter, before, after)
            wall_s[letter] += wall
            before = after
        log = {place: block.log_s_per_token for place, block in blocks_done.items()}
        ar = next((half for letter, half in blocks if letter == "R"), None)
        cycle = Cycle(
            order=order,
            log_ratio=math.fsum(log["A", half] - log["B", half] for half in (0, 1)) / 2,
            ar_over_a=None if ar is None else log["R", ar] - log["A", ar],
            ar_over_b=None if ar is None else log["R", ar] - log["B", ar],
            foreign_cores=foreign_cores(begin, before, os.getpid()),
            taken_cores=_cores(taken_s["A"], wall_s["A"]) - _cores(taken_s["B"], wall_s["B"]),
            disturbed=False,
        )
        outputs: dict[str, list[Generation]] = {letter: [] for letter in "ABR"}
        seconds = dict.fromkeys("ABR", 0.0)
        for letter, half in sorted(blocks_done):
            outputs[letter] += blocks_done[letter, half].outputs
            seconds[letter] += blocks_done[letter, half].seconds
        return _Timed(cycle, outputs, seconds)

    def check_cores(self) -> None:
        """Fail if an arm computed during the other arms' blocks, or B beyond its threads in its
        own, over all cycles so far."""
        for letter, (cpu, wall) in self._idle.items():
            if wall >= IDLE_FROM_S:
                arm = self._by_letter[letter].name
                check_idle(cpu, wall, arm=arm, max_cores=self._design.max_idle_cores)
        cpu, wall = self._busy_b
        if self._design.max_busy_cores is not None and wall >= IDLE_FROM_S:
            arm = self._by_letter["B"].name
            check_busy(cpu, wall, arm=arm, max_cores=self._design.max_busy_cores)

    def _block(self, arm: Arm, prompts: Sequence[Prompt], cycle: int, half: int) -> _Block:
        """Serve ``prompts`` under the design's load."""
        load = self._design.load
        if load.arrivals_per_s is not None:
            outputs, starts = self._arriving(arm, prompts, self._design.arrivals(cycle, half))
        elif load.in_flight > 1:
            outputs = self._in_flight(arm, prompts, load.in_flight)
        else:
            outputs = self._one_by_one(arm, prompts)
        for generation, prompt in zip(outputs, prompts, strict=True):
            self._check(arm, generation, prompt)
        tokens = self._design.tokens
        wall = max(g.last_token_s for g in outputs) - min(g.sent_s for g in outputs)
        if load.arrivals_per_s is None and load.in_flight > 1:
            return _Block(outputs, math.log(wall / (tokens * len(outputs))), wall)
        if load.arrivals_per_s is None:
            starts = [g.sent_s for g in outputs]
            wall = math.fsum(g.seconds for g in outputs)
        latencies = [g.last_token_s - start for g, start in zip(outputs, starts, strict=True)]
        logs = [math.log(seconds / tokens) for seconds in latencies]
        return _Block(outputs, math.fsum(logs) / len(logs), wall)

    def _one_by_one(self, arm: Arm, prompts: Sequence[Prompt]) -> list[Generation]:
        outputs = []
        for number, prompt in enumerate(prompts):
            if number:
                self._flush(arm)
            outputs.append(self._request(arm, number, prompt))
        return outputs

    def _in_flight(self, arm: Arm, prompts: Sequence[Prompt], width: int) -> list[Generation]:
        with ThreadPoolExecutor(width) as pool:
            return list(pool.map(lambda item: self._request(arm, *item), enumerate(prompts)))

    def _arriving(
        self, arm: Arm, prompts: Sequence[Prompt], offsets: Sequence[float]
    ) -> tuple[list[Generation], list[float]]:
        begin = time.perf_counter()

        def send(number: int, prompt: Prompt, offset: float) -> Generation:
            if self._cancelled.wait(max(0.0, begin + offset - time.perf_counter())):
                raise Cancelled("The measurement was cancelled.")
            return self._request(arm, number, prompt)

        with ThreadPoolExecutor(len(prompts)) as pool:
            outputs = list(pool.map(send, range(len(prompts)), prompts, offsets))
        return outputs, [begin + offset for offset in offsets]

    def _request(self, arm: Arm, number: int, prompt: Prompt) -> Generation:
        if self._cancelled.is_set():
            raise Cancelled("The measurement was cancelled.")
        try:
            return arm.engine.generate(prompt, self._params(number))
        except EngineFailure as error:
            raise ArmFailure(arm.name, str(error)) from error

    def _flush(self, arm: Arm) -> None:
        try:
            arm.engine.flush()
        except EngineFailure as error:
            raise ArmFailure(arm.name, str(error)) from error

    def _params(self, number: int) -> SamplingParams:
        design = self._design
        seed = None if design.temperature == 0 else (design.seed + number) % 2**31
        return SamplingParams(
            max_new_tokens=design.tokens,
            temperature=design.temperature,
            ignore_eos=True,
            sampling_seed=seed,
        )

    def _check(self, arm: Arm, generation: Generation, prompt: Prompt) -> None:
        check_generation(
            generation,
            prompt,
            arm=arm.name,
            tokens=self._design.tokens,
            vocab_size=self._vocab_size,
            floor_s_per_token=self._design.floor_s_per_token,
        )

    def _take(self, prompts: Iterator[Prompt]) -> list[Prompt]:
        count = self._design.requests_per_block
        taken = list(islice(prompts, count))
        if len(taken) < count:
            raise CheckFailed("The prompts ran out before the measurement was complete.")
        return taken

    def _used_by_others(self, busy: str, before: CpuSample, after: CpuSample) -> float:
        """Return the CPU seconds of the systems that were not to work between two samples."""
        others = [arm.pid for letter, arm in self._by_letter.items() if letter != busy]
        return sum(after.trees_s[pid] - before.trees_s[pid] for pid in others if pid is not None)

    def _note_cores(self, busy: str, before: CpuSample, after: CpuSample) -> None:
        for letter, arm in self._by_letter.items():
            if arm.pid is None or (letter == busy != "B"):
                continue
            noted = self._busy_b if letter == busy else self._idle[letter]
            noted[0] += after.trees_s[arm.pid] - before.trees_s[arm.pid]
            noted[1] += after.at_s - before.at_s
