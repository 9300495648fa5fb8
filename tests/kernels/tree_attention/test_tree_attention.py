"""Tree attention equals softmax attention over context and root path."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from specpilot.errors import InvalidInput, Unsupported
from specpilot.kernels.tree_attention import launch, naive

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def problem(seed: int, rows: int, lengths: tuple[int, int], *, capacity: int = 80) -> dict:
    """Two requests, 4 query and 2 key heads of 16."""
    gen = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=gen).bfloat16().to(DEVICE)

    parent = [int(torch.randint(0, n, (), generator=gen)) for n in range(1, rows)]
    mask = torch.eye(rows, dtype=torch.bool)
    for node, up in enumerate(parent, start=1):
        mask[node] |= mask[up]
    past = normal(2, capacity, 2, 16), normal(2, capacity, 2, 16)
    for r in range(2):  # rows beyond the length must not be read
        past[0][r, lengths[r] :] = float("nan")
        past[1][r, lengths[r] :] = float("nan")
    return {
        "q": normal(2, rows, 4, 16),
        "k_tree": normal(2, rows, 2, 16),
        "v_tree": normal(2, rows, 2, 16),
        "k_past": past[0],
        "v_past": past[1],
        "length": torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        "mask": mask.expand(2, rows, rows).contiguous().to(DEVICE),
    }


def by_hand(p: dict, r: int, node: int, head: int) -> Tensor:
    """One output in fp64, written out."""
    seen = p["mask"][r, node]
    length = int(p["length"][r])
    k = torch.cat((p["k_past"][r, :length, head // 2], p["k_tree"][r, seen, head // 2])).double()
    v = torch.cat((p["v_past"][r, :length, head // 2], p["v_tree"][r, seen, head // 2])).double()
    weights = torch.softmax(k @ p["q"][r, node, head].double() * 16**-0.5, 0)
    return weights @ v


def reference(p: dict) -> Tensor:
    wide = {n: p[n].double().nan_to_num() for n in ("q", "k_tree", "v_tree", "k_past", "v_past")}
    return naive.tree_attention(**wide, length=p["length"], mask=p["mask"])


def test_naive_is_softmax_over_context_and_path() -> None:
    p = problem(0, 9, (5, 0))
    out = reference(p)
    for r, node, head in ((0, 0, 0), (0, 8, 3), (1, 0, 1), (1, 5, 2)):
        torch.testing.assert_close(out[r, node, head], by_hand(p, r, node, head))


@pytest.mark.parametrize(
    ("rows", "lengths", "config"),
    [
        (1, (33, 80), (16, 16, 4, 2, 2)),
        (9, (0, 17), (16, 16, 4, 2, 3)),  # a split without rows
        (20, (64, 3), (32, 16, 4, 2, 1)),
        (7, (50, 41), None),
    ],
)
def test_kernel_equals_naive(rows: int, lengths: tuple[int, int], config) -> None:
    p = problem(rows, rows, lengths)
    got = launch.tree_attention(
        **p, longest=80, config=config, out=torch.full_like(p["q"], float("nan"))
    )
    want = reference(p)
    assert (got.double() - want).norm() / want.norm() < 6e-3


@pytest.mark.parametrize(
    ("change", "kind", "word"),
    [
        ({"q": lambda x: x.half()}, InvalidInput, "q is torch.float16"),
        ({"mask": lambda x: x.int()}, InvalidInput, "mask is torch.int32"),
        ({"k_past": lambda x: x[:, :, :1]}, InvalidInput, "shape"),
        ({"length": lambda x: x[:1]}, InvalidInput, "length has shape"),
        ({"q": lambda x: x[..., :12].contiguous()}, Unsupported, "head size 12"),
    ],
)
def test_wrong_inputs_are_named(change, kind, word: str) -> None:
    p = problem(0, 4, (5, 6))
    p |= {name: make(p[name]) for name, make in change.items()}
    with pytest.raises(kind, match=word):
        launch.tree_attention(**p, longest=80)


def test_a_bound_beyond_the_context_is_refused() -> None:
    with pytest.raises(InvalidInput, match="longest 81"):
        launch.tree_attention(**problem(0, 4, (5, 6)), longest=81)
