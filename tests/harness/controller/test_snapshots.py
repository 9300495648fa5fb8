"""Copies of patches: whole or absent, whatever interrupts the copying."""

from pathlib import Path

import pytest

from specpilot.errors import CheckFailed
from specpilot.harness import patches
from specpilot.harness.controller.snapshots import Snapshots
from specpilot.harness.patches import Patch


class Killed(BaseException):
    """Stands for the end of the process: nothing after it is carried out."""


def test_a_copy_that_a_kill_cut_short_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch = patches.create(tmp_path, "fast", "fast", launch_args={"rows": 8})

    def cut_short(patch: Patch, parent: Path) -> Patch:
        (parent / patch.id).mkdir(parents=True)
        raise Killed

    with monkeypatch.context() as during:
        during.setattr(patches, "freeze", cut_short)
        with pytest.raises(Killed):
            Snapshots(tmp_path / "copies").take(patch.folder)
    taken = Snapshots(tmp_path / "copies").take(patch.folder)
    assert taken.sha256 == patch.sha256
    assert Snapshots(tmp_path / "copies").take(patch.folder) == taken


def test_a_copy_that_was_changed_is_refused(tmp_path: Path) -> None:
    patch = patches.create(tmp_path, "fast", "fast", launch_args={"rows": 8})
    copies = Snapshots(tmp_path / "copies")
    copy = copies.take(patch.folder)
    (copy.folder / "more").write_text("x")
    with pytest.raises(CheckFailed, match="was changed"):
        copies.get(patch.sha256)
