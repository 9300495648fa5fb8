"""The entries that ship with SpecPilot: one reviewed JSON file each, loaded when asked for."""

import hashlib
import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable

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
    for file in _files():
        try:
            entry = read_entry(file.read_text(encoding="utf-8"))
        except InvalidInput as error:
            raise InvalidInput(f"Seed {file.name}: {error}") from None
        if file.name != f"{entry.id}.json":
            raise InvalidInput(f"Seed {file.name} holds the entry {entry.id!r}; rename one.")
        entries.append(entry)
    return tuple(entries)


def load_seeds(store: MemoryStore) -> SeedReport:
    """Bring the shipped entries into a store, in one transaction.

    When they are there already this costs one look at a digest, and nothing is parsed.
    """
    digest = _digest()
    if store.note("seeds_digest") == digest:
        return SeedReport(0, 0, len(_files()))
    entries = read_seeds()
    with store.transaction():
        outcomes = [store.reseed(entry) for entry in entries]
        store.set_note("seeds_digest", digest)
    return SeedReport(*(outcomes.count(word) for word in ("added", "updated", "kept")))


def _files() -> list[Traversable]:
    folder = files("specpilot.memory") / "seeds"
    return sorted(
        (file for file in folder.iterdir() if file.name.endswith(".json")),
        key=lambda file: file.name,
    )


@cache
def _digest() -> str:
    """Return a hash over names and contents of the shipped files, taken once a process."""
    digest = hashlib.sha256()
    for file in _files():
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


def as_file(entry: Entry) -> str:
    """Return the text of an entry's reviewable file: indented, fields in the schema's order."""
    return json.dumps(
        entry.model_dump(mode="json", exclude_defaults=True), indent=1, ensure_ascii=False
    ) + "\n"  # fmt: skip
