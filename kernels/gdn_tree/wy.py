"""Triton: every node of a tree from one read of the state (the WY form of ``naive.tree_wy``).

Putting the solve ``(I + A) U = beta (V - e^G K S)`` into ``O = e^G Q S + P U`` (``P = D * Q K^T``)
takes the state out of the solve::

    M = P (I + A)^-1 beta          [N, N]
    O = (e^G Q - M e^G K) S + M V

So a program first makes ``M`` and the queries in brackets from keys, queries and gates alone, and
then passes once over the state and the values, which the loads of that pass can hide behind.

The unit-triangular inverse grows by merging: with the inverse X of all diagonal blocks of b rows,
``X - X A' X`` is that of 2b rows, A' being what A has between the two halves. That is substitution
by blocks, stable for repeated keys (unlike doubling powers of A), in 2 log2 N matrix products.
Products run in tf32: what they lose is below the rounding of bf16 outputs.
"""

import triton
import triton.language as tl

__all__ = ["wy_kernel"]


@triton.jit
def _decay_weights(mask, row_decay, col_decay):
    """exp(G_n - G_m) under the ancestor mask, 0 elsewhere; the mask comes before the exponent."""
    return tl.where(mask, tl.exp(tl.where(mask, row_decay - col_decay, 0.0)), 0.0)


@triton.jit
def _between_halves(row, col, b: tl.constexpr):
    """Entries from the upper to the lower half of one block of 2b rows."""
    return (row // b == col // b + 1) & (row // (2 * b) == col // (2 * b))


@triton.jit
def wy_kernel(
    q, k, v, g, beta, state, slot, mask, out, N: tl.constexpr, NP: tl.constexpr, C: tl.constexpr,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr,
    SHARES: tl.constexpr, MMA: tl.constexpr, SOLVE: tl.constexpr, READ: tl.constexpr,
):  # fmt: skip
    """Grid (Hv * SHARES, R): a program takes 1 / SHARES of a head's columns, BV at a time.

    ``NP`` is N rounded up to a power of two, at least 16; inverses are made for blocks of ``C``
    rows at once and then merged. ``MMA`` is the type of key and query operands, ``SOLVE`` and
    ``READ`` are the precisions before the state is read and of reading it.
    """
    r = tl.program_id(1).to(tl.int64)
    h = tl.program_id(0) // SHARES
    first_col = (tl.program_id(0) % SHARES) * (DV // SHARES)
    kh = h // (HV // HK)
    dims = tl.arange(0, DK)
    row = tl.arange(0, NP)
    ok = row < N
    q += (r * N * HK + kh) * DK
    k += (r * N * HK + kh) * DK
    v += (r * N * HV + h) * DV
    out += (r * N * HV + h) * DV
    g += r * N * HV + h
    beta += r * N * HV + h
    mask += r * N * N
    state += (tl.load(slot + r).to(tl.int64) * HV + h) * (DK * DV)

    pairs = ok[:, None] & ok[None, :]
    sees = tl.load(mask + row[:, None] * N + row[None, :], mask=pairs, other=0) != 0
    g_row = tl.load(g + row * HV, mask=ok, other=0.0)
    b_row = tl.load(beta + row * HV, mask=ok, other=0.0)
    lines = row[:, None] * (HK * DK) + dims[None, :]
    keys = tl.load(k + lines, mask=ok[:, None], other=0.0).to(MMA)
    queries = tl.load(q + lines, mask=ok[:, None], other=0.0).to(MMA)

    decay = tl.sum(tl.where(sees, g_row[None, :], 0.0), axis=1)  # summed along each root path
    weight = _decay_weights(sees, decay[:, None], decay[None, :])
    weight_b = weight * b_row[:, None]
    a = tl.where(row[:, None] > row[None, :], weight_b * tl.dot(keys, tl.trans(keys)), 0.0)
    p = weight * tl.dot(queries, tl.trans(keys))

    if C == NP:
        inverse = tl.where(_between_halves(row[:, None], row[None, :], 1), -a, 0.0)
        inverse += tl.where(row[:, None] == row[None, :], 1.0, 0.0)
    else:
        # Diagonal blocks of C rows, [NP / C, C, C], as A is above.
        block = tl.arange(0, NP // C)
        lane = tl.arange(0, C)
        row3 = block[:, None] * C + lane[None, :]
        ok3 = row3 < N
        k3 = tl.load(
            k + row3[:, :, None] * (HK * DK) + dims[None, None, :], mask=ok3[:, :, None], other=0.0
        ).to(MMA)
        d3 = tl.reshape(decay, [NP // C, C])
        b3 = tl.load(beta + row3 * HV, mask=ok3, other=0.0)
        sees3 = tl.load(
            mask + row3[:, :, None] * N + row3[:, None, :],
            mask=ok3[:, :, None] & ok3[:, None, :],
            other=0,
        )
        w3 = _decay_weights(sees3 != 0, d3[:, :, None], d3[:, None, :]) * b3[:, :, None]
        a3 = w3 * tl.dot(k3, tl.permute(k3, (0, 2, 1)))
        up, down = lane[None, :, None], lane[None, None, :]
        x3 = tl.where(_between_halves(up, down, 1), -a3, 0.0)
        x3 += tl.where(up == down, 1.0, 0.0)
        for e in tl.static_range(1, 6):
            if (1 << e) < C:
                part = tl.where(_between_halves(up, down, 1 << e), a3, 0.0)
                half = tl.dot(x3, part, input_precision=SOLVE)
                x3 -= tl.dot(half, x3, input_precision=SOLVE)
        placed = tl.where(
            block[:, None, None, None] == block[None, None, :, None], x3[:, :, None, :], 0.0
        )
        inverse = tl.reshape(placed, [NP, NP])
    for e in tl.static_range(1, 7):
        if (1 << e) < NP and ((1 << e) >= C or C == NP):
            part = tl.where(_between_halves(row[:, None], row[None, :], 1 << e), a, 0.0)
            half = tl.dot(inverse, part, input_precision=SOLVE)
            inverse -= tl.dot(half, inverse, input_precision=SOLVE)

    m = tl.dot(p, inverse, input_precision=SOLVE) * b_row[None, :]
    from_root = tl.exp(decay)
    reads = tl.dot(m * from_root[None, :], keys.to(tl.float32), input_precision=SOLVE)
    reads = from_root[:, None] * queries.to(tl.float32) - reads

    for at in range(first_col, first_col + DV // SHARES, BV):
        cols = at + tl.arange(0, BV)
        s = tl.load(state + dims[:, None] * DV + cols[None, :])
        place = row[:, None] * (HV * DV) + cols[None, :]
        value = tl.load(v + place, mask=ok[:, None], other=0.0).to(tl.float32)
        o = tl.dot(m, value, input_precision=READ)
        o = tl.dot(reads, s, o, input_precision=READ)
        tl.store(out + place, o.to(out.dtype.element_ty), mask=ok[:, None])
