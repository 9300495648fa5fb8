"""Checked launches of the Triton kernels; layouts and meaning as in ``naive``.

Differences to ``naive``: the state lies in a pool [slots, Hv, dk, dv] (fp32) of which each request
uses one slot, so that a serving engine's pool is used in place, and ``commit`` works from the
pass's inputs and changes the pool in place. Inputs q, k, v are bf16 (fp32 too where Triton runs in
its interpreter), g and beta fp32; all are contiguous. Imports Triton; ``naive`` does not.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from specpilot.errors import InvalidInput, Unsupported
from specpilot.kernels.gdn_tree.recurrent import commit_kernel, path_kernel, snapshot_kernel
from specpilot.kernels.gdn_tree.wy import wy_kernel

__all__ = [
    "MAX_ROWS",
    "Paths",
    "commit",
    "path_table",
    "snapshot_bytes",
    "tree_path",
    "tree_snapshot",
    "tree_wy",
]

MAX_ROWS = 128
INTERPRETED = triton.knobs.runtime.interpret


@dataclass(frozen=True, slots=True)
class Paths:
    """Root paths that cover a batch of trees: what ``tree_path`` runs.

    ``nodes`` int32 [R, P, L] from the root down, ``length`` int32 [R, P] (0: no path), ``first``
    int32 [R, P]: outputs before this place on a path are written by another path.
    """

    nodes: Tensor
    length: Tensor
    first: Tensor


def path_table(parent: Tensor) -> Paths:
    """Lay out one path a leaf for ``parent`` int [R, N], on the device of ``parent``."""
    tables: list[list[tuple[list[int], int]]] = []
    for up in parent.tolist():
        leaves = set(range(len(up))) - set(up)
        written: set[int] = set()
        paths = []
        for leaf in sorted(leaves):
            path, node = [], leaf
            while node >= 0:
                path.append(node)
                node = up[node]
            path.reverse()
            first = next(t for t, n in enumerate(path) if n not in written)
            written.update(path)
            paths.append((path, first))
        tables.append(paths)
    count = max(map(len, tables))
    longest = max(len(path) for paths in tables for path, _ in paths)
    nodes = torch.zeros(len(tables), count, longest, dtype=torch.int32)
    length = torch.zeros(len(tables), count, dtype=torch.int32)
    begin = torch.zeros(len(tables), count, dtype=torch.int32)
    for r, paths in enumerate(tables):
        for p, (path, start) in enumerate(paths):
            nodes[r, p, : len(path)] = torch.tensor(path, dtype=torch.int32)
            length[r, p], begin[r, p] = len(path), start
    to = parent.device
    return Paths(nodes.to(to), length.to(to), begin.to(to))


def _need(ok: bool, message: str) -> None:
    if not ok:
        raise InvalidInput(message, hint="See specpilot.kernels.gdn_tree.naive for the layout.")


def _check(
    k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, slot: Tensor, q: Tensor | None
) -> tuple[int, int, int, int, int, int]:
    """Return (R, N, Hk, Hv, dk, dv) after checking shapes, dtypes and devices."""
    _need(v.dim() == 4 and k.dim() == 4, f"k and v need 4 axes, got {k.dim()} and {v.dim()}.")
    requests, rows, heads, dv = v.shape
    key_heads, dk = k.shape[2], k.shape[3]
    if rows > MAX_ROWS:
        raise Unsupported(f"the tree has {rows} rows, the kernels take {MAX_ROWS}.")
    if dk & (dk - 1) or dv & (dv - 1) or not 16 <= dk <= 256 or not 16 <= dv <= 256:
        raise Unsupported(f"head sizes dk {dk} and dv {dv} must be powers of two from 16 to 256.")
    _need(heads % key_heads == 0, f"{heads} value heads are no multiple of {key_heads} key heads.")
    shapes = {
        "k": (k, (requests, rows, key_heads, dk)),
        "g": (g, (requests, rows, heads)),
        "beta": (beta, (requests, rows, heads)),
        "state": (state, (state.shape[0], heads, dk, dv)),
        "slot": (slot, (requests,)),
        "q": (k if q is None else q, (requests, rows, key_heads, dk)),
    }
    low = (torch.bfloat16, torch.float32) if INTERPRETED else (torch.bfloat16,)
    for name, (x, shape) in shapes.items():
        _need(tuple(x.shape) == shape, f"{name} has shape {tuple(x.shape)}, needs {shape}.")
    for name, x in (("q", k if q is None else q), ("k", k), ("v", v)):
        _need(x.dtype in low, f"{name} is {x.dtype}, needs {' or '.join(map(str, low))}.")
    for name, x in (("g", g), ("beta", beta), ("state", state)):
        _need(x.dtype == torch.float32, f"{name} is {x.dtype}, needs torch.float32.")
    _need(slot.dtype in (torch.int32, torch.int64), f"slot is {slot.dtype}, needs integers.")
    for x in (k, v, g, beta, state, slot) + (() if q is None else (q,)):
        _need(x.is_contiguous(), "every tensor must be contiguous.")
        _need(x.device == v.device, f"tensors lie on {x.device} and {v.device}.")
    if v.device.type != "cuda" and not INTERPRETED:
        raise Unsupported(
            f"the Triton kernels run on CUDA devices, not {v.device}.",
            hint="Use specpilot.kernels.gdn_tree.naive there.",
        )
    return requests, rows, key_heads, heads, dk, dv


WyConfig = tuple[int, int, int, int]


def _wy_config(rows: int, programs: int, dv: int) -> WyConfig:
    """(rows a block of inverses, shares of a head's columns, columns a step, warps)."""
    shares = 2 if programs < 132 else 1
    return min(max(16, triton.next_power_of_2(rows)), 32), shares, min(dv // shares, 32), 4


def tree_wy(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    slot: Tensor,
    mask: Tensor,
    *,
    out: Tensor | None = None,
    config: WyConfig | None = None,
    precision: tuple[str, str] = ("tf32", "tf32"),
) -> Tensor:
    """Outputs [R, N, Hv, dv] of every node, in v's dtype; the state pool is read once.

    ``mask`` bool [R, N, N] from ``naive.ancestor_mask``. ``config`` is (rows a block of inverses,
    shares that a head's columns are split into, columns a step, warps), ``precision`` that of the
    products before the state is read and of reading it. Raises ``InvalidInput``, ``Unsupported``.
    """
    requests, rows, key_heads, heads, dk, dv = _check(k, v, g, beta, state, slot, q)
    _need(
        mask.dtype == torch.bool and tuple(mask.shape) == (requests, rows, rows),
        f"mask is {mask.dtype} {tuple(mask.shape)}, needs bool {(requests, rows, rows)}.",
    )
    _need(mask.is_contiguous() and mask.device == v.device, "mask must be contiguous, with v.")
    out = torch.empty_like(v) if out is None else out
    block, shares, columns, warps = config or _wy_config(rows, requests * heads, dv)
    padded = max(16, triton.next_power_of_2(rows))
    wy_kernel[(heads * shares, requests)](
        q, k, v, g, beta, state, slot, mask.view(torch.uint8), out,
        N=rows, NP=padded, C=min(block, padded), HK=key_heads, HV=heads, DK=dk, DV=dv, BV=columns,
        SHARES=shares, MMA=tl.float32 if INTERPRETED else tl.bfloat16,
        SOLVE=precision[0], READ=precision[1], num_warps=warps, num_stages=2,
    )  # fmt: skip
    return out


def tree_path(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    slot: Tensor,
    paths: Paths,
    *,
    out: Tensor | None = None,
    config: tuple[int, int] = (16, 1),
) -> Tensor:
    """Outputs [R, N, Hv, dv] by running every leaf's root path; ``paths`` from ``path_table``."""
    requests, rows, key_heads, heads, dk, dv = _check(k, v, g, beta, state, slot, q)
    _need(
        paths.nodes.shape[0] == requests and paths.nodes.device == v.device,
        f"paths are for {paths.nodes.shape[0]} requests on {paths.nodes.device}.",
    )
    out = torch.empty_like(v) if out is None else out
    columns, warps = min(config[0], dv), config[1]
    count, longest = paths.nodes.shape[1:]
    path_kernel[(requests * count, heads * (dv // columns))](
        q, k, v, g, beta, state, slot, paths.nodes, paths.length, paths.first, out,
        rows, count, longest,
        HK=key_heads, HV=heads, DK=dk, DV=dv, BV=columns, num_warps=warps,
    )  # fmt: skip
    return out


def snapshot_bytes(requests: int, rows: int, heads: int, dk: int, dv: int) -> int:
    """Bytes a layer of the buffer that ``tree_snapshot`` needs."""
    return 4 * requests * rows * heads * dk * dv


def tree_snapshot(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    slot: Tensor,
    parent: Tensor,
    snapshots: Tensor,
    *,
    out: Tensor | None = None,
    config: tuple[int, int] = (16, 1),
) -> Tensor:
    """Outputs [R, N, Hv, dv]; each node's state goes to ``snapshots`` fp32 [R, N, Hv, dk, dv]."""
    requests, rows, key_heads, heads, dk, dv = _check(k, v, g, beta, state, slot, q)
    shape = (requests, rows, heads, dk, dv)
    _need(
        tuple(snapshots.shape) == shape and snapshots.dtype == torch.float32,
        f"snapshots are {snapshots.dtype} {tuple(snapshots.shape)}, need torch.float32 {shape}.",
    )
    _need(tuple(parent.shape) == (requests, rows), f"parent has shape {tuple(parent.shape)}.")
    out = torch.empty_like(v) if out is None else out
    columns, warps = min(config[0], dv), config[1]
    snapshot_kernel[(heads * (dv // columns), requests)](
        q, k, v, g, beta, state, slot, parent, snapshots, out, rows,
        HK=key_heads, HV=heads, DK=dk, DV=dv, BV=columns, num_warps=warps,
    )  # fmt: skip
    return out


def commit(
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    slot: Tensor,
    path: Tensor,
    length: Tensor,
    *,
    config: tuple[int, int] = (16, 1),
) -> None:
    """Advance each request's slot of ``state`` in place along its accepted path.

    ``path`` int [R, L] node indices from the root down, ``length`` int [R]; 0 changes nothing. Runs
    the recurrence on the pass's own inputs, so the state has no error of the solve.
    """
    requests, rows, key_heads, heads, dk, dv = _check(k, v, g, beta, state, slot, None)
    _need(
        path.dim() == 2 and path.shape[0] == requests and tuple(length.shape) == (requests,),
        f"path has shape {tuple(path.shape)}, length {tuple(length.shape)}.",
    )
    _need(path.is_contiguous() and path.device == v.device, "path must be contiguous, with v.")
    columns, warps = min(config[0], dv), config[1]
    commit_kernel[(heads * (dv // columns), requests)](
        k, v, g, beta, state, slot, path, length, rows, path.shape[1],
        HK=key_heads, HV=heads, DK=dk, DV=dv, BV=columns, num_warps=warps,
    )  # fmt: skip
