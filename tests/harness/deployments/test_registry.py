"""Deployments as data: loading, registering, and everything that makes one unusable."""

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specpilot.errors import Conflict, InvalidInput, NotFound
from specpilot.harness.deployments import registry
from specpilot.harness.deployments.health import check_health, check_weights
from specpilot.harness.deployments.schema import parse_deployment, to_json


def safetensors(path: Path, cut: int = 0) -> None:
    header = {"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}
    text = json.dumps(header).encode()
    data = struct.pack("<Q", len(text)) + text + bytes(16)
    path.write_bytes(data[: len(data) - cut])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A deployment of a reference engine whose files are sound."""
    root = tmp_path / "mine"
    config = {"architectures": ["X"], "hidden_size": 64, "vocab_size": 100, "num_hidden_layers": 4}
    for role in ("target", "drafter"):
        (root / role).mkdir(parents=True)
        (root / role / "config.json").write_text(json.dumps(config))
        (root / role / "tokenizer.json").write_text('{"model": {"a": 1}}')
        safetensors(root / role / "model.safetensors")
    deployment = {
        "id": "mine",
        "title": "Mine",
        "engine": "reference",
        "target": "target",
        "drafter": "drafter",
        "drafter_kind": "block",
        "hardware": "cpu",
        "dtype": "bfloat16",
        "regime": {"requests": 2},
        "workload": "mock",
        "stock": {"speculation": "chain", "block": 8},
    }
    (root / "deployment.json").write_text(json.dumps(deployment))
    return root


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_every_shipped_deployment_loads_and_is_sound() -> None:
    ids = registry.list_ids()
    assert "mock" in ids
    for deployment_id in ids:
        deployment = registry.load(deployment_id)
        assert deployment.id == deployment_id
        assert Path(deployment.target).is_absolute()
        assert check_health(deployment).problems == ()


def test_an_unknown_id_lists_what_exists() -> None:
    with pytest.raises(NotFound, match=r"no deployment 'nope'\. Deployments: .*mock"):
        registry.load("nope")


def test_a_registered_deployment_comes_back_equal(folder: Path) -> None:
    added = registry.add(folder)
    assert added.target == str(folder / "target") and added.regime.requests == 2
    assert registry.load("mine") == added
    assert "mine" in registry.list_ids()
    assert registry.add(folder / "deployment.json") == added  # again: nothing changes


def test_a_mapping_needs_absolute_paths(folder: Path) -> None:
    raw = json.loads((folder / "deployment.json").read_text())
    with pytest.raises(InvalidInput, match="target: 'target' must be an absolute path"):
        registry.add(raw)
    raw |= {"target": str(folder / "target"), "drafter": str(folder / "drafter")}
    assert registry.add(raw).id == "mine"


def test_an_id_is_taken_once(folder: Path) -> None:
    registry.add(folder)
    edit(folder / "deployment.json", title="Other")
    with pytest.raises(Conflict, match="another deployment 'mine'"):
        registry.add(folder)
    edit(folder / "deployment.json", id="mock")
    with pytest.raises(Conflict, match="another deployment 'mock'"):
        registry.add(folder)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"id": "../../etc"}, "id"),
        ({"id": ""}, "id"),
        ({"engine": "vllm"}, "engine"),
        ({"dtype": "int4"}, "dtype"),
        ({"extra": 1}, "extra"),
        ({"regime": {"requests": 0}}, "regime.requests"),
        ({"regime": {"temperature": "hot"}}, "regime.temperature"),
        ({"drafter_kind": None}, "drafter and drafter_kind"),
        ({"stock": {"warp": 9}}, "no setting 'warp'"),
        ({"stock": {"block": 1}}, "block"),
        ({"hardware": "GTX 9999"}, "hardware"),
    ],
)
def test_a_wrong_file_is_refused_by_its_field(
    folder: Path, changes: dict[str, Any], words: str
) -> None:
    edit(folder / "deployment.json", **changes)
    with pytest.raises(InvalidInput, match=words):
        registry.add(folder)
    assert "mine" not in registry.list_ids()


def no_target(folder: Path) -> None:
    (folder / "target").rename(folder / "moved")


def no_config(folder: Path) -> None:
    (folder / "target" / "config.json").unlink()


def bad_config(folder: Path) -> None:
    (folder / "target" / "config.json").write_text("{")


def no_weights(folder: Path) -> None:
    (folder / "drafter" / "model.safetensors").unlink()


def truncated(folder: Path) -> None:
    safetensors(folder / "target" / "model.safetensors", cut=5)


def cut_header(folder: Path) -> None:
    safetensors(folder / "target" / "model.safetensors", cut=40)


def empty(folder: Path) -> None:
    (folder / "target" / "model.safetensors").write_bytes(b"")


def lost_shard(folder: Path) -> None:
    index = {"weight_map": {"w": "model.safetensors", "v": "model-2.safetensors"}}
    (folder / "target" / "model.safetensors.index.json").write_text(json.dumps(index))


def bad_index(folder: Path) -> None:
    (folder / "target" / "model.safetensors.index.json").write_text("[]")


def other_width(folder: Path) -> None:
    edit(folder / "drafter" / "config.json", hidden_size=128)


def other_vocabulary(folder: Path) -> None:
    edit(folder / "drafter" / "config.json", vocab_size=101)


def layer_beyond(folder: Path) -> None:
    edit(folder / "drafter" / "config.json", dflash_config={"target_layer_ids": [0, 4]})


def mask_beyond(folder: Path) -> None:
    edit(folder / "drafter" / "config.json", dflash_config={"mask_token_id": 100})


def other_tokenizer(folder: Path) -> None:
    (folder / "drafter" / "tokenizer.json").write_text('{"model": {"a": 2}}')


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (no_target, "target: the folder .* does not exist"),
        (no_config, "target: cannot read .*config.json"),
        (bad_config, "config.json is not JSON"),
        (no_weights, r"drafter: no \*\.safetensors"),
        (truncated, "has 81 bytes, its header says 86"),
        (cut_header, "is truncated|no safetensors file"),
        (empty, "no safetensors file"),
        (lost_shard, "cannot read .*model-2.safetensors: No such file"),
        (bad_index, "is no safetensors index"),
        (other_width, "its hidden_size is 128, the target's is 64"),
        (other_vocabulary, "its vocab_size is 101, the target's is 100"),
        (layer_beyond, "reads target layer 4, the target has 4"),
        (mask_beyond, "mask token 100 is outside"),
        (other_tokenizer, "tokenizer.json differs"),
    ],
)
def test_damaged_or_unfitting_models_are_found(
    folder: Path, damage: Callable[[Path], None], words: str
) -> None:
    assert registry.add(folder)
    damage(folder)
    problems = check_health(registry.load("mine")).problems
    assert len(problems) == 1
    assert re.search(words, problems[0])


def test_a_composed_config_is_read_at_its_language_model(folder: Path) -> None:
    path = folder / "target" / "config.json"
    path.write_text(
        json.dumps({"architectures": ["Y"], "text_config": json.loads(path.read_text())})
    )
    assert check_health(registry.add(folder)).ok


def test_all_problems_are_told_at_once(folder: Path) -> None:
    truncated(folder)
    other_width(folder)
    with pytest.raises(InvalidInput, match=r"(?s)header says.*hidden_size is 128"):
        registry.add(folder)


def test_writing_and_parsing_are_inverse() -> None:
    mock = registry.load("mock")
    assert parse_deployment(to_json(mock), "x", Path("/elsewhere")) == mock


def test_a_missing_file_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="There is no file"):
        registry.add(tmp_path / "nothing.json")


def test_weights_of_one_file_are_sound(tmp_path: Path) -> None:
    safetensors(tmp_path / "model.safetensors")
    assert check_weights(tmp_path) == []


@pytest.mark.parametrize("group", ["stock", "launch"])
@pytest.mark.parametrize("name", ["overlay", "target", "dtype", "nonce", "port"])
def test_a_deployment_cannot_bring_code_or_models_in_through_its_settings(
    folder: Path, group: str, name: str
) -> None:
    file = folder / "deployment.json"
    given = json.loads(file.read_text()).get(group, {})
    edit(file, **{group: given | {name: 1 if name == "port" else str(folder)}})
    with pytest.raises(InvalidInput, match=f"{group} may not set '{name}'"):
        registry.add(file)


@pytest.mark.parametrize("threads", ["two", 0, 1.5, True])
def test_threads_are_a_whole_number_above_0(folder: Path, threads: object) -> None:
    edit(folder / "deployment.json", launch={"threads": threads})
    with pytest.raises(InvalidInput, match="threads"):
        registry.add(folder / "deployment.json")
