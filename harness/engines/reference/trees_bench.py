"""Benchmark of tree policies: time to build, and tokens per pass on pico by exact replay.

Every policy is followed through the same recorded lattices (32 greedy continuations of open
prompts), at 8 to 64 rows; the oracle accepts whenever the target's token is any candidate. The
chain is stock's: the drafter runs with the chain's own block.
"""

from functools import partial
from typing import Any

from specpilot.mechanisms.trees import bench, policies
from specpilot.mechanisms.trees.calibration import Calibration
from specpilot.mechanisms.trees.replay import Replay, Trace, oracle, replay

__all__ = ["run", "table"]

PROMPTS, PROMPT_TOKENS, TOKENS, GROUPS = 32, 128, 96, 4
BLOCK = TOP_K = 16
CHAIN_BLOCKS = (4, 8, 16)
ROWS = (8, 16, 32, 64)
POLICIES: dict[str, policies.Policy] = {
    "best_first": policies.best_first,
    "eagle2_beam4": partial(policies.eagle2, beam=4, max_depth=BLOCK - 1),
    "eagle2_beam10": partial(policies.eagle2, beam=10, max_depth=BLOCK - 1),
}
KEY = b"tree policies"


def run() -> list[dict[str, Any]]:
    """Return results in the benchmark format."""
    from specpilot.harness.deployments.registry import load
    from specpilot.harness.deployments.workload import load_workload
    from specpilot.harness.engines.reference.traces import record
    from specpilot.harness.engines.settings import ReferenceSettings

    pico = load("pico")
    prompts = load_workload(pico.workload, PROMPT_TOKENS).prompts("open", PROMPTS, KEY)
    traces = {}
    for block in CHAIN_BLOCKS:
        settings = ReferenceSettings(
            target=pico.target, drafter=str(pico.drafter), block=block, top_k=TOP_K, context=512
        )
        traces[block] = record(settings, prompts, TOKENS)
    return [*bench.run(), *table(traces)]


def table(traces: dict[int, list[Trace]]) -> list[dict[str, Any]]:
    """Tokens per pass by policy and rows. ``traces`` by the block that the drafter ran with."""
    wide = traces[max(traces)]
    results, chains = [], {}
    for block, recorded in traces.items():
        outcome = replay(recorded, policies.chain, block)
        chains[block] = outcome.tokens_per_pass
        results.append(_result(f"trees.pico.tau.chain.n{block}", outcome))
    results.append(_result("trees.pico.tau.oracle", oracle(wide)))
    best: dict[int, float] = {}
    for rows in ROWS:
        for name, policy in POLICIES.items():
            outcome = replay(wide, policy, rows)
            results.append(_result(f"trees.pico.tau.{name}.n{rows}", outcome))
            if name == "best_first":
                best[rows] = outcome.tokens_per_pass
        depth, width = wide[0].lattices[0].depth, wide[0].lattices[0].width
        learned = replay(wide, policies.best_first, rows, calibration=Calibration(depth, width))
        results.append(_result(f"trees.pico.tau.best_first_calibrated.n{rows}", learned))
    stock = max(chains.values())
    for rows, value in best.items():
        suffix = "" if rows == max(ROWS) else f".n{rows}"
        results.append(
            {
                "id": f"trees.pico.best_first_over_chain_tau{suffix}",
                "value": round(value / stock, 4),
                "unit": "ratio",
                "note": f"{rows} rows over the best chain of {CHAIN_BLOCKS} rows, exact replay",
            }
        )
    return results


def _result(name: str, outcome: Replay) -> dict[str, Any]:
    groups = [
        Replay(outcome.tokens[i::GROUPS], outcome.passes[i::GROUPS]).tokens_per_pass
        for i in range(GROUPS)
    ]
    return {
        "id": name,
        "value": round(outcome.tokens_per_pass, 4),
        "low": round(min(groups), 4),
        "high": round(max(groups), 4),
        "unit": "tokens/pass",
        "repeats": [round(x, 4) for x in groups],
        "note": f"{len(outcome.tokens)} open prompts, {sum(outcome.tokens)} tokens, exact replay; "
        f"low and high are the extremes of {GROUPS} groups of prompts",
    }
