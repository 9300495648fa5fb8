"""All entries as columns, so that ranking is a few array operations at any size.

Regimes and preconditions repeat across entries: each distinct one is graded once for a query and
spread over the entries that carry it.
"""

import re
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from specpilot.memory.cards import Card
from specpilot.memory.regime import EXACT, FIELDS, GENERAL, MISMATCH, UNKNOWN, Predicate, grade_set

__all__ = ["Coded", "Columns", "RANGES", "WORDS", "grade_range", "grade_value", "predicate_of"]

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
class Coded:
    """A column of repeated values: distinct ``values`` and, by entry, the ``codes`` into them.

    The table of values only grows and is shared by successive versions of the column.
    """

    values: list[Any] = field(default_factory=list)
    table: dict[Hashable, int] = field(default_factory=dict)
    codes: NDArray[np.intp] = field(default_factory=lambda: np.empty(0, dtype=np.intp))

    def with_changes(self, size: int, changes: Mapping[int, Hashable]) -> "Coded":
        """Return the column at a size with the values at some positions set."""
        codes = np.zeros(size, dtype=np.intp)
        codes[: len(self.codes)] = self.codes
        for at, value in changes.items():
            code = self.table.get(value)
            if code is None:
                code = len(self.values)
                self.values.append(value)
                self.table[value] = code
            codes[at] = code
        return Coded(self.values, self.table, codes)

    def spread(self, graded: Iterable[float]) -> Floats:
        """Return a number for each distinct value, given in order, at every entry: [entries]."""
        return np.fromiter(graded, dtype=np.float64, count=len(self.values))[self.codes]


_FEW: Final = 5000
_ATTRIBUTES: Final = ("kind", "status", "bottleneck")


@dataclass(frozen=True)
class Columns:
    """Cards of all heads. ``rows`` are row ids of the store, ``seq`` the newest write seen.

    An update copies arrays and grades nothing anew, so that following other writers is cheap.
    """

    cards: tuple[Card, ...] = ()
    rows: tuple[int, ...] = ()
    seq: int = 0
    position: Mapping[int, int] = field(default_factory=dict)
    regime: Mapping[str, Coded] = field(default_factory=lambda: {f: Coded() for f in FIELDS})
    attribute: Mapping[str, Coded] = field(
        default_factory=lambda: {name: Coded() for name in _ATTRIBUTES}
    )
    needs: Coded = field(default_factory=Coded)
    effect: Floats = field(default_factory=lambda: np.empty(0))

    def with_rows(self, changed: Iterable[tuple[int, int, str]]) -> "Columns":
        """Return columns with (row, seq, card JSON) added or replaced."""
        cards, rows, position = list(self.cards), list(self.rows), dict(self.position)
        seq, fresh = self.seq, {}
        for row, row_seq, text in changed:
            card = Card.load(text)
            seq = max(seq, row_seq)
            if row in position:
                cards[position[row]] = card
            else:
                position[row] = len(cards)
                cards.append(card)
                rows.append(row)
            fresh[position[row]] = card
        size = len(cards)
        effect = np.zeros(size)
        effect[: len(self.effect)] = self.effect
        effect[list(fresh)] = [card.effect for card in fresh.values()]

        def updated(column: Coded, value: Callable[[Card], Any]) -> Coded:
            return column.with_changes(
                size, {at: _hashable(value(card)) for at, card in fresh.items()}
            )

        return Columns(
            cards=tuple(cards),
            rows=tuple(rows),
            seq=seq,
            position=position,
            regime={
                name: updated(column, _regime_of(name)) for name, column in self.regime.items()
            },
            attribute={
                name: updated(column, attrgetter(name)) for name, column in self.attribute.items()
            },
            needs=updated(self.needs, attrgetter("preconditions")),
            effect=effect,
        )

    def __len__(self) -> int:
        return len(self.cards)

    @cached_property
    def by_id(self) -> dict[str, int]:
        return {card.id: at for at, card in enumerate(self.cards)}

    def grades(self, name: str, facts: Mapping[str, Any]) -> Floats:
        """Return the grade of every entry for a regime field, [entries]."""
        column = self.regime[name]
        return column.spread(grade_value(name, value, facts) for value in column.values)

    def preconditions(self, facts: Mapping[str, Any]) -> tuple[Floats, Floats, Floats]:
        """Return how many preconditions are unmet and hard, unmet and soft, unknown; [entries]."""
        counts = []
        for value in self.needs.values:
            held = [(p.holds(facts), p.hard) for p in map(predicate_of, value)]
            counts.append(
                (held.count((False, True)), held.count((False, False)),
                 sum(verdict is None for verdict, _ in held))
            )  # fmt: skip
        hard, soft, unknown = (
            self.needs.spread(row[which] for row in counts) for which in range(3)
        )
        return hard, soft, unknown

    def spread(self, name: str, table: Mapping[str, float], default: float) -> Floats:
        """Return ``table[value]`` for every entry's kind, status or bottleneck, [entries]."""
        column = self.attribute[name]
        return column.spread(table.get(value, default) for value in column.values)

    @cached_property
    def words(self) -> frozenset[str]:
        """Return the words of titles, claims and tags; empty where the memory is large."""
        if len(self) > _FEW:
            return frozenset()
        text = " ".join(" ".join((c.title, c.claim, *c.tags)) for c in self.cards)
        return frozenset(re.findall(r"[a-z]{4,}", text.lower()))

    @cached_property
    def neighbours(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Return both directions of every link between entries, as two arrays [2 links]."""
        at = self.by_id
        pairs = [
            (here, at[other])
            for here, card in enumerate(self.cards)
            for _, other in card.links
            if other in at
        ]
        one = np.asarray([pair[0] for pair in pairs], dtype=np.intp)
        two = np.asarray([pair[1] for pair in pairs], dtype=np.intp)
        return np.concatenate([one, two]), np.concatenate([two, one])

    @cached_property
    def authority(self) -> Floats:
        """Return how many entries relate to each one, as log(1 + links) scaled to 1, [entries]."""
        degree = np.bincount(self.neighbours[0], minlength=len(self)).astype(np.float64)
        logs = np.log1p(degree)
        return logs / max(float(logs.max(initial=0.0)), 1.0)

    @cached_property
    def incoming(self) -> dict[str, dict[str, list[str]]]:
        """Return, by id and relation, the entries that point at it."""
        found: dict[str, dict[str, list[str]]] = {}
        for card in self.cards:
            for relation, other in card.links:
                found.setdefault(other, {}).setdefault(relation, []).append(card.id)
        return found


def _regime_of(name: str) -> Callable[[Card], Any]:
    return lambda card: card.regime.get(name)


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
