"""Copies of patches that their author cannot edit any more, by the hash of their content.

An agent owns its patch directory and could change it between check, start and report. What is
measured, promoted and named in a receipt is the controller's copy.
"""

import shutil
import threading
from pathlib import Path

from specpilot.errors import CheckFailed, NotFound
from specpilot.harness import patches
from specpilot.harness.patches import Patch

__all__ = ["Snapshots"]


class Snapshots:
    """The controller's folder of copies: ``folder/<sha256>/<patch id>``.

    A copy is made aside and then renamed, so one that a kill cut short is never taken for whole.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._unfinished = folder / ".unfinished"

    def take(self, source: Path) -> Patch:
        """Copy the patch at ``source``, once for each content; raises like ``patches.load``."""
        patch = patches.load(source)
        with self._lock:
            if (self._folder / patch.sha256 / patch.id).exists():
                return self.get(patch.sha256)
            shutil.rmtree(self._unfinished, ignore_errors=True)
            patches.freeze(patch, self._unfinished)
            self._unfinished.replace(self._folder / patch.sha256)
            return self.get(patch.sha256)

    def get(self, sha256: str) -> Patch:
        """Return a copy taken earlier. Raises ``CheckFailed`` if it was changed since."""
        found = list((self._folder / sha256).glob("*")) if sha256.isalnum() else []
        if not found:
            raise NotFound(f"The controller has no copy of the patch {sha256[:16]}….")
        patch = patches.load(found[0])
        if patch.sha256 != sha256:
            raise CheckFailed(f"The controller's copy of patch {patch.id!r} was changed.")
        return patch
