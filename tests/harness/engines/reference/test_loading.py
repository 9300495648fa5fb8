"""What is wrong with a model folder is said before anything runs."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from specpilot.errors import InvalidInput, NotFound, Unsupported
from specpilot.harness.engines.reference.config import TargetConfig
from specpilot.harness.engines.reference.engine import ReferenceEngine
from specpilot.harness.engines.reference.target import Target
from specpilot.harness.engines.settings import ReferenceSettings


@pytest.fixture
def copy(folder, tmp_path):
    """A function that copies a model folder and changes fields of its config."""

    def make(kind: str = "hybrid", **changes):
        path = tmp_path / "model"
        shutil.copytree(folder(kind), path)
        config = json.loads((path / "config.json").read_text())
        config |= changes
        config = {k: v for k, v in config.items() if v != "remove"}
        (path / "config.json").write_text(json.dumps(config))
        return path

    return make


@pytest.mark.parametrize(
    ("kind", "changes", "error", "complaint"),
    [
        ("hybrid", {"architectures": ["GPT2LMHeadModel"]}, Unsupported, "GPT2LMHeadModel"),
        ("hybrid", {"layer_types": ["full_attention"] * 3}, InvalidInput, "lists 3 layers"),
        ("hybrid", {"layer_types": ["sliding_attention"] * 4}, Unsupported, r"layer_types\[0\]"),
        ("qwen3", {"layer_types": ["linear_attention"] * 4}, Unsupported, "linear_attention"),
        ("hybrid", {"num_key_value_heads": 3}, InvalidInput, "not a multiple"),
        ("hybrid", {"linear_num_value_heads": 5}, InvalidInput, "linear_num_value_heads 5"),
        ("hybrid", {"linear_num_key_heads": "remove"}, InvalidInput, "linear_num_key_heads"),
        ("hybrid", {"hidden_size": "48"}, InvalidInput, "hidden_size must be a positive integer"),
        ("hybrid", {"hidden_act": "gelu"}, Unsupported, "gelu"),
        ("llama", {"rope_parameters": {"rope_type": "yarn"}}, Unsupported, "yarn"),
        ("llama", {"mlp_bias": True}, Unsupported, "mlp_bias"),
        ("llama", {"eos_token_id": "end"}, InvalidInput, "eos_token_id"),
        ("hybrid", {"intermediate_size": 81}, InvalidInput, r"gate_proj.* is \(80, 48\)"),
        ("qwen3", {"num_hidden_layers": 5, "layer_types": None}, NotFound, "layers.4"),
    ],
)
def test_a_config_that_cannot_be_run_is_refused(copy, kind, changes, error, complaint):
    with pytest.raises(error, match=complaint):
        Target(copy(kind, **changes))


def test_missing_files_are_named(tmp_path, copy):
    with pytest.raises(NotFound, match=r"config\.json"):
        Target(tmp_path)
    path = copy()
    (path / "model.safetensors").unlink()
    with pytest.raises(NotFound, match=r"model\.safetensors"):
        Target(path)


def test_a_truncated_weights_file_is_refused(copy):
    path = copy()
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[:-100])
    with pytest.raises(InvalidInput, match="truncated"):
        Target(path)


def test_shards_give_the_same_model_and_a_lost_tensor_is_named(copy, folder):
    path = copy()
    tensors = load_file(path / "model.safetensors")
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, keys in parts.items():
        save_file({k: tensors[k] for k in keys}, path / file)
    index = {"weight_map": {k: file for file, keys in parts.items() for k in keys}}
    (path / "model.safetensors").unlink()
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    sharded, whole = Target(path), Target(folder("hybrid"))
    assert torch.equal(sharded.layers[1].mlp.w_in, whole.layers[1].mlp.w_in)
    save_file({k: tensors[k] for k in names[:4:2]}, path / "a.safetensors")
    with pytest.raises(InvalidInput, match="does not hold"):
        Target(path)


def test_the_text_model_of_a_composed_config_is_read(copy):
    path = copy()
    text = json.loads((path / "config.json").read_text())
    outer = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text}
    (path / "config.json").write_text(json.dumps(outer))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 1]}))
    config = TargetConfig.load(path)
    assert config.prefix == "model.language_model."
    assert config.eos_ids == (1, 3)
    assert config.layer_types[0] == "linear_attention"


def test_tokenizers_that_do_not_fit_are_refused(copy, drafter_folder):
    def write(path, words):
        vocabulary = {word: i for i, word in enumerate(words)}
        Tokenizer(WordLevel(vocabulary)).save(str(path / "tokenizer.json"))

    target, drafter = copy(), drafter_folder()
    settings = ReferenceSettings(
        target=str(target), drafter=str(drafter), speculation="chain", context=64
    )
    write(target, "abc")
    write(drafter, "acb")
    with pytest.raises(InvalidInput, match="different tokenizers"):
        ReferenceEngine(settings)
    write(drafter, "abc")
    assert ReferenceEngine(settings).vocab_size == 97
    write(target, map(str, range(98)))
    with pytest.raises(InvalidInput, match="ids up to 97"):
        ReferenceEngine(settings)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"block": 9}, "block 9 exceeds"),
        ({"speculation": "tree", "rows": 200}, "rows 200 exceeds"),
        ({"context": 300}, "context 300 exceeds"),
    ],
)
def test_settings_that_do_not_fit_the_models_are_refused(
    folder, drafter_folder, changes, complaint
):
    given = {"speculation": "chain", "context": 64, **changes}
    with pytest.raises(InvalidInput, match=complaint):
        ReferenceEngine(
            ReferenceSettings(target=str(folder("hybrid")), drafter=str(drafter_folder()), **given)
        )
