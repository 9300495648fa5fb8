"""The W12 product as a torch operator, safe in CUDA graphs and under ``torch.compile``.

``torch.ops.specpilot.w12_linear``: the Triton kernel for up to 64 rows on CUDA, an ordinary product
of the decoded weights above that, the specification on the CPU.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from specpilot.kernels.w12 import naive
from specpilot.kernels.w12.layout import TiledW12, untile
from specpilot.kernels.w12.schedules import ROW_CLASSES

__all__ = ["linear"]


def linear(x: Tensor, weight: TiledW12, *, view: bool = False) -> Tensor:
    """Return ``x @ W.T``: x bf16 [M, K], result bf16 [M, N]; ``view`` reads the 8-bit view alone.

    On CUDA a row's result is bitwise the same for every M of 1 to 64; not so above.
    """
    parts = (weight.scale, weight.row_start, weight.column, weight.value)
    return _w12_linear(x, weight.q, weight.b, *parts, weight.columns, view)


@torch.library.custom_op("specpilot::w12_linear", mutates_args=(), device_types="cpu")
def _w12_linear(
    x: Tensor,
    q: Tensor,
    b: Tensor,
    scale: Tensor,
    row_start: Tensor,
    column: Tensor,
    value: Tensor,
    columns: int,
    view: bool,
) -> Tensor:
    weight = TiledW12(q.shape[0], columns, q, b, scale, row_start, column, value)
    return naive.linear(x, *untile(weight), view=view).to(x.dtype)


@_w12_linear.register_kernel("cuda")
def _cuda(
    x: Tensor,
    q: Tensor,
    b: Tensor,
    scale: Tensor,
    row_start: Tensor,
    column: Tensor,
    value: Tensor,
    columns: int,
    view: bool,
) -> Tensor:
    weight = TiledW12(q.shape[0], columns, q, b, scale, row_start, column, value)
    if x.shape[0] > ROW_CLASSES[-1]:
        return F.linear(x, naive.dense(*untile(weight), view=view))
    from specpilot.kernels.w12.gemm import gemm  # needs Triton

    return gemm(x, weight, view=view)


@_w12_linear.register_fake
def _fake(
    x: Tensor,
    q: Tensor,
    b: Tensor,
    scale: Tensor,
    row_start: Tensor,
    column: Tensor,
    value: Tensor,
    columns: int,
    view: bool,
) -> Tensor:
    return x.new_empty((x.shape[0], q.shape[0]))
