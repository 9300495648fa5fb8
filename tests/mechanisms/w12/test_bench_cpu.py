"""The CPU benchmark reports every model that is there and passes over the others."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from specpilot.harness import benchmarks
from specpilot.mechanisms.w12 import bench_cpu

ENTRIES = {"half": torch.float16, "wide": torch.float32, "bf16": torch.bfloat16}


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    entries = [f"lost={tmp_path / 'lost.safetensors'}"]
    for name, dtype in ENTRIES.items():
        path = tmp_path / f"{name}.safetensors"
        weight = torch.randn(64, 1024, generator=generator) * 0.02
        save_file({"up.weight": weight.to(dtype), "norm.weight": torch.ones(8)}, path)
        entries.append(f"{name}={path}")
    monkeypatch.setenv(bench_cpu.MODELS, os.pathsep.join(entries))
    monkeypatch.setattr(bench_cpu, "PICO", tmp_path / "absent")
    monkeypatch.setattr(bench_cpu, "_SHAPE", (64, 256))


def test_the_results_name_models_origins_and_bounds(
    models: None, capsys: pytest.CaptureFixture[str]
) -> None:
    document = benchmarks.document("w12_cpu", "command", bench_cpu.run())
    rows = {row["id"]: row for row in document["results"]}
    for name in ENTRIES:
        bits = rows[f"w12.bits_per_weight.{name}"]["value"]
        assert rows[f"w12.entropy_bits.{name}"]["value"] < 12 < bits < 12.1
    assert "F16 origin, rounded" in rows["w12.bits_per_weight.half"]["note"]
    assert "stored as BF16" in rows["w12.bits_per_weight.bf16"]["note"]
    real = rows["w12.bits_per_weight.real"]
    assert real["low"] <= real["value"] <= real["high"]
    assert rows["w12.encode_gbs_per_thread"]["value"] > 0
    assert "lost passed over" in capsys.readouterr().out


def test_rounding_to_bf16_is_torchs() -> None:
    values = torch.randn(4096, generator=torch.Generator().manual_seed(2))
    expected = values.bfloat16().view(torch.int16).numpy().view("uint16")
    assert (bench_cpu._round(values.numpy()) == expected).all()
