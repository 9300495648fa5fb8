"""All entries as columns, so that ranking is a few array operations at any size.

Regimes and preconditions repeat across entries: each distinct one is graded once for a query and
spread over the entries that carry it.
"""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from specpilot.memory.cards import Card
from specpilot.memory.regime import EXACT, FIELDS, GENERAL, MISMATCH, UNKNOWN, Predicate, grade_set

__all__ = ["RANGES", "WORDS", "Columns", "grade_range"]

RANGES: Final = ("requests", "context_tokens", "target_params_b", "temperature")
WORDS: Final = ("target_family", "target_arch", "weight_dtype", "drafter", "gpu_arch", "engine",
                "workload")  # fmt: skip
assert {*RANGES, *WORDS, "serving"} == set(FIELDS)

Floats = NDArray[np.float64]


def grade_range(bounds: tuple[float, float] | None, fact: float | None) -> float:
    """Grade a number against an inclusive range; just outside (within a factor 2) is kin."""
    if bounds is None:
        return GENERAL
    if fact is None:
        return UNKNOWN
    low, high = bounds
    if low <= fact <= high:
        return EXACT
    return 0.4 if low / 2 <= fact <= high * 2 and fact > 0 else MISMATCH


@dataclass(frozen=True)
class Columns:
    """Cards of all heads. ``rows`` are row ids of the store, ``seq`` the newest write seen."""

    cards: tuple[Card, ...] = ()
    rows: tuple[int, ...] = ()
    seq: int = 0
    position: Mapping[int, int] = field(default_factory=dict)

    def with_rows(self, changed: Iterable[tuple[int, int, str]]) -> "Columns":
        """Return columns with (row, seq, card JSON) added or replaced."""
        cards, rows, position, seq = (
            list(self.cards),
            list(self.rows),
            dict(self.position),
            self.seq,
        )
        for row, row_seq, text in changed:
            card = Card.load(text)
            seq = max(seq, row_seq)
            if row in position:
                cards[position[row]] = card
            else:
                position[row] = len(cards)
                cards.append(card)
                rows.append(row)
        return Columns(tuple(cards), tuple(rows), seq, position)

    def __len__(self) -> int:
        return len(self.cards)

    @cached_property
    def by_id(self) -> dict[str, int]:
        return {card.id: at for at, card in enumerate(self.cards)}

    @cached_property
    def _regime_codes(self) -> dict[str, tuple[list[Any], NDArray[np.intp]]]:
        return {
            name: _codes(_hashable(card.regime.get(name)) for card in self.cards)
            for name in FIELDS
        }  # fmt: skip

    def grades(self, facts: Mapping[str, Any]) -> dict[str, Floats]:
        """Return the grade of every entry for every regime field, each [entries]."""
        graded: dict[str, Floats] = {}
        for name, (values, codes) in self._regime_codes.items():
            table = [grade_value(name, value, facts) for value in values]
            graded[name] = np.asarray(table, dtype=np.float64)[codes]
        return graded

    @cached_property
    def _predicates(self) -> tuple[list[Predicate], NDArray[np.intp], NDArray[np.intp]]:
        flat = [(at, p) for at, card in enumerate(self.cards) for p in card.preconditions]
        values, codes = _codes(_hashable(p) for _, p in flat)
        owner = np.asarray([at for at, _ in flat], dtype=np.intp)
        return [predicate_of(value) for value in values], codes, owner

    def preconditions(self, facts: Mapping[str, Any]) -> tuple[Floats, Floats, Floats]:
        """Return how many preconditions are unmet and hard, unmet and soft, unknown; [entries]."""
        predicates, codes, owner = self._predicates
        verdicts = [predicate.holds(facts) for predicate in predicates]
        columns = []
        for counted in (
            [v is False and p.hard for v, p in zip(verdicts, predicates, strict=True)],
            [v is False and not p.hard for v, p in zip(verdicts, predicates, strict=True)],
            [v is None for v in verdicts],
        ):
            weights = np.asarray(counted, dtype=np.float64)[codes] if len(codes) else None
            columns.append(np.bincount(owner, weights, minlength=len(self)).astype(np.float64))
        return columns[0], columns[1], columns[2]

    def words(self, name: str) -> tuple[list[Any], NDArray[np.intp]]:
        """Return distinct values of a card attribute and each entry's code, for table look-ups."""
        if name not in self._words:
            self._words[name] = _codes(getattr(card, name) for card in self.cards)
        return self._words[name]

    @cached_property
    def _words(self) -> dict[str, tuple[list[Any], NDArray[np.intp]]]:
        return {}

    def spread(self, name: str, table: Mapping[str, float], default: float) -> Floats:
        """Return ``table[value]`` for every entry's value of a card attribute, [entries]."""
        values, codes = self.words(name)
        return np.asarray([table.get(v, default) for v in values], dtype=np.float64)[codes]

    @cached_property
    def effect(self) -> Floats:
        return np.asarray([card.effect for card in self.cards], dtype=np.float64)

    @cached_property
    def receipts(self) -> Floats:
        return np.asarray([card.receipts for card in self.cards], dtype=np.float64)

    @cached_property
    def incoming(self) -> dict[str, dict[str, list[str]]]:
        """Return, by id and relation, the entries that point at it."""
        found: dict[str, dict[str, list[str]]] = {}
        for card in self.cards:
            for relation, other in card.links:
                found.setdefault(other, {}).setdefault(relation, []).append(card.id)
        return found


def grade_value(name: str, value: Any, facts: Mapping[str, Any]) -> float:
    """Grade one regime field of an entry (None: the entry does not constrain it)."""
    if name in RANGES:
        return grade_range(value, facts.get(name))
    words = () if value is None else (value,) if isinstance(value, str) else tuple(value)
    return grade_set(name, words, facts)


def predicate_of(raw: tuple[str, Any, Any, str, bool]) -> Predicate:
    name, op, value, why, hard = raw
    if isinstance(value, list):
        value = tuple(value)
    return Predicate.model_construct(field=name, op=op, value=value, why=why, hard=hard)


def _hashable(value: Any) -> Hashable:
    if isinstance(value, list | tuple):
        return tuple(_hashable(item) for item in value)
    word: Hashable = value
    return word


def _codes(values: Iterable[Hashable]) -> tuple[list[Any], NDArray[np.intp]]:
    table: dict[Hashable, int] = {}
    codes = [table.setdefault(value, len(table)) for value in values]
    return list(table), np.asarray(codes, dtype=np.intp)
