"""The design of a measurement: everything that is fixed, and written down, before it starts.

A design says how many cycles are run, what a cycle is, how a disturbed one is handled and when the
bound is read. It goes into the ledger before the first request, so that a measurement that never
reports, or one whose rules changed on the way, is visible.
"""

import hashlib
import random
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Self

from specpilot.errors import InvalidInput
from specpilot.harness.controller.ledger import canonical
from specpilot.harness.controller.promotion import DIVERGED_FLOOR, FLOOR
from specpilot.types import Deployment

__all__ = ["Design", "Load", "Phase", "default_design"]

Phase = Literal["trial", "final"]
SERVING_CORES = 0.5
"""What a system may use beside the threads that its deployment gives it: HTTP, logging."""


@dataclass(frozen=True, slots=True)
class Load:
    """How requests of a block reach a system.

    ``in_flight`` requests are kept running (1: one after another, the latency regime). With
    ``arrivals_per_s`` requests instead arrive at random at that mean rate, whatever is running.
    """

    in_flight: int = 1
    arrivals_per_s: float | None = None

    @property
    def unit(self) -> str:
        """What a block's score is, in words."""
        if self.arrivals_per_s is not None:
            return "seconds per token from a request's arrival"
        if self.in_flight == 1:
            return "seconds per token of a request"
        return "seconds of wall time per token of all requests"


@dataclass(frozen=True, slots=True)
class Design:
    """A measurement of system B against system A in cycles of the order ABBA or BAAB.

    The first two blocks of a cycle (one of each system) serve the same fresh prompts, the last two
    another fresh set, so that a system never sees a prompt twice. ``looks`` are the numbers of
    cycles at which the bound is read; the last is the most that are run. At those of ``futility``
    a hopeless candidate is rejected, and none is promoted. ``seed`` draws the orders
    and arrivals; only its commitment is written down before the measurement.

    A cycle is repeated with fresh prompts if other processes used more than ``max_foreign_cores``
    of CPU on average while it ran, at most ``max_repeats`` times in all; later disturbed cycles
    are kept and marked. ``max_idle_cores`` bounds what a system may use while the other one is
    being timed, ``max_busy_cores`` what B may use while it is timed itself (None: all there are).
    """

    looks: tuple[int, ...]
    requests_per_block: int
    tokens: int
    seed: int
    load: Load = Load()
    temperature: float = 0.0
    warmup_requests: int = 2
    max_foreign_cores: float = 0.25
    max_repeats: int = 3
    max_idle_cores: float = 0.2
    max_busy_cores: float | None = None
    futility: tuple[int, ...] = ()
    floor_s_per_token: float = 0.0
    request_timeout_s: float = 120.0

    def __post_init__(self) -> None:
        if not self.looks or self.looks[0] < 2 or sorted(set(self.looks)) != list(self.looks):
            raise InvalidInput(f"looks must increase and start at 2 or more, got {self.looks}.")
        for name in ("requests_per_block", "tokens"):
            if getattr(self, name) < 1:
                raise InvalidInput(f"{name} must be at least 1, got {getattr(self, name)}.")
        if self.load.in_flight < 1:
            raise InvalidInput(f"in_flight must be at least 1, got {self.load.in_flight}.")

    @property
    def cycles(self) -> int:
        return self.looks[-1]

    @property
    def requests_per_arm(self) -> int:
        return 2 * self.cycles * self.requests_per_block

    @property
    def prompts_needed(self) -> int:
        """Fresh prompts for every cycle and every repeat that the rules allow."""
        return 2 * self.requests_per_block * (self.cycles + self.max_repeats)

    def orders(self) -> tuple[str, ...]:
        """Return the order of each cycle, repeats included: ``ABBA`` or ``BAAB``, drawn by seed."""
        rng = random.Random(f"orders {self.seed}")
        return tuple(
            "ABBA" if rng.random() < 0.5 else "BAAB" for _ in range(self.cycles + self.max_repeats)
        )

    def arrivals(self, cycle: int, half: int) -> tuple[float, ...]:
        """Return the seconds at which a block's requests arrive; both systems get the same."""
        rng = random.Random(f"arrivals {self.seed} {cycle} {half}")
        rate = self.load.arrivals_per_s or 1.0
        times, now = [], 0.0
        for _ in range(self.requests_per_block):
            now += rng.expovariate(rate)
            times.append(now)
        return tuple(times)

    def shape(self) -> str:
        """Hash what one cycle is. Designs of one shape have the same noise per cycle."""
        same = ("requests_per_block", "tokens", "load", "temperature")
        fields = asdict(self)
        return hashlib.sha256(canonical({name: fields[name] for name in same})).hexdigest()

    def record(self) -> dict[str, Any]:
        """Return what is written before the measurement: all but the seed, which is committed."""
        fields = asdict(self)
        fields |= {"looks": list(self.looks), "futility": list(self.futility)}
        seed = fields.pop("seed")
        fields["seed_sha256"] = hashlib.sha256(str(seed).encode()).hexdigest()
        fields["unit"] = self.load.unit
        fields["rule"] = {"floor": FLOOR, "diverged_floor": DIVERGED_FLOOR, "noise_factor": 2}
        return fields

    def with_seed(self, seed: int) -> Self:
        return replace(self, seed=seed)


def default_design(deployment: Deployment, phase: Phase, seed: int) -> Design:
    """Return the design for a deployment: small on the CPU engine, longer where a GPU serves.

    A trial times at least 40 requests for each system, a final at least 48: without any, 35 bound
    the rate of mismatches below the audit's limit, and 2000 tokens calibrate its thresholds. Both
    have cycles of one shape, so one A/A run tells the noise of both.
    """
    regime = deployment.regime
    in_flight = regime.requests
    load = Load(in_flight=in_flight)
    if deployment.engine == "sglang":
        tokens = max(64, min(regime.output_tokens, 512))
        block = 2 if in_flight == 1 else 2 * in_flight
        looks = {"trial": (6, 12), "final": (12,)}[phase]
        futility = {"trial": (6,), "final": ()}[phase]
        timeout = 600.0
    else:
        tokens = 56
        block = 2 if in_flight == 1 else 2 * in_flight
        looks = {"trial": (22,), "final": (16,)}[phase]
        futility = {"trial": (4, 7), "final": ()}[phase]
        timeout = 60.0
    threads = deployment.launch.get("threads")
    return Design(
        looks=looks,
        futility=futility,
        requests_per_block=block,
        tokens=tokens,
        seed=seed,
        load=load,
        temperature=regime.temperature,
        max_busy_cores=None if threads is None else float(threads) + SERVING_CORES,
        request_timeout_s=timeout,
    )
