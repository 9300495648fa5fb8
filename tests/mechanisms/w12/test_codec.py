"""W12 is exact: on every bit pattern, on every shape, and beside weights that do not fit."""

import numpy as np
import pytest

from specpilot.errors import CheckFailed, InvalidInput
from specpilot.mechanisms.w12 import codec, naive, planes

BASES = (0, 1, 3, 97, 112, 127)


def bf16(values: np.ndarray) -> np.ndarray:
    """Round fp32 to BF16 patterns, nearest even."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def gaussian(rows: int, columns: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    scales = np.exp2(rng.integers(-9, 2, (rows, 1)))
    return bf16(rng.standard_normal((rows, columns)) * scales * 0.02)


@pytest.mark.parametrize("base", BASES)
def test_the_naive_code_gives_back_every_pattern_it_accepts(base: int) -> None:
    accepted = 0
    for pattern in range(65536):
        code = naive.encode_value(pattern, base)
        if code is not None:
            accepted += 1
            assert naive.join(*naive.split(code)) == code
            assert naive.decode_value(code, base) == pattern
    assert accepted >= 2 * (15 * 128 + 1)


def test_the_codec_agrees_with_the_naive_code_on_every_pattern() -> None:
    compared = 0
    for block in np.arange(65536, dtype=np.uint16).reshape(-1, 64):
        row = np.concatenate([block, np.full(4096, 0x3F80, np.uint16)])[None, :]
        matrix = codec.encode(row)
        escaped = set(matrix.escape_column.tolist())
        if len(matrix.raw_rows):
            continue  # too many escapes: the row is whole in raw_bits
        base = int(matrix.base[0])
        compared += 1
        for column, pattern in enumerate(block.tolist()):
            code = naive.encode_value(pattern, base)
            assert (code is None) == (column in escaped)
            low = int(matrix.b[0, column // 2]) >> (4 * (column % 2)) & 0xF
            assert naive.join(int(matrix.q[0, column]), low) == (code or 0)
    assert compared >= 1000, "64 patterns a row leave room for 64 escapes, so all rows are coded"


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 33), (64, 256), (7, 4097)])
def test_random_patterns_come_back_bit_for_bit(shape: tuple[int, int]) -> None:
    bits = np.random.default_rng(sum(shape)).integers(0, 65536, shape).astype(np.uint16)
    assert np.array_equal(codec.decode(codec.encode(bits)), bits)


def test_gaussian_weights_take_12_bits_and_few_escapes() -> None:
    bits = gaussian(256, 4096, seed=1)
    bits[3, 5], bits[3, 6], bits[4, 7], bits[4, 8], bits[5, 9] = 0, 0x8000, 0x7F80, 0xFFC1, 1
    bits[6] = 0
    matrix = codec.encode(bits)
    codec.verify(bits, matrix)
    row = np.repeat(np.arange(256), np.diff(matrix.row_start))
    assert np.array_equal(bits[row, matrix.escape_column], matrix.escape_bits)
    assert not len(matrix.raw_rows)
    assert matrix.bits_per_weight < 12.03
    assert len(matrix.escape_bits) / bits.size < 2e-4


def test_exact_zeros_are_no_escapes() -> None:
    bits = gaussian(16, 4096, seed=2)
    bits[np.random.default_rng(3).random(bits.shape) < 0.5] = 0
    assert len(codec.encode(bits).escape_bits) / bits.size < 2e-4


def test_a_row_that_does_not_fit_is_kept_whole_and_reported() -> None:
    bits = gaussian(8, 1024, seed=4)
    bits[2] = np.random.default_rng(5).integers(0, 65536, 1024)
    matrix = codec.encode(bits)
    assert matrix.raw_rows.tolist() == [2]
    assert np.array_equal(codec.decode(matrix), bits)


def test_the_window_follows_the_weights_not_one_outlier() -> None:
    bits = gaussian(4, 4096, seed=6)
    bits[1, 10] = bf16(np.array([1e4]))[0]
    matrix = codec.encode(bits)
    assert np.array_equal(codec.decode(matrix), bits)
    assert int(matrix.row_start[2] - matrix.row_start[1]) <= codec.MAX_ESCAPES_PER_ROW


def test_rows_are_coded_alike_in_blocks_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    bits = gaussian(40, 515, seed=8)
    rare = np.random.default_rng(9).random(bits.shape) < 0.005
    bits[rare] = np.random.default_rng(10).integers(0, 65536, int(rare.sum()))
    whole = codec.encode(bits)
    monkeypatch.setattr(planes, "_BLOCK_WEIGHTS", 2 * 515)
    monkeypatch.setattr(codec, "_CHUNK_WEIGHTS", 7 * 515)
    cut = codec.encode(bits)
    assert np.array_equal(codec.decode(cut), bits)
    for part in ("q", "b", "base", "escape_place", "escape_bits", "raw_rows"):
        assert np.array_equal(getattr(cut, part), getattr(whole, part))


@pytest.mark.parametrize(("high", "low", "escapes", "base"), [(2, 20, 2, 110), (30, 20, 20, 112)])
def test_the_window_is_the_one_with_fewest_escapes(
    high: int, low: int, escapes: int, base: int
) -> None:
    exponents = np.full(4096, 120)
    exponents[:high], exponents[high : high + low] = 127, 111
    matrix = codec.encode((exponents << 7 | 1).astype(np.uint16)[None, :])  # 1: no gradual code
    assert (len(matrix.escape_bits), int(matrix.base[0])) == (escapes, base)


def test_verify_names_the_first_wrong_weight() -> None:
    bits = gaussian(4, 64, seed=7)
    matrix = codec.encode(bits)
    matrix.q[2, 9] ^= 1
    with pytest.raises(CheckFailed, match=r"\(2, 9\)"):
        codec.verify(bits, matrix)


@pytest.mark.parametrize(
    "array",
    [np.zeros((0, 4), np.uint16), np.zeros(4, np.uint16), np.zeros((2, 2), np.float32)],
)
def test_anything_but_a_matrix_of_patterns_is_refused(array: np.ndarray) -> None:
    with pytest.raises(InvalidInput, match="non-empty matrix"):
        codec.encode(array)
