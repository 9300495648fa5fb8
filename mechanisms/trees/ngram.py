"""A drafter without a model: counts of what followed the same last tokens before.

A pool keeps, for every context of 1 to ``order`` tokens that it has seen, which tokens followed and
how often, as suffix decoding does (SuffixDecoding, arXiv 2411.04975). Agents and editors repeat
themselves, so their own past is a good drafter. Each tenant has a pool of its own: text of one must
never surface as guesses, and so as timing, of another. Memory is bounded by the number of contexts;
the least recently used go first.
"""

from collections import OrderedDict
from collections.abc import Sequence
from math import log

import numpy as np

from specpilot.errors import InvalidInput
from specpilot.mechanisms.trees.lattice import Lattice

__all__ = ["NgramPool", "NgramPools"]

_FOLLOWERS = 32  # kept for one context; the rarest is dropped beyond


class NgramPool:
    """Follower counts of one tenant. Bounded by ``capacity`` contexts."""

    def __init__(self, vocab_size: int, *, order: int = 6, capacity: int = 200_000) -> None:
        if vocab_size < 1 or order < 1 or capacity < 1:
            raise InvalidInput(
                f"a pool needs vocabulary, order and capacity above 0, got {vocab_size}, {order}, "
                f"{capacity}."
            )
        self._vocab_size, self._order, self._capacity = vocab_size, order, capacity
        self._followers: OrderedDict[tuple[int, ...], dict[int, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._followers)

    def extend(self, context: Sequence[int], new: Sequence[int]) -> None:
        """Learn that ``new`` tokens followed ``context`` (its last ``order`` tokens matter)."""
        line = [*context[-self._order :], *new]
        for token in line:
            if not 0 <= token < self._vocab_size:
                raise InvalidInput(
                    f"token {token} lies outside the vocabulary of {self._vocab_size}."
                )
        for at in range(len(line) - len(new), len(line)):
            for length in range(1, min(self._order, at) + 1):
                self._count(tuple(line[at - length : at]), line[at])

    def _count(self, context: tuple[int, ...], token: int) -> None:
        counts = self._followers.get(context)
        if counts is None:
            if len(self._followers) >= self._capacity:
                self._followers.popitem(last=False)
            counts = self._followers[context] = {}
        else:
            self._followers.move_to_end(context)
        if token not in counts and len(counts) >= _FOLLOWERS:
            del counts[min(counts, key=lambda follower: counts[follower])]
        counts[token] = counts.get(token, 0) + 1

    def followers(self, context: Sequence[int]) -> dict[int, float]:
        """Log-probs of tokens after the longest known end of ``context``; empty if none is known.

        With c counts in all, a token counted n times has n / (c + 1): one count is left for what
        was never seen here.
        """
        for length in range(min(self._order, len(context)), 0, -1):
            counts = self._followers.get(tuple(context[-length:]))
            if counts:
                total = sum(counts.values()) + 1
                return {token: log(n / total) for token, n in counts.items()}
        return {}

    def lattice(self, context: Sequence[int], depth: int, width: int) -> Lattice | None:
        """Pairwise lattice of what may follow ``context`` (the anchor last), or None if unknown.

        Candidates of a position are the ``width`` likeliest over all paths; each carries on from
        its likeliest path. Positions end where nothing is known. Unused places hold other token ids
        with log-prob minus infinity, which no policy takes.
        """
        if depth < 1 or not 1 <= width <= self._vocab_size:
            raise InvalidInput(f"a lattice of {depth} x {width} is out of range.")
        paths: list[tuple[float, tuple[int, ...]]] = [(0.0, tuple(context[-self._order :]))]
        tokens: list[list[int]] = []
        tables: list[np.ndarray] = []
        for _ in range(depth):
            known = [self.followers(path) for _, path in paths]
            best: dict[int, tuple[float, int]] = {}  # token -> (path log-prob, slot before)
            for slot, ((score, _), after) in enumerate(zip(paths, known, strict=True)):
                for token, value in after.items():
                    if token not in best or score + value > best[token][0]:
                        best[token] = (score + value, slot)
            if not best:
                break
            chosen = sorted(best, key=lambda token: (-best[token][0], token))[:width]
            ids = self._padded(chosen, width)
            table = np.full((width if tokens else 1, width), -np.inf)
            for slot, after in enumerate(known):
                for column, token in enumerate(chosen):
                    table[slot, column] = after.get(token, -np.inf)
            tokens.append(ids)
            tables.append(table)
            paths = [(best[t][0], (*paths[best[t][1]][1], t)[-self._order :]) for t in chosen]
        if not tokens:
            return None
        edges = np.stack(tables[1:]) if len(tables) > 1 else np.empty((0, width, width))
        return Lattice.pairwise(tokens, tables[0][0], edges, self._vocab_size)

    def _padded(self, chosen: list[int], width: int) -> list[int]:
        ids, taken, spare = list(chosen), set(chosen), 0
        while len(ids) < width:
            if spare not in taken:
                ids.append(spare)
            spare += 1
        return ids


class NgramPools:
    """Pools by tenant, at most ``tenants`` of them; the least recently used is forgotten whole."""

    def __init__(
        self, vocab_size: int, *, tenants: int = 64, order: int = 6, capacity: int = 200_000
    ) -> None:
        if tenants < 1:
            raise InvalidInput(f"pools need room for at least one tenant, got {tenants}.")
        self._vocab_size, self._tenants = vocab_size, tenants
        self._order, self._capacity = order, capacity
        self._pools: OrderedDict[str, NgramPool] = OrderedDict()

    def of(self, tenant: str) -> NgramPool:
        """Return the tenant's own pool, made on first use."""
        pool = self._pools.get(tenant)
        if pool is None:
            if len(self._pools) >= self._tenants:
                self._pools.popitem(last=False)
            pool = NgramPool(self._vocab_size, order=self._order, capacity=self._capacity)
            self._pools[tenant] = pool
        self._pools.move_to_end(tenant)
        return pool

    def forget(self, tenant: str) -> None:
        """Drop all that is known of a tenant."""
        self._pools.pop(tenant, None)
