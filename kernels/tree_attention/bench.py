"""Benchmark of tree attention on one GPU, with the heads of a 27B hybrid target.

24 query and 4 key heads of 256, one request. The floor is the larger of the bytes that must move
at the measured copy rate and the operations at 60 % of the bf16 peak.
"""

import statistics
import time
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from specpilot.errors import CheckFailed, Unsupported
from specpilot.kernels.gdn_tree import bench as gdn
from specpilot.kernels.gdn_tree.naive import ancestor_mask
from specpilot.kernels.tree_attention import launch, naive

__all__ = ["check", "run"]

QUERY_HEADS, KEY_HEADS, SIZE = 24, 4, 256
PEAK_TFLOPS = 989.0  # dense bf16 of H100 and H200 SXM
SIZES = ((16, 8192), (64, 32768), (16, 32768), (64, 8192))
COPIES = 4  # contexts that launches take in turn, so that they do not stay in cache
ERROR_LIMIT = 8e-3  # bf16 outputs against fp64


def _problem(requests: int, rows: int, context: int, seed: int) -> dict[str, Any]:
    def normal(*size: int) -> Tensor:
        return torch.randn(*size, device=gdn.DEVICE).bfloat16()

    return {
        "q": normal(requests, rows, QUERY_HEADS, SIZE),
        "k_tree": normal(requests, rows, KEY_HEADS, SIZE),
        "v_tree": normal(requests, rows, KEY_HEADS, SIZE),
        "k_past": normal(requests, context, KEY_HEADS, SIZE),
        "v_past": normal(requests, context, KEY_HEADS, SIZE),
        "length": torch.full((requests,), context, device=gdn.DEVICE, dtype=torch.int32),
        "mask": ancestor_mask(gdn._parents("best_first", requests, rows, seed)),
    }


def check(rows: int, context: int, seed: int) -> float:
    """Relative error against fp64 on fresh inputs, lengths that differ and poisoned outputs."""
    p = _problem(2, rows, context, seed)
    p["length"][1] = context // 3 + 5
    got = launch.tree_attention(**p, longest=context, out=torch.full_like(p["q"], float("nan")))
    wide = {name: x.double() if x.is_floating_point() else x for name, x in p.items()}
    error = gdn._error(got, naive.tree_attention(**wide))
    if not error < ERROR_LIMIT:
        raise CheckFailed(f"tree attention is off by {error:.3g} at {rows} rows, {context} context")
    return error


def _configs(rows: int) -> list[tuple[int, int, int, int, int]]:
    lines = QUERY_HEADS // KEY_HEADS * rows
    found = []
    for block, tile, warps, stages in (
        (128, 64, 8, 2), (128, 32, 8, 3), (64, 64, 4, 2), (64, 32, 4, 3), (128, 32, 8, 2),
    ):  # fmt: skip
        programs = triton.cdiv(lines, block) * KEY_HEADS
        found += [
            (block, tile, warps, stages, splits)
            for splits in {max(1, 132 // programs), max(1, 264 // programs)}
        ]
    return found


def run(seconds: float = 120.0) -> list[dict[str, Any]]:
    """Check, then time; results in the benchmark format. Raises ``Unsupported`` without a GPU."""
    if not torch.cuda.is_available():
        raise Unsupported("the kernel benchmark needs a CUDA device.", hint="Run it on one.")
    began = time.monotonic()
    for rows, context in ((1, 64), (17, 1000), (64, 2048), (128, 777)):
        check(rows, context, seed=rows)
    bandwidth = statistics.median(gdn._copy_gbs()) * 1e9
    results = []
    for rows, context in SIZES:
        problems = [_problem(1, rows, context, seed=i) for i in range(COPIES)]
        out = torch.empty_like(problems[0]["q"])
        best: tuple[float, tuple[int, ...], list[float]] | None = None
        for config in _configs(rows):
            if best is not None and time.monotonic() - began > seconds:
                break
            launches = [
                partial(launch.tree_attention, **p, longest=context, out=out, config=config)
                for p in problems * 4
            ]
            try:
                repeats = gdn._time_us(launches, 10)
            except triton.OutOfResources:
                continue
            if best is None or statistics.median(repeats) < best[0]:
                best = (statistics.median(repeats), config, repeats)
        assert best is not None
        moved = 2 * 2 * KEY_HEADS * SIZE * (context + rows) + 2 * 2 * rows * QUERY_HEADS * SIZE
        operations = 4 * rows * QUERY_HEADS * SIZE * (context + rows)
        floor_us = max(moved / bandwidth, operations / (0.6 * PEAK_TFLOPS * 1e12)) * 1e6
        name = f"n{rows}_{context // 1024}k"
        note = f"configuration {best[1]}; low and high are the extremes of replays"
        results.append(gdn._result(f"tree_attention.us.{name}", best[2], "us", note))
        results.append(
            gdn._result(
                f"tree_attention.over_floor.{name}",
                [t / floor_us for t in best[2]],
                "ratio",
                f"floor {floor_us:.1f} us: {moved / 1e6:.0f} MB at {bandwidth / 1e9:.0f} GB/s or "
                f"{operations / 1e9:.1f} GFLOP at 60 % of {PEAK_TFLOPS:.0f} TFLOP/s",
            )
        )
    return results
