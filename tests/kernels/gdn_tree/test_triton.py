"""The Triton kernels equal ``naive``; run in Triton's interpreter where there is no GPU."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from specpilot.errors import InvalidInput, Unsupported
from specpilot.kernels.gdn_tree import launch, naive

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = 5e-3  # bf16 outputs


def tree(seed: int, rows: int, shape: str) -> list[int]:
    gen = torch.Generator().manual_seed(seed)
    if shape == "chain":
        return list(range(-1, rows - 1))
    back = {"random": 6, "bushy": rows}[shape]
    return [-1] + [
        int(torch.randint(max(0, n - back), n, (), generator=gen)) for n in range(1, rows)
    ]


def problem(seed: int, rows: int, shape: str, *, repeat_key: bool = False) -> dict[str, Tensor]:
    """Two requests, 2 key and 4 value heads; slots out of order; bf16 inputs."""
    gen = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=gen)

    q = torch.nn.functional.normalize(normal(2, rows, 2, 32), dim=-1) * 32**-0.5
    k = torch.nn.functional.normalize(normal(2, rows, 2, 32), dim=-1)
    if repeat_key:
        k = k[:, :1].expand_as(k).contiguous()
    beta = torch.sigmoid(normal(2, rows, 4)) if not repeat_key else torch.full((2, rows, 4), 0.99)
    made = {
        "q": q.bfloat16(),
        "k": k.bfloat16(),
        "v": normal(2, rows, 4, 32).bfloat16(),
        "g": -0.3 * torch.rand(2, rows, 4, generator=gen),
        "beta": beta,
        "state": normal(3, 4, 32, 32),
        "slot": torch.tensor([2, 0], dtype=torch.int32),
        "parent": torch.tensor([tree(seed + r, rows, shape) for r in range(2)]),
    }
    return {name: x.to(DEVICE) for name, x in made.items()}


def inputs(p: dict[str, Tensor]) -> list[Tensor]:
    return [p[name] for name in ("q", "k", "v", "g", "beta", "state", "slot")]


def reference(p: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    wide = [p[name].double() for name in ("q", "k", "v", "g", "beta")]
    return naive.tree_path(*wide, p["state"].double()[p["slot"].long()], p["parent"])


def poisoned(p: dict[str, Tensor]) -> Tensor:
    return torch.full_like(p["v"], float("nan"))


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


@pytest.mark.parametrize("shape", ["random", "chain", "bushy"])
@pytest.mark.parametrize("rows", [1, 16, 23, 40])
def test_wy_kernel_equals_the_recurrence(rows: int, shape: str) -> None:
    p = problem(rows, rows, shape)
    before = p["state"].clone()
    mask = naive.ancestor_mask(p["parent"])
    got = launch.tree_wy(*inputs(p), mask, out=poisoned(p))
    assert error(got, reference(p)[0]) < TOLERANCE
    assert torch.equal(p["state"], before)


@pytest.mark.parametrize("config", [(16, 1, 32, 4), (32, 2, 16, 4), (64, 1, 16, 4)])
def test_wy_kernel_does_not_depend_on_its_configuration(config: tuple) -> None:
    p = problem(3, 33, "random")
    got = launch.tree_wy(*inputs(p), naive.ancestor_mask(p["parent"]), config=config)
    assert error(got, reference(p)[0]) < TOLERANCE


def test_wy_kernel_survives_repeated_keys_on_a_deep_chain() -> None:
    p = problem(5, 128, "chain", repeat_key=True)
    got = launch.tree_wy(*inputs(p), naive.ancestor_mask(p["parent"]), out=poisoned(p))
    assert error(got, reference(p)[0]) < TOLERANCE


@pytest.mark.parametrize("shape", ["random", "chain"])
def test_path_kernel_equals_the_recurrence(shape: str) -> None:
    p = problem(7, 12, shape)
    got = launch.tree_path(
        *inputs(p), launch.path_table(p["parent"]), out=poisoned(p), config=(32, 1)
    )
    assert error(got, reference(p)[0]) < TOLERANCE


@pytest.mark.parametrize("shape", ["random", "chain"])
def test_snapshot_kernel_keeps_every_state(shape: str) -> None:
    p = problem(9, 12, shape)
    kept = torch.full((2, 12, 4, 32, 32), float("nan"), device=DEVICE)
    got = launch.tree_snapshot(*inputs(p), p["parent"].int(), kept, out=poisoned(p), config=(32, 1))
    want, states = reference(p)
    assert error(got, want) < TOLERANCE
    assert error(kept, states) < 1e-5
    assert kept.nbytes == launch.snapshot_bytes(2, 12, 4, 32, 32)


def test_commit_kernel_advances_only_the_slots_in_use() -> None:
    p = problem(11, 16, "random")
    _, states = reference(p)
    path = [15]
    while p["parent"][0, path[-1]] >= 0:
        path.append(int(p["parent"][0, path[-1]]))
    table = torch.zeros(2, 16, dtype=torch.int32)
    table[0, : len(path)] = torch.tensor(path[::-1], dtype=torch.int32)
    length = torch.tensor([len(path), 0], dtype=torch.int32)
    before = p["state"].clone()
    args = [p[name] for name in ("k", "v", "g", "beta", "state", "slot")]
    launch.commit(*args, table.to(DEVICE), length.to(DEVICE))
    assert error(p["state"][2], states[0, 15]) < 1e-5
    assert torch.equal(p["state"][:2], before[:2])  # unused slot, and length 0


def test_padding_rows_change_nothing() -> None:
    p = problem(13, 20, "random")
    wide = {n: torch.cat((p[n], torch.zeros_like(p[n][:, :12])), 1) for n in ("q", "k", "v")}
    wide |= {n: torch.cat((p[n], torch.zeros_like(p[n][:, :12])), 1) for n in ("g", "beta")}
    parent = torch.cat((p["parent"], torch.full_like(p["parent"][:, :12], -1)), 1)
    full = {**p, **{n: x.contiguous() for n, x in wide.items()}, "parent": parent}
    got = launch.tree_wy(*inputs(full), naive.ancestor_mask(parent))
    assert error(got[:, :20], reference(p)[0]) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "change", "kind", "word"),
    [
        ("g", lambda x: x.double(), InvalidInput, "g is torch.float64"),
        ("v", lambda x: x.half(), InvalidInput, "v is torch.float16"),
        ("beta", lambda x: x[:, :-1], InvalidInput, "beta has shape"),
        ("q", lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), InvalidInput, "contiguous"),
        ("k", lambda x: x[..., :24], Unsupported, "dk 24"),
        ("slot", lambda x: x.float(), InvalidInput, "slot is"),
    ],
)
def test_wrong_inputs_are_named(name, change, kind, word) -> None:
    p = problem(1, 16, "chain")
    mask = naive.ancestor_mask(p["parent"])
    p[name] = change(p[name])
    with pytest.raises(kind, match=word):
        launch.tree_wy(*inputs(p), mask)


def test_more_rows_than_the_limit_are_refused() -> None:
    p = problem(1, 129, "chain")
    with pytest.raises(Unsupported, match="129 rows"):
        launch.tree_wy(*inputs(p), naive.ancestor_mask(p["parent"]))
