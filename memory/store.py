"""The memory: append-only revisions of entries in one SQLite file, safe with many writers.

Nothing is rewritten and nothing is merged: a revision adds rows, contradictions are links that
are shown from both sides. Status rises only through the receipt verifier that the caller gives.
"""

import difflib
import hashlib
import re
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from specpilot.errors import CheckFailed, Conflict, InvalidInput, NotFound
from specpilot.memory.cards import CARD_VERSION, Card, card_of, search_text
from specpilot.memory.columns import Columns
from specpilot.memory.database import TOKENIZER, Database
from specpilot.memory.query import STOP_WORDS
from specpilot.memory.schema import (
    Change,
    Entry,
    Evidence,
    Note,
    Transfer,
    canonical,
    parse,
    read_entry,
)
from specpilot.memory.text import index_terms, indexable
from specpilot.types import StepShares

if TYPE_CHECKING:
    from specpilot.memory.retrieval import SearchResult, VectorScores

__all__ = ["Link", "MemoryStore", "ReceiptVerifier", "Written"]

_CLOSE = 0.8
_SMALL = 1000
"""Below this many entries every word is searched: the index is fast anyway."""

ReceiptVerifier = Callable[[Evidence | Transfer], bool]
"""Says whether the ledger holds a row's ``receipt`` and says what the row says: its ``deployment``
and ``figures``, for evidence its ``forcing`` and whether it was ``promoted``.

Only ``True`` accepts. An exception counts as a refusal: a check that cannot run did not pass.
"""


@dataclass(frozen=True, slots=True)
class Link:
    """A relation between two entries, seen from ``source``."""

    source: str
    relation: str
    other: str


@dataclass(frozen=True, slots=True)
class Written:
    """A revision that was stored. ``similar`` names entries that may say the same."""

    entry: Entry
    seq: int
    similar: tuple[str, ...] = ()


class MemoryStore:
    """A memory in one SQLite file, made if missing. Threads may share it, processes open their own.

    Raises Unsupported for a store from a newer version, a read-only place or a full disk,
    InvalidInput for a file that is no memory.
    """

    def __init__(self, path: Path | str, *, verifier: ReceiptVerifier | None = None) -> None:
        self.database = Database(Path(path))
        self._verifier = verifier
        self._columns = Columns()
        self._seen: tuple[int, int] = (-1, -1)
        self._own_writes = 0
        self._refresh_cards()

    def __enter__(self) -> "MemoryStore":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.database.close()

    # Reading

    def get(self, id: str, revision: int | None = None) -> Entry:
        """Return an entry, at its head or at an earlier revision. Raises NotFound."""
        with self.database.read() as connection:
            row = connection.execute(
                "SELECT body, sha256 FROM revisions WHERE id = ?"
                + (" AND revision = ?" if revision else " ORDER BY revision DESC LIMIT 1"),
                (id, revision) if revision else (id,),
            ).fetchone()
        if row is None:
            at = f" at revision {revision}" if revision else ""
            raise NotFound(f"No memory entry {str(id)[:80]!r}{at}.", hint="Search for its subject.")
        if _sha(row[0]) != row[1]:
            raise CheckFailed(f"The stored text of {id!r} does not match its hash.")
        return read_entry(row[0])

    def history(self, id: str) -> tuple[Entry, ...]:
        """Return all revisions of an entry, oldest first. Raises NotFound."""
        with self.database.read() as connection:
            rows = connection.execute(
                "SELECT body FROM revisions WHERE id = ? ORDER BY revision", (id,)
            ).fetchall()
        if not rows:
            raise NotFound(f"No memory entry {str(id)[:80]!r}.")
        return tuple(read_entry(row[0]) for row in rows)

    def links(self, id: str) -> tuple[Link, ...]:
        """Return the relations of an entry in both directions."""
        with self.database.read() as connection:
            rows = connection.execute(
                "SELECT source, relation, other FROM links WHERE source = ? OR other = ? "
                "ORDER BY source, relation, other", (id, id),
            )  # fmt: skip
            return tuple(Link(*row) for row in rows)

    def ids(self) -> tuple[str, ...]:
        """Return the ids of all entries, sorted."""
        with self.database.read() as connection:
            return tuple(row[0] for row in connection.execute("SELECT id FROM heads ORDER BY id"))

    def entries(self) -> Iterator[Entry]:
        """Yield all entries at their head, by id."""
        for id in self.ids():
            yield self.get(id)

    def __len__(self) -> int:
        with self.database.read() as connection:
            return int(connection.execute("SELECT count(*) FROM heads").fetchone()[0])

    # Writing

    def propose(self, entry: Entry | Mapping[str, Any] | str) -> Written:
        """Store a new entry as revision 1.

        Raises InvalidInput for a malformed entry, Conflict when the id exists, CheckFailed when
        it claims a status that its receipts do not support.
        """
        entry = entry if isinstance(entry, Entry) else read_entry(entry)
        if entry.revision != 1:
            raise InvalidInput(
                f"A new entry starts at revision 1, not {entry.revision}.",
                hint="Use revise for an entry that exists.",
            )
        self._vouch(entry)
        with self.database.write() as connection:
            similar = self._similar(entry)
            if connection.execute("SELECT 1 FROM heads WHERE id = ?", (entry.id,)).fetchone():
                raise Conflict(
                    f"A memory entry {entry.id!r} exists.",
                    hint="Revise it, or choose another id and link the two.",
                )
            seq = self._append(entry)
        return Written(entry, seq, similar)

    def revise(self, id: str, base_revision: int, change: Change | Mapping[str, Any]) -> Written:
        """Append a revision that adds the change to revision ``base_revision``.

        Raises Conflict when the head has moved on: read it again and decide anew.
        """
        change = change if isinstance(change, Change) else parse(Change, change, "change")
        with self.database.write():
            head = self.get(id)
            if head.revision != base_revision:
                raise Conflict(
                    f"Memory entry {id!r} is at revision {head.revision}, not {base_revision}.",
                    hint="Read it again, then revise that revision.",
                )
            entry = _revised(head, change)
            self._vouch(entry, known=head)
            return Written(entry, self._append(entry))

    def reseed(self, entry: Entry) -> Literal["added", "updated", "kept"]:
        """Bring a shipped entry up to date; what others have added to it stays.

        While only seeds have written the entry, its new text replaces the head (the old revision
        stays readable). Later the accumulated evidence, transfers, links and notes are carried on.
        """
        sha = _sha(canonical(entry))
        with self.database.write() as connection:
            row = connection.execute(
                "SELECT sha256 FROM seeds WHERE id = ?", (entry.id,)
            ).fetchone()
            if row is not None and row[0] == sha:
                return "kept"
            exists = connection.execute("SELECT 1 FROM heads WHERE id = ?", (entry.id,)).fetchone()
            if row is None and exists:
                return "kept"
            if exists:
                self._append(_reseeded(self.get(entry.id), entry))
            else:
                self._vouch(entry)
                self._append(entry)
            connection.execute("INSERT OR REPLACE INTO seeds VALUES (?, ?)", (entry.id, sha))
        return "updated" if exists else "added"

    def transaction(self) -> Any:
        """Return a context manager that makes several writes one transaction."""
        return self.database.write()

    def restore(self, revisions: Iterable[Entry]) -> int:
        """Append exported revisions of one entry that are missing here; return how many.

        Raises Conflict when a revision exists with other content, CheckFailed when a receipt does
        not verify.
        """
        added = 0
        with self.database.write() as connection:
            for entry in sorted(revisions, key=lambda item: item.revision):
                row = connection.execute(
                    "SELECT sha256 FROM revisions WHERE id = ? AND revision = ?",
                    (entry.id, entry.revision),
                ).fetchone()
                if row is None:
                    last = connection.execute(
                        "SELECT max(revision) FROM revisions WHERE id = ?", (entry.id,)
                    ).fetchone()[0]
                    if entry.revision != (last or 0) + 1:
                        raise Conflict(
                            f"{entry.id!r} is at revision {last or 0} here; revision "
                            f"{entry.revision} cannot follow."
                        )
                    self._vouch(entry)
                    self._append(entry)
                    added += 1
                elif row[0] != _sha(canonical(entry)):
                    raise Conflict(
                        f"{entry.id!r} revision {entry.revision} exists here with other content.",
                        hint="Rename the imported entry, then link the two.",
                    )
        return added

    # Searching

    def search(
        self,
        query: str = "",
        *,
        facts: Mapping[str, Any] | None = None,
        shares: StepShares | None = None,
        kinds: tuple[str, ...] = (),
        stack: tuple[str, ...] = (),
        limit: int = 8,
        offset: int = 0,
        vectors: "VectorScores | None" = None,
    ) -> "SearchResult":
        """Rank entries for a question and a deployment: see ``retrieval.search``.

        ``vectors`` is the vector index's answer, such as ``SemanticClient(path).scores``.
        """
        from specpilot.memory.retrieval import search

        return search(self, query, facts=facts, shares=shares, kinds=kinds, stack=stack,
                      limit=limit, offset=offset, vectors=vectors)  # fmt: skip

    def columns(self) -> Columns:
        """Return the columns over all heads, brought up to date with other writers."""
        with self.database.read() as connection:
            now = (self.database.data_version(), self._own_writes)
            if now != self._seen:
                rows = connection.execute(
                    "SELECT row, seq, card FROM heads WHERE seq > ? ORDER BY seq",
                    (self._columns.seq,),
                ).fetchall()
                fresh = self._columns.with_rows(rows) if rows else self._columns
                if connection.in_transaction:
                    return fresh  # may still be undone: not kept
                self._columns, self._seen = fresh, now
            return self._columns

    def text_scores(self, terms: Iterable[str], limit: int = 400) -> dict[int, float]:
        """Return BM25 of the best heads for OR-ed terms, by row; larger is better.

        Terms that more than a third of all entries have say little and cost most: they are left
        out while rarer ones remain.
        """
        words = [term for term in dict.fromkeys(terms) if term.replace("_", "").isalnum()][:64]
        if not words:
            return {}
        with self.database.read() as connection:
            words = [f'"{word}"' for word in self._telling(words)]
            rows = connection.execute(
                "SELECT rowid, bm25(fts, 4.0, 3.0, 1.0, 3.0) AS score FROM fts WHERE fts MATCH ? "
                "ORDER BY score LIMIT ?", (" OR ".join(words), limit),
            )  # fmt: skip
            return {row: -score for row, score in rows}

    def spelt(self, text: str) -> str:
        """Return a question with words that no entry holds put right where one is close.

        Only in memories of up to some thousand entries: larger ones hold nearly every word.
        """
        words = self.columns().words
        if not words:
            return text

        def right(match: re.Match[str]) -> str:
            word = match.group().lower()
            if word in words or word in STOP_WORDS or self._indexed(word):
                return match.group()
            near = [known for known in words if known[0] == word[0]]
            close = difflib.get_close_matches(word, near, n=1, cutoff=_CLOSE)
            return close[0] if close else match.group()

        return re.sub(r"\b[A-Za-z]{4,}\b", right, text)

    def _indexed(self, word: str) -> bool:
        with self.database.read() as connection:
            row = connection.execute("SELECT doc FROM fts_terms WHERE term = ?", (_stem(word),))
            return row.fetchone() is not None

    # Inside

    def _telling(self, words: list[str]) -> list[str]:
        """Return the words in at most a third of all entries; all of them where none is."""
        stems = [_stem(word) for word in words]
        with self.database.read() as connection:
            entries = connection.execute("SELECT max(row) FROM heads").fetchone()[0] or 0
            if entries < _SMALL:
                return words
            counts = {
                stem: row[0] if row else 0
                for stem in set(stems)
                for row in [connection.execute(
                    "SELECT doc FROM fts_terms WHERE term = ?", (stem,)).fetchone()]
            }  # fmt: skip
        rare = [w for w, stem in zip(words, stems, strict=True) if counts[stem] <= entries / 3]
        return rare or words

    def vouched(self, row: Evidence | Transfer) -> bool:
        """Return whether the receipt of a row is accepted by the verifier."""
        if row.receipt is None or self._verifier is None:
            return False
        try:
            return self._verifier(row) is True
        except Exception:
            return False

    def _vouch(self, entry: Entry, known: Entry | None = None) -> None:
        old: set[Evidence | Transfer] = {*known.evidence, *known.transfers} if known else set()
        rows: tuple[Evidence | Transfer, ...] = (*entry.evidence, *entry.transfers)
        for row in rows:
            if row.receipt is not None and row not in old and not self.vouched(row):
                why = "no verifier is set" if self._verifier is None else "the verifier refused it"
                raise CheckFailed(
                    f"The receipt {row.receipt.hash[:12]} of {entry.id!r} does not verify ({why}).",
                    hint="Record evidence by the controller, or cite a source instead.",
                )
        if entry.status == "validated" and not any(
            row.promoted and self.vouched(row) for row in entry.evidence
        ):
            raise CheckFailed(
                f"{entry.id!r} cannot be validated: no receipt of a promotion verifies."
            )

    def _append(self, entry: Entry) -> int:
        body = canonical(entry)
        card = card_of(entry)
        with self.database.write() as connection:
            seq = connection.execute(
                "INSERT INTO revisions (id, revision, body, sha256) VALUES (?, ?, ?, ?)",
                (entry.id, entry.revision, body, _sha(body)),
            ).lastrowid
            connection.execute(
                "INSERT INTO heads (id, revision, seq, card) VALUES (?, ?, ?, ?) "
                "ON CONFLICT (id) DO UPDATE SET revision = excluded.revision, "
                "seq = excluded.seq, card = excluded.card",
                (entry.id, entry.revision, seq, card.dump()),
            )
            row = connection.execute("SELECT row FROM heads WHERE id = ?", (entry.id,)).fetchone()[
                0
            ]
            connection.execute("DELETE FROM fts WHERE rowid = ?", (row,))
            connection.execute(
                "INSERT INTO fts (rowid, title, claim, body, tags) VALUES (?, ?, ?, ?, ?)",
                (row, *(indexable(text) for text in search_text(entry))),
            )
            connection.execute("DELETE FROM links WHERE source = ?", (entry.id,))
            connection.executemany(
                "INSERT OR IGNORE INTO links VALUES (?, ?, ?)",
                [(entry.id, link.relation, link.other) for link in entry.interactions],
            )
            self._own_writes += 1
            assert seq is not None
            return seq

    def _similar(self, entry: Entry) -> tuple[str, ...]:
        """Return ids of the same kind whose title shares most of its trigrams."""
        scores = self.text_scores(index_terms(entry.title), limit=20)
        with self.database.read() as connection:
            cards = [
                Card.load(connection.execute("SELECT card FROM heads WHERE row = ?", (row,))
                          .fetchone()[0])
                for row in scores
            ]  # fmt: skip
        mine = trigrams(entry.title)
        return tuple(
            card.id for card in cards
            if card.kind == entry.kind and overlap(mine, trigrams(card.title)) >= 0.6
        )  # fmt: skip

    def note(self, key: str) -> str | None:
        """Return a value that the memory keeps about itself, such as the seeds' digest."""
        with self.database.read() as connection:
            row = connection.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def set_note(self, key: str, value: str) -> None:
        with self.database.write() as connection:
            connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))

    def _refresh_cards(self) -> None:
        if self.note("card_version") == str(CARD_VERSION):
            return
        with self.database.write() as connection:
            for id in self.ids():
                connection.execute(
                    "UPDATE heads SET card = ? WHERE id = ?", (card_of(self.get(id)).dump(), id)
                )
            self.set_note("card_version", str(CARD_VERSION))


@lru_cache(maxsize=4096)
def _stem(word: str) -> str:
    """Return what the full-text index stores for a word, by asking its tokenizer."""
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.execute(f"CREATE VIRTUAL TABLE t USING fts5(x, tokenize = {TOKENIZER})")
        connection.execute("CREATE VIRTUAL TABLE v USING fts5vocab('t', 'row')")
        connection.execute("INSERT INTO t VALUES (?)", (word,))
        row = connection.execute("SELECT term FROM v").fetchone()
    return str(row[0]) if row else word


def trigrams(text: str) -> frozenset[str]:
    """Return the character trigrams of a text, case and punctuation aside."""
    flat = f"  {' '.join(index_terms(text))} "
    return frozenset(flat[i : i + 3] for i in range(len(flat) - 2))


def overlap(one: frozenset[str], other: frozenset[str]) -> float:
    """Return the Jaccard overlap of two sets."""
    return len(one & other) / max(1, len(one | other))


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _revised(head: Entry, change: Change) -> Entry:
    notes = head.notes
    if change.note:
        author = change.provenance
        notes += (Note(text=change.note, author=author.author, created=author.created),)
    update = {
        "revision": head.revision + 1,
        "evidence": head.evidence + change.evidence,
        "transfers": head.transfers + change.transfers,
        "interactions": head.interactions + change.interactions,
        "notes": notes,
        "status": change.status or head.status,
        "implementation": change.implementation or head.implementation,
        "provenance": change.provenance,
    }
    return read_entry(canonical(head.model_copy(update=update)))


def _reseeded(head: Entry, seed: Entry) -> Entry:
    update: dict[str, Any] = {"revision": head.revision + 1}
    if head.provenance.origin != "seed":
        for name in ("evidence", "transfers", "interactions", "notes"):
            old = getattr(head, name)
            update[name] = old + tuple(row for row in getattr(seed, name) if row not in old)
        update["status"] = head.status
    return read_entry(canonical(seed.model_copy(update=update)))
