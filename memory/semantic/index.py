"""A chroma collection over all heads, brought up to date from the store and its cached vectors.

The collection lives in memory of the one process that owns it: chromadb's persistent client is
stale and loses vectors when several processes share it. Vectors are cached in the store by model
and text, so that a restart encodes nothing anew.
"""

import hashlib
from collections.abc import Iterable
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from specpilot.memory.schema import Entry, read_entry
from specpilot.memory.semantic.encoder import Encoder
from specpilot.memory.store import MemoryStore

__all__ = ["Collection", "VectorIndex", "chroma_collection", "embedded_text"]

_BATCH: Final = 64


class Collection(Protocol):
    """What the index needs of chromadb's collection."""

    def upsert(self, *, ids: list[str], embeddings: Any) -> Any: ...
    def query(self, *, query_embeddings: Any, n_results: int, include: list[str]) -> Any: ...
    def count(self) -> int: ...


def chroma_collection() -> Collection:
    """Make an empty collection in this process's memory, by cosine, with no encoder of its own."""
    import chromadb
    from chromadb.config import Settings

    client = chromadb.EphemeralClient(Settings(anonymized_telemetry=False))
    collection: Collection = client.create_collection(
        "entries", embedding_function=None, configuration={"hnsw": {"space": "cosine"}}
    )
    return collection


def embedded_text(entry: Entry) -> str:
    """Return what of an entry is embedded: it fits the model's 256 word pieces."""
    return f"{entry.title}. {entry.claim} {entry.body[:600]}"


class VectorIndex:
    """Cosine search over a store. Not thread-safe: its owner asks one question at a time."""

    def __init__(self, store: MemoryStore, encoder: Encoder, collection: Collection) -> None:
        self._store = store
        self._encoder = encoder
        self._collection = collection
        self._seq = 0
        self._version = -1

    def refresh(self) -> int:
        """Take in heads written since the last look; return how many."""
        version = self._store.database.data_version()
        if version == self._version:
            return 0
        with self._store.database.read() as connection:
            rows = connection.execute(
                "SELECT h.row, h.seq, r.body FROM heads h JOIN revisions r ON r.seq = h.seq "
                "WHERE h.seq > ? ORDER BY h.seq", (self._seq,),
            ).fetchall()  # fmt: skip
        for start in range(0, len(rows), _BATCH):
            batch = rows[start : start + _BATCH]
            vectors = self._vectors([embedded_text(read_entry(body)) for _, _, body in batch])
            self._collection.upsert(
                ids=[str(row) for row, _, _ in batch], embeddings=vectors.tolist()
            )
            self._seq = batch[-1][1]
        self._version = version
        return len(rows)

    def scores(self, text: str, limit: int) -> dict[int, float]:
        """Return the cosine of the nearest heads to a text, by store row."""
        count = self._collection.count()
        if count == 0:
            return {}
        found = self._collection.query(
            query_embeddings=self._encoder.encode([text]).tolist(),
            n_results=min(limit, count),
            include=["distances"],
        )
        pairs = zip(found["ids"][0], found["distances"][0], strict=True)
        return {int(row): 1.0 - float(distance) for row, distance in pairs}

    def _vectors(self, texts: list[str]) -> NDArray[np.float32]:
        keys = [hashlib.sha256(text.encode()).hexdigest() for text in texts]
        known = self._cached(keys)
        missing = [at for at, key in enumerate(keys) if key not in known]
        if missing:
            made = self._encoder.encode([texts[at] for at in missing])
            with self._store.transaction() as connection:
                connection.executemany(
                    "INSERT OR IGNORE INTO embeddings VALUES (?, ?, ?)",
                    [(self._encoder.model, keys[at], vector.astype("<f4").tobytes())
                     for at, vector in zip(missing, made, strict=True)],
                )  # fmt: skip
            known |= {keys[at]: vector for at, vector in zip(missing, made, strict=True)}
        return np.stack([known[key] for key in keys])

    def _cached(self, keys: Iterable[str]) -> dict[str, NDArray[np.float32]]:
        with self._store.database.read() as connection:
            rows = [
                (key, connection.execute(
                    "SELECT vector FROM embeddings WHERE model = ? AND text_sha256 = ?",
                    (self._encoder.model, key)).fetchone())
                for key in keys
            ]  # fmt: skip
        return {key: np.frombuffer(row[0], dtype="<f4") for key, row in rows if row is not None}
