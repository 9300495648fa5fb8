"""The n-gram drafter: exact counts, bounded memory, tenants that do not see each other."""

import itertools
import math

import numpy as np
import pytest

from specpilot.errors import InvalidInput
from specpilot.mechanisms.trees import policies
from specpilot.mechanisms.trees.ngram import NgramPool, NgramPools


def test_followers_are_counts_after_the_longest_known_context() -> None:
    pool = NgramPool(10, order=3)
    pool.extend([], [1, 2, 3, 1, 2, 4, 1, 2, 3])
    assert pool.followers([1, 2]) == {3: math.log(2 / 4), 4: math.log(1 / 4)}
    assert pool.followers([9, 1, 2]) == pool.followers([1, 2])  # falls back
    assert pool.followers([4, 1, 2]) == {3: math.log(1 / 2)}  # the longer context wins
    assert pool.followers([9]) == {}


def test_learning_in_pieces_equals_learning_at_once() -> None:
    rng = np.random.default_rng(0)
    text = rng.integers(0, 6, 80).tolist()
    whole, pieces = NgramPool(6, order=4), NgramPool(6, order=4)
    whole.extend([], text)
    for start in range(0, 80, 7):
        pieces.extend(text[:start], text[start : start + 7])
    for end in range(1, 80):
        assert whole.followers(text[:end]) == pieces.followers(text[:end])


def test_a_repeated_text_is_drafted_whole() -> None:
    text = [5, 7, 2, 9, 4, 1, 8, 3]
    pool = NgramPool(10)
    pool.extend([], text * 3)
    lattice = pool.lattice(text[:2], depth=5, width=4)
    assert lattice is not None and lattice.depth == 5
    assert policies.chain(lattice, 7, 6).tokens == (7, 2, 9, 4, 1, 8)


def test_lattice_paths_are_products_of_the_pools_own_probabilities() -> None:
    rng = np.random.default_rng(1)
    text = rng.integers(0, 5, 300).tolist()
    pool = NgramPool(5, order=1)
    pool.extend([], text)
    lattice = pool.lattice([3], depth=4, width=5)
    assert lattice is not None
    tree = policies.best_first(lattice, 3, 40)
    for node in range(1, tree.rows):
        line = [tree.tokens[n] for n in tree.path(node)]
        want = sum(pool.followers([a])[b] for a, b in itertools.pairwise(line))
        assert tree.scores[node] == pytest.approx(want)


def test_unknown_contexts_and_ends_of_knowledge_give_no_guesses() -> None:
    pool = NgramPool(10)
    assert pool.lattice([1], depth=3, width=4) is None
    pool.extend([], [1, 2])
    lattice = pool.lattice([1], depth=3, width=4)
    assert lattice is not None and lattice.depth == 1
    assert policies.best_first(lattice, 1, 8).tokens == (1, 2)


def test_memory_is_bounded_and_the_oldest_context_goes_first() -> None:
    pool = NgramPool(10_000, order=2, capacity=100)
    pool.extend([], list(range(5000)))
    assert len(pool) == 100
    assert pool.followers([0]) == {} and pool.followers([4998]) != {}
    wide = NgramPool(10_000, order=1)
    for token in range(1, 1000):
        wide.extend([0], [token])
    assert len(wide.followers([0])) <= 32


def test_tenants_do_not_see_each_other() -> None:
    pools = NgramPools(10, tenants=2)
    pools.of("a").extend([], [1, 2, 3])
    assert pools.of("b").lattice([1], depth=2, width=2) is None
    assert pools.of("a").lattice([1], depth=2, width=2) is not None
    pools.forget("a")
    assert pools.of("a").lattice([1], depth=2, width=2) is None


def test_the_least_recent_tenant_is_forgotten() -> None:
    pools = NgramPools(10, tenants=2)
    for tenant in ("a", "b"):
        pools.of(tenant).extend([], [1, 2])
    pools.of("a")
    pools.of("c")
    assert len(pools.of("a")) > 0
    assert len(pools.of("b")) == 0


@pytest.mark.parametrize(
    ("use", "word"),
    [
        (lambda: NgramPool(10).extend([], [10]), "outside the vocabulary"),
        (lambda: NgramPool(10).lattice([1], 0, 4), "out of range"),
        (lambda: NgramPool(10).lattice([1], 2, 11), "out of range"),
        (lambda: NgramPool(10, capacity=0), "above 0"),
        (lambda: NgramPools(10, tenants=0), "at least one tenant"),
    ],
)
def test_wrong_use_is_named(use, word: str) -> None:
    with pytest.raises(InvalidInput, match=word):
        use()
