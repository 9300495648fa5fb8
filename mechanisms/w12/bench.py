"""Time the W12 product against cuBLAS and against the same kernel with BF16 weights, on a GPU.

Every figure is a ratio of two things timed in turn in one process: CUDA graphs, weights rotated
through more memory than the L2 cache holds, random data, medians over repeats. Shapes are those of
a 27B hybrid and of an 8B dense model, [output channels, input features].
"""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from specpilot.errors import Unsupported
from specpilot.mechanisms.w12 import codec

__all__ = ["MS", "SHAPES", "run"]

SHAPES = (
    (34816, 5120), (5120, 17408), (16384, 5120), (5120, 6144), (14336, 5120), (248320, 5120),
    (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336),
)  # fmt: skip
MS = (1, 8, 16, 32, 64)
_REPEATS = 9
_ROTATE_BYTES = 256 << 20  # five times the L2 of an H200
_TILES = {16: ((64, 4, 3), (64, 4, 4), (128, 8, 3)), 32: ((64, 4, 3), (128, 8, 3)),
          64: ((64, 4, 2), (128, 8, 2), (128, 8, 3))}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Timed:
    """Microseconds of one call, all repeats."""

    repeats: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.repeats)


def run() -> list[dict[str, Any]]:
    """Measure all shapes and rows. Raises ``Unsupported`` without a CUDA device."""
    import torch

    if not torch.cuda.is_available():
        raise Unsupported("the W12 benchmark needs a CUDA device.", hint="Run it on the GPU.")
    results: list[dict[str, Any]] = []
    for shape in SHAPES:
        results += _measure(shape)
    return results + list(_summary(results))


def _measure(shape: tuple[int, int]) -> list[dict[str, Any]]:
    import torch

    from specpilot.kernels.w12 import gemm, layout

    weight = _random_weight(shape)
    tiled = layout.tile(*_planes(weight))
    copies = max(2, math.ceil(_ROTATE_BYTES / tiled.nbytes))
    packed = [tiled, *(_clone(tiled) for _ in range(copies - 1))]
    dense = [weight, *(weight.clone() for _ in range(copies - 1))]
    plan = _plan(packed)
    rows: list[dict[str, Any]] = []
    for m in MS:
        x = torch.randn(m, shape[1], device="cuda").bfloat16()
        schedule = plan[_block(m)]
        _check(x, weight, tiled, schedule)
        times = _interleaved({
            "cublas": [partial(torch.nn.functional.linear, x, w) for w in dense],
            "w12": [partial(gemm.gemm, x, w, schedule) for w in packed],
            "view": [partial(gemm.gemm, x, w, schedule, view=True) for w in packed],
            "bf16": [partial(gemm.gemm_bf16, x, w, tiled, schedule) for w in dense],
        })  # fmt: skip
        rows += _rows(shape, m, times, tiled.nbytes, schedule)
    return rows


def _rows(
    shape: tuple[int, int], m: int, times: dict[str, _Timed], nbytes: int, schedule: Any
) -> list[dict[str, Any]]:
    name = f"{shape[0]}x{shape[1]}.m{m}"
    w12 = times["w12"].median
    out = [
        _ratio(f"w12.vs_cublas.{name}", times["cublas"], times["w12"]),
        _ratio(f"w12.vs_own_bf16.{name}", times["bf16"], times["w12"]),
        _ratio(f"w12.q_pass_over_w12_time.{name}", times["view"], times["w12"]),
        {"id": f"w12.us.{name}", "value": w12, "unit": "us",
         "low": min(times["w12"].repeats), "high": max(times["w12"].repeats),
         "repeats": list(times["w12"].repeats),
         "note": f"cuBLAS {times['cublas'].median:.1f} us; {schedule}"},
        {"id": f"w12.tbs.{name}", "value": nbytes / w12 / 1e6, "unit": "TB/s"},
    ]  # fmt: skip
    return out


def _ratio(name: str, over: _Timed, under: _Timed) -> dict[str, Any]:
    repeats = [a / b for a, b in zip(over.repeats, under.repeats, strict=True)]
    return {
        "id": name, "value": statistics.median(repeats), "low": min(repeats),
        "high": max(repeats), "unit": "ratio", "repeats": repeats,
    }  # fmt: skip


def _summary(results: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Geometric means over shapes, with their extremes as bounds."""
    for kind in ("w12.vs_cublas", "w12.vs_own_bf16", "w12.q_pass_over_w12_time"):
        for m in MS:
            parts = [
                r["value"]
                for r in results
                if r["id"].startswith(kind + ".") and r["id"].endswith(f"x{_k(r)}.m{m}")
            ]
            yield {
                "id": f"{kind}.m{m}", "value": statistics.geometric_mean(parts),
                "low": min(parts), "high": max(parts), "unit": "ratio",
                "note": f"geometric mean over {len(parts)} shapes; low and high are shapes",
            }  # fmt: skip
    large = [r["value"] for r in results if r["id"].startswith("w12.tbs.248320x5120.m1")]
    yield {"id": "w12.tbs_large", "value": large[0], "unit": "TB/s", "note": "248320x5120, m 1"}


def _k(result: dict[str, Any]) -> str:
    return str(result["id"]).rsplit(".m", 1)[0].rsplit("x", 1)[1]


def _plan(packed: list[Any]) -> dict[int, Any]:
    """Pick one split for all M (rows must not depend on M) and the best tile for each M class."""
    import torch

    from specpilot.kernels.w12 import gemm

    best: tuple[float, dict[int, Any]] | None = None
    tiles = packed[0].columns // 256
    for splits in sorted({s for s in (1, 2, 3, 4, 6, 8, 12) if s <= tiles}):
        total, chosen = 0.0, {}
        for block, options in _TILES.items():
            x = torch.randn(block, packed[0].columns, device="cuda").bfloat16()
            timed = []
            for block_n, warps, stages in options:
                schedule = gemm.Schedule(block_n, splits, warps, stages)
                calls = [partial(gemm.gemm, x, w, schedule) for w in packed]
                timed.append((_interleaved({"": calls}, repeats=3)[""].median, schedule))
            fastest = min(timed, key=lambda pair: pair[0])
            total, chosen[block] = total + math.log(fastest[0]), fastest[1]
        if best is None or total < best[0]:
            best = (total, chosen)
    assert best
    return best[1]


def _block(m: int) -> int:
    return 16 if m <= 16 else 32 if m <= 32 else 64


def _interleaved(
    arms: Mapping[str, Sequence[Callable[[], Any]]], repeats: int = _REPEATS
) -> dict[str, _Timed]:
    """Microseconds a call for each arm, one CUDA graph an arm, arms replayed in turn."""
    import torch

    graphs = {}
    for name, calls in arms.items():
        for call in calls[:2]:
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        graphs[name] = graph
    times: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(repeats + 1):
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) * 1e3 / len(arms[name]))
    return {name: _Timed(tuple(values[1:])) for name, values in times.items()}


def _random_weight(shape: tuple[int, int]) -> Any:
    import torch

    generator = torch.Generator("cuda").manual_seed(shape[0] * 31 + shape[1])
    return (torch.randn(shape, device="cuda", generator=generator) * 0.02).bfloat16()


def _planes(weight: Any) -> list[Any]:
    import torch

    bits = weight.view(torch.int16).cpu().numpy().view(np.uint16)
    matrix = codec.encode(bits)
    assert not len(matrix.raw_rows)
    arrays = (matrix.q, matrix.b, matrix.base, matrix.row_start, matrix.escape_column)
    value = torch.from_numpy(matrix.escape_bits.view(np.int16)).view(torch.bfloat16)
    return [*(torch.from_numpy(a).cuda() for a in arrays), value.cuda()]


def _clone(tiled: Any) -> Any:
    return replace(tiled, q=tiled.q.clone(), b=tiled.b.clone())


def _check(x: Any, weight: Any, tiled: Any, schedule: Any) -> None:
    """Against fp64 on a slice of channels, and row 0 alone against row 0 among m."""
    import torch

    from specpilot.kernels.w12 import gemm

    got = gemm.gemm(x, tiled, schedule)
    part = slice(0, 512)
    expected = x.double() @ weight[part].double().T
    error = (got[:, part].double() - expected).norm() / expected.norm()
    assert error < 5e-3, f"W12 product is off by {error:.2e}"
    assert torch.isfinite(got).all()
    alone = gemm.gemm(x[:1], tiled, schedule)
    assert torch.equal(alone, got[:1]), "a row depends on the rows beside it"
