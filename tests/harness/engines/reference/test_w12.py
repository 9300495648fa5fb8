"""Weights in W12, on disk or in memory, give bit for bit what BF16 weights give."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specpilot.errors import CheckFailed, InvalidInput
from specpilot.harness.engines.backend import GenerateRequest
from specpilot.harness.engines.reference.engine import ReferenceEngine
from specpilot.harness.engines.reference.target import Target
from specpilot.harness.engines.settings import ReferenceSettings
from specpilot.mechanisms import registry
from specpilot.mechanisms.w12 import container, folder

IDS = [5, 9, 33, 2, 71, 8, 12]


@pytest.fixture
def bf16(folder, tmp_path, monkeypatch):
    """A function that makes a BF16 model folder of a kind; its small matrices count for W12."""
    monkeypatch.setattr(container, "_MIN_WEIGHTS", 64)

    def make(kind: str) -> Path:
        path = tmp_path / kind
        shutil.copytree(folder(kind), path)
        tensors = load_file(path / "model.safetensors")
        narrow = {name: tensor.bfloat16() for name, tensor in tensors.items()}
        save_file(narrow, path / "model.safetensors", {"format": "pt"})
        return path

    return make


def logits(target: Target) -> torch.Tensor:
    """Logits of a prompt, of one more token, and of nothing else."""
    pool = target.pool(1, 32)
    prompt = target.prefill(torch.tensor(IDS), pool, 0, 0)
    step = target.decode(torch.tensor([3]), pool, [len(IDS)])
    return target.logits(torch.cat((prompt.hidden, step.hidden), 1))


def generate(path: Path, **changes) -> tuple[tuple[int, ...], dict]:
    engine = ReferenceEngine(ReferenceSettings(target=str(path), context=64, **changes))
    engine.add(GenerateRequest("r", tuple(IDS), 24, ignore_eos=True))
    tokens: tuple[int, ...] = ()
    while engine.has_work():
        for event in engine.step():
            tokens += event.new_ids
            meta = event.meta
    return tokens, meta


@pytest.mark.parametrize("kind", ["hybrid", "qwen3", "biased"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_bitwise_those_of_bf16_weights(bf16, kind: str, dtype: torch.dtype) -> None:
    source = bf16(kind)
    packed = source.with_name("w12")
    assert folder.encode_folder(source, packed)
    plain = logits(Target(source, dtype))
    from_disk, in_memory = Target(packed, dtype), Target(source, dtype, packed=True)
    assert torch.equal(logits(from_disk), plain)
    assert torch.equal(logits(in_memory), plain)
    assert from_disk.packed_matrices == 0
    assert in_memory.packed_matrices == 4 * len(in_memory.layers)


def test_the_mechanism_changes_no_token_and_reports_that_it_ran(bf16) -> None:
    source = bf16("hybrid")
    stock, meta = generate(source)
    off = registry.get("w12").settings("reference", {})
    on = registry.get("w12").settings("reference", {"weights": "w12"})
    counter = registry.get("w12").counter
    assert meta[counter] == 0
    assert generate(source, **off)[0] == stock
    tokens, meta = generate(source, **on)
    assert tokens == stock
    assert meta[counter] > 0


def test_a_damaged_matrix_is_found_on_loading(bf16) -> None:
    source = bf16("qwen3")
    packed = source.with_name("w12")
    folder.encode_folder(source, packed)
    path = packed / "model.safetensors"
    shard = container.W12Shard(path)
    span = shard.spans[next(iter(shard.matrices)) + ".w12.q"]
    data = bytearray(path.read_bytes())
    data[shard.data_start + span.start] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckFailed, match="other weights"):
        Target(packed)


def test_weights_that_are_no_bf16_values_are_not_packed(folder) -> None:
    with pytest.raises(InvalidInput, match="BF16 values"):
        Target(folder("qwen3"), packed=True)


def test_packed_weights_are_for_the_cpu() -> None:
    with pytest.raises(InvalidInput, match="decoded on the CPU"):
        ReferenceSettings(target="t", weights="w12", device="cuda")
