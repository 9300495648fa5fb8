"""Model folders go to W12 and back unchanged; damage, other dtypes and full disks are errors."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from specpilot.errors import CheckFailed, Conflict, InvalidInput, NotFound, SpecPilotError
from specpilot.mechanisms.w12 import folder
from specpilot.mechanisms.w12.statistics import total


def tensors(seed: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    weight = torch.randn(96, 512, generator=gen) * 0.02
    odd = torch.randn(130, 513, generator=gen)
    odd[3] = torch.randn(513, generator=gen) * torch.exp2(
        torch.randint(-60, 60, (513,), generator=gen).float()
    )
    return {
        "model.embed_tokens.weight": torch.randn(512, 64, generator=gen).bfloat16(),
        "model.layers.0.mlp.up_proj.weight": weight.bfloat16().to(dtype),
        "model.layers.0.mlp.down_proj.weight": odd.bfloat16().to(dtype),
        "model.norm.weight": torch.ones(64, dtype=torch.bfloat16),
        "lm_head.weight": torch.randn(512, 64, generator=gen).bfloat16(),
    }


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "qwen3"}')
    (path / "tokenizer.json").write_text("{}")
    for number in (1, 2):
        named = {f"s{number}.{k}" if "layers" in k else k: v for k, v in tensors(number).items()}
        if number == 2:
            named = {k: v for k, v in named.items() if "layers" in k}
        save_file(named, path / f"model-{number}.safetensors", {"format": "pt"})
    names = {
        name: f"model-{n}.safetensors"
        for n in (1, 2)
        for name in load_file(path / f"model-{n}.safetensors")
    }
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return path


def same(one: Path, other: Path) -> bool:
    a = {k: v for f in sorted(one.glob("*.safetensors")) for k, v in load_file(f).items()}
    b = {k: v for f in sorted(other.glob("*.safetensors")) for k, v in load_file(f).items()}
    return a.keys() == b.keys() and all(
        a[k].dtype == b[k].dtype and torch.equal(a[k].view(torch.uint8), b[k].view(torch.uint8))
        for k in a
    )


def test_a_folder_comes_back_bit_for_bit(model: Path, tmp_path: Path) -> None:
    packed, back = tmp_path / "w12", tmp_path / "back"
    statistics = folder.encode_folder(model, packed)
    assert {s.name.split(".")[-2] for s in statistics} == {"up_proj", "down_proj"}
    assert sum(s.raw_rows for s in statistics) == 2
    assert folder.verify_folder(packed) == 4
    assert folder.decode_folder(packed, back) == 4
    assert same(model, back)
    assert json.loads((packed / "config.json").read_text())["quantization_config"]
    assert "quantization_config" not in json.loads((back / "config.json").read_text())
    assert (packed / "tokenizer.json").exists()


def test_the_head_is_packed_when_asked(model: Path, tmp_path: Path) -> None:
    statistics = folder.encode_folder(model, tmp_path / "w12", head=True)
    assert "lm_head.weight" in {s.name for s in statistics}


def test_statistics_stay_above_the_entropy_bound(model: Path, tmp_path: Path) -> None:
    folder.encode_folder(model, tmp_path / "w12")
    found = folder.info_folder(tmp_path / "w12")
    assert all(s.entropy_bits < s.bits_per_weight for s in found)
    assert 12 < total(found).bits_per_weight < 12.5


def test_an_interrupted_run_goes_on_after_the_last_whole_shard(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = tmp_path / "w12"
    seen: list[str] = []

    def stop(done: int, planned: int, message: str) -> None:
        if message.startswith("s2."):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        folder.encode_folder(model, packed, progress=stop)
    assert [p.name for p in packed.glob("*.safetensors*")] == ["model-1.safetensors"]
    folder.encode_folder(model, packed, progress=lambda d, n, m: seen.append(m))
    assert not any(message.startswith("s1.") for message in seen)
    assert folder.verify_folder(packed) == 4


def test_a_target_made_from_another_source_is_not_overwritten(model: Path, tmp_path: Path) -> None:
    folder.encode_folder(model, tmp_path / "w12")
    with pytest.raises(Conflict, match="another source"):
        folder.encode_folder(model, tmp_path / "w12", head=True)


@pytest.mark.parametrize("where", ["planes", "checksum"])
def test_an_edited_file_is_found(model: Path, tmp_path: Path, where: str) -> None:
    packed = tmp_path / "w12"
    folder.encode_folder(model, packed)
    path = packed / "model-1.safetensors"
    data = bytearray(path.read_bytes())
    if where == "planes":
        data[-40_000] ^= 1
    else:
        at = data.index(b'sha256\\": \\"') + 20
        data[at] = ord("0") if data[at] != ord("0") else ord("1")
    path.write_bytes(data)
    with pytest.raises(CheckFailed, match="other weights"):
        folder.verify_folder(packed)


def test_a_truncated_file_is_found(model: Path, tmp_path: Path) -> None:
    packed = tmp_path / "w12"
    folder.encode_folder(model, packed)
    path = packed / "model-2.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(InvalidInput, match="truncated"):
        folder.verify_folder(packed)


def one_file(path: Path, dtype: torch.dtype, exact: bool) -> Path:
    path.mkdir()
    named = tensors(5, dtype)
    if not exact:
        named["model.layers.0.mlp.up_proj.weight"] += 1e-6
    save_file(named, path / "model.safetensors")
    return path


def test_fp32_is_taken_only_when_asked_and_exact(tmp_path: Path) -> None:
    exact = one_file(tmp_path / "exact", torch.float32, exact=True)
    inexact = one_file(tmp_path / "inexact", torch.float32, exact=False)
    with pytest.raises(InvalidInput, match="is F32"):
        folder.encode_folder(exact, tmp_path / "a")
    assert folder.encode_folder(exact, tmp_path / "b", convert_exact=True)
    with pytest.raises(InvalidInput, match="BF16 cannot hold"):
        folder.encode_folder(inexact, tmp_path / "c", convert_exact=True)
    assert not list((tmp_path / "c").glob("*.safetensors*"))


def test_fp16_is_refused(tmp_path: Path) -> None:
    half = one_file(tmp_path / "half", torch.float16, exact=True)
    with pytest.raises(InvalidInput, match="is F16"):
        folder.encode_folder(half, tmp_path / "a", convert_exact=True)


def test_empty_tensors_are_kept(tmp_path: Path) -> None:
    source = tmp_path / "m"
    source.mkdir()
    save_file({"a.weight": torch.empty(0, 8, dtype=torch.bfloat16)}, source / "model.safetensors")
    assert folder.encode_folder(source, tmp_path / "w") == []
    assert same(source, tmp_path / "w")


def test_wrong_folders_are_named(model: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no folder"):
        folder.encode_folder(tmp_path / "nope", tmp_path / "w")
    with pytest.raises(InvalidInput, match="same folder"):
        folder.encode_folder(model, model)
    with pytest.raises(NotFound, match="no W12"):
        folder.verify_folder(model)


def test_a_full_disk_leaves_no_half_file(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(SpecPilotError, match="No space left"):
        folder.encode_folder(model, tmp_path / "w12")
    assert not list((tmp_path / "w12").glob("*.safetensors*"))
    assert np.array_equal(sorted(p.name for p in model.iterdir()), sorted(
        ["config.json", "tokenizer.json", "model-1.safetensors", "model-2.safetensors",
         "model.safetensors.index.json"]
    ))  # fmt: skip
