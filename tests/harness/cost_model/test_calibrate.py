"""Calibration: measured once, stored with the deployment, never extrapolated."""

import time
from dataclasses import replace

import pytest

from specpilot.errors import InvalidInput, NotFound, Unsupported
from specpilot.harness.cost_model import load_hardware
from specpilot.harness.cost_model.calibrate import (
    Calibration,
    calibrate,
    calibration_path,
    load_calibration,
    require_calibration,
    save_calibration,
    time_call_ms,
)
from specpilot.harness.cost_model.hardware import achievable
from specpilot.types import Hardware

CPU = Hardware("cpu", "x86_64", 16.0, 20.0, {"fp32": 0.1}, calibrated=True, source="test")


def made(**change) -> Calibration:
    fields = {"pass_ms": {1: 2.0, 8: 3.0, 64: 8.0}, "draft_ms": {8: 1.0, 16: 1.5}} | change
    return Calibration("pico", CPU, "float32", **fields)


def test_a_calibration_survives_the_disk_and_gives_the_cpu() -> None:
    path = save_calibration(made())
    assert path == calibration_path("pico")
    assert load_calibration("pico") == made()
    cpu = load_hardware("cpu", "pico")
    assert cpu.calibrated and cpu.bandwidth_gbs == 20.0
    assert achievable(cpu).bytes == 1.0  # what was reached is not discounted again
    assert load_hardware("cpu").bandwidth_gbs == 20.0  # the newest of any deployment


def test_a_damaged_calibration_is_refused_with_what_to_do() -> None:
    path = save_calibration(made())
    path.write_text(path.read_text()[:80])
    with pytest.raises(InvalidInput, match="calibrate again"):
        load_calibration("pico")
    path.write_text(path.read_text())
    with pytest.raises(NotFound, match="'other'"):
        require_calibration("other")
    with pytest.raises(InvalidInput, match="deployment id"):
        calibration_path("../pico")


def test_times_are_interpolated_between_points_and_never_beyond() -> None:
    found = made()
    assert found.pass_at(8) == 3.0
    assert found.pass_at(36) == pytest.approx(5.5)
    assert found.draft_at(4) == 1.0
    with pytest.raises(InvalidInput, match="rows"):
        found.pass_at(65)
    with pytest.raises(InvalidInput, match="block"):
        found.draft_at(32)
    with pytest.raises(InvalidInput, match="Calibrate"):
        made(pass_ms={}).pass_at(1)


def test_the_time_of_a_call_is_its_median() -> None:
    pauses = iter([0.0, 0.0, 0.002, 0.05, 0.002])
    assert 1.9 < time_call_ms(lambda: time.sleep(next(pauses)), seconds=0.0) < 45


def test_the_machine_and_the_engine_are_measured_within_seconds() -> None:
    pytest.importorskip("torch")
    seen: list[int] = []
    start = time.perf_counter()
    found = calibrate(
        "pico", dtype="float64", working_set_mb=8, run_pass=seen.append, rows=(1, 8), seconds=0.02
    )
    assert time.perf_counter() - start < 10
    assert set(seen) == {1, 8} and set(found.pass_ms) == {1, 8}
    assert found.draft_ms == {}
    assert found.hardware.bandwidth_gbs > 0.1
    assert set(found.hardware.peak_tflops) == {"fp32", "bf16", "fp64"}
    assert found.hardware.calibrated and "random" in found.hardware.source


def test_the_reference_engine_is_calibrated_in_process(tiny) -> None:
    from specpilot.harness.cost_model.reference import calibrate_deployment

    found = calibrate_deployment(tiny, seconds=0.01, rows=(1, 8, 32), blocks=(4, 16, 32))
    assert set(found.pass_ms) == {1, 8, 32}
    assert set(found.draft_ms) == {4, 16}  # the drafter's block is 16 rows
    assert load_calibration("tiny") == found
    with pytest.raises(Unsupported, match="sglang"):
        calibrate_deployment(replace(tiny, engine="sglang"))
