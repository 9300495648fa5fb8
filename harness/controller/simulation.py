"""Simulated machines for the rule's error rates: engines on a virtual clock, and many rounds.

Used by the benchmarks and the tests; a simulated engine is an ``Engine`` whose requests take a
virtual time with noise and drift, so that the very code that measures servers is what is tested.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from specpilot.harness.controller.design import Design
from specpilot.harness.controller.measure import Arm, Measurement, decision_at, measure
from specpilot.harness.controller.promotion import Decision
from specpilot.harness.controller.statistics import estimate
from specpilot.harness.controller.telemetry import CpuSample
from specpilot.harness.engines.client import Generation, SamplingParams

__all__ = [
    "SimulatedEngine",
    "VirtualMachine",
    "fresh_prompts",
    "measure_simulated",
    "simulate_cycles",
    "simulate_decision",
]

VOCAB = 4096


@dataclass(slots=True)
class VirtualMachine:
    """A clock that only requests advance. ``drift_per_s`` slows everything linearly in time."""

    drift_per_s: float = 0.0
    now_s: float = 1.0

    def slowdown(self) -> float:
        return 1.0 + self.drift_per_s * self.now_s

    def sample(self, roots: Sequence[int]) -> CpuSample:
        return CpuSample(self.now_s, 0.0, dict.fromkeys(roots, 0.0))


@dataclass(slots=True)
class SimulatedEngine:
    """Answers any prompt with tokens that depend on it alone, in a virtual time.

    ``sd`` is the standard deviation of a request's log time.
    """

    machine: VirtualMachine
    seconds_per_token: float = 0.01
    sd: float = 0.0
    seed: int = 0
    salt: int = 0
    _rng: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(self.seed)

    def generate(self, input_ids: Sequence[int], params: SamplingParams) -> Generation:
        count = params.max_new_tokens
        noise = float(np.exp(self._rng.normal(0.0, self.sd))) if self.sd else 1.0
        seconds = count * self.seconds_per_token * self.machine.slowdown() * noise
        sent = self.machine.now_s
        self.machine.now_s += seconds
        ids = np.random.default_rng([self.salt, *input_ids]).integers(0, VOCAB, count)
        return Generation(
            prompt_ids=tuple(input_ids),
            output_ids=tuple(int(token) for token in ids),
            sent_s=sent,
            first_token_s=sent + seconds / count,
            last_token_s=self.machine.now_s,
            finish_reason="length",
        )

    def flush(self) -> None:
        pass


def fresh_prompts(seed: int) -> Iterator[tuple[int, ...]]:
    """Yield prompts without end, no two alike."""
    number = 0
    while True:
        yield (seed, number)
        number += 1


def measure_simulated(
    design: Design,
    gain: float = 0.0,
    *,
    sd: float = 0.0,
    noise: float | None = 0.0,
    drift_per_s: float = 0.0,
    seed: int = 0,
) -> Measurement:
    """Measure two simulated engines of which B is faster by ``gain`` (0.03: 3 %)."""
    machine = VirtualMachine(drift_per_s)
    a = SimulatedEngine(machine, 0.01, sd, seed=2 * seed)
    b = SimulatedEngine(machine, 0.01 / (1.0 + gain), sd, seed=2 * seed + 1)
    return measure(
        Arm("stock", a),
        Arm("candidate", b),
        design,
        fresh_prompts(seed),
        [(1, 0), (2, 0)],
        noise=noise,
        vocab_size=VOCAB,
        sample=machine.sample,
    )


def simulate_cycles(
    rng: np.random.Generator, design: Design, gain: float, sd_pair: float
) -> list[float]:
    """Draw a measurement's log-ratios: each cycle averages two blocks' pairs of requests.

    ``sd_pair`` is the standard deviation of one request pair's log-ratio.
    """
    pairs = 2 * design.requests_per_block
    draws = rng.normal(np.log1p(gain), sd_pair, (design.cycles, pairs))
    return [float(value) for value in draws.mean(axis=1)]


def simulate_decision(
    rng: np.random.Generator, design: Design, gain: float, sd_pair: float
) -> Decision:
    """Draw an A/A run for the noise and a measurement, and apply the rule at its looks."""
    noise = estimate(simulate_cycles(rng, design, 0.0, sd_pair)).se
    ratios = simulate_cycles(rng, design, gain, sd_pair)
    for count in range(2, design.cycles + 1):
        decision = decision_at(design, ratios[:count], noise, diverged=False)
        if decision is not None and decision.outcome != "continue":
            return decision
    raise AssertionError("the last look always decides")
