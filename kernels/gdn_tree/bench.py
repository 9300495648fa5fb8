"""Benchmark of the tree kernels on one GPU: right first, then 48 dependent launches in one graph.

Shapes are those of a 27B hybrid target (48 recurrent layers, 48 value and 16 key heads of
128 x 128, fp32 state). Every figure is the time of one layer: the median over replays of a CUDA
graph that launches the layers one after the other, each with its own state, divided by the layers.
Each kernel runs in the fastest of its configurations for that size. The table of stock's tree mode
is stood for by ``snapshot_kernel``, ours with the same traffic.
"""

import contextlib
import heapq
import itertools
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import triton
from torch import Tensor

from specpilot.errors import CheckFailed, Unsupported
from specpilot.kernels.gdn_tree import launch, naive

__all__ = ["TREES", "check", "main", "run"]

DEVICE = "cuda"
LAYERS, HEADS, KEY_HEADS, SIZE = 48, 48, 16, 128
ROWS = (8, 16, 32, 64, 128)
REQUESTS = (1, 24)
REPLAYS = 30
STEP_CONFIGS = ((8, 1), (16, 1), (16, 2), (32, 1), (32, 2), (32, 4), (64, 4))
SNAPSHOT_LIMIT = 24e9  # bytes: beyond, layers share a buffer; a buffer beyond is not measured
ERROR_LIMIT = 8e-3  # bf16 outputs against fp64

Result = dict[str, Any]
C = TypeVar("C")


def chain_tree(rows: int, _: random.Random) -> list[int]:
    """Every row follows the one before."""
    return list(range(-1, rows - 1))


def best_first_tree(rows: int, chance: random.Random) -> list[int]:
    """The likeliest nodes when the candidate of rank r is right with a probability that falls in r
    and with depth, at most 15 deep: the shape that best-first gives on a block drafter's lattice.
    """
    ranks = [0.75, 0.1, 0.04, 0.025, 0.016, 0.011, 0.008, 0.006]
    parent: list[int] = [-1]
    frontier: list[tuple[float, int, int, int, int]] = []
    serial = itertools.count()

    def push(score: float, up: int, depth: int, rank: int) -> None:
        if depth <= 15 and rank < len(ranks):
            right = ranks[rank] * chance.uniform(0.6, 1.4) * 0.97**depth
            heapq.heappush(frontier, (-score - math.log(right), next(serial), up, depth, rank))

    scores = [0.0]
    push(0.0, 0, 1, 0)
    while len(parent) < rows:
        cost, _, up, depth, rank = heapq.heappop(frontier)
        parent.append(up)
        scores.append(-cost)
        push(scores[up], up, depth, rank + 1)
        push(-cost, len(parent) - 1, depth + 1, 0)
    return parent


def bushy_tree(rows: int, chance: random.Random) -> list[int]:
    """Every row hangs from any earlier one: shallow, many leaves."""
    return [-1, *(chance.randrange(n) for n in range(1, rows))]


TREES: dict[str, Callable[[int, random.Random], list[int]]] = {
    "chain": chain_tree,
    "best_first": best_first_tree,
    "bushy": bushy_tree,
}


@dataclass(frozen=True, slots=True)
class Problem:
    """Inputs of one layer, as the launches take them."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    state: Tensor
    slot: Tensor

    @classmethod
    def random(cls, requests: int, rows: int) -> "Problem":
        def normal(*size: int) -> Tensor:
            return torch.randn(*size, device=DEVICE)

        keys = (requests, rows, KEY_HEADS, SIZE)
        values = (requests, rows, HEADS, SIZE)
        unit = torch.nn.functional.normalize
        return cls(
            q=(unit(normal(*keys), dim=-1) * SIZE**-0.5).bfloat16(),
            k=unit(normal(*keys), dim=-1).bfloat16(),
            v=normal(*values).bfloat16(),
            g=-0.2 * torch.rand(requests, rows, HEADS, device=DEVICE),
            beta=torch.sigmoid(normal(requests, rows, HEADS)),
            state=normal(requests, HEADS, SIZE, SIZE),
            slot=torch.arange(requests, device=DEVICE, dtype=torch.int32),
        )

    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        return (self.q, self.k, self.v, self.g, self.beta, self.state, self.slot)


def _parents(tree: str, requests: int, rows: int, seed: int) -> Tensor:
    chance = random.Random(f"{tree} {rows} {seed}")
    return torch.tensor([TREES[tree](rows, chance) for _ in range(requests)], device=DEVICE)


def _error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def wy_configs(rows: int, requests: int) -> list[launch.WyConfig]:
    """Configurations of the WY kernel worth trying."""
    block = 16 if rows <= 16 else 32
    if requests > 1:
        few, many = (4, 2) if rows <= 32 else (8, 4)
        found = [(block, 1, 32, few), (block, 1, 64, few), (block, 2, 32, few)]
        found += [(block, 1, 32, many), (block, 1, 64, many)] if rows <= 64 else []
    else:
        warps = (2, 4) if rows <= 32 else (4, 8) if rows <= 64 else (8,)
        found = [(block, shares, 32, w) for w in warps for shares in (1, 2, 4)]
    if 16 < rows <= 64:
        found.append((16, 1 if requests > 1 else 2, 32, 4))
    return found


def check(
    tree: str, rows: int, requests: int, seed: int, wy: launch.WyConfig | None
) -> dict[str, float]:
    """Compare all kernels with the fp64 recurrence on fresh inputs into poisoned outputs.

    Returns relative errors by kernel. Raises ``CheckFailed`` beyond the limits.
    """
    p = Problem.random(requests, rows)
    parent = _parents(tree, requests, rows, seed)
    q, k, v, g, beta, state = (x.double() for x in p.inputs()[:6])
    want, states = naive.tree_path(q, k, v, g, beta, state, parent)
    poison = torch.full_like(p.v, float("nan"))
    kept = torch.full((requests, rows, HEADS, SIZE, SIZE), float("nan"), device=DEVICE)
    mask, paths = naive.ancestor_mask(parent), launch.path_table(parent)
    errors = {
        "wy": _error(launch.tree_wy(*p.inputs(), mask, out=poison.clone(), config=wy), want),
        "path": _error(launch.tree_path(*p.inputs(), paths, out=poison.clone()), want),
        "snapshot": _error(
            launch.tree_snapshot(*p.inputs(), parent.int(), kept, out=poison.clone()), want
        ),
        "snapshot_state": _error(kept, states),
    }
    leaf = paths.nodes[:, 0].contiguous(), paths.length[:, 0].contiguous()
    launch.commit(p.k, p.v, p.g, p.beta, p.state, p.slot, *leaf)
    end = leaf[0].gather(1, (leaf[1] - 1)[:, None].long())[:, 0].long()
    errors["commit_state"] = _error(p.state, states[torch.arange(requests, device=DEVICE), end])
    for name, error in errors.items():
        limit = 1e-4 if name.endswith("state") else ERROR_LIMIT
        if not error < limit:
            raise CheckFailed(
                f"{name} is off by {error:.3g} (limit {limit:g}) on {tree}, {rows} rows, "
                f"{requests} requests, configuration {wy}."
            )
    return errors


def _time_us(launches: Sequence[Callable[[], object]], replays: int = REPLAYS) -> list[float]:
    """Microseconds a launch, one figure a replay of the graph that makes all launches."""
    for one in launches[:2]:
        one()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for one in launches:
            one()
    times = []
    for replay in range(replays + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if replay >= 3:
            times.append(start.elapsed_time(end) * 1e3 / len(launches))
    graph.reset()
    return times


def _result(name: str, repeats: Sequence[float], unit: str, note: str) -> Result:
    return {
        "id": name,
        "value": round(statistics.median(repeats), 4),
        "low": round(min(repeats), 4),
        "high": round(max(repeats), 4),
        "unit": unit,
        "repeats": [round(x, 3) for x in repeats],
        "note": note,
    }


def _copy_gbs() -> list[float]:
    """Device-to-device copy, bytes read plus written, in GB/s."""
    source = torch.randn(2**30, device=DEVICE)
    target = torch.empty_like(source)
    copy = partial(torch.mul, source, 1.0, out=target)  # a kernel: copy engines are slower
    return [2 * source.nbytes / (t * 1e3) for t in _time_us([copy], 10)]


def _floor_bytes(requests: int, rows: int) -> int:
    """Bytes that any kernel must move a layer: state, inputs and mask read, outputs written."""
    keys = 2 * 2 * rows * KEY_HEADS * SIZE
    values = 2 * 2 * rows * HEADS * SIZE
    gates = 2 * 4 * rows * HEADS
    return requests * (4 * HEADS * SIZE * SIZE + keys + values + gates + rows * rows)


def kept_bytes(rows: int) -> int:
    """Bytes a layer that a request keeps from a pass until its commit: k, v, g and beta."""
    return rows * (2 * KEY_HEADS * SIZE + 2 * HEADS * SIZE + 2 * 4 * HEADS)


def _fastest(
    make: Callable[[C], Sequence[Callable[[], object]]], configs: Sequence[C]
) -> tuple[C, list[float]]:
    """Time every configuration shortly, then the best one in full."""
    quick = {}
    for config in configs:
        with contextlib.suppress(triton.OutOfResources):  # too much shared memory or registers
            quick[config] = statistics.median(_time_us(make(config), 5))
    best = min(quick, key=lambda config: quick[config])
    return best, _time_us(make(best))


def _measure(
    tree: str, rows: int, requests: int, layers: Sequence[Problem]
) -> tuple[dict[str, list[float]], list[Result]]:
    parent = _parents(tree, requests, rows, seed=0)
    mask, paths = naive.ancestor_mask(parent), launch.path_table(parent)
    out = torch.empty_like(layers[0].v)
    results: list[Result] = []
    times: dict[str, list[float]] = {}

    def record(kernel: str, config: tuple[int, ...], repeats: list[float]) -> None:
        times[kernel] = repeats
        results.append(
            _result(
                f"gdn.us_per_layer.{kernel}.{tree}.n{rows}.r{requests}",
                repeats,
                "us",
                f"configuration {config}; low and high are the extremes of {len(repeats)} replays "
                f"of {LAYERS} layers",
            )
        )

    def wy(config: launch.WyConfig) -> list[Callable[[], object]]:
        return [partial(launch.tree_wy, *p.inputs(), mask, out=out, config=config) for p in layers]

    def path(config: tuple[int, int]) -> list[Callable[[], object]]:
        return [
            partial(launch.tree_path, *p.inputs(), paths, out=out, config=config) for p in layers
        ]

    best, repeats = _fastest(wy, wy_configs(rows, requests))
    check(tree, rows, min(requests, 2), seed=1, wy=best)
    record("wy", best, repeats)
    record("path", *_fastest(path, STEP_CONFIGS))

    one_buffer = launch.snapshot_bytes(requests, rows, HEADS, SIZE, SIZE)
    if one_buffer <= SNAPSHOT_LIMIT:
        count = LAYERS if one_buffer * LAYERS <= SNAPSHOT_LIMIT else 1
        buffers = [
            torch.empty(requests, rows, HEADS, SIZE, SIZE, device=DEVICE) for _ in range(count)
        ]
        up = parent.int()

        def snapshot(config: tuple[int, int]) -> list[Callable[[], object]]:
            return [
                partial(
                    launch.tree_snapshot,
                    *p.inputs(),
                    up,
                    buffers[i % count],
                    out=out,
                    config=config,
                )
                for i, p in enumerate(layers)
            ]

        record("snapshot", *_fastest(snapshot, STEP_CONFIGS))
    return times, results


def _ratio(name: str, over: list[float], under: list[float], note: str) -> Result:
    spread = [a / b for a, b in zip(sorted(over), sorted(under), strict=True)]
    return _result(name, spread, "ratio", note)


def run(
    seconds: float = 420.0,
    rows: Sequence[int] = ROWS,
    requests: Sequence[int] = REQUESTS,
    progress: Callable[[list[Result]], None] = lambda _: None,
) -> list[Result]:
    """Check and time all kernels; results in the benchmark format, most wanted sizes first.

    Stops opening new sizes after ``seconds`` and says what it left out. ``progress`` sees the
    results after each size. Raises ``Unsupported`` without a GPU and ``CheckFailed`` when a kernel
    is wrong.
    """
    if not torch.cuda.is_available():
        raise Unsupported("the kernel benchmark needs a CUDA device.", hint="Run it on one.")
    began = time.monotonic()
    results = [_result("gdn.copy_gbs", _copy_gbs(), "GB/s", "4 GiB copied, read plus written")]
    bandwidth = results[0]["value"] * 1e9
    empty = torch.zeros(1, device=DEVICE)
    results.append(
        _result(
            "gdn.us_per_empty_launch",
            _time_us([lambda: empty.add_(1)] * LAYERS),
            "us",
            f"one of {LAYERS} dependent launches of one element in a graph",
        )
    )
    for tree in TREES:
        for n in (1, 8, 17, 32, 64, 128):
            check(tree, n, 3, seed=n, wy=None)
    torch.cuda.empty_cache()
    sizes = [(t, n, r) for r in requests for t in ("best_first", "chain", "bushy") for n in rows]
    sizes.sort(key=lambda size: (size[0] != "best_first", size[1] not in (32, 64)))
    left_out = []
    for tree, n, r in sizes:
        if time.monotonic() - began > seconds:
            left_out.append(f"{tree} n{n} r{r}")
            continue
        layers = [Problem.random(r, n) for _ in range(LAYERS)]
        times, measured = _measure(tree, n, r, layers)
        results += measured
        if tree == "best_first":
            suffix = f".n{n}" if r == 1 else f".n{n}.r{r}"
            note = f"best-first trees, {r} request(s), medians of one run in turn"
            results.append(
                _ratio(f"gdn.path_over_wy_time{suffix}", times["path"], times["wy"], note)
            )
            if "snapshot" in times:
                results.append(
                    _ratio(
                        f"gdn.snapshot_over_wy_time{suffix}", times["snapshot"], times["wy"], note
                    )
                )
            floor_us = _floor_bytes(r, n) / bandwidth * 1e6
            results.append(
                _result(
                    f"gdn.wy_over_floor.n{n}.r{r}",
                    [t / floor_us for t in times["wy"]],
                    "ratio",
                    f"floor {floor_us:.2f} us: state and inputs read once, outputs written, at the "
                    "copy's rate",
                )
            )
            if r == 1:
                results.append(
                    _result(f"gdn.wy_us_per_layer.n{n}.r1", times["wy"], "us", "best-first trees")
                )
                results.append(
                    {
                        "id": f"gdn.snapshot_over_wy_memory.n{n}",
                        "value": round(
                            launch.snapshot_bytes(1, n, HEADS, SIZE, SIZE) / kept_bytes(n), 2
                        ),
                        "unit": "ratio",
                        "note": "counted: fp32 state a row against k, v, g and beta a row, which "
                        "the pass has anyway and keeps until the commit",
                    }
                )
        del layers
        torch.cuda.empty_cache()
        progress(results)
    for r in requests:
        layers = [Problem.random(r, 32) for _ in range(LAYERS)]
        path = torch.arange(8, device=DEVICE, dtype=torch.int32).repeat(r, 1)
        length = torch.full((r,), 8, device=DEVICE, dtype=torch.int32)

        def commits(
            config: tuple[int, int],
            layers: list[Problem] = layers,
            accepted: tuple[Tensor, Tensor] = (path, length),
        ) -> list[Callable[[], object]]:
            return [
                partial(launch.commit, *p.inputs()[1:], *accepted, config=config) for p in layers
            ]

        config, repeats = _fastest(commits, STEP_CONFIGS)
        results.append(
            _result(f"gdn.us_per_layer.commit.n8.r{r}", repeats, "us", f"8 rows, {config}")
        )
    if left_out:
        print(f"left out after {seconds:.0f} s: {', '.join(left_out)}", file=sys.stderr)
    return results


def main() -> None:
    """Print results as JSON; for machines without the command line."""
    print(json.dumps(run(), indent=1))


if __name__ == "__main__":
    main()
