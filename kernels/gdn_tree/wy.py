"""Triton: every node of a tree from one read of the state (the WY form of ``naive.tree_wy``).

One program owns a value head of one request and a block of its value columns, which the recurrence
never mixes. It reads its part of the state once and goes down the rows in blocks of 16, parents
first: the 16 x 16 diagonal blocks of ``I + A`` are inverted together by substitution, everything
off the diagonal is a small matrix product on tensor cores. The fp32 state enters products as the
sum of two bf16 halves (an error of 2^-17), since keys and queries are bf16 already.
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
    block = tl.arange(0, NB)
    row3 = block[:, None] * 16 + lane[None, :]  # [NB, 16]

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

    # Log decay summed along each root path, [NB, 16].
    every = tl.arange(0, NB * 16)
    g_all = tl.load(g + every * HV, mask=every < N, other=0.0)
    above = tl.load(
        mask + row3[:, :, None] * N + every[None, None, :],
        mask=(row3[:, :, None] < N) & (every[None, None, :] < N),
        other=0,
    )
    decay3 = tl.sum(tl.where(above != 0, g_all[None, None, :], 0.0), axis=2)

    # Inverses of the diagonal blocks of I + A, by substitution on the identity, [NB, 16, 16].
    in_tree = row3 < N
    k3 = tl.load(
        k + row3[:, :, None] * (HK * DK) + dims[None, None, :], mask=in_tree[:, :, None], other=0.0
    ).to(MMA)
    beta3 = tl.load(beta + row3 * HV, mask=in_tree, other=0.0)
    strict3 = (
        tl.load(
            mask + row3[:, :, None] * N + row3[:, None, :],
            mask=in_tree[:, :, None] & in_tree[:, None, :],
            other=0,
        )
        != 0
    ) & (lane[None, :, None] > lane[None, None, :])
    weights3 = _decay_weights(strict3, decay3[:, :, None], decay3[:, None, :])
    a3 = beta3[:, :, None] * weights3 * tl.dot(k3, tl.permute(k3, (0, 2, 1)))
    inverse3 = (lane[None, :, None] == lane[None, None, :]).to(tl.float32) + tl.zeros(
        [NB, 16, 16], tl.float32
    )
    for t in tl.static_range(15):
        solved = tl.sum(tl.where(lane[None, :, None] == t, inverse3, 0.0), axis=1)
        column = tl.sum(tl.where(lane[None, None, :] == t, a3, 0.0), axis=2)
        inverse3 -= column[:, :, None] * solved[:, None, :]

    updates = ()
    decays = ()
    keys = ()
    for i in tl.static_range(NB):
        rows = i * 16 + lane
        ok = rows < N
        k_i = tl.load(
            k + rows[:, None] * (HK * DK) + dims[None, :], mask=ok[:, None], other=0.0
        ).to(MMA)
        q_i = tl.load(
            q + rows[:, None] * (HK * DK) + dims[None, :], mask=ok[:, None], other=0.0
        ).to(MMA)
        v_i = tl.load(
            v + rows[:, None] * (HV * DV) + cols[None, :], mask=ok[:, None], other=0.0
        ).to(tl.float32)
        beta_i = tl.load(beta + rows * HV, mask=ok, other=0.0)
        decay_i = tl.sum(tl.where(block[:, None] == i, decay3, 0.0), axis=0)
        inverse_i = tl.sum(tl.where(block[:, None, None] == i, inverse3, 0.0), axis=0)
        from_root = tl.exp(decay_i)[:, None]
        rhs = beta_i[:, None] * (v_i - from_root * tl.dot(k_i, low, tl.dot(k_i, high)))
        o = from_root * tl.dot(q_i, low, tl.dot(q_i, high))
        for j in tl.static_range(i):
            over = tl.load(
                mask + rows[:, None] * N + (j * 16 + lane)[None, :],
                mask=ok[:, None] & ((j * 16 + lane) < N)[None, :],
                other=0,
            )
            w = _decay_weights(over != 0, decay_i[:, None], decays[j][None, :])
            key_t = tl.trans(keys[j])
            rhs -= tl.dot(
                beta_i[:, None] * w * tl.dot(k_i, key_t), updates[j], input_precision=SOLVE
            )
            o += tl.dot(w * tl.dot(q_i, key_t), updates[j], input_precision=READ)
        u_i = tl.dot(inverse_i, rhs, input_precision=SOLVE)
        own = tl.load(
            mask + rows[:, None] * N + rows[None, :], mask=ok[:, None] & ok[None, :], other=0
        )
        w = _decay_weights(own != 0, decay_i[:, None], decay_i[None, :])
        o += tl.dot(w * tl.dot(q_i, tl.trans(k_i)), u_i, input_precision=READ)
        tl.store(
            out + rows[:, None] * (HV * DV) + cols[None, :],
            o.to(out.dtype.element_ty),
            mask=ok[:, None],
        )
        updates = updates + (u_i,)  # noqa: RUF005 - Triton has no tuple unpacking
        decays = decays + (decay_i,)  # noqa: RUF005
        keys = keys + (k_i,)  # noqa: RUF005
