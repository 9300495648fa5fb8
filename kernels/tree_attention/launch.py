"""Checked launch of split tree attention; layout and meaning as in ``naive``."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from specpilot.errors import InvalidInput, Unsupported
from specpilot.kernels.tree_attention.split import combine_kernel, split_kernel

__all__ = ["MAX_ROWS", "tree_attention"]

MAX_ROWS = 128
INTERPRETED = triton.knobs.runtime.interpret


def _need(ok: bool, message: str) -> None:
    if not ok:
        raise InvalidInput(message, hint="See specpilot.kernels.tree_attention.naive.")


def _splits(programs: int, longest: int, tile: int, processors: int) -> int:
    """Shares of the context that fill the device once, none under four tiles."""
    return max(1, min(processors // max(1, programs), longest // (4 * tile), 64))


def tree_attention(
    q: Tensor,
    k_tree: Tensor,
    v_tree: Tensor,
    k_past: Tensor,
    v_past: Tensor,
    length: Tensor,
    mask: Tensor,
    *,
    longest: int,
    scale: float | None = None,
    out: Tensor | None = None,
    config: tuple[int, int, int, int, int] | None = None,
) -> Tensor:
    """Outputs [R, N, Hq, d] in q's dtype.

    ``longest`` is an upper bound of ``length`` that the host knows: it sizes the launch without a
    wait for the device. ``config`` is (query rows a program, context rows a step, warps, pipeline
    stages, splits). Raises ``InvalidInput`` and ``Unsupported``.
    """
    _need(q.dim() == 4 and k_past.dim() == 4, "q and k_past need 4 axes.")
    requests, rows, heads, size = q.shape
    capacity, key_heads = k_past.shape[1], k_past.shape[2]
    if rows > MAX_ROWS:
        raise Unsupported(f"the tree has {rows} rows, the kernel takes {MAX_ROWS}.")
    if size & (size - 1) or not 16 <= size <= 256:
        raise Unsupported(f"head size {size} must be a power of two from 16 to 256.")
    _need(heads % key_heads == 0, f"{heads} query heads are no multiple of {key_heads} key heads.")
    _need(0 <= longest <= capacity, f"longest {longest} exceeds the context of {capacity} rows.")
    shapes = {
        "k_tree": (k_tree, (requests, rows, key_heads, size)),
        "v_tree": (v_tree, (requests, rows, key_heads, size)),
        "k_past": (k_past, (requests, capacity, key_heads, size)),
        "v_past": (v_past, (requests, capacity, key_heads, size)),
        "length": (length, (requests,)),
        "mask": (mask, (requests, rows, rows)),
    }
    for name, (x, shape) in shapes.items():
        _need(tuple(x.shape) == shape, f"{name} has shape {tuple(x.shape)}, needs {shape}.")
        _need(x.is_contiguous() and x.device == q.device, f"{name} must be contiguous, with q.")
    _need(q.is_contiguous(), "q must be contiguous.")
    low = (torch.bfloat16, torch.float32) if INTERPRETED else (torch.bfloat16,)
    for name, x in (("q", q), *((n, shapes[n][0]) for n in list(shapes)[:4])):
        _need(x.dtype in low, f"{name} is {x.dtype}, needs {' or '.join(map(str, low))}.")
    _need(mask.dtype == torch.bool, f"mask is {mask.dtype}, needs torch.bool.")
    if q.device.type != "cuda" and not INTERPRETED:
        raise Unsupported(
            f"the Triton kernels run on CUDA devices, not {q.device}.",
            hint="Use specpilot.kernels.tree_attention.naive there.",
        )
    group = heads // key_heads
    if config is None:
        block, tile, warps, stages = (128, 64, 8, 2) if group * rows > 64 else (64, 64, 4, 2)
        programs = triton.cdiv(group * rows, block) * requests * key_heads
        processors = (
            1 if INTERPRETED else torch.cuda.get_device_properties(q.device).multi_processor_count
        )
        splits = _splits(programs, longest, tile, processors)
    else:
        block, tile, warps, stages, splits = config
    share = triton.cdiv(max(longest, 1), splits * tile) * tile
    out = torch.empty_like(q) if out is None else out
    lines = (requests, key_heads, splits, group * rows)
    partial = torch.empty(*lines, size, dtype=torch.float32, device=q.device)
    tops, totals = torch.empty(2, *lines, dtype=torch.float32, device=q.device)
    split_kernel[(triton.cdiv(group * rows, block), splits, requests * key_heads)](
        q, k_tree, v_tree, k_past, v_past, length, mask.view(torch.uint8), partial, tops, totals,
        (scale or size**-0.5) * math.log2(math.e), share, capacity,
        N=rows, TN=min(tile, max(16, triton.next_power_of_2(rows))), HQ=heads, HK=key_heads, D=size,
        BM=block, BN=tile, SPLITS=splits, MMA=tl.float32 if INTERPRETED else tl.bfloat16,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    combine_kernel[(group * rows, requests * key_heads)](
        partial, tops, totals, out, N=rows, HQ=heads, HK=key_heads, D=size, SPLITS=splits,
        SP=triton.next_power_of_2(splits), num_warps=4,
    )  # fmt: skip
    return out
