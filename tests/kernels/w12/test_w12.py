"""The W12 product equals its specification, and a row does not depend on its neighbours."""

import numpy as np
import pytest
import torch

from specpilot.errors import InvalidInput
from specpilot.kernels.w12 import layout, naive, ops, schedules
from specpilot.mechanisms.w12 import codec


def planes(rows: int, columns: int, seed: int) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Random weights with some zeros and escapes, and their W12 planes as torch tensors."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator) * 0.02
    weight *= torch.exp2(torch.randint(-4, 4, (rows, 1), generator=generator))
    weight[:, 3], weight[1, 5], weight[2, 7] = 0, 1e-6, -3e-9
    bits = weight.bfloat16()
    matrix = codec.encode(bits.view(torch.int16).numpy().view(np.uint16))
    assert not len(matrix.raw_rows)
    assert len(matrix.escape_bits)
    value = torch.from_numpy(matrix.escape_bits.view(np.int16)).view(torch.bfloat16)
    parts = [matrix.q, matrix.b, matrix.base, matrix.row_start, matrix.escape_column]
    return bits, (*(torch.from_numpy(part) for part in parts), value)


def test_naive_decode_gives_the_weights_but_for_escapes() -> None:
    bits, (q, b, base, row_start, column, _) = planes(16, 320, seed=0)
    decoded = naive.decode_planes(q, b, base)
    expected = bits.clone()
    row = torch.repeat_interleave(torch.arange(16), row_start.diff())
    expected[row, column.long()] = 0
    assert torch.equal(decoded.view(torch.int16), expected.view(torch.int16))


def test_the_view_is_within_its_rounding_of_the_weights() -> None:
    bits, (q, _, base, *_) = planes(64, 512, seed=1)
    error = (naive.decode_view(q, base).float() - bits.float()).norm() / bits.float().norm()
    assert 0.02 < error < 0.03


def test_naive_linear_is_the_bf16_product() -> None:
    bits, parts = planes(32, 256, seed=2)
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(3)).bfloat16()
    expected = x.double() @ bits.double().T
    torch.testing.assert_close(naive.linear(x, *parts), expected, rtol=1e-12, atol=1e-12)


def test_planes_that_do_not_belong_together_are_refused() -> None:
    _, parts = planes(8, 256, seed=4)
    with pytest.raises(InvalidInput, match="planes disagree"):
        layout.tile(parts[0], parts[1][:, :-1], *parts[2:])


@pytest.mark.parametrize("columns", [5, 255, 512, 777])
def test_tiling_is_undone_bit_for_bit(columns: int) -> None:
    _, parts = planes(6, columns + 8, seed=columns)
    for before, after in zip(parts, layout.untile(layout.tile(*parts)), strict=True):
        assert torch.equal(before, after)


def test_every_shape_has_one_number_of_parts_for_all_rows() -> None:
    shapes = [tuple(map(int, name.split("x"))) for name in schedules._measured()]
    assert len(shapes) == 10
    for rows, columns in [*shapes, (64, 256), (5120, 5120), (300000, 64)]:
        chosen = [schedules.choose(rows, columns, m) for m in range(1, 65)]
        assert len({schedule.splits for schedule in chosen}) == 1
        assert chosen[0] == chosen[15]


def test_the_rule_for_other_shapes_agrees_with_what_was_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured = {name: s["splits"] for name, s in schedules._measured().items()}
    monkeypatch.setattr(schedules, "_measured", dict)
    ruled = {n: schedules.choose(*map(int, n.split("x")), m=1).splits for n in measured}
    assert sum(measured[name] != ruled[name] for name in measured) <= 1


def test_the_operator_on_the_cpu_is_the_specification() -> None:
    bits, parts = planes(40, 600, seed=20)
    x = torch.randn(3, 600, generator=torch.Generator().manual_seed(21)).bfloat16()
    tiled = layout.tile(*parts)
    expected = (x.double() @ bits.double().T).bfloat16()
    assert torch.equal(ops.linear(x, tiled), expected)
    seen = (x.double() @ naive.dense(*parts, view=True).double().T).bfloat16()
    assert torch.equal(ops.linear(x, tiled, view=True), seen)
    assert not torch.equal(seen, expected)


def test_the_operator_passes_torchs_own_checks() -> None:
    _, parts = planes(16, 256, seed=22)
    tiled = layout.tile(*parts)
    arguments = (tiled.q, tiled.b, tiled.scale, tiled.row_start, tiled.column, tiled.value)
    for view in (False, True):
        torch.library.opcheck(
            torch.ops.specpilot.w12_linear,
            (torch.ones(2, 256).bfloat16(), *arguments, 256, view),
            test_utils=("test_schema", "test_faketensor"),
        )


triton = pytest.importorskip("triton", reason="Triton is part of the gpu extra")


@pytest.mark.parametrize(("rows", "columns"), [(70, 256), (64, 600), (130, 1024)])
@pytest.mark.parametrize(("m", "splits"), [(1, 1), (5, 2), (16, 4)])
def test_the_kernel_equals_its_specification(
    rows: int, columns: int, m: int, splits: int, device: str
) -> None:
    from specpilot.kernels.w12.gemm import Schedule, gemm

    _, parts = planes(rows, columns, seed=rows + m)
    x = torch.randn(m, columns, generator=torch.Generator().manual_seed(m)).bfloat16()
    expected = naive.linear(x, *parts)
    tiled = layout.tile(*(part.to(device) for part in parts))
    got = gemm(x.to(device), tiled, Schedule(splits=splits)).cpu().double()
    assert torch.isfinite(got).all()
    assert (got - expected).norm() / expected.norm() < 5e-3


def test_a_row_is_bitwise_the_same_beside_any_number_of_rows(device: str) -> None:
    from specpilot.kernels.w12.gemm import Schedule, gemm

    _, parts = planes(64, 512, seed=11)
    tiled = layout.tile(*(part.to(device) for part in parts))
    x = torch.randn(40, 512, generator=torch.Generator().manual_seed(12)).bfloat16().to(device)
    alone = gemm(x[:1], tiled, Schedule(splits=2))
    for m in (2, 17, 40):
        assert torch.equal(gemm(x[:m], tiled, Schedule(splits=2))[:1], alone)


@pytest.mark.parametrize(("columns", "m", "splits"), [(256, 1, 1), (600, 5, 2)])
def test_the_view_reads_the_high_bytes_alone(
    columns: int, m: int, splits: int, device: str
) -> None:
    from specpilot.kernels.w12.gemm import Schedule, gemm

    _, parts = planes(70, columns, seed=columns)
    x = torch.randn(m, columns, generator=torch.Generator().manual_seed(m)).bfloat16()
    tiled = layout.tile(*(part.to(device) for part in parts))
    tiled.b.fill_(-1)  # must not be looked at
    got = gemm(x.to(device), tiled, Schedule(splits=splits), view=True).cpu().double()
    expected = naive.linear(x, *parts, view=True)
    assert (got - expected).norm() / expected.norm() < 5e-3


def test_the_chosen_schedule_is_used_when_none_is_given(device: str) -> None:
    from specpilot.kernels.w12.gemm import gemm

    _, parts = planes(64, 1024, seed=23)
    tiled = layout.tile(*(part.to(device) for part in parts))
    x = torch.randn(2, 1024, generator=torch.Generator().manual_seed(24)).bfloat16().to(device)
    schedule = schedules.choose(64, 1024, 2)
    assert schedule.splits > 1
    assert torch.equal(gemm(x, tiled), gemm(x, tiled, schedule))


@pytest.mark.gpu
def test_the_operator_runs_under_compile_and_in_a_graph_and_above_64_rows() -> None:
    bits, parts = planes(320, 512, seed=25)
    tiled = layout.tile(*(part.cuda() for part in parts))
    x = torch.randn(100, 512, generator=torch.Generator().manual_seed(26)).bfloat16().cuda()
    eager = ops.linear(x[:8], tiled)
    assert torch.equal(torch.compile(ops.linear, fullgraph=True)(x[:8], tiled), eager)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = ops.linear(x[:8], tiled)
    graph.replay()
    assert torch.equal(captured, eager)
    expected = torch.nn.functional.linear(x, bits.cuda())
    assert torch.equal(ops.linear(x, tiled), expected)


def test_a_wrong_operand_is_refused(device: str) -> None:
    from specpilot.kernels.w12.gemm import gemm

    _, parts = planes(64, 256, seed=13)
    tiled = layout.tile(*(part.to(device) for part in parts))
    for x in (torch.zeros(65, 256), torch.zeros(1, 128), torch.zeros(1, 256).float()):
        x = x if x.shape == (1, 256) else x.bfloat16()
        with pytest.raises(InvalidInput, match="W12 product takes"):
            gemm(x.to(device), tiled)
