"""The W12 product equals its specification, and a row does not depend on its neighbours."""

import numpy as np
import pytest
import torch

from specpilot.errors import InvalidInput
from specpilot.kernels.w12 import layout, naive
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


def test_a_wrong_operand_is_refused(device: str) -> None:
    from specpilot.kernels.w12.gemm import gemm

    _, parts = planes(64, 256, seed=13)
    tiled = layout.tile(*(part.to(device) for part in parts))
    for x in (torch.zeros(65, 256), torch.zeros(1, 128), torch.zeros(1, 256).float()):
        x = x if x.shape == (1, 256) else x.bfloat16()
        with pytest.raises(InvalidInput, match="W12 product takes"):
            gemm(x.to(device), tiled)
