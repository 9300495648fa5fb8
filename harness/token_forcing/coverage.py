"""True coverage of the rate rule's interval, by simulation; ``coverage.json`` holds the table.

Made by ``python -P -m specpilot.harness.token_forcing.coverage``. Each world is a way in which
mismatches spread over requests. In each the system's true rate lies exactly at the limit, 0.5
points above stock, where a false accept costs most; coverage is the share of simulated audits
whose upper bound is not below that truth. A verdict quotes the lowest coverage over worlds, at
the tabulated size just below its own.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from specpilot.harness.token_forcing.intervals import mover_upper

__all__ = ["TABLE", "WORLDS", "World", "coverage_at", "simulate"]

TABLE = Path(__file__).with_name("coverage.json")
LIMIT = 0.005
LEVEL = 0.975
REQUESTS = (30, 48, 60, 96, 120, 240, 480)
TOKENS = (64, 128, 512, 2048)

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class World:
    """How mismatches spread. Rates of requests are log-normal (``log_sd``), correlated between
    arms; only a share ``affected`` of the system's requests has the system's excess; mismatches
    come in runs of ``burst`` on average."""

    name: str
    stock_rate: float
    log_sd: float
    affected: float = 1.0
    burst: float = 1.0
    correlation: float = 0.7


WORLDS = (
    World("even requests", 0.006, 0.5),
    World("uneven requests", 0.006, 0.9),
    World("runs of mismatches", 0.006, 0.5, burst=4.0),
    World("exact stock, uneven requests", 0.0, 0.9),
    World("exact stock, a tenth of the requests affected", 0.0, 0.0, affected=0.1),
    World("noisy stock, a tenth of the requests affected", 0.006, 0.5, affected=0.1),
)


def _counts(
    rng: np.random.Generator, tokens: Counts, rate: npt.NDArray[np.float64], burst: float
) -> Counts:
    rate = np.minimum(rate, 0.5)
    if burst == 1.0:
        return rng.binomial(tokens, rate)
    runs = rng.binomial(tokens, rate / burst)
    extra = np.where(runs > 0, rng.negative_binomial(np.maximum(runs, 1), 1 / burst), 0)
    return np.minimum(runs + extra, tokens)


def simulate(
    world: World, requests: int, tokens: int, excess: float, rng: np.random.Generator
) -> tuple[Counts, Counts, Counts, Counts]:
    """Draw one audit: mismatches and tokens of the system, then of stock, each [requests].

    Output lengths are log-normal around ``tokens``, and the arms' lengths differ as texts diverge.
    """
    stock_tokens = np.maximum(tokens * rng.lognormal(-0.08, 0.4, requests), 16).astype(int)
    own_tokens = np.maximum(stock_tokens * rng.lognormal(0, 0.15, requests), 16).astype(int)
    shared, own, other = rng.standard_normal((3, requests))
    weight = np.sqrt(world.correlation), np.sqrt(1 - world.correlation)

    def unevenness(noise: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        z = weight[0] * shared + weight[1] * noise
        return np.asarray(np.exp(world.log_sd * z - world.log_sd**2 / 2))

    hit = rng.random(requests) < world.affected
    rate = (world.stock_rate + excess * hit / world.affected) * unevenness(own)
    return (
        _counts(rng, own_tokens, rate, world.burst),
        own_tokens,
        _counts(rng, stock_tokens, world.stock_rate * unevenness(other), world.burst),
        stock_tokens,
    )


def coverage(world: World, requests: int, tokens: int, draws: int, seed: int) -> dict[str, float]:
    """Return coverage at the limit, and how often a truly lossless system is accepted."""
    rng = np.random.default_rng([seed, requests, tokens, WORLDS.index(world)])
    covered = accepted = 0
    for _ in range(draws):
        at_limit = mover_upper(*simulate(world, requests, tokens, LIMIT, rng), level=LEVEL)
        covered += at_limit.upper >= LIMIT
        lossless = mover_upper(*simulate(world, requests, tokens, 0.0, rng), level=LEVEL)
        accepted += lossless.upper <= LIMIT
    return {"coverage": covered / draws, "lossless_accepted": accepted / draws}


def rows(draws: int, seed: int) -> Iterator[dict[str, Any]]:
    for tokens in TOKENS:
        for requests in REQUESTS:
            for world in WORLDS:
                found = coverage(world, requests, tokens, draws, seed)
                yield {"world": world.name, "requests": requests, "tokens": tokens, **found}


@cache
def _table() -> tuple[dict[str, Any], ...]:
    return tuple(json.loads(TABLE.read_text())["rows"])


def coverage_at(requests: int, tokens_per_request: float) -> float | None:
    """Return the lowest coverage over worlds at the tabulated size just below, None below all.

    Outputs shorter than the shortest tabulated count as the shortest.
    """
    sizes = [r for r in REQUESTS if r <= requests]
    lengths = [n for n in TOKENS if n <= tokens_per_request] or [TOKENS[0]]
    if not sizes:
        return None
    at = (sizes[-1], lengths[-1])
    return min(float(r["coverage"]) for r in _table() if (r["requests"], r["tokens"]) == at)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=4)
    parser.add_argument("--output", type=Path, default=TABLE)
    options = parser.parse_args()
    table = {
        "command": "python -P -m specpilot.harness.token_forcing.coverage"
        f" --draws {options.draws} --seed {options.seed}",
        "level": LEVEL,
        "limit": LIMIT,
        "draws": options.draws,
        "rows": list(rows(options.draws, options.seed)),
    }
    options.output.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
