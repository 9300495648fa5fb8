"""Export and import of a memory as reviewable files: one JSON file an entry, all its revisions.

The round trip is exact. An import is one transaction: it goes in whole or not at all.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from specpilot.errors import CheckFailed, Conflict, InvalidInput
from specpilot.memory.schema import Entry, read_entry
from specpilot.memory.store import MemoryStore

__all__ = ["FORMAT", "Imported", "export_entries", "import_entries"]

FORMAT: Final = "specpilot-memory-1"
_MAX_FILE_BYTES: Final = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Imported:
    """How many revisions were added, and which entries were left out because of receipts."""

    files: int
    revisions: int
    unverified: tuple[str, ...] = ()


def export_entries(store: MemoryStore, folder: Path) -> int:
    """Write every entry with its revisions to ``folder/<id>.json``; return how many.

    The folder must be new or empty, so that a file there always stands for a stored entry.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise InvalidInput(f"{folder} is not empty.", hint="Export into a new folder.")
    ids = store.ids()
    for id in ids:
        revisions = [
            entry.model_dump(mode="json", exclude_defaults=True) for entry in store.history(id)
        ]
        text = json.dumps({"format": FORMAT, "revisions": revisions}, indent=1, ensure_ascii=False)
        (folder / f"{id}.json").write_text(text + "\n", encoding="utf-8")
    return len(ids)


def import_entries(store: MemoryStore, folder: Path, *, skip_unverified: bool = False) -> Imported:
    """Add the entries of exported files, or of single reviewed entry files, to a store.

    Raises InvalidInput for a malformed file, Conflict for an entry that differs here, CheckFailed
    for receipts that do not verify (``skip_unverified`` leaves those entries out instead).
    """
    if not folder.is_dir():
        raise InvalidInput(f"{folder} is no folder of exported entries.")
    files = sorted(folder.glob("*.json"))
    if not files:
        raise InvalidInput(f"{folder} holds no .json file.")
    added, unverified = 0, []
    with store.transaction():
        for path in files:
            try:
                added += store.restore(_revisions(path))
            except CheckFailed as error:
                if not skip_unverified:
                    raise CheckFailed(f"{path.name}: {error}") from None
                unverified.append(path.stem)
            except (Conflict, InvalidInput) as error:
                raise type(error)(f"{path.name}: {error}") from None
    return Imported(len(files), added, tuple(unverified))


def _revisions(path: Path) -> list[Entry]:
    if path.stat().st_size > _MAX_FILE_BYTES:
        raise InvalidInput(f"{path.stat().st_size} bytes are too many for one entry.")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"no JSON: {error}.") from None
    if not isinstance(raw, dict):
        raise InvalidInput("no exported entry: the file must hold a JSON object.")
    if "format" not in raw:
        raw = {"format": FORMAT, "revisions": [raw]}
    if raw["format"] != FORMAT:
        raise InvalidInput(f"format {raw['format']!r} is unknown; this version reads {FORMAT}.")
    revisions = raw.get("revisions")
    if not isinstance(revisions, list) or not revisions:
        raise InvalidInput("'revisions' must be a list that is not empty.")
    entries = [read_entry(item) for item in revisions if isinstance(item, dict)]
    if len(entries) != len(revisions) or {entry.id for entry in entries} != {path.stem}:
        raise InvalidInput(f"the file must hold revisions of the entry {path.stem!r} only.")
    return entries
