"""``specpilot bench cost``: the model against public figures, replay against live runs of pico."""

import json
import tempfile
import time
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from specpilot.harness.cost_model.ceiling import AcceptanceProfile, ceiling
from specpilot.harness.cost_model.drafters import read_drafter
from specpilot.harness.cost_model.hardware import load_hardware
from specpilot.harness.cost_model.kernels import expected_step_ms
from specpilot.harness.cost_model.replay import bias, oracle, replay, spearman
from specpilot.harness.cost_model.shapes import ModelShape
from specpilot.harness.cost_model.traces import read_trace
from specpilot.mechanisms.trees.policies import best_first, chain
from specpilot.types import Deployment, Regime

__all__ = ["LIVE_POLICIES", "compare_with_live", "run"]

LIVE_POLICIES: tuple[dict[str, Any], ...] = (
    *({"speculation": "chain", "block": b} for b in (4, 8, 16)),
    *({"speculation": "tree", "block": 8, "rows": n} for n in (8, 16, 24)),
    *({"speculation": "tree", "block": 16, "rows": n} for n in (8, 16, 24, 32, 48, 64)),
)
"""Twelve settings that the reference engine runs and replay can judge."""

_KEY = b"specpilot bench cost: open prompts"


def _result(
    name: str, value: float, unit: str, note: str, repeats: Sequence[float] = ()
) -> dict[str, Any]:
    """One result; ``low`` and ``high`` are the least and the largest of the repeats."""
    repeats = list(repeats) or [value]
    return {
        "id": name,
        "value": value,
        "low": min(repeats),
        "high": max(repeats),
        "unit": unit,
        "repeats": repeats,
        "note": note,
    }


def _public() -> list[dict[str, Any]]:
    """AR on an H200: predicted over measured, with efficiencies that were not fitted to it."""
    resource = files("specpilot.harness.cost_model") / "anchors.json"
    table = json.loads(resource.read_text("utf-8"))
    shape = ModelShape.from_config(table["configs"]["target_27b"])
    drafter = read_drafter(table["configs"]["drafter_27b"], "dflash", shape)
    hardware = load_hardware("H200")
    results = []
    for requests, row in ((1, "sglang.h200.ar.r1"), (24, "sglang.h200.ar.r24")):
        rate = next(r["value"] for r in table["measured"] if r["id"] == row)
        predicted = expected_step_ms(shape, None, hardware, Regime(requests, 128, 256), 1)
        ratio = predicted / (requests * 1e3 / rate)
        note = f"{predicted:.2f} ms predicted; {row} is {rate} tok/s (stock SGLang 0.5.20)"
        results.append(
            _result(f"cost.h200_ar{requests}.predicted_over_measured", ratio, "ratio", note)
        )
    times = []
    for _ in range(5):
        start = time.perf_counter()
        ceiling(
            shape, drafter, hardware, Regime(1, 128, 256), ar_ms=14.86, block=8,
            best_tree=AcceptanceProfile.of({8: 4.6, 64: 5.8}, "timing only"),
            rows=(8, 16, 24, 32, 48, 64),
        )  # fmt: skip
        times.append((time.perf_counter() - start) * 1e3)
    note = "ceiling of the 27B over six row counts"
    results.append(_result("cost.ceiling_ms", min(times), "ms", note, times))
    return results


def compare_with_live(
    deployment: Deployment,
    prompts: list[tuple[int, ...]],
    *,
    output_tokens: int,
    policies: tuple[dict[str, Any], ...] = LIVE_POLICIES,
) -> list[tuple[dict[str, Any], float, float]]:
    """Return (settings, replayed τ, live τ) of each policy, on the same prompts.

    Lattices are recorded once, at every position; each policy then runs live in this process.
    """
    from specpilot.harness.cost_model.reference import record_lattices

    longest = max(p["block"] for p in policies)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "every.jsonl.gz"
        record_lattices(deployment, prompts, path, output_tokens=output_tokens, block=longest)
        trace = read_trace(path)
        rows = []
        for settings in policies:
            policy = chain if settings["speculation"] == "chain" else best_first
            count, block = settings.get("rows", settings["block"]), settings["block"]
            found = replay(trace, policy, count, block=block).tokens_per_pass
            live = record_lattices(
                deployment, prompts, Path(folder) / "live.jsonl", output_tokens=output_tokens,
                settings=settings,
            )  # fmt: skip
            rows.append((settings, found, live))
        best = oracle(trace).tokens_per_pass
        rows.append(({"speculation": "oracle", "block": longest}, best, best))
    return rows


def _pico(requests: int = 12, output_tokens: int = 96) -> list[dict[str, Any]]:
    from specpilot.harness.deployments import registry
    from specpilot.harness.deployments.workload import load_workload

    deployment = registry.load("pico")
    workload = load_workload(deployment.workload, deployment.regime.prompt_tokens)
    prompts = workload.prompts("open", requests, _KEY)
    rows = compare_with_live(deployment, prompts, output_tokens=output_tokens)
    *compared, (_, best, _) = rows
    note = f"{requests} requests of {output_tokens} tokens, greedy; lattices at every position"
    ranks = spearman([r for _, r, _ in compared], [x for _, _, x in compared])
    results = [
        _result("replay.pico.spearman", ranks, "correlation", f"{len(compared)} policies, {note}"),
        _result("replay.pico.oracle_tokens_per_pass", best, "tokens/pass", note),
    ]
    for settings, replayed, live in compared:
        name = "{speculation}.block{block}".format(**settings)
        name += f".rows{settings['rows']}" if "rows" in settings else ""
        said = f"live; replay says {replayed:.3f} ({bias(replayed, live):+.1%})"
        results.append(_result(f"replay.pico.{name}.tokens_per_pass", live, "tokens/pass", said))
    worst = max(abs(bias(r, x)) for _, r, x in compared)
    results.append(_result("replay.pico.worst_bias", worst, "ratio", note))
    return results


def run() -> list[dict[str, Any]]:
    """Return the ``cost.*`` results, then ``replay.*`` on pico (about a minute on two cores)."""
    return _public() + _pico()
