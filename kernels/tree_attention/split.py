"""Triton: tree attention with the context split over programs, then one combination.

A program takes one key head of one request, a block of its query rows (all query heads of the key
head times tree rows, so that each key is read once for all of them) and a share of the context; the
last share also takes the tree's own rows under the mask. It leaves an unnormalised output with its
running maximum and sum, which the second kernel combines. A share of no rows leaves sum 0.
"""

import triton
import triton.language as tl

__all__ = ["combine_kernel", "split_kernel"]


@triton.jit
def _absorb(scores, v, top, total, acc, MMA: tl.constexpr):
    """One step of the running softmax (base 2); fully hidden rows stay at sum 0."""
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    safe = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores - safe[:, None])
    fade = tl.exp2(top - safe)
    total = total * fade + tl.sum(weights, axis=1)
    acc = tl.dot(weights.to(MMA), v, acc * fade[:, None])
    return new_top, total, acc


@triton.jit
def split_kernel(
    q, k_tree, v_tree, k_past, v_past, length, mask, partial, tops, totals, scale, share, capacity,
    N: tl.constexpr, TN: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, SPLITS: tl.constexpr, MMA: tl.constexpr,
):  # fmt: skip
    """Grid (cdiv(Hq / Hk * N, BM), SPLITS, R * Hk); ``share`` rows of context a split, in BN.

    ``TN`` rows of the tree are taken a step; ``partial`` fp32 [R, Hk, SPLITS, group * N, D].
    """
    group: tl.constexpr = HQ // HK
    split = tl.program_id(1)
    r = (tl.program_id(2) // HK).to(tl.int64)
    h = tl.program_id(2) % HK
    rows = tl.program_id(0) * BM + tl.arange(0, BM)  # (tree row, head of the group)
    node = rows // group
    head = h * group + rows % group
    ok = rows < group * N
    dims = tl.arange(0, D)
    queries = tl.load(
        q + ((r * N + node) * HQ + head)[:, None] * D + dims[None, :], mask=ok[:, None], other=0.0
    ).to(MMA)
    top = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D], tl.float32)
    held = tl.load(length + r)
    begin = split * share
    end = tl.minimum(begin + share, held)
    lane = tl.arange(0, BN)
    k_past += (r * capacity * HK + h) * D
    v_past += (r * capacity * HK + h) * D

    whole = begin + tl.maximum(end - begin, 0) // BN * BN
    for at in range(begin, whole, BN):
        tile = (at + lane).to(tl.int64)[:, None] * (HK * D) + dims[None, :]
        keys = tl.load(k_past + tile).to(MMA)
        values = tl.load(v_past + tile).to(MMA)
        scores = tl.dot(queries, tl.trans(keys)) * scale
        top, total, acc = _absorb(scores, values, top, total, acc, MMA)
    if whole < end:
        inside = whole + lane < end
        tile = (whole + lane).to(tl.int64)[:, None] * (HK * D) + dims[None, :]
        keys = tl.load(k_past + tile, mask=inside[:, None], other=0.0).to(MMA)
        values = tl.load(v_past + tile, mask=inside[:, None], other=0.0).to(MMA)
        scores = tl.dot(queries, tl.trans(keys)) * scale
        scores = tl.where(inside[None, :], scores, float("-inf"))
        top, total, acc = _absorb(scores, values, top, total, acc, MMA)
    if split == SPLITS - 1:
        for start in tl.static_range(0, N, TN):
            others = start + tl.arange(0, TN)
            exists = others < N
            tile = ((r * N + others) * HK + h)[:, None] * D + dims[None, :]
            keys = tl.load(k_tree + tile, mask=exists[:, None], other=0.0).to(MMA)
            values = tl.load(v_tree + tile, mask=exists[:, None], other=0.0).to(MMA)
            sees = tl.load(
                mask + (r * N + node)[:, None] * N + others[None, :],
                mask=ok[:, None] & exists[None, :],
                other=0,
            )
            scores = tl.dot(queries, tl.trans(keys)) * scale
            scores = tl.where(sees != 0, scores, float("-inf"))
            top, total, acc = _absorb(scores, values, top, total, acc, MMA)

    line = ((r * HK + h) * SPLITS + split) * (group * N) + rows
    tl.store(partial + line[:, None] * D + dims[None, :], acc, mask=ok[:, None])
    tl.store(tops + line, top, mask=ok)
    tl.store(totals + line, total, mask=ok)


@triton.jit
def combine_kernel(
    partial, tops, totals, out, N: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr,
    D: tl.constexpr, SPLITS: tl.constexpr, SP: tl.constexpr,
):  # fmt: skip
    """Grid (Hq / Hk * N, R * Hk): weigh the splits of one query row."""
    group: tl.constexpr = HQ // HK
    r = (tl.program_id(1) // HK).to(tl.int64)
    h = tl.program_id(1) % HK
    row = tl.program_id(0)
    split = tl.arange(0, SP)
    there = split < SPLITS
    line = ((r * HK + h) * SPLITS + split) * (group * N) + row
    top = tl.load(tops + line, mask=there, other=float("-inf"))
    total = tl.load(totals + line, mask=there, other=0.0)
    best = tl.max(top, axis=0)
    weight = tl.exp2(top - tl.where(best == float("-inf"), 0.0, best))
    dims = tl.arange(0, D)
    parts = tl.load(partial + line[:, None] * D + dims[None, :], mask=there[:, None], other=0.0)
    norm = tl.sum(total * weight, axis=0)
    o = tl.sum(parts * weight[:, None], axis=0) / tl.where(norm > 0, norm, 1.0)
    where = ((r * N + row // group) * HQ + h * group + row % group) * D
    tl.store(out + where + dims, o.to(out.dtype.element_ty))
