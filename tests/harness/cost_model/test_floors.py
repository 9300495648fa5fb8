"""Floors: monotone, bound by the right thing, and every bad input named."""

from dataclasses import replace

import pytest

from specpilot.errors import InvalidInput, Unsupported
from specpilot.harness.cost_model import (
    ModelShape,
    load_hardware,
    read_drafter,
    step_floor,
    step_shares,
    total_ms,
)
from specpilot.types import Regime

from .configs27b import DRAFTER_27B, TARGET_27B

TARGET = ModelShape.from_config(TARGET_27B)
DRAFTER = read_drafter(DRAFTER_27B, "dflash", TARGET)
H200 = load_hardware("H200")
ONE = Regime(requests=1, prompt_tokens=128, output_tokens=256)
MOE = ModelShape.from_config(
    {"model_type": "qwen3_moe", "hidden_size": 2048, "vocab_size": 151936, "num_hidden_layers": 48,
     "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
     "num_experts_per_tok": 8, "moe_intermediate_size": 768, "intermediate_size": 6144}
)  # fmt: skip


def step(rows: int = 8, regime: Regime = ONE, hardware=H200, block: int = 8) -> float:
    return total_ms(step_floor(TARGET, DRAFTER, hardware, regime, rows, block=block))


def test_floors_do_not_fall_with_rows_requests_or_context() -> None:
    by_rows = [step(rows=r) for r in (1, 8, 16, 64, 256, 1024)]
    assert by_rows == sorted(by_rows)
    by_requests = [step(regime=replace(ONE, requests=n)) for n in (1, 2, 8, 24, 128)]
    assert by_requests == sorted(by_requests)
    by_context = [step(regime=replace(ONE, prompt_tokens=n)) for n in (0, 512, 8192, 100_000)]
    assert by_context == sorted(by_context)


def test_doubling_bandwidth_halves_memory_bound_floors_and_leaves_the_others() -> None:
    fast = replace(H200, bandwidth_gbs=2 * H200.bandwidth_gbs)
    regime = replace(ONE, requests=64)
    slow_parts = step_floor(TARGET, DRAFTER, H200, regime, 24, block=8)
    fast_parts = step_floor(TARGET, DRAFTER, fast, regime, 24, block=8)
    bounds = set()
    for slow, quick in zip(slow_parts, fast_parts, strict=True):
        bounds.add(slow.bound)
        if quick.bound == "bytes":
            assert quick.floor_ms == pytest.approx(slow.floor_ms / 2)
        elif slow.bound == "flops":
            assert quick.floor_ms == pytest.approx(slow.floor_ms)
    assert bounds == {"bytes", "flops"}


def test_a_bf16_gemm_leaves_the_memory_floor_near_the_ridge() -> None:
    h100 = load_hardware("H100")
    ridge = 989.4 * 0.6 / (3.35 * 0.9)  # about 197 FLOP/byte: 197 rows of BF16

    def bound(rows: int) -> str:
        parts = step_floor(TARGET, None, h100, ONE, rows)
        return next(p.bound for p in parts if p.part == "mlp")

    assert bound(int(ridge * 0.9)) == "bytes"
    assert bound(int(ridge * 1.2)) == "flops"


def test_experts_are_read_as_rows_touch_them() -> None:
    experts = MOE.group("experts")
    assert experts is not None
    assert experts.bytes_read(8) > 6 * experts.bytes_read(1)  # speculation reads more weights here
    assert experts.bytes_read(4096) == pytest.approx(experts.parameters * 2)  # never more than all
    assert experts.bytes_read(1) == pytest.approx(experts.parameters * 2 * 8 / 128)
    dense = TARGET.group("mlp")
    assert dense is not None and dense.bytes_read(8) == dense.bytes_read(1)


def test_the_recurrent_state_is_read_and_written_once_for_each_request() -> None:
    parts = step_floor(TARGET, None, load_hardware("H100"), replace(ONE, requests=24), 1)
    gdn = next(p for p in parts if p.component == "gdn")
    assert gdn.floor_ms == pytest.approx(2.40, rel=0.04)  # 24 × 302 MB at 90 % of 3.35 TB/s


def test_w12_shrinks_the_floor_by_its_bytes() -> None:
    w12 = TARGET.with_format("w12")
    ratio = total_ms(step_floor(w12, None, H200, ONE, 1)) / total_ms(
        step_floor(TARGET, None, H200, ONE, 1)
    )
    assert ratio == pytest.approx(1 - 48.7 / 51.6 * (1 - 12.03 / 16), abs=0.005)


def test_a_drafter_that_drafts_token_by_token_pays_for_each_pass() -> None:
    lm = read_drafter(TARGET_27B, "mtp", TARGET)

    def drafter_ms(block: int) -> float:
        return total_ms(step_floor(TARGET, lm, H200, ONE, block, block=block), "drafter")

    assert drafter_ms(9) == pytest.approx(2 * drafter_ms(5), rel=1e-6)
    assert drafter_ms(1) == 0


@pytest.mark.parametrize(
    ("regime", "rows", "block", "field"),
    [
        (replace(ONE, requests=0), 8, 8, "requests"),
        (replace(ONE, prompt_tokens=-1), 8, 8, "prompt_tokens"),
        (replace(ONE, output_tokens=-5), 8, 8, "output_tokens"),
        (Regime(1, 0, 0), 8, 8, "output_tokens"),
        (ONE, 0, 8, "rows"),
        (ONE, 8, -1, "block"),
    ],
)
def test_impossible_steps_are_refused_by_field(
    regime: Regime, rows: int, block: int, field: str
) -> None:
    with pytest.raises(InvalidInput, match=field):
        step_floor(TARGET, DRAFTER, H200, regime, rows, block=block)


def test_a_machine_without_a_peak_for_the_dtype_is_refused() -> None:
    with pytest.raises(Unsupported, match=r"fp32.*bf16"):
        step_floor(ModelShape.from_config(TARGET_27B, dtype="float32"), None, H200, ONE, 1)


def test_shares_sum_to_one_and_overhead_is_what_the_parts_do_not_explain() -> None:
    parts = [(p.component, p.floor_ms) for p in step_floor(TARGET, DRAFTER, H200, ONE, 8, block=8)]
    spent = sum(ms for _, ms in parts)
    shares = step_shares(parts, 1.25 * spent)
    total = (
        shares.weights + shares.lm_head + shares.attention + shares.gdn + shares.drafter
        + shares.overhead
    )  # fmt: skip
    assert total == pytest.approx(1)
    assert shares.overhead == pytest.approx(0.2)
    assert shares.weights == max(
        shares.weights, shares.lm_head, shares.attention, shares.gdn, shares.drafter
    )
    with pytest.raises(InvalidInput, match="add up"):
        step_shares(parts, 0.9 * spent)
    with pytest.raises(InvalidInput, match="router"):
        step_shares([("router", 1.0)], 2.0)
