"""Model files that change while a round is open: nothing measured with them counts."""

import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specpilot.errors import CheckFailed
from specpilot.harness import patches
from specpilot.harness.controller.models import check_unchanged, stamp
from specpilot.harness.deployments import registry
from specpilot.types import Deployment


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    mock = registry.load("mock")
    shutil.copytree(mock.target, tmp_path / "target")
    time.sleep(0.02)  # change times have the grain of the kernel's clock
    return replace(mock, target=str(tmp_path / "target"), drafter=None)


def test_files_that_nobody_touches_keep_their_stamp(deployment: Deployment) -> None:
    check_unchanged(deployment, stamp(deployment))


@pytest.mark.parametrize("what", ["edit", "edit and restore", "swap folder", "add", "remove"])
def test_every_change_is_seen_even_if_it_was_undone(deployment: Deployment, what: str) -> None:
    folder = Path(deployment.target)
    noted = stamp(deployment)
    config = folder / "config.json"
    before = config.stat()
    match what:
        case "edit":
            config.write_text("{}")
        case "edit and restore":
            text = config.read_text()
            config.write_text("{}")
            config.write_text(text)
            os.utime(config, ns=(before.st_atime_ns, before.st_mtime_ns))
        case "swap folder":
            folder.rename(folder.with_name("kept"))
            folder.with_name("kept").rename(folder)
        case "add":
            (folder / "more.safetensors").touch()
        case "remove":
            config.unlink()
    with pytest.raises(CheckFailed, match="changed since the round was opened"):
        check_unchanged(deployment, noted)


def test_a_trial_on_models_that_changed_is_not_recorded(
    controller: Any, tmp_path: Path, deployment: Deployment
) -> None:
    definition = {
        "id": "swapped", "title": "mock", "engine": "mock", "target": deployment.target,
        "hardware": "cpu", "dtype": "float32", "workload": "mock",
        "regime": {"prompt_tokens": 16, "output_tokens": 64},
        "stock": {"speculation": "chain", "block": 8}, "launch": {"threads": 1, "delay_ms": 0.5},
    }  # fmt: skip
    registry.add(definition)
    round_id = replace(controller, deployment="swapped").open()
    (Path(deployment.target) / "config.json").touch()
    fast = patches.create(tmp_path, "fast", "fast", launch_args={"tokens_per_pass": 6})
    ended = controller.trial(round_id, fast.folder)
    assert ended.state == "failed"
    assert "changed since the round was opened" in ended.message
    assert controller.status(round_id).trials == []
