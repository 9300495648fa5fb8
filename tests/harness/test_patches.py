"""Patches: what a stack means, and everything that must not get into one."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from specpilot.errors import Conflict, InvalidInput, NotFound, SpecPilotError, Unsupported
from specpilot.harness import patches
from specpilot.harness.deployments import registry
from specpilot.harness.engines.launch import launch_spec
from specpilot.harness.patches import MechanismUse, Patch
from specpilot.types import Deployment, Regime

MOCK = registry.load("mock")


def tree(tmp_path: Path, name: str = "tree", **params: int) -> Patch:
    use = MechanismUse("best_first_tree", params or {"rows": 24})
    return patches.create(tmp_path, name, "A tree", [use])


def args(tmp_path: Path, name: str, **launch_args: Any) -> Patch:
    return patches.create(tmp_path, name, "Arguments", (), launch_args)


def written(tmp_path: Path, manifest: Any) -> Path:
    folder = tmp_path / "written"
    folder.mkdir()
    text = manifest if isinstance(manifest, str) else json.dumps(manifest)
    (folder / "manifest.json").write_text(text)
    return folder


def test_no_patch_is_stock() -> None:
    assert patches.resolve(MOCK, []) == MOCK.stock


def test_a_stack_merges_mechanisms_and_arguments_onto_stock(tmp_path: Path) -> None:
    stack = [tree(tmp_path), args(tmp_path, "wider", max_running=16)]
    settings = patches.resolve(MOCK, stack)
    assert settings["speculation"] == "tree" and settings["rows"] == 24
    assert settings["max_running"] == 16
    assert patches.counters(stack) == {"best_first_tree": "spec_tree_passes"}
    launch_spec(MOCK, settings, "candidate", 4000, run_dir=tmp_path)


def test_a_mechanism_at_its_defaults_is_stock(tmp_path: Path) -> None:
    off = patches.create(tmp_path, "off", "Off", [MechanismUse("best_first_tree", {})])
    assert patches.resolve(MOCK, [off]) == MOCK.stock


def test_two_patches_that_disagree_are_both_named(tmp_path: Path) -> None:
    stack = [tree(tmp_path), args(tmp_path, "rows", rows=16)]
    with pytest.raises(Conflict, match=r"patch 'tree' sets rows to 24.*patch 'rows' to 16"):
        patches.resolve(MOCK, stack)


def test_two_patches_that_agree_stack(tmp_path: Path) -> None:
    stack = [tree(tmp_path), args(tmp_path, "rows", rows=24)]
    assert patches.resolve(MOCK, stack) == patches.resolve(MOCK, stack[:1])


def test_the_same_patch_twice_is_refused(tmp_path: Path) -> None:
    patch = tree(tmp_path)
    with pytest.raises(Conflict, match="holds patch 'tree' twice"):
        patches.resolve(MOCK, [patch, patch])


@pytest.mark.parametrize("name", ["target", "drafter", "dtype", "port", "nonce", "overlay", "no"])
def test_launch_arguments_may_not_change_what_is_measured(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidInput, match=f"may not set '{name}'.*Settings of the mock engine"):
        patches.resolve(MOCK, [args(tmp_path, "bad", **{name: "x"})])


@pytest.mark.parametrize(
    ("use", "error", "words"),
    [
        (MechanismUse("perpetual_motion", {}), NotFound, "perpetual_motion"),
        (MechanismUse("best_first_tree", {"warp": 9}), InvalidInput, "warp"),
        (MechanismUse("best_first_tree", {"rows": 4096}), InvalidInput, "rows"),
    ],
)
def test_unknown_mechanisms_and_wrong_parameters_are_refused(
    tmp_path: Path, use: MechanismUse, error: type[SpecPilotError], words: str
) -> None:
    with pytest.raises(error, match=words):
        patches.resolve(MOCK, [patches.create(tmp_path, "bad", "Bad", [use])])


def test_a_mechanism_that_does_not_apply_says_why(tmp_path: Path) -> None:
    plain = Deployment(
        "plain", "P", "mock", MOCK.target, None, None, "cpu", "float32", Regime(), "mock"
    )
    with pytest.raises(Unsupported, match=r"does not apply to 'plain': .*drafter"):
        patches.resolve(plain, [tree(tmp_path)])


def test_settings_that_only_clash_together_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="max_running"):
        patches.resolve(MOCK, [args(tmp_path, "zero", max_running=0)])


@pytest.mark.parametrize(
    ("manifest", "words"),
    [
        ("{", "the whole file"),
        ([], "the whole file"),
        ({"id": "a"}, "title"),
        ({"id": "../a", "title": "t"}, "id"),
        ({"id": "A b", "title": "t"}, "id"),
        ({"id": "a", "title": "t", "extra": 1}, "extra"),
        ({"id": "a", "title": "t", "mechanisms": ["x"]}, "mechanisms.0"),
        ({"id": "a", "title": "t", "launch_args": {"x": [1]}}, "launch_args.x"),
        ({"id": "a", "title": "t", "overlay": "../other"}, "inside the patch"),
        ({"id": "a", "title": "t", "overlay": "/etc"}, "inside the patch"),
        ({"id": "a", "title": "t", "overlay": ""}, "inside the patch"),
        ({"id": "a", "title": "t", "overlay": "code"}, "has no overlay.py"),
    ],
)
def test_a_wrong_manifest_is_refused_by_its_field(
    tmp_path: Path, manifest: Any, words: str
) -> None:
    with pytest.raises(InvalidInput, match=words):
        patches.load(written(tmp_path, manifest))


def test_a_folder_without_manifest_is_no_patch(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"manifest\.json is missing"):
        patches.load(tmp_path)


def overlaid(tmp_path: Path) -> Path:
    folder = written(tmp_path, {"id": "code", "title": "Code", "overlay": "code"})
    (folder / "code").mkdir()
    (folder / "code" / "overlay.py").write_text("def apply(backend): return backend\n")
    return folder


def test_an_overlay_reaches_the_engine_by_path(tmp_path: Path) -> None:
    patch = patches.load(overlaid(tmp_path))
    settings = patches.resolve(MOCK, [patch])
    assert settings["overlay"] == str(patch.folder / "code")


def test_every_byte_and_name_counts_in_the_hash(tmp_path: Path) -> None:
    folder = overlaid(tmp_path)
    seen = {patches.load(folder).sha256}
    assert patches.load(folder).sha256 in seen
    (folder / "code" / "overlay.py").write_text("def apply(backend): return  backend\n")
    seen.add(patches.load(folder).sha256)
    (folder / "note").write_text("")
    seen.add(patches.load(folder).sha256)
    (folder / "note").rename(folder / "nota")
    seen.add(patches.load(folder).sha256)
    assert len(seen) == 4


@pytest.mark.parametrize("kind", ["link", "pipe", "compiled", "large", "many"])
def test_what_could_hide_code_is_refused(tmp_path: Path, kind: str) -> None:
    folder = overlaid(tmp_path)
    if kind == "link":
        (folder / "x").symlink_to("/etc")
    elif kind == "pipe":
        os.mkfifo(folder / "x")
    elif kind == "compiled":
        (folder / "code" / "__pycache__").mkdir()
    elif kind == "many":
        for i in range(patches.MAX_FILES):
            (folder / f"{i}").touch()
    else:
        with (folder / "x").open("wb") as file:
            file.truncate(patches.MAX_BYTES + 1)
    with pytest.raises(InvalidInput):
        patches.load(folder)


def test_a_frozen_patch_is_a_copy_that_its_author_cannot_change(tmp_path: Path) -> None:
    folder = overlaid(tmp_path)
    patch = patches.load(folder)
    frozen = patches.freeze(patch, tmp_path / "kept")
    (folder / "code" / "overlay.py").write_text("import evil\n")
    assert patches.load(frozen.folder).sha256 == patch.sha256
    with pytest.raises(Conflict, match="exists"):
        patches.freeze(patch, tmp_path / "kept")
    with pytest.raises(Conflict, match="changed while it was being copied"):
        patches.freeze(patch, tmp_path / "again")
    (folder / "code" / "pipe").symlink_to("/etc")
    with pytest.raises(Conflict, match="changed while it was being copied"):
        patches.freeze(patch, tmp_path / "again")
    assert not (tmp_path / "again" / patch.id).exists()


def test_creating_over_a_patch_is_a_conflict(tmp_path: Path) -> None:
    tree(tmp_path)
    with pytest.raises(Conflict, match="exists"):
        tree(tmp_path)
    with pytest.raises(InvalidInput, match="id"):
        tree(tmp_path, "../escape")
