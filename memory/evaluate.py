"""How good the ranking is, on queries that were labelled by somebody who did not see it.

A query file is JSON Lines under ``memory/evaluation/``: one ``Query`` a line. Grades: 3 would be
right to apply there, 2 right with retuning, 1 relevant; what is not named is 0. Queries of the
split ``tune`` may be used to set weights, those of ``heldout`` only to report.
"""

import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

import numpy as np
from pydantic import BaseModel, Field, model_validator

from specpilot.errors import InvalidInput
from specpilot.memory.cards import card_of
from specpilot.memory.columns import Columns, Floats
from specpilot.memory.facts import FACTS, read_facts
from specpilot.memory.figures import STRICT
from specpilot.memory.query import Question, read_question
from specpilot.memory.retrieval import (
    DEFAULT_WEIGHTS,
    VectorScores,
    Weights,
    hit_of,
    on_rows,
    regime_match,
    score_columns,
)
from specpilot.memory.schema import Entry, Slug, parse
from specpilot.memory.seeding import load_seeds
from specpilot.memory.store import MemoryStore
from specpilot.types import StepShares

__all__ = ["DEPTH", "Query", "Report", "Score", "evaluate", "evaluation_results", "read_queries"]

DEPTH: Final = 8
_Z95: Final = 1.96

Ranker = Callable[[Columns, "Query"], Floats]


class Query(BaseModel):
    """One labelled query: free text, facts of a deployment, or both.

    ``leave_out`` names a deployment or a device whose evidence and transfers are hidden while this
    query is answered, for leave-one-deployment-out.
    """

    model_config = STRICT

    id: Slug
    split: Literal["tune", "heldout"]
    query: Annotated[str, Field(max_length=1000)] = ""
    facts: dict[str, str | int | float | bool] = {}
    shares: dict[str, Annotated[float, Field(ge=0, le=1)]] | None = None
    leave_out: Annotated[str, Field(max_length=80)] = ""
    grades: Annotated[dict[Slug, Annotated[int, Field(ge=0, le=3)]], Field(min_length=1)]

    @model_validator(mode="after")
    def _asks_something(self) -> Self:
        if not self.query.strip() and not self.facts:
            raise ValueError("a query needs text or facts")
        unknown = set(self.facts) - set(FACTS)
        if unknown:
            raise ValueError(f"unknown facts {sorted(unknown)}")
        if max(self.grades.values()) == 0:
            raise ValueError("a query needs an entry of grade 1 or more")
        return self

    @property
    def step_shares(self) -> StepShares | None:
        return StepShares(**self.shares) if self.shares else None


@dataclass(frozen=True, slots=True)
class Score:
    """Means over queries, each in 0 to 1, with ``low`` and ``high`` of the 95 % interval."""

    ndcg: float
    recall: float
    mrr: float
    harmful: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Report:
    """Scores by ranker, and what the fused ranking gains over each other one in nDCG, paired.

    ``gains`` maps a ranker to (mean, low, high) of the difference per query at 95 %.
    """

    split: str
    queries: int
    scores: dict[str, Score]
    gains: dict[str, tuple[float, float, float]]


def read_queries(name: str = "queries.jsonl") -> tuple[Query, ...]:
    """Read the labelled queries that ship; empty where there are none. Raises InvalidInput."""
    file = files("specpilot.memory") / "evaluation" / name
    if not file.is_file():
        return ()
    lines = file.read_text(encoding="utf-8").splitlines()
    queries = tuple(
        parse(Query, line, f"query in line {number}")
        for number, line in enumerate(lines, 1) if line.strip()
    )  # fmt: skip
    if len({query.id for query in queries}) != len(queries):
        raise InvalidInput(f"{name} names a query twice.")
    return queries


def evaluate(
    store: MemoryStore,
    queries: Sequence[Query],
    split: str,
    *,
    weights: Weights = DEFAULT_WEIGHTS,
    vectors: VectorScores | None = None,
) -> Report:
    """Score the fused ranking and its parts alone on the queries of a split.

    Raises InvalidInput for labels on entries that do not exist.
    """
    chosen = [query for query in queries if query.split == split]
    if not chosen:
        raise InvalidInput(f"No labelled query belongs to the split {split!r}.")
    known = set(store.ids())
    for query in chosen:
        if missing := set(query.grades) - known:
            raise InvalidInput(f"Query {query.id} grades unknown entries: {sorted(missing)[:5]}.")
    rankers = _rankers(store, weights, vectors)
    per_query = {name: [_score(store, ranker, query) for query in chosen]
                 for name, ranker in rankers.items()}  # fmt: skip
    scores = {}
    for name, rows in per_query.items():
        ndcg, recall, mrr, harmful = (float(value) for value in np.mean(rows, axis=0))
        _, low, high = _mean_interval([row[0] for row in rows])
        scores[name] = Score(ndcg, recall, mrr, harmful, low, high)
    fused = [row[0] for row in per_query["fused"]]
    gains = {
        name: _mean_interval([a - b[0] for a, b in zip(fused, rows, strict=True)])
        for name, rows in per_query.items() if name != "fused"
    }  # fmt: skip
    return Report(split, len(chosen), scores, gains)


def _rankers(
    store: MemoryStore, weights: Weights, vectors: VectorScores | None
) -> dict[str, Ranker]:
    def read(query: Query) -> tuple[Question, dict[str, Any]]:
        question = read_question(store.spelt(query.query))
        return question, read_facts(question.facts | query.facts, query.step_shares)

    def fused(columns: Columns, query: Query) -> Floats:
        question, facts = read(query)
        return score_columns(
            columns, question, facts, query.step_shares, store.text_scores(question.terms),
            weights=weights, cosines=vectors(query.query) if vectors and query.query else None,
        )  # fmt: skip

    def random_order(columns: Columns, query: Query) -> Floats:
        rng = random.Random(query.id)
        return np.asarray([rng.random() for _ in columns.cards])

    def bm25(columns: Columns, query: Query) -> Floats:
        words = query.query or " ".join(str(value) for value in query.facts.values())
        return on_rows(columns, store.text_scores(read_question(words).terms))

    def regime(columns: Columns, query: Query) -> Floats:
        return regime_match(columns, read(query)[1], weights)

    def cosine(columns: Columns, query: Query) -> Floats:
        words = query.query or " ".join(f"{k} {v}" for k, v in query.facts.items())
        return on_rows(columns, (vectors(words) if vectors else None) or {})

    alone: dict[str, Ranker] = {"random": random_order, "bm25": bm25, "regime": regime}
    return {"fused": fused} | alone | ({"vectors": cosine} if vectors else {})


def _score(store: MemoryStore, ranker: Ranker, query: Query) -> tuple[float, float, float, float]:
    columns = _without(store, query.leave_out) if query.leave_out else store.columns()
    order = np.argsort(-ranker(columns, query), kind="stable")[:DEPTH]
    ids = [columns.cards[at].id for at in order]
    got = [query.grades.get(id, 0) for id in ids]
    ideal = sorted(query.grades.values(), reverse=True)[:DEPTH]
    relevant = sum(grade >= 2 for grade in query.grades.values())
    found = sum(grade >= 2 for grade in got)
    best = max(query.grades.values())
    first = next((1 / rank for rank, grade in enumerate(got, 1) if grade == best), 0.0)
    return (
        _dcg(got) / _dcg(ideal),
        found / min(DEPTH, relevant) if relevant else float(any(got)),
        first,
        _harmful(store, columns, [int(at) for at in order], query) / DEPTH,
    )


def _dcg(grades: Sequence[int]) -> float:
    return float(sum((2**grade - 1) / np.log2(rank + 1) for rank, grade in enumerate(grades, 1)))


def _harmful(store: MemoryStore, columns: Columns, order: Sequence[int], query: Query) -> int:
    """Count hits that cannot apply or were refuted, and that carry no flag saying so."""
    facts = read_facts(read_question(query.query).facts | query.facts, query.step_shares)
    count = 0
    for at in order:
        entry = store.get(columns.cards[at].id)
        bad = entry.status in ("refuted", "retracted") or any(
            p.hard and p.holds(facts) is False for p in entry.preconditions
        )
        count += bad and not hit_of(columns, at, 0.0, facts).flags
    return count


def _without(store: MemoryStore, name: str) -> Columns:
    """Return columns in which nothing is known from a deployment or device."""
    columns = store.columns()
    changed = []
    for at, card in enumerate(columns.cards):
        entry = store.get(card.id)
        hidden = _hide(entry, name)
        if hidden is not entry:
            changed.append((columns.rows[at], columns.seq, card_of(hidden).dump()))
    return columns.with_rows(changed) if changed else columns


def _hide(entry: Entry, name: str) -> Entry:
    low = name.lower()

    def seen(*texts: str) -> bool:
        return any(low in text.lower() for text in texts)

    evidence = tuple(r for r in entry.evidence if not seen(r.deployment, r.hardware, r.regime))
    transfers = tuple(t for t in entry.transfers if not seen(t.deployment))
    if len(evidence) == len(entry.evidence) and len(transfers) == len(entry.transfers):
        return entry
    return entry.model_copy(update={"evidence": evidence, "transfers": transfers})


def _mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return mean and 95 % limits by the normal approximation over queries."""
    array = np.asarray(values)
    mean = float(array.mean())
    half = _Z95 * float(array.std(ddof=1)) / len(array) ** 0.5 if len(array) > 1 else 0.0
    return mean, mean - half, mean + half


def evaluation_results(vectors: VectorScores | None = None) -> list[dict[str, Any]]:
    """Return the held-out scores as benchmark results; empty where no labels ship."""
    queries = read_queries()
    if not any(query.split == "heldout" for query in queries):
        return []
    with (
        tempfile.TemporaryDirectory() as folder,
        MemoryStore(Path(folder) / "memory.sqlite") as store,
    ):
        load_seeds(store)
        report = evaluate(store, queries, "heldout", vectors=vectors)
    return as_results(report)


def as_results(report: Report) -> list[dict[str, Any]]:
    """Return a report in the benchmark format: the fused ranking, and its gain over each part."""
    fused = report.scores["fused"]
    note = f"{report.queries} {report.split} queries"
    prefix = f"memory.{report.split}"

    def row(id: str, value: float, low: float, high: float, note: str) -> dict[str, Any]:
        return {"id": id, "value": value, "low": low, "high": high, "unit": "1", "repeats": [],
                "note": note}  # fmt: skip

    rows = [
        row(f"{prefix}.ndcg8", fused.ndcg, fused.low, fused.high, note + ", 95 % interval"),
        row(f"{prefix}.recall8", fused.recall, fused.recall, fused.recall, note),
        row(f"{prefix}.mrr", fused.mrr, fused.mrr, fused.mrr, note),
        row(f"{prefix}.harmful_hits", fused.harmful, fused.harmful, fused.harmful, note),
    ]
    for name, (mean, low, high) in report.gains.items():
        rows.append(row(f"{prefix}.ndcg8_over_{name}", mean, low, high,
                        f"{note}, paired difference, 95 %; {name} alone has "
                        f"{report.scores[name].ndcg:.3f}"))  # fmt: skip
    return rows
