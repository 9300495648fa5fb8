"""Measuring: the order cancels drift, prompts are fresh, impossible outputs are typed failures."""

import itertools
import math
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from specpilot.errors import CheckFailed, EngineFailure, InvalidInput
from specpilot.harness.controller.design import Design, Load, default_design
from specpilot.harness.controller.measure import Arm, Cancelled, Measurement, measure
from specpilot.harness.controller.sanity import FailureKind, InsaneOutput
from specpilot.harness.controller.simulation import (
    VOCAB,
    SimulatedEngine,
    VirtualMachine,
    fresh_prompts,
    measure_simulated,
)
from specpilot.harness.controller.telemetry import CpuSample
from specpilot.harness.engines.client import Generation, SamplingParams
from specpilot.types import Deployment, Regime

DESIGN = Design(looks=(8,), requests_per_block=1, tokens=16, seed=5)
WARMUP = [(1, 1), (1, 2)]


class Recording(SimulatedEngine):
    """A simulated engine that keeps what it was asked, and whose answer a test can change."""

    def __init__(self, machine: VirtualMachine, change: Any = None, **options: Any) -> None:
        super().__init__(machine, **options)
        self.prompts: list[tuple[int, ...]] = []
        self.flushes = 0
        self.change = change

    def generate(self, input_ids: Sequence[int], params: SamplingParams) -> Generation:
        self.prompts.append(tuple(input_ids))
        answer = super().generate(input_ids, params)
        return self.change(answer) if self.change and len(self.prompts) > 4 else answer

    def flush(self) -> None:
        self.flushes += 1


def run(a: Any, b: Any, design: Design = DESIGN, **options: Any) -> Measurement:
    machine = a.machine
    defaults: dict[str, Any] = {
        "noise": 0.0,
        "vocab_size": VOCAB,
        "sample": machine.sample,
        "prompts": fresh_prompts(9),
    }
    given = defaults | options
    prompts = given.pop("prompts")
    return measure(Arm("stock", a), Arm("candidate", b), design, prompts, WARMUP, **given)


@pytest.fixture
def machine() -> VirtualMachine:
    return VirtualMachine()


def test_a_faster_system_is_promoted() -> None:
    result = measure_simulated(DESIGN, gain=0.05, sd=0.002, noise=0.001)
    assert result.decision is not None and result.decision.outcome == "promote"
    assert result.decision.estimate.gain == pytest.approx(0.05, abs=0.005)


def test_an_equal_system_is_not_promoted() -> None:
    result = measure_simulated(DESIGN, gain=0.0, sd=0.002, noise=0.001)
    assert result.decision is not None and result.decision.outcome == "reject"


def test_abba_cancels_a_linear_drift() -> None:
    """1 % over the session: the bias must stay under 0.02 %."""
    slots = 4 * DESIGN.cycles * DESIGN.tokens * 0.01
    biases = [
        measure_simulated(
            DESIGN.with_seed(seed), sd=0.0, drift_per_s=0.01 / slots, seed=seed
        ).log_ratios
        for seed in range(20)
    ]
    assert abs(float(np.mean(biases))) < 0.0002


def test_each_system_sees_each_prompt_once_and_both_see_the_same(machine: VirtualMachine) -> None:
    a, b = Recording(machine), Recording(machine)
    run(a, b)
    timed_a, timed_b = a.prompts[2:], b.prompts[2:]
    assert len(timed_a) == DESIGN.requests_per_arm == 16
    assert len(set(timed_a)) == 16
    assert set(timed_a) == set(timed_b)
    assert not set(timed_a) & set(WARMUP)


def test_outputs_are_paired_by_prompt(machine: VirtualMachine) -> None:
    result = run(Recording(machine), Recording(machine))
    assert [g.prompt_ids for g in result.a] == [g.prompt_ids for g in result.b]
    assert not result.diverged
    assert run(Recording(machine), Recording(machine, salt=1)).diverged


def test_caches_are_flushed_before_every_single_request(machine: VirtualMachine) -> None:
    a, b = Recording(machine), Recording(machine)
    run(a, b, replace(DESIGN, requests_per_block=2))
    assert a.flushes == 32


def test_orders_are_drawn_by_seed_and_both_occur() -> None:
    orders = Design(looks=(30,), requests_per_block=1, tokens=8, seed=1).orders()
    assert set(orders) == {"ABBA", "BAAB"}
    assert orders != Design(looks=(30,), requests_per_block=1, tokens=8, seed=2).orders()


def test_the_record_commits_to_the_seed_without_telling_it() -> None:
    record = replace(DESIGN, seed=123456789).record()
    assert "123456789" not in str(record)
    assert record["seed_sha256"] != DESIGN.record()["seed_sha256"]


def test_ar_is_timed_once_a_cycle_and_does_not_decide(machine: VirtualMachine) -> None:
    a, b = Recording(machine), Recording(machine)
    ar = Recording(machine, seconds_per_token=0.03)
    result = run(a, b, ar=Arm("ar", ar))
    assert len(result.ar) == DESIGN.cycles
    assert [c.ar_over_b for c in result.cycles] == pytest.approx([math.log(3)] * 8)
    assert result.tokens_per_s("R") == pytest.approx(1 / 0.03)
    assert result.log_ratios == pytest.approx([0.0] * 8)


def test_the_second_look_is_not_taken_if_the_first_decides(machine: VirtualMachine) -> None:
    design = replace(DESIGN, looks=(6, 12))
    result = run(Recording(machine), Recording(machine, seconds_per_token=0.005), design)
    assert len(result.cycles) == 6


def test_a_hopeless_candidate_ends_the_measurement_early(machine: VirtualMachine) -> None:
    slow = Recording(machine, seconds_per_token=0.02)
    result = run(Recording(machine), slow, replace(DESIGN, futility=(4,)))
    assert len(result.cycles) == 4
    assert result.decision is not None and result.decision.outcome == "reject"


def test_without_noise_nothing_is_decided(machine: VirtualMachine) -> None:
    assert run(Recording(machine), Recording(machine), noise=None).decision is None


def _double(g: Generation) -> Generation:
    return replace(g, output_ids=g.output_ids * 2)


def _at(g: Generation, sent: float, last: float) -> Generation:
    return replace(g, sent_s=sent, first_token_s=last, last_token_s=last)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda g: replace(g, last_token_s=math.nan), FailureKind.NOT_FINITE),
        (lambda g: replace(g, last_token_s=math.inf), FailureKind.NOT_FINITE),
        (lambda g: _at(g, 5.0, 5.0), FailureKind.NOT_POSITIVE),
        (lambda g: _at(g, 5.0, 4.0), FailureKind.NOT_POSITIVE),
        (lambda g: replace(g, output_ids=g.output_ids[:-1]), FailureKind.MISSING_TOKENS),
        (lambda g: replace(g, output_ids=()), FailureKind.MISSING_TOKENS),
        (
            lambda g: replace(g, output_ids=g.output_ids[:3], finish_reason="stop"),
            FailureKind.EARLY_STOP,
        ),
        (_double, FailureKind.EXTRA_TOKENS),
        (lambda g: replace(g, output_ids=(VOCAB, *g.output_ids[1:])), FailureKind.BAD_ID),
        (lambda g: replace(g, output_ids=(-1, *g.output_ids[1:])), FailureKind.BAD_ID),
        (lambda g: replace(g, output_ids=(True, *g.output_ids[1:])), FailureKind.BAD_ID),
        (lambda g: replace(g, prompt_ids=(3,)), FailureKind.WRONG_PROMPT),
        (lambda g: replace(g, output_ids=(7,) * 16), FailureKind.REPEATED_ANSWER),
        (lambda g: _at(g, g.sent_s, g.sent_s + 1e-6), FailureKind.FASTER_THAN_FLOOR),
    ],
)
def test_impossible_outputs_are_typed_failures(
    machine: VirtualMachine, change: Any, kind: FailureKind
) -> None:
    design = replace(DESIGN, floor_s_per_token=1e-4)
    with pytest.raises(InsaneOutput) as caught:
        run(Recording(machine), Recording(machine, change), design)
    assert caught.value.kind == kind
    assert caught.value.arm == "candidate"


def test_answers_that_repeat_on_both_sides_are_the_model(machine: VirtualMachine) -> None:
    def same(g: Generation) -> Generation:
        return replace(g, output_ids=(7,) * 16)

    assert len(run(Recording(machine, same), Recording(machine, same)).cycles) == 8


class Machine:
    """CPU samples from a script: cores that foreigners use in each cycle, and idle arms' use."""

    def __init__(self, machine: VirtualMachine, foreign: list[float], idle: float = 0.0) -> None:
        self.machine, self.foreign, self.idle = machine, foreign, idle
        self.samples = 0
        self.busy = 0.0
        self.last = machine.now_s

    def sample(self, roots: Sequence[int]) -> CpuSample:
        wall, self.last = self.machine.now_s - self.last, self.machine.now_s
        index = min(max(self.samples - 1, 0) // 5, len(self.foreign) - 1)
        self.busy += wall * self.foreign[index]
        self.samples += 1
        trees = dict.fromkeys(roots, 0.0) | {77: self.machine.now_s * self.idle}
        return CpuSample(self.machine.now_s, self.busy, trees)


def test_disturbed_cycles_are_repeated_whole_with_fresh_prompts(machine: VirtualMachine) -> None:
    a, b = Recording(machine), Recording(machine)
    script = Machine(machine, [0.0, 1.5, 0.0])
    result = run(a, b, sample=script.sample)
    assert result.repeated == 1
    assert len(result.cycles) == 8
    assert not any(cycle.disturbed for cycle in result.cycles)
    assert len(set(a.prompts)) == len(a.prompts) == 2 + 18


def test_repeats_are_bounded_and_later_disturbed_cycles_are_marked(machine: VirtualMachine) -> None:
    script = Machine(machine, [1.5])
    result = run(Recording(machine), Recording(machine), sample=script.sample)
    assert result.repeated == DESIGN.max_repeats
    assert len(result.cycles) == 8 and all(cycle.disturbed for cycle in result.cycles)


def test_a_system_that_computes_while_the_other_is_timed_fails(machine: VirtualMachine) -> None:
    script = Machine(machine, [0.0], idle=0.9)
    with pytest.raises(InsaneOutput) as caught:
        measure(
            Arm("stock", Recording(machine)),
            Arm("candidate", Recording(machine), pid=77),
            DESIGN,
            fresh_prompts(1),
            WARMUP,
            noise=0.0,
            vocab_size=VOCAB,
            sample=script.sample,
        )
    assert caught.value.kind == FailureKind.BUSY_WHILE_IDLE


@pytest.mark.parametrize(("cores", "fails"), [(1.2, False), (1.9, True)])
def test_more_cores_than_the_deployment_gives_are_no_gain(
    machine: VirtualMachine, cores: float, fails: bool
) -> None:
    candidate = Recording(machine)
    used, last, served = 0.0, machine.now_s, 0

    def sample(roots: Sequence[int]) -> CpuSample:
        nonlocal used, last, served
        if len(candidate.prompts) > served:
            used += cores * (machine.now_s - last)
        last, served = machine.now_s, len(candidate.prompts)
        return CpuSample(last, used, dict.fromkeys(roots, used) | {76: 0.0})

    def timed() -> Measurement:
        return measure(
            Arm("stock", Recording(machine, seconds_per_token=0.02), pid=76),
            Arm("candidate", candidate, pid=77),
            replace(DESIGN, max_busy_cores=1.5),
            fresh_prompts(1),
            WARMUP,
            noise=0.001,
            vocab_size=VOCAB,
            sample=sample,
        )

    if not fails:
        assert len(timed().cycles) == DESIGN.cycles
        return
    with pytest.raises(InsaneOutput) as caught:
        timed()
    assert (caught.value.kind, caught.value.arm) == (FailureKind.TOO_MANY_CORES, "candidate")


def test_a_deployments_threads_bound_the_cores_of_a_candidate() -> None:
    deployment = Deployment(
        "d", "d", "reference", "/t", None, None, "cpu", "float32", Regime(), "w",
        launch={"threads": 2},
    )  # fmt: skip
    assert default_design(deployment, "trial", 1).max_busy_cores == 2.5
    assert default_design(replace(deployment, launch={}), "trial", 1).max_busy_cores is None


class Thief:
    """Another process, or the candidate (pid 77), that computes while the stock is timed only."""

    def __init__(self, machine: VirtualMachine, stock: Recording, cores: float, inside: bool):
        self.machine, self.stock, self.cores, self.inside = machine, stock, cores, inside
        self.used, self.last, self.served = 0.0, machine.now_s, 0

    def sample(self, roots: Sequence[int]) -> CpuSample:
        wall, self.last = self.machine.now_s - self.last, self.machine.now_s
        if len(self.stock.prompts) > self.served:
            self.used += self.cores * wall
        self.served = len(self.stock.prompts)
        own = self.used if self.inside else 0.0
        return CpuSample(self.last, self.used, dict.fromkeys(roots, own) | {76: 0.0})


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize(("cores", "outcome"), [(0.0, "promote"), (0.15, "reject")])
def test_a_gain_that_stolen_cpu_time_may_explain_is_not_promoted(
    machine: VirtualMachine, inside: bool, cores: float, outcome: str
) -> None:
    stock = Recording(machine, seconds_per_token=0.01 / 0.85)
    thief = Thief(machine, stock, cores, inside)
    result = measure(
        Arm("stock", stock, pid=76),
        Arm("candidate", Recording(machine), pid=77),
        DESIGN,
        fresh_prompts(1),
        WARMUP,
        noise=0.001,
        vocab_size=VOCAB,
        sample=thief.sample,
    )
    assert result.decision is not None and result.decision.outcome == outcome


def test_prompts_that_run_out_fail_the_check(machine: VirtualMachine) -> None:
    with pytest.raises(CheckFailed, match="ran out"):
        run(Recording(machine), Recording(machine), prompts=itertools.islice(fresh_prompts(1), 7))


def test_a_failing_engine_fails_the_measurement(machine: VirtualMachine) -> None:
    def die(g: Generation) -> Generation:
        raise EngineFailure("The server died.")

    with pytest.raises(EngineFailure, match="died"):
        run(Recording(machine), Recording(machine, die))


def test_a_cancelled_measurement_ends_between_requests(machine: VirtualMachine) -> None:
    cancelled = threading.Event()

    def cancel(g: Generation) -> Generation:
        cancelled.set()
        return g

    a, b = Recording(machine), Recording(machine, cancel)
    with pytest.raises(Cancelled):
        run(a, b, cancelled=cancelled)
    assert len(a.prompts) + len(b.prompts) <= 12


def test_batched_blocks_are_timed_by_the_wall(machine: VirtualMachine) -> None:
    design = replace(DESIGN, requests_per_block=4, load=Load(in_flight=2))
    result = run(Recording(machine), Recording(machine, seconds_per_token=0.005), design)
    assert len(result.b) == 64


def test_a_bad_design_is_refused() -> None:
    for change in ({"looks": (1,)}, {"tokens": 0}, {"load": Load(0)}, {"looks": (8, 4)}):
        with pytest.raises(InvalidInput):
            replace(DESIGN, **change)


def test_arrivals_are_the_same_for_both_systems_and_differ_between_blocks() -> None:
    design = replace(DESIGN, requests_per_block=5, load=Load(arrivals_per_s=10.0))
    assert design.arrivals(0, 0) == design.arrivals(0, 0) != design.arrivals(0, 1)


@pytest.mark.parametrize("requests", [1, 8])
def test_a_final_times_48_requests_or_more(requests: int) -> None:
    deployment = Deployment(
        "d", "d", "reference", "/t", None, None, "cpu", "float32", Regime(requests=requests), "w"
    )
    assert default_design(deployment, "final", 1).requests_per_arm >= 48


class RealTime:
    """Answers any request after a fixed real time, however many are running."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def generate(self, input_ids: Sequence[int], params: SamplingParams) -> Generation:
        sent = time.perf_counter()
        time.sleep(self.seconds)
        first, last = time.perf_counter(), time.perf_counter()
        ids = tuple((input_ids[-1] + step) % VOCAB for step in range(params.max_new_tokens))
        return Generation(tuple(input_ids), ids, sent, first, last, "length")

    def flush(self) -> None:
        pass


@pytest.mark.parametrize("load", [Load(in_flight=4), Load(arrivals_per_s=200.0)])
def test_concurrent_loads_keep_requests_running_together(load: Load) -> None:
    design = Design(looks=(2,), requests_per_block=8, tokens=4, seed=1, load=load)
    begin = time.perf_counter()
    result = measure(
        Arm("stock", RealTime(0.05)),
        Arm("candidate", RealTime(0.05)),
        design,
        fresh_prompts(1),
        WARMUP,
        noise=None,
        vocab_size=VOCAB,
        sample=VirtualMachine().sample,
    )
    one_by_one = 64 * 0.05
    assert time.perf_counter() - begin < one_by_one
    assert len(result.b) == 32
