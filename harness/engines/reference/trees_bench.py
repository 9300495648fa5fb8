"""Benchmark of tree policies: time to build, and tokens per pass on pico by exact replay.

Every policy is followed through the same recorded lattices (24 greedy continuations of open
prompts), at 4 to 64 rows; the oracle accepts whenever the target's token is any candidate. The
chain is stock's: the drafter runs with the chain's own block. ``pairwise``: the same drafter with
its selector.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from specpilot.mechanisms.trees import bench, policies
from specpilot.mechanisms.trees.calibration import Calibration
from specpilot.mechanisms.trees.replay import Replay, Trace, oracle, replay

__all__ = ["run", "table"]

PROMPTS, PROMPT_TOKENS, TOKENS, GROUPS = 24, 128, 128, 4
BLOCK = TOP_K = 16
CHAIN_BLOCKS = (4, 8, 16)
ROWS = (4, 8, 12, 16, 24, 32, 64)
POLICIES: dict[str, policies.Policy] = {
    "best_first": policies.best_first,
    "eagle2_beam4": partial(policies.eagle2, beam=4, max_depth=BLOCK - 1),
    "eagle2_beam10": partial(policies.eagle2, beam=10, max_depth=BLOCK - 1),
}
Traces = Mapping[int, list[Trace]]
KEY = b"tree policies"


def run() -> list[dict[str, Any]]:
    """Return results in the benchmark format."""
    from specpilot.harness.deployments.registry import load
    from specpilot.harness.deployments.workload import load_workload
    from specpilot.harness.engines.reference.traces import record
    from specpilot.harness.engines.settings import ReferenceSettings

    pico = load("pico")
    prompts = load_workload(pico.workload, PROMPT_TOKENS).prompts("open", PROMPTS, KEY)
    stock = ReferenceSettings(
        target=pico.target, drafter=str(pico.drafter), top_k=TOP_K, context=512
    )
    traces = {b: record(replace(stock, block=b), prompts, TOKENS) for b in CHAIN_BLOCKS}
    paired = {
        b: record(replace(stock, block=b, selector=True), prompts, TOKENS) for b in CHAIN_BLOCKS
    }
    return [*bench.run(), *table(traces, paired)]


def table(traces: Traces, paired: Traces | None = None) -> list[dict[str, Any]]:
    """Tokens per pass by policy and rows, and what the best tree gains over the best chain.

    Traces by the block that the drafter ran with, ``paired`` those of the drafter with its selector
    (None: it has none).
    """
    results = [_result("trees.pico.tau.oracle", oracle(traces[max(traces)]))]
    chains = _chains("chain", traces)
    trees = dict(_trees("", traces[max(traces)]))
    best, basis = trees, "best-first"
    if paired is not None:
        chains |= _chains("pairwise_chain", paired)
        pairwise = dict(_trees("pairwise_", paired[max(paired)]))
        best = {n.removeprefix("pairwise_"): o for n, o in pairwise.items()}
        trees |= pairwise
        basis = "best-first with the pairwise selector"
    outcomes = chains | trees
    results += [_result(f"trees.pico.tau.{name}", outcome) for name, outcome in outcomes.items()]
    stock = max(chains[f"chain.n{block}"].tokens_per_pass for block in traces)
    for rows in ROWS:
        suffix = "" if rows == max(ROWS) else f".n{rows}"
        results.append(
            {
                "id": f"trees.pico.best_first_over_chain_tau{suffix}",
                "value": round(best[f"best_first.n{rows}"].tokens_per_pass / stock, 4),
                "unit": "ratio",
                "note": f"{basis}, {rows} rows, over stock's best chain of {tuple(traces)} rows, "
                "exact replay",
            }
        )
    return results


def _chains(name: str, traces: Traces) -> dict[str, Replay]:
    return {f"{name}.n{b}": replay(t, policies.chain, b) for b, t in traces.items()}


def _trees(prefix: str, traces: list[Trace]) -> Iterator[tuple[str, Replay]]:
    depth, width = traces[0].lattices[0].depth, traces[0].lattices[0].width
    for rows in ROWS:
        for name, policy in POLICIES.items():
            yield f"{prefix}{name}.n{rows}", replay(traces, policy, rows)
        learned = Calibration(depth, width)
        outcome = replay(traces, policies.best_first, rows, calibration=learned)
        yield f"{prefix}best_first_calibrated.n{rows}", outcome


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
