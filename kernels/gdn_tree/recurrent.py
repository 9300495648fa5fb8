"""Triton: the recurrence node by node, in the three ways that need no solve.

- ``path_kernel``: each leaf's root path runs from the committed state again; a node's output is
  written by the first path that holds it. No extra memory; shared prefixes are computed again.
- ``snapshot_kernel``: each node loads its parent's whole state from a buffer and stores its own
  there: the traffic of the tree mode that stock SGLang has for recurrent layers (its pull request
  11133).
- ``commit_kernel``: the accepted path alone, from inputs that a pass has anyway, into the state.

State in fp32, products and sums on CUDA cores in fp32.
"""

import triton
import triton.language as tl

__all__ = ["commit_kernel", "path_kernel", "snapshot_kernel"]


@triton.jit
def _step(
    s, k, v, g, beta, row, h, kh, cols, HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr,
    DV: tl.constexpr,
):  # fmt: skip
    """One token: state [DK, BV] after tree row ``row`` (a row of all requests' rows)."""
    dims = tl.arange(0, DK)
    key = tl.load(k + (row * HK + kh) * DK + dims).to(tl.float32)
    value = tl.load(v + (row * HV + h) * DV + cols).to(tl.float32)
    s *= tl.exp(tl.load(g + row * HV + h))
    u = tl.load(beta + row * HV + h) * (value - tl.sum(s * key[:, None], axis=0))
    return s + key[:, None] * u[None, :]


@triton.jit
def _read(s, q, row, kh, HK: tl.constexpr, DK: tl.constexpr):
    query = tl.load(q + (row * HK + kh) * DK + tl.arange(0, DK)).to(tl.float32)
    return tl.sum(s * query[:, None], axis=0)


@triton.jit
def path_kernel(
    q, k, v, g, beta, state, slot, nodes, length, first, out, N, P, L, HK: tl.constexpr,
    HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Grid (R * P, Hv * dv / BV): path p of request r, ``nodes`` [R, P, L] from the root down.

    ``length`` [R, P] counts its nodes; outputs before ``first`` [R, P] belong to other paths.
    """
    rp = tl.program_id(0).to(tl.int64)
    r = rp // P
    h = tl.program_id(1) // (DV // BV)
    kh = h // (HV // HK)
    cols = (tl.program_id(1) % (DV // BV)) * BV + tl.arange(0, BV)
    dims = tl.arange(0, DK)
    count = tl.load(length + rp)
    begin = tl.load(first + rp)
    if count > 0:
        at = (tl.load(slot + r).to(tl.int64) * HV + h) * (DK * DV)
        s = tl.load(state + at + dims[:, None] * DV + cols[None, :])
        for t in range(count):
            row = r * N + tl.load(nodes + rp * L + t)
            s = _step(s, k, v, g, beta, row, h, kh, cols, HK, HV, DK, DV)
            if t >= begin:
                o = _read(s, q, row, kh, HK, DK)
                tl.store(out + (row * HV + h) * DV + cols, o.to(out.dtype.element_ty))


@triton.jit
def snapshot_kernel(
    q, k, v, g, beta, state, slot, parent, snapshots, out, N, HK: tl.constexpr, HV: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Grid (Hv * dv / BV, R). ``snapshots`` fp32 [R, N, Hv, dk, dv] gets every node's state."""
    r = tl.program_id(1).to(tl.int64)
    h = tl.program_id(0) // (DV // BV)
    kh = h // (HV // HK)
    cols = (tl.program_id(0) % (DV // BV)) * BV + tl.arange(0, BV)
    tile = tl.arange(0, DK)[:, None] * DV + cols[None, :]
    initial = state + (tl.load(slot + r).to(tl.int64) * HV + h) * (DK * DV)
    for n in range(N):
        row = r * N + n
        above = tl.load(parent + row)
        kept = snapshots + ((r * N + above) * HV + h) * (DK * DV)
        if above < 0:
            kept = initial
        s = tl.load(kept + tile)
        s = _step(s, k, v, g, beta, row, h, kh, cols, HK, HV, DK, DV)
        o = _read(s, q, row, kh, HK, DK)
        tl.store(out + (row * HV + h) * DV + cols, o.to(out.dtype.element_ty))
        tl.store(snapshots + (row * HV + h) * (DK * DV) + tile, s)
        tl.debug_barrier()  # a later row may load this snapshot


@triton.jit
def commit_kernel(
    k, v, g, beta, state, slot, path, length, N, L, HK: tl.constexpr, HV: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Grid (Hv * dv / BV, R). Advances ``state`` in place along ``path`` [R, L]."""
    r = tl.program_id(1).to(tl.int64)
    h = tl.program_id(0) // (DV // BV)
    kh = h // (HV // HK)
    cols = (tl.program_id(0) % (DV // BV)) * BV + tl.arange(0, BV)
    dims = tl.arange(0, DK)
    at = state + (tl.load(slot + r).to(tl.int64) * HV + h) * (DK * DV)
    tile = at + dims[:, None] * DV + cols[None, :]
    count = tl.load(length + r)
    if count > 0:
        s = tl.load(tile)
        for t in range(count):
            row = r * N + tl.load(path + r * L + t)
            s = _step(s, k, v, g, beta, row, h, kh, cols, HK, HV, DK, DV)
        tl.store(tile, s)
