"""What is wrong or doubtful in a memory: found and shown, never repaired silently."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from specpilot.errors import SpecPilotError
from specpilot.memory.schema import Entry, Evidence, Transfer
from specpilot.memory.store import MemoryStore, overlap, trigrams
from specpilot.memory.text import index_terms

__all__ = ["Finding", "check_memory"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One doubt. Errors break a promise of the store, warnings ask a person to look."""

    kind: Literal["duplicate", "contradiction", "dead_link", "receipt", "damaged", "suspicious"]
    severity: Literal["error", "warning"]
    entry: str
    detail: str


def check_memory(store: MemoryStore) -> tuple[Finding, ...]:
    """Look at every entry: near-duplicates, contradictions, dead links, receipts, hashes, text."""
    findings: list[Finding] = []
    entries: dict[str, Entry] = {}
    for id in store.ids():
        try:
            entries[id] = store.get(id)
        except SpecPilotError as error:
            findings.append(Finding("damaged", "error", id, str(error)))
    for entry in entries.values():
        findings += _links(entry, entries)
        findings += _receipts(store, entry)
        findings += _duplicates(store, entry, entries)
    findings += _opposite_outcomes(entries)
    for card in store.columns().cards:
        if card.suspicious:
            detail = "its text addresses the reader instead of stating a fact"
            findings.append(Finding("suspicious", "warning", card.id, detail))
    return tuple(sorted(findings, key=lambda f: (f.severity, f.kind, f.entry, f.detail)))


def _links(entry: Entry, entries: dict[str, Entry]) -> Iterator[Finding]:
    for link in entry.interactions:
        if link.other not in entries:
            yield Finding("dead_link", "error", entry.id,
                          f"{link.relation} {link.other}, which does not exist")  # fmt: skip
        elif link.relation == "contradicts":
            yield Finding("contradiction", "warning", entry.id,
                          f"contradicts {link.other}: {link.note or 'no note'}")  # fmt: skip


def _receipts(store: MemoryStore, entry: Entry) -> Iterator[Finding]:
    rows: tuple[Evidence | Transfer, ...] = (*entry.evidence, *entry.transfers)
    for row in rows:
        if row.receipt is not None and not store.vouched(row):
            detail = f"receipt {row.receipt.seq} ({row.receipt.hash[:12]}) does not verify"
            yield Finding("receipt", "error", entry.id, detail)
    if entry.status == "validated" and not any(
        row.promoted and store.vouched(row) for row in entry.evidence
    ):
        yield Finding("receipt", "error", entry.id, "validated, but no receipt supports it now")


def _duplicates(store: MemoryStore, entry: Entry, entries: dict[str, Entry]) -> Iterator[Finding]:
    mine = trigrams(entry.title)
    rows = store.columns().rows
    at = store.columns().position
    for row in store.text_scores(index_terms(entry.title), limit=12):
        other = entries.get(store.columns().cards[at[row]].id) if row in at and rows else None
        if other is None or other.id <= entry.id or other.kind != entry.kind:
            continue
        if overlap(mine, trigrams(other.title)) >= 0.6:
            yield Finding("duplicate", "warning", entry.id,
                          f"{other.id} has nearly the same title")  # fmt: skip


def _opposite_outcomes(entries: dict[str, Entry]) -> Iterator[Finding]:
    """Yield entries whose own transfers disagree on one deployment, with equal notes."""
    for entry in entries.values():
        verdicts: dict[tuple[str, str], set[bool]] = {}
        for transfer in entry.transfers:
            works = transfer.outcome in ("works", "works_retuned")
            verdicts.setdefault((transfer.deployment, transfer.note), set()).add(works)
        for (deployment, note), seen in verdicts.items():
            if len(seen) == 2:
                detail = f"on {deployment} it both works and does not ({note or 'no note'})"
                yield Finding("contradiction", "warning", entry.id, detail)
