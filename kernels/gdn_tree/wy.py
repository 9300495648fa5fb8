"""Triton: every node of a tree from one read of the state (the WY form of ``naive.tree_wy``).

One program owns a value head of one request and a block of its value columns, which the recurrence
never mixes. It reads its part of the state once. The 16 x 16 diagonal blocks of ``I + A`` are
inverted together, by substitution; then a loop goes down the blocks, parents first, and subtracts
what each block's updates mean for all rows below, as small products on tensor cores. The fp32
state enters products as the sum of two bf16 halves (an error of 2^-17), since keys and queries are
bf16 already.
"""

import triton
import triton.language as tl

__all__ = ["wy_kernel"]


@triton.jit
def _decay_weights(mask, row_decay, col_decay):
    """exp(G_n - G_m) under the ancestor mask, 0 elsewhere; the mask comes before the exponent."""
    return tl.where(mask, tl.exp(tl.where(mask, row_decay - col_decay, 0.0)), 0.0)


@triton.jit
def wy_kernel(
    q,
    k,
    v,
    g,
    beta,
    state,
    slot,
    mask,
    out,
    N: tl.constexpr,
    NB: tl.constexpr,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BV: tl.constexpr,
    MMA: tl.constexpr,
    SOLVE: tl.constexpr,
    READ: tl.constexpr,
):
    """Grid (Hv * dv / BV, R). ``NB`` blocks of 16 rows hold the ``N`` rows.

    ``MMA`` is the type of key and query operands, ``SOLVE`` and ``READ`` are the precisions of the
    products that make and that read the updates.
    """
    r = tl.program_id(1).to(tl.int64)
    h = tl.program_id(0) // (DV // BV)
    kh = h // (HV // HK)
    cols = (tl.program_id(0) % (DV // BV)) * BV + tl.arange(0, BV)
    dims = tl.arange(0, DK)
    lane = tl.arange(0, 16)
    rows = tl.arange(0, NB * 16)
    ok = rows < N

    at = (tl.load(slot + r).to(tl.int64) * HV + h) * (DK * DV)
    s = tl.load(state + at + dims[:, None] * DV + cols[None, :])
    high = s.to(tl.bfloat16)
    low = (s - high.to(tl.float32)).to(tl.bfloat16).to(MMA)
    high = high.to(MMA)

    q += (r * N * HK + kh) * DK
    k += (r * N * HK + kh) * DK
    v += (r * N * HV + h) * DV
    out += (r * N * HV + h) * DV
    g += r * N * HV + h
    beta += r * N * HV + h
    mask += r * N * N

    g_all = tl.load(g + rows * HV, mask=ok, other=0.0)

    # Inverses of the diagonal blocks of I + A, by substitution on the identity, [NB, 16, 16].
    row3 = tl.arange(0, NB)[:, None] * 16 + lane[None, :]  # [NB, 16]
    ok3 = row3 < N
    above3 = tl.load(
        mask + row3[:, :, None] * N + rows[None, None, :],
        mask=ok3[:, :, None] & ok[None, None, :],
        other=0,
    )
    decay3 = tl.sum(tl.where(above3 != 0, g_all[None, None, :], 0.0), axis=2)
    k3 = tl.load(
        k + row3[:, :, None] * (HK * DK) + dims[None, None, :], mask=ok3[:, :, None], other=0.0
    ).to(MMA)
    strict3 = (
        tl.load(
            mask + row3[:, :, None] * N + row3[:, None, :],
            mask=ok3[:, :, None] & ok3[:, None, :],
            other=0,
        )
        != 0
    ) & (lane[None, :, None] > lane[None, None, :])
    weight3 = _decay_weights(strict3, decay3[:, :, None], decay3[:, None, :])
    beta3 = tl.load(beta + row3 * HV, mask=ok3, other=0.0)
    a3 = beta3[:, :, None] * weight3 * tl.dot(k3, tl.permute(k3, (0, 2, 1)))
    inverse3 = (lane[None, :, None] == lane[None, None, :]).to(tl.float32) + tl.zeros(
        [NB, 16, 16], tl.float32
    )
    for t in tl.static_range(15):
        solved = tl.sum(tl.where(lane[None, :, None] == t, inverse3, 0.0), axis=1)
        column = tl.sum(tl.where(lane[None, None, :] == t, a3, 0.0), axis=2)
        inverse3 -= column[:, :, None] * solved[:, None, :]

    # What the committed state gives to every row: right-hand sides and outputs, [NB * 16, BV].
    k_all = tl.load(k + rows[:, None] * (HK * DK) + dims[None, :], mask=ok[:, None], other=0.0).to(
        MMA
    )
    q_all = tl.load(q + rows[:, None] * (HK * DK) + dims[None, :], mask=ok[:, None], other=0.0).to(
        MMA
    )
    v_all = tl.load(v + rows[:, None] * (HV * DV) + cols[None, :], mask=ok[:, None], other=0.0).to(
        tl.float32
    )
    beta_all = tl.load(beta + rows * HV, mask=ok, other=0.0)
    decay = tl.reshape(decay3, [NB * 16])
    from_root = tl.exp(decay)[:, None]
    rhs = beta_all[:, None] * (v_all - from_root * tl.dot(k_all, low, tl.dot(k_all, high)))
    o = from_root * tl.dot(q_all, low, tl.dot(q_all, high))

    for j in range(NB):
        columns = j * 16 + lane
        in_tree = columns < N
        at_j = tl.arange(0, NB) == j
        key_t = tl.load(
            k + columns[None, :] * (HK * DK) + dims[:, None], mask=in_tree[None, :], other=0.0
        ).to(MMA)
        under = tl.load(
            mask + rows[:, None] * N + columns[None, :],
            mask=ok[:, None] & in_tree[None, :],
            other=0,
        )
        decay_j = tl.sum(tl.where(at_j[:, None], decay3, 0.0), axis=0)
        weight = _decay_weights(under != 0, decay[:, None], decay_j[None, :])
        inverse = tl.sum(tl.where(at_j[:, None, None], inverse3, 0.0), axis=0)
        rhs_j = tl.sum(tl.where(at_j[:, None, None], tl.reshape(rhs, [NB, 16, BV]), 0.0), axis=0)
        u = tl.dot(inverse, rhs_j, input_precision=SOLVE)
        # Rows of this block are done: what the product does to their right-hand sides is not read.
        a = beta_all[:, None] * weight * tl.dot(k_all, key_t)
        rhs -= tl.dot(a, u, input_precision=SOLVE)
        o += tl.dot(weight * tl.dot(q_all, key_t), u, input_precision=READ)

    tl.store(
        out + rows[:, None] * (HV * DV) + cols[None, :],
        o.to(out.dtype.element_ty),
        mask=ok[:, None],
    )
