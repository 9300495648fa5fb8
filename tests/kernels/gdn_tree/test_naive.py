"""Gated DeltaNet over trees: the solve equals the recurrence, and commits equal replays."""

import pytest
import torch
from torch import Tensor

from specpilot.kernels.gdn_tree import naive

SHAPES = ("random", "chain", "star")


def parents(generator: torch.Generator, rows: int, shape: str) -> list[int]:
    if shape == "chain":
        return list(range(-1, rows - 1))
    if shape == "star":
        return [-1] + [0] * (rows - 1)
    pick = [int(torch.randint(max(0, n - 6), n, (), generator=generator)) for n in range(1, rows)]
    return [-1, *pick]


def inputs(
    seed: int, shape: str, *, decay: float, rows: int = 24, dv: int = 32, dtype=torch.float64
) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    """Two requests, two key heads, four value heads: (q, k, v, g, beta), state, parent."""
    gen = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=gen, dtype=torch.float64)

    q = torch.nn.functional.normalize(normal(2, rows, 2, 16), dim=-1) * 16**-0.5
    k = torch.nn.functional.normalize(normal(2, rows, 2, 16), dim=-1)
    g = -decay * torch.rand(2, rows, 4, generator=gen, dtype=torch.float64)
    beta = torch.sigmoid(normal(2, rows, 4))
    v, state = normal(2, rows, 4, dv), normal(2, 4, 16, dv)
    parent = torch.tensor([parents(gen, rows, shape) for _ in range(2)])
    return tuple(x.to(dtype) for x in (q, k, v, g, beta)), state.to(dtype), parent


def path_to(parent: list[int], node: int) -> list[int]:
    path = [node]
    while parent[path[-1]] >= 0:
        path.append(parent[path[-1]])
    return path[::-1]


def padded(paths: list[list[int]], longest: int) -> tuple[Tensor, Tensor]:
    rows = [p + [0] * (longest - len(p)) for p in paths]
    return torch.tensor(rows), torch.tensor([len(p) for p in paths])


@pytest.mark.parametrize("shape", SHAPES)
def test_ancestor_mask_and_depth_follow_the_parents(shape: str) -> None:
    parent = parents(torch.Generator().manual_seed(1), 24, shape)
    mask = naive.ancestor_mask(torch.tensor([parent]))[0]
    for n in range(24):
        assert mask[n].nonzero().flatten().tolist() == sorted(path_to(parent, n))
    assert naive.depths(torch.tensor([parent]))[0].tolist() == [
        len(path_to(parent, n)) - 1 for n in range(24)
    ]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("decay", [0.0, 0.3, 8.0])
@pytest.mark.parametrize("seed", range(4))
def test_solve_equals_recurrence_in_fp64(seed: int, shape: str, decay: float) -> None:
    args, state, parent = inputs(seed, shape, decay=decay)
    want, states = naive.tree_path(*args, state, parent)
    out, updates = naive.tree_wy(*args, state, naive.ancestor_mask(parent))
    torch.testing.assert_close(out, want, rtol=0, atol=1e-10)
    for node in range(24):
        path, length = padded([path_to(p, node) for p in parent.tolist()], 24)
        got = naive.commit(state, updates, path, length)
        torch.testing.assert_close(got, states[:, node], rtol=0, atol=1e-10)


@pytest.mark.parametrize("shape", SHAPES)
def test_solve_equals_recurrence_in_fp32_to_1e_4(shape: str) -> None:
    args, state, parent = inputs(7, shape, decay=0.3)
    want, _ = naive.tree_path(*args, state, parent)
    low = [x.float() for x in args]
    out, _ = naive.tree_wy(*low, state.float(), naive.ancestor_mask(parent))
    assert (out.double() - want).norm() / want.norm() < 1e-4


def test_solve_stays_accurate_on_a_deep_chain_of_one_repeated_key() -> None:
    args, state, parent = inputs(3, "chain", decay=0.0, rows=64)
    q, k, v, g, _ = args
    k = k[:, :1].expand_as(k)
    beta = torch.full_like(g, 0.99)
    want, _ = naive.tree_path(q, k, v, g, beta, state, parent)
    low = [x.float() for x in (q, k, v, g, beta)]
    out, _ = naive.tree_wy(*low, state.float(), naive.ancestor_mask(parent))
    assert (out.double() - want).norm() / want.norm() < 1e-5


def test_strong_decay_stays_finite_in_fp32() -> None:
    args, state, parent = inputs(3, "chain", decay=12.0, dtype=torch.float32)
    out, updates = naive.tree_wy(*args, state, naive.ancestor_mask(parent))
    assert updates.decay.min() < -100
    assert out.isfinite().all()


def test_two_cycles_equal_one_long_sequence() -> None:
    args, state, parent = inputs(0, "random", decay=0.3)
    more, _, second = inputs(1, "random", decay=0.3)
    ends = [23, 17]
    paths = [path_to(p, e) for p, e in zip(parent.tolist(), ends, strict=True)]
    _, updates = naive.tree_wy(*args, state, naive.ancestor_mask(parent))
    after = naive.commit(state, updates, *padded(paths, 24))
    got, _ = naive.tree_wy(*more, after, naive.ancestor_mask(second))
    for r in range(2):
        trunk = paths[r]
        n = len(trunk)
        joined = [
            torch.cat((a[r, trunk], b[r]), dim=0)[None] for a, b in zip(args, more, strict=True)
        ]
        hung = [-1, *range(n - 1)] + [n - 1 if p < 0 else p + n for p in second[r].tolist()]
        want, _ = naive.tree_path(*joined, state[r : r + 1], torch.tensor([hung]))
        torch.testing.assert_close(got[r], want[0, n:], rtol=0, atol=1e-10)
        one_pass, _ = naive.tree_wy(
            *joined, state[r : r + 1], naive.ancestor_mask(torch.tensor([hung]))
        )
        torch.testing.assert_close(one_pass, want, rtol=0, atol=1e-10)  # trunk + subtree layout


def test_padding_rows_change_nothing_and_length_zero_keeps_the_state() -> None:
    args, state, parent = inputs(2, "random", decay=0.3)
    out, _ = naive.tree_wy(*args, state, naive.ancestor_mask(parent))
    wide = [torch.cat((x, torch.zeros_like(x[:, :8])), dim=1) for x in args]
    longer = torch.cat((parent, torch.full((2, 8), -1)), dim=1)
    got, updates = naive.tree_wy(*wide, state, naive.ancestor_mask(longer))
    torch.testing.assert_close(got[:, :24], out, rtol=0, atol=1e-12)
    path, _ = padded([[0], [0]], 4)
    kept = naive.commit(state, updates, path, torch.tensor([0, 0]))
    assert torch.equal(kept, state)
    padding_row = naive.commit(state, updates, path + 25, torch.tensor([1, 1]))
    torch.testing.assert_close(padding_row, state, rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
def test_convolution_and_its_commit_follow_the_path(shape: str) -> None:
    gen = torch.Generator().manual_seed(5)
    parent = torch.tensor([parents(gen, 24, shape) for _ in range(2)])
    x = torch.randn(2, 24, 8, generator=gen, dtype=torch.float64)
    held = torch.randn(2, 3, 8, generator=gen, dtype=torch.float64)
    weight = torch.randn(8, 4, generator=gen, dtype=torch.float64)
    bias = torch.randn(8, generator=gen, dtype=torch.float64)
    out = naive.conv_tree(x, held, weight, naive.conv_index(parent, 4), bias)
    for node in range(24):
        paths = [path_to(p, node) for p in parent.tolist()]
        after = naive.conv_commit(x, held, *padded(paths, 24))
        for r in range(2):
            line = torch.cat((held[r], x[r, paths[r]]), dim=0)
            want = (line[-4:] * weight.t()).sum(0) + bias
            torch.testing.assert_close(out[r, node], want, rtol=0, atol=1e-12)
            assert torch.equal(after[r], line[-3:])
    untouched = naive.conv_commit(
        x, held, torch.zeros(2, 1, dtype=torch.long), torch.tensor([0, 0])
    )
    assert torch.equal(untouched, held)
