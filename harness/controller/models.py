"""Whether a deployment's model files are still those that its round was opened with.

Weights lie where the user put them, often where an agent can write. A drafter swapped between the
starts of two systems would be a gain that no patch made, so a round notes the state of every file
and each verdict compares it. Contents are not read: a change of any byte, name or link changes a
file's change time, which nobody but root can set.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path

from specpilot.errors import CheckFailed
from specpilot.types import Deployment

__all__ = ["check_unchanged", "stamp"]


def stamp(deployment: Deployment) -> str:
    """Return the sha256 (hex) over names, inodes, sizes and change times of all model files."""
    digest = hashlib.sha256()
    for folder in (deployment.target, deployment.drafter):
        for line in _states(Path(folder)) if folder is not None else ():
            digest.update(line.encode() + b"\0")
    return digest.hexdigest()


def _states(folder: Path) -> Iterator[str]:
    for path in (folder, *sorted(folder.rglob("*"))):
        for state in (path.lstat(), path.stat()):  # of a link, and of what it leads to
            yield f"{path} {state.st_dev} {state.st_ino} {state.st_size} {state.st_ctime_ns}"


def check_unchanged(deployment: Deployment, noted: object) -> None:
    """Raise ``CheckFailed`` unless the model files are as they were when ``noted`` was taken."""
    try:
        now = stamp(deployment)
    except OSError as error:
        raise CheckFailed(f"A model file of {deployment.id} is gone: {error}.") from error
    if now != noted:
        folders = " or ".join(filter(None, (deployment.target, deployment.drafter)))
        raise CheckFailed(
            f"Model files in {folders} changed since the round was opened.",
            hint="Nothing measured in between counts. Open a new round.",
        )
