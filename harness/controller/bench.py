"""The controller's figures: error rates, bias, ledger speed, overhead, exploits caught."""

import http.client
import json
import os
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from specpilot.harness.controller.design import Design, default_design
from specpilot.harness.controller.exploits.suite import EXPLOITS, open_round, run_exploit
from specpilot.harness.controller.isolation import Tier
from specpilot.harness.controller.ledger import Ledger
from specpilot.harness.controller.service import Service
from specpilot.harness.controller.simulation import (
    measure_simulated,
    simulate_decision,
)
from specpilot.harness.controller.systems import Starter, SystemSpec
from specpilot.harness.deployments import registry
from specpilot.harness.engines.client import SamplingParams

__all__ = ["run"]

ROUNDS = 20_000
SD_PAIR = 0.01
APPENDS = 500
REQUESTS = 200
REPEATS = 5


def run() -> list[Mapping[str, Any]]:
    """Measure everything; takes some minutes, most of it the exploits' trials."""
    design = default_design(registry.load("mock"), "trial", 0)
    return [
        _promotions("controller.aa_promotions_per_1000", design, 0.0, 1000, "per 1000 rounds"),
        _promotions("controller.power_at_3pct", design, 0.03, 1, "share of rounds"),
        _bias(design),
        _appends(),
        _overhead(),
        *_exploits(),
    ]


def _promotions(
    name: str, design: Design, gain: float, scale: float, unit: str
) -> Mapping[str, Any]:
    rng = np.random.default_rng(2026)
    promoted = sum(
        simulate_decision(rng, design, gain, SD_PAIR).outcome == "promote" for _ in range(ROUNDS)
    )
    share = promoted / ROUNDS
    half = 1.96 * float(np.sqrt(max(share * (1 - share), 1 / ROUNDS) / ROUNDS))
    return {
        "id": name,
        "value": scale * share,
        "low": scale * max(0.0, share - half),
        "high": scale * min(1.0, share + half),
        "unit": unit,
        "note": f"{ROUNDS} simulated rounds, sd {SD_PAIR:.0%} per pair, {design.cycles} cycles; "
        "95 % interval of the share",
    }


def _bias(design: Design) -> Mapping[str, Any]:
    seconds = 4 * design.cycles * design.requests_per_block * design.tokens * 0.01
    means = [
        100 * abs(float(np.mean(measure_simulated(
            design.with_seed(seed), drift_per_s=0.01 / seconds, seed=seed
        ).log_ratios)))
        for seed in range(REPEATS)
    ]  # fmt: skip
    return _summary("controller.abba_bias_pct", means, "%", "1 % linear drift, simulated clock")


def _appends() -> Mapping[str, Any]:
    rates = []
    for _ in range(REPEATS):
        with tempfile.TemporaryDirectory() as folder:
            ledger = Ledger(Path(folder) / "ledger.jsonl", b"k" * 32)
            begin = time.perf_counter()
            for number in range(APPENDS):
                ledger.append("note", {"number": number, "text": "x" * 200})
            rates.append(APPENDS / (time.perf_counter() - begin))
            ledger.close()
    note = f"{APPENDS} records with fsync each, in the temporary directory"
    return _summary("controller.ledger_appends_per_s", rates, "1/s", note)


def _overhead() -> Mapping[str, Any]:
    """Time requests as the controller does, in turn with a bare connection, on one mock server."""
    deployment = registry.load("mock")
    system = SystemSpec("stock", "stock", {"delay_ms": 0.0, "row_ms": 0.0})
    params = SamplingParams(max_new_tokens=8, ignore_eos=True)
    ours, bare = [], []
    with Starter(deployment, Tier.NONE, 30.0).running([system]) as (running,):
        connection = http.client.HTTPConnection("127.0.0.1", running.process.spec.port)
        for number in range(REQUESTS):
            prompt = (7, 1 + number % 500, 1 + number // 500)
            ours.append(1000 * running.client.generate(prompt, params).seconds)
            bare.append(_bare_ms(connection, prompt, params))
        connection.close()
    found = [a - b for a, b in zip(ours, bare, strict=True)]
    note = f"p50 over {REQUESTS} pairs of 8-token requests to the mock; bare: http.client"
    return {
        "id": "controller.request_overhead_ms_p50",
        "value": statistics.median(found),
        "low": statistics.quantiles(found, n=4)[0],
        "high": statistics.quantiles(found, n=4)[2],
        "unit": "ms",
        "note": f"{note}; low and high are the quartiles",
    }


def _bare_ms(
    connection: http.client.HTTPConnection, prompt: tuple[int, ...], params: SamplingParams
) -> float:
    body = json.dumps({"input_ids": prompt, "sampling_params": params.body(), "stream": True})
    begin = time.perf_counter()
    connection.request("POST", "/generate", body, {"content-type": "application/json"})
    connection.getresponse().read()
    return 1000 * (time.perf_counter() - begin)


def _exploits() -> list[Mapping[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        before = os.environ.get("SPECPILOT_HOME")
        os.environ["SPECPILOT_HOME"] = folder
        try:
            service = Service(Path(folder))
            round_id = open_round(service)
            outcomes = []
            for exploit in EXPLOITS:
                with tempfile.TemporaryDirectory() as work:
                    outcomes.append(run_exploit(service, round_id, exploit, Path(work)))
            tier = service.lab.tier
            service.close()
        finally:
            if before is None:
                del os.environ["SPECPILOT_HOME"]
            else:
                os.environ["SPECPILOT_HOME"] = before
    if tier is Tier.NONE:
        return []  # the figure is about tier 1 and above, which this machine does not offer
    missed = [outcome.exploit.name for outcome in outcomes if not outcome.caught]
    note = f"{len(outcomes)} hostile systems at tier {int(tier)} ({tier.title})"
    if missed:
        note += f"; missed: {', '.join(missed)}"
    result = {"id": "controller.exploits_missed_tier1", "value": len(missed), "unit": "exploits"}
    return [result | {"low": len(missed), "high": len(missed), "note": note}]


def _summary(name: str, values: list[float], unit: str, note: str) -> Mapping[str, Any]:
    return {
        "id": name,
        "value": statistics.median(values),
        "low": min(values),
        "high": max(values),
        "unit": unit,
        "repeats": values,
        "note": f"{note}; low and high are the extremes",
    }
