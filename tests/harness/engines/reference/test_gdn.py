"""The engine's arrangement of the tree form equals the kernels' specification."""

import pytest
import torch

from specpilot.harness.engines.reference.gdn import GdnState, GdnUpdates, commit_, tree_form
from specpilot.harness.engines.reference.rows import tree_rows
from specpilot.kernels.gdn_tree import naive


@pytest.mark.parametrize(("key_heads", "heads"), [(1, 3), (2, 4), (3, 3)])
@pytest.mark.parametrize("decay", [0.0, 0.3, 40.0])
def test_tree_form_and_commit_equal_the_specification(key_heads, heads, decay):
    generator = torch.Generator().manual_seed(heads)
    requests, count, dk, dv, layers = 2, 14, 8, 6, 3

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def unit(x):
        return x / x.norm(dim=-1, keepdim=True)

    parents = [
        (-1, *(max(0, n - 1 - n % 4) for n in range(1, count))),
        (-1, *range(count - 4)),  # a shorter chain: three rows of padding
    ]
    like = torch.zeros(1, dtype=torch.float64)
    rows = tree_rows(0, [0, 5], parents, 64, 4, like)
    padded = torch.tensor([up + (-1,) * (count - len(up)) for up in parents])
    mask = naive.ancestor_mask(padded)
    taps = naive.conv_index(padded, 4) + torch.tensor([0, 3 + count])[:, None, None]
    assert torch.equal(rows.tree.taps, taps.flatten())
    assert torch.equal(rows.tree.above, mask.double())
    assert torch.equal(rows.positions, mask.sum(-1) - 1 + torch.tensor([[0], [5]]))
    path = torch.tensor([[0, 1, 2, 3], [0, 1, 1, 1]])
    length = torch.tensor([4, 2])
    memory = random(requests, layers, heads, dk, dv)
    conv = random(requests, layers, 3, 5)
    expected_memory, expected_conv, updates = [], [], []
    for layer in range(layers):
        q, k = (unit(random(requests, count, key_heads, dk)) for _ in range(2))
        v = random(requests, count, heads, dv)
        g = -decay * torch.rand(requests, count, heads, generator=generator, dtype=torch.float64)
        beta = torch.rand(requests, count, heads, generator=generator, dtype=torch.float64)
        inputs = random(requests, count, 5)
        out, *kept = tree_form(q, k, v, g, beta, memory[:, layer], rows.tree)
        updates.append(GdnUpdates(*kept, inputs))
        expected, delta = naive.tree_wy(q, k, v, g, beta, memory[:, layer], mask)
        torch.testing.assert_close(out, expected, atol=1e-12, rtol=0)
        expected_memory.append(naive.commit(memory[:, layer], delta, path, length))
        expected_conv.append(naive.conv_commit(inputs, conv[:, layer], path, length))
    commit_(GdnState(memory, conv), updates, path, length)
    torch.testing.assert_close(memory, torch.stack(expected_memory, 1), atol=1e-12, rtol=0)
    torch.testing.assert_close(conv, torch.stack(expected_conv, 1), atol=0, rtol=0)
