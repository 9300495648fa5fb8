"""The entries that ship with SpecPilot: one reviewed JSON file each, loaded when asked for."""

import json
from dataclasses import dataclass
from importlib.resources import files

from specpilot.errors import InvalidInput
from specpilot.memory.schema import Entry, read_entry
from specpilot.memory.store import MemoryStore

__all__ = ["SeedReport", "as_file", "load_seeds", "read_seeds"]


@dataclass(frozen=True, slots=True)
class SeedReport:
    """How many shipped entries were added, brought up to date, or already there."""

    added: int
    updated: int
    kept: int


def read_seeds() -> tuple[Entry, ...]:
    """Read and check every shipped entry, by id. Raises InvalidInput naming the file."""
    entries = []
    folder = files("specpilot.memory") / "seeds"
    for file in sorted(folder.iterdir(), key=lambda item: item.name):
        if not file.name.endswith(".json"):
            continue
        try:
            entry = read_entry(file.read_text(encoding="utf-8"))
        except InvalidInput as error:
            raise InvalidInput(f"Seed {file.name}: {error}") from None
        if file.name != f"{entry.id}.json":
            raise InvalidInput(f"Seed {file.name} holds the entry {entry.id!r}; rename one.")
        entries.append(entry)
    return tuple(entries)


def load_seeds(store: MemoryStore) -> SeedReport:
    """Bring the shipped entries into a store, in one transaction. Cheap when nothing changed."""
    entries = read_seeds()
    with store.transaction():
        outcomes = [store.reseed(entry) for entry in entries]
    return SeedReport(*(outcomes.count(word) for word in ("added", "updated", "kept")))


def as_file(entry: Entry) -> str:
    """Return the text of an entry's reviewable file: indented, fields in the schema's order."""
    return json.dumps(
        entry.model_dump(mode="json", exclude_defaults=True), indent=1, ensure_ascii=False
    ) + "\n"  # fmt: skip
