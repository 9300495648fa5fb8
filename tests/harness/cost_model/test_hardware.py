"""The hardware table: names, honesty of its rows, and errors that say what to do."""

import json

import pytest

from specpilot.errors import InvalidInput, NotFound
from specpilot.harness.cost_model import load_hardware
from specpilot.harness.cost_model.hardware import achievable, known_hardware, user_table

WANTED = ["H100 SXM", "H100 PCIe", "H200", "B200", "RTX PRO 6000", "A100", "L40S", "L4",
          "RTX 4090", "RTX 5090", "MI300X", "NVIDIA H200"]  # fmt: skip


@pytest.mark.parametrize("name", WANTED)
def test_the_machines_of_the_field_are_known_by_their_usual_names(name: str) -> None:
    hardware = load_hardware(name)
    assert hardware.peak_tflops["bf16"] > 0
    assert hardware.source and hardware.confidence in "AB"
    assert hardware.smem_per_block_kb is not None


@pytest.mark.parametrize("name", known_hardware())
def test_peaks_are_dense(name: str) -> None:
    # A sparse figure in a row shows as a ratio of 4 between neighbouring precisions, or as a ridge
    # far beyond that of any GPU (peak over bandwidth, FLOP for each byte).
    peaks = load_hardware(name).peak_tflops
    if "fp8" in peaks:
        assert 1.9 <= peaks["fp8"] / peaks["bf16"] <= 2.1
    assert 100 < peaks["bf16"] * 1e3 / load_hardware(name).bandwidth_gbs < 450


def test_an_unknown_machine_says_how_to_add_it() -> None:
    with pytest.raises(NotFound, match=r"TPU v9.*hardware\.json") as error:
        load_hardware("TPU v9")
    assert "H200" in str(error.value)


def test_an_uncalibrated_cpu_is_not_guessed() -> None:
    with pytest.raises(NotFound, match="calibrat"):
        load_hardware("cpu")
    with pytest.raises(NotFound, match="'pico'"):
        load_hardware("cpu", "pico")


def test_a_person_can_add_a_machine_and_a_bad_row_is_named() -> None:
    row = {"name": "X1", "arch": "x", "memory_gb": 8, "bandwidth_gbs": 100,
           "peak_tflops": {"bf16": 10}, "confidence": "B", "source": "its data sheet"}  # fmt: skip
    user_table().write_text(json.dumps({"rows": [row]}))
    assert load_hardware("x1").bandwidth_gbs == 100
    user_table().write_text(json.dumps({"rows": [{**row, "bandwidth_gbs": -1}]}))
    with pytest.raises(InvalidInput, match="bandwidth_gbs"):
        load_hardware("x1")


def test_floors_discount_datasheet_figures_only() -> None:
    assert achievable(load_hardware("H200")).bytes == 0.90
    assert achievable(load_hardware("H200")).flops == 0.60
