"""W12 matrix product in Triton: weights are decoded in registers and fed to the tensor cores.

``y[m, n] = sum_k x[m, k] w[n, k]`` for up to 64 rows of x. The K range is split into a fixed
number of parts per shape (never per M) and every row of x takes the same path through the same
instructions, so row m of the result does not depend on how many rows are computed with it. A
second small kernel adds the parts in order, then the escapes in column order, and scales.

The weight operand is ``w * 2^(112 - base)``: a constant factor per output channel that the last
step takes out again, which is exact. Inline PTX needs sm_90; elsewhere (sm_80, the interpreter)
the same decode runs as Triton operations.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specpilot.errors import InvalidInput
from specpilot.kernels.w12.layout import BLOCK_K, TiledW12
from specpilot.kernels.w12.schedules import ROW_CLASSES, Schedule, choose

__all__ = ["MAX_ROWS", "Schedule", "gemm", "gemm_bf16"]

MAX_ROWS = ROW_CLASSES[-1]


_DECODE = tl.constexpr("""
{
.reg .b32 h, d, l, t;
and.b32 h, $2, 0x87878787;
shl.b32 d, $2, 1;
lop3.b32 l, $3, 0x0F0F0F0F, d, 0xE2;
prmt.b32 t, l, h, 0x5140;
mul.bf16x2 $0, t, $4;
prmt.b32 t, l, h, 0x7362;
mul.bf16x2 $1, t, $4;
}
""")


@triton.jit
def _decode_tl(q, low, BN: tl.constexpr, J: tl.constexpr):
    """The decode as Triton operations: q and low are uint16 [BN, J], two words a pair of bytes."""
    q32 = q.to(tl.int32) & 0xFFFF
    b32 = low.to(tl.int32) & 0x0F0F
    # Each uint16 holds two codes; even positions are the low slice's pair, odd ones the high's.
    pair_q = tl.reshape(q32, (BN, J // 2, 2))
    pair_b = tl.reshape(b32, (BN, J // 2, 2))
    q_lo, q_hi = tl.split(pair_q)
    b_lo, b_hi = tl.split(pair_b)
    return _pair(q_lo, b_lo, BN, J), _pair(q_hi, b_hi, BN, J)


@triton.jit
def _pair(q, b, BN: tl.constexpr, J: tl.constexpr):
    even = _code(q & 0xFF, b & 0xF)
    odd = _code(q >> 8, b >> 8)
    code = tl.reshape(tl.join(even, odd), (BN, J))
    value = (code << 16).to(tl.float32, bitcast=True)
    return (value * 5192296858534827628530496329220096.0).to(tl.bfloat16)  # 2^112


@triton.jit
def _code(q, b):
    return ((q & 0x87) << 8) | ((q & 0x78) << 1) | b


@triton.jit
def _partial_kernel(
    x_ptr, q_ptr, b_ptr, part_ptr, M, N, K, x_stride, tiles_per_split, tiles,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    VIEW: tl.constexpr, ASM: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    J: tl.constexpr = BK // 4
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    rows = tl.where(rows < N, rows, N - 1).to(tl.int64)
    word = tl.arange(0, J)
    row_m = tl.arange(0, BM)
    first = tl.program_id(1) * tiles_per_split
    last = tl.minimum(first + tiles_per_split, tiles)
    q_row = q_ptr + rows[:, None] * (tiles * 2 * J) + word[None, :]
    b_row = b_ptr + rows[:, None] * (tiles * J) + word[None, :]
    acc = tl.zeros((BN, BM), dtype=tl.float32)
    for tile in range(first, last):
        q0 = tl.load(q_row + tile * 2 * J)
        q1 = tl.load(q_row + tile * 2 * J + J)
        if VIEW:
            low0 = tl.full((BN, J), 0x0808, tl.int16)
            low1 = low0
        else:
            low0 = tl.load(b_row + tile * J)
            low1 = (low0.to(tl.uint16, bitcast=True) >> 4).to(tl.int16, bitcast=True)
        for half in tl.static_range(2):
            q = q0 if half == 0 else q1
            low = low0 if half == 0 else low1
            if ASM:
                scale = tl.full((BN, J), 0x7780, tl.int16)
                w0, w1 = tl.inline_asm_elementwise(
                    _DECODE, "=r,=r,r,r,r", [q, low, scale],
                    dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
                )  # fmt: skip
            else:
                w0, w1 = _decode_tl(q, low, BN, J)
            k = tile * BK + half * 2 * J + word
            x_at = x_ptr + row_m[None, :] * x_stride + k[:, None]
            inside = (row_m[None, :] < M) & (k[:, None] < K)
            acc = tl.dot(w0.to(DOT), tl.load(x_at, mask=inside, other=0.0).to(DOT), acc)
            inside = (row_m[None, :] < M) & (k[:, None] + J < K)
            acc = tl.dot(w1.to(DOT), tl.load(x_at + J, mask=inside, other=0.0).to(DOT), acc)
    out_n = tl.program_id(0) * BN + tl.arange(0, BN)
    at = (tl.program_id(1) * M + row_m[None, :]) * N + out_n[:, None]
    tl.store(part_ptr + at, acc, mask=(out_n[:, None] < N) & (row_m[None, :] < M))


@triton.jit
def _partial_bf16_kernel(
    x_ptr, w_ptr, part_ptr, M, N, K, x_stride, tiles_per_split, tiles,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The same schedule with a BF16 loader: what the format itself is measured against."""
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    rows = tl.where(rows < N, rows, N - 1).to(tl.int64)
    row_m = tl.arange(0, BM)
    first = tl.program_id(1) * tiles_per_split
    last = tl.minimum(first + tiles_per_split, tiles)
    acc = tl.zeros((BN, BM), dtype=tl.float32)
    for tile in range(first, last):
        k = tile * BK + tl.arange(0, BK)
        w = tl.load(w_ptr + rows[:, None] * K + k[None, :], mask=k[None, :] < K, other=0.0)
        inside = (row_m[None, :] < M) & (k[:, None] < K)
        x = tl.load(x_ptr + row_m[None, :] * x_stride + k[:, None], mask=inside, other=0.0)
        acc = tl.dot(w, x, acc)
    out_n = tl.program_id(0) * BN + tl.arange(0, BN)
    at = (tl.program_id(1) * M + row_m[None, :]) * N + out_n[:, None]
    tl.store(part_ptr + at, acc, mask=(out_n[:, None] < N) & (row_m[None, :] < M))


@triton.jit
def _finish_kernel(
    part_ptr, x_ptr, y_ptr, scale_ptr, start_ptr, column_ptr, value_ptr,
    M, N, x_stride, SPLITS: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(1)
    inside = n < N
    total = tl.zeros((BN,), dtype=tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(part_ptr + (split * M + m) * N + n, mask=inside, other=0.0)
    total *= tl.load(scale_ptr + n, mask=inside, other=0.0)
    start = tl.load(start_ptr + n, mask=inside, other=0)
    count = tl.load(start_ptr + n + 1, mask=inside, other=0) - start
    for step in range(0, tl.max(count, axis=0)):
        has = step < count
        column = tl.load(column_ptr + start + step, mask=has, other=0)
        weight = tl.load(value_ptr + start + step, mask=has, other=0.0).to(tl.float32)
        total += weight * tl.load(x_ptr + m * x_stride + column, mask=has, other=0.0)
    tl.store(y_ptr + m * N + n, total.to(y_ptr.dtype.element_ty), mask=inside)


def gemm(
    x: Tensor,
    weight: TiledW12,
    schedule: Schedule | None = None,
    *,
    view: bool = False,
    inline_ptx: bool | None = None,
) -> Tensor:
    """Return ``x @ W.T``: x bf16 [M, K] with M of 1..64, result bf16 [M, N].

    The schedule is chosen by shape unless it is given.
    ``view`` reads only the 8-bit view: the low mantissa bits at their midpoint, also where the
    planes hold a zero (an escape is added to that).
    Parts of K are summed in fp32 in a fixed order. Safe inside a CUDA graph.

    Raises:
        InvalidInput: x is not bf16 [1..64, K], or not contiguous along K.
    """
    if x.dtype != torch.bfloat16 or x.ndim != 2 or x.shape[1] != weight.columns:
        raise InvalidInput(
            f"W12 product takes bf16 [1..{MAX_ROWS}, {weight.columns}], "
            f"got {x.dtype} {tuple(x.shape)}."
        )
    if not 1 <= x.shape[0] <= MAX_ROWS or x.stride(1) != 1:
        raise InvalidInput(
            f"W12 product takes 1 to {MAX_ROWS} contiguous rows, got {x.shape[0]} rows of stride "
            f"{x.stride(1)}.",
            hint="Above that, decode the weights once and use an ordinary product.",
        )
    rows_m, rows_n = x.shape[0], weight.rows
    schedule = schedule or choose(rows_n, weight.columns, rows_m)
    tiles = -(-weight.columns // BLOCK_K)
    splits = min(schedule.splits, tiles)
    part = torch.empty((splits, rows_m, rows_n), dtype=torch.float32, device=x.device)
    y = torch.empty((rows_m, rows_n), dtype=torch.bfloat16, device=x.device)
    if inline_ptx is None:
        inline_ptx = x.is_cuda and torch.cuda.get_device_capability(x.device)[0] >= 9
    block_m = next(size for size in ROW_CLASSES if rows_m <= size)
    _partial_kernel[(triton.cdiv(rows_n, schedule.block_n), splits)](
        x, weight.q, weight.b, part, rows_m, rows_n, weight.columns, x.stride(0),
        triton.cdiv(tiles, splits), tiles,
        BM=block_m, BN=schedule.block_n, BK=BLOCK_K, VIEW=view, ASM=inline_ptx,
        DOT=tl.bfloat16 if x.is_cuda else tl.float32,  # the interpreter has no bf16 products
        num_warps=schedule.warps, num_stages=schedule.stages,
    )  # fmt: skip
    _finish_kernel[(triton.cdiv(rows_n, 256), rows_m)](
        part, x, y, weight.scale, weight.row_start, weight.column, weight.value,
        rows_m, rows_n, x.stride(0), SPLITS=splits, BN=256, num_warps=4,
    )  # fmt: skip
    return y


def gemm_bf16(x: Tensor, weight: Tensor, like: TiledW12, schedule: Schedule) -> Tensor:
    """Return ``x @ weight.T`` by the schedule of ``gemm`` with BF16 weights [N, K]: a yardstick.

    The second step is the same kernel over the same escapes (``like``); only its time is of use.
    """
    rows_m, (rows_n, columns) = x.shape[0], weight.shape
    tiles = -(-columns // BLOCK_K)
    splits = min(schedule.splits, tiles)
    part = torch.empty((splits, rows_m, rows_n), dtype=torch.float32, device=x.device)
    y = torch.empty((rows_m, rows_n), dtype=torch.bfloat16, device=x.device)
    block_m = next(size for size in ROW_CLASSES if rows_m <= size)
    _partial_bf16_kernel[(triton.cdiv(rows_n, schedule.block_n), splits)](
        x, weight, part, rows_m, rows_n, columns, x.stride(0),
        2 * triton.cdiv(tiles, splits), 2 * tiles,
        BM=block_m, BN=schedule.block_n, BK=BLOCK_K // 2,
        num_warps=schedule.warps, num_stages=schedule.stages + 1,
    )  # fmt: skip
    _finish_kernel[(triton.cdiv(rows_n, 256), rows_m)](
        part, x, y, like.scale, like.row_start, like.column, like.value,
        rows_m, rows_n, x.stride(0), SPLITS=splits, BN=256, num_warps=4,
    )  # fmt: skip
    return y
