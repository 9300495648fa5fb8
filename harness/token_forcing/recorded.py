"""Recorded runs: the scored outputs of systems, one ``.npz`` each, to judge again and again.

A GPU generates and scores once; power curves and error rates are then drawn from the record on
any machine. One folder holds ``calibration.json``, ``run.json`` (deployment, settings, versions),
``task.json`` (right answers) and ``<system>.npz``.
"""

import json
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from specpilot.errors import InvalidInput, NotFound
from specpilot.harness.token_forcing.calibration import Calibration

__all__ = ["RecordedRun", "RecordedSystem", "load_run", "load_system", "save_system"]

CALIBRATION, RUN, TASK = "calibration.json", "run.json", "task.json"


@dataclass(frozen=True, slots=True, eq=False)
class RecordedSystem:
    """One system's requests. Ragged arrays are concatenated; ``lengths`` [requests] cuts them.

    ``tokens`` int32 and ``margins`` fp32 are [tokens of all requests]; ``event_at`` are indices
    into them where the margin is large, and ``event_margins`` [events] fp32 the smallest margin
    that any stock variant gives that token (infinite without variants).
    """

    name: str
    prompts: tuple[str, ...]
    lengths: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int32]
    margins: npt.NDArray[np.float32]
    event_at: npt.NDArray[np.int64]
    event_margins: npt.NDArray[np.float32]

    def __post_init__(self) -> None:
        total = int(self.lengths.sum())
        if (
            len(self.prompts) != len(self.lengths)
            or total != len(self.tokens)
            or total != len(self.margins)
            or len(self.event_at) != len(self.event_margins)
        ):
            raise InvalidInput(f"The record of {self.name!r} contradicts its own lengths.")

    def per_request(self, flags: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
        """Count true tokens by request: [requests] int64."""
        ends = np.cumsum(self.lengths)
        sums = np.concatenate(([0], np.cumsum(flags)))
        counts: npt.NDArray[np.int64] = sums[ends] - sums[ends - self.lengths]
        return counts

    def unexplained(self, near_tie: float) -> npt.NDArray[np.bool_]:
        """Which tokens are events that no variant explains: [tokens of all requests] bool."""
        flags = np.zeros(len(self.margins), dtype=bool)
        flags[self.event_at] = self.event_margins > near_tie
        return flags


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A folder of recorded systems with the calibration that they are judged by, and which of the
    task's ``answers`` were right."""

    calibration: Calibration
    facts: dict[str, Any]
    systems: dict[str, RecordedSystem]
    answers: dict[str, list[bool]] = field(default_factory=dict)


def save_system(folder: Path, system: RecordedSystem) -> None:
    """Write ``<name>.npz``. Margins keep fp32; both thresholds need more than half precision."""
    np.savez_compressed(
        folder / f"{system.name}.npz",
        prompts=np.array(system.prompts),
        lengths=system.lengths.astype(np.int32),
        tokens=system.tokens,
        margins=system.margins,
        event_at=system.event_at,
        event_margins=system.event_margins,
    )


def load_system(file: Path) -> RecordedSystem:
    """Read one system; raises ``InvalidInput`` for a file that is no record."""
    try:
        with np.load(file, allow_pickle=False) as data:
            return RecordedSystem(
                name=file.stem,
                prompts=tuple(data["prompts"].tolist()),
                lengths=data["lengths"].astype(np.int64),
                tokens=data["tokens"],
                margins=data["margins"],
                event_at=data["event_at"],
                event_margins=data["event_margins"],
            )
    except (KeyError, ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise InvalidInput(f"{file} is no recorded system: {error}.") from error


def load_run(folder: Path) -> RecordedRun:
    """Read a folder; raises ``NotFound`` if there is none, ``InvalidInput`` if it is damaged."""
    if not (folder / CALIBRATION).is_file():
        raise NotFound(
            f"There are no recorded runs in {folder}.",
            hint="Make them: python -P -m specpilot.harness.token_forcing.record --help",
        )
    try:
        calibration = Calibration.from_dict(json.loads((folder / CALIBRATION).read_text()))
        facts = json.loads((folder / RUN).read_text())
        answers = json.loads((folder / TASK).read_text()) if (folder / TASK).is_file() else {}
    except (ValueError, OSError) as error:
        raise InvalidInput(f"{folder} is no recorded run: {error}.") from error
    files: Sequence[Path] = sorted(folder.glob("*.npz"))
    return RecordedRun(calibration, facts, {f.stem: load_system(f) for f in files}, answers)
