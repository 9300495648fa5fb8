"""The chunked gated delta rule is the recurrence, in values and in gradients."""

import pytest
import torch

from specpilot.errors import InvalidInput
from specpilot.kernels.gdn_chunk.naive import (
    chunk_gated_delta_rule,
    recurrent_gated_delta_rule,
    unit_lower_inverse,
)


def draw(tokens, batch=2, key_heads=1, value_heads=3, dk=8, dv=6, decay=1.0, seed=0):
    r = torch.Generator().manual_seed(seed)
    f64 = {"dtype": torch.float64, "generator": r}
    q = torch.nn.functional.normalize(torch.randn(batch, tokens, key_heads, dk, **f64), dim=-1)
    k = torch.nn.functional.normalize(torch.randn(batch, tokens, key_heads, dk, **f64), dim=-1)
    v = torch.randn(batch, tokens, value_heads, dv, **f64)
    g = -decay * torch.rand(batch, tokens, value_heads, **f64)
    beta = torch.rand(batch, tokens, value_heads, **f64)
    state = torch.randn(batch, value_heads, dk, dv, **f64)
    return q * dk**-0.5, k, v, g, beta, state


@pytest.mark.parametrize("tokens", [1, 7, 16, 33, 80])
@pytest.mark.parametrize("decay", [0.0, 0.3, 8.0])
@pytest.mark.parametrize("heads", [(1, 3), (2, 4), (2, 2)])
def test_chunks_equal_the_recurrence_in_float64(tokens, decay, heads):
    *args, state = draw(tokens, key_heads=heads[0], value_heads=heads[1], decay=decay)
    for start in (None, state):
        out, final = chunk_gated_delta_rule(*args, start, chunk=16)
        expected_out, expected_final = recurrent_gated_delta_rule(*args, start)
        assert (out - expected_out).abs().max() < 1e-12
        assert (final - expected_final).abs().max() < 1e-12


def test_gradients_equal_those_of_the_recurrence():
    args = [x.requires_grad_() for x in draw(21, decay=0.5)]
    weight = torch.randn(2, 21, 3, 6, dtype=torch.float64)
    grads = []
    for out, final in (
        chunk_gated_delta_rule(*args, chunk=8),
        recurrent_gated_delta_rule(*args),
    ):
        loss = (out * weight).sum() + final.square().sum()
        grads.append(torch.autograd.grad(loss, args))
    for ours, expected in zip(*grads, strict=True):
        assert (ours - expected).abs().max() < 1e-10


def test_two_calls_that_hand_over_the_state_equal_one():
    q, k, v, g, beta, state = draw(50)
    whole, final = chunk_gated_delta_rule(q, k, v, g, beta, state, chunk=16)
    first, middle = chunk_gated_delta_rule(
        *(x[:, :19] for x in (q, k, v, g, beta)), state, chunk=16
    )
    second, last = chunk_gated_delta_rule(
        *(x[:, 19:] for x in (q, k, v, g, beta)), middle, chunk=16
    )
    assert (torch.cat([first, second], 1) - whole).abs().max() < 1e-12
    assert (last - final).abs().max() < 1e-12


def test_repeated_keys_at_beta_one_stay_accurate_in_float32():
    q, k, v, g, beta, state = draw(128, dk=16, decay=0.0)
    args = (q, k[:, :1].expand_as(k), v, g, torch.ones_like(beta), state)
    expected, _ = recurrent_gated_delta_rule(*args)
    out, _ = chunk_gated_delta_rule(*(x.float() for x in args))
    assert out.dtype == torch.float32
    assert (out - expected).norm() / expected.norm() < 1e-5


def test_strong_decay_stays_finite_in_float32():
    args = tuple(x.float() for x in draw(128, decay=30.0))
    out, final = chunk_gated_delta_rule(*args)
    assert out.isfinite().all() and final.isfinite().all()


def test_output_keeps_the_dtype_of_v_and_the_state_stays_float32():
    args = tuple(x.bfloat16() for x in draw(20)[:-1])
    out, final = chunk_gated_delta_rule(*args)
    assert (out.dtype, final.dtype) == (torch.bfloat16, torch.float32)


def test_no_tokens_give_back_the_state():
    args = draw(0)
    out, final = chunk_gated_delta_rule(*args)
    assert out.shape == (2, 0, 3, 6)
    assert torch.equal(final, args[-1])


def test_inverse_and_its_gradient_are_right():
    lower = torch.randn(3, 32, 32, dtype=torch.float64).mul(0.3).tril(-1).requires_grad_()
    identity = torch.eye(32, dtype=torch.float64)
    assert ((identity + lower) @ unit_lower_inverse(lower) - identity).abs().max() < 1e-12
    small = lower.detach()[:1, :4, :4].requires_grad_()
    assert torch.autograd.gradcheck(lambda x: unit_lower_inverse(x.tril(-1)), small)


@pytest.mark.parametrize("what", ["chunk", "heads", "gate", "state"])
def test_contradicting_shapes_are_refused(what):
    q, k, v, g, beta, state = draw(4)
    chunk = 48 if what == "chunk" else 16
    if what == "heads":
        q, k = q.expand(-1, -1, 2, -1), k.expand(-1, -1, 2, -1)
    if what == "gate":
        g = g[..., :1]
    if what == "state":
        state = state.transpose(-1, -2)
    with pytest.raises(InvalidInput):
        chunk_gated_delta_rule(q, k, v, g, beta, state, chunk=chunk)
