"""Tree policies: best-first is optimal, all are closed under ancestors and keep to their rows."""

import itertools
import math
from functools import partial

import numpy as np
import pytest

from specpilot.errors import InvalidInput
from specpilot.mechanisms.trees import policies
from specpilot.mechanisms.trees.lattice import Lattice
from specpilot.mechanisms.trees.tree import Tree

VOCAB = 50  # of random_lattice

ALL = {
    "chain": policies.chain,
    "best_first": policies.best_first,
    "ddtree": policies.ddtree,
    "eagle2": partial(policies.eagle2, beam=4),
    "cost_aware": policies.cost_aware({4: 1.0, 8: 1.1, 16: 1.2}),
}


def value(tree: Tree) -> float:
    return sum(map(math.exp, tree.scores[1:]))


def every_path(lattice: Lattice) -> dict[tuple[int, ...], float]:
    """Path log-prob of every candidate path, by slots."""
    scores: dict[tuple[int, ...], float] = {}
    for length in range(1, lattice.depth + 1):
        for path in itertools.product(range(lattice.width), repeat=length):
            total, before = 0.0, 0
            for position, slot in enumerate(path):
                total += float(lattice.row(position, before)[slot])
                before = slot
            scores[path] = total
    return scores


@pytest.mark.parametrize("pairwise", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_best_first_matches_brute_force_over_all_trees(
    seed: int, pairwise: bool, random_lattice
) -> None:
    lattice = random_lattice(seed, 3, 2, pairwise=pairwise)
    scores = every_path(lattice)
    for drafts in (1, 3, 5):
        best = max(
            sum(math.exp(scores[p]) for p in nodes)
            for nodes in itertools.combinations(scores, drafts)
            if all(len(p) == 1 or p[:-1] in nodes for p in nodes)
        )
        assert value(policies.best_first(lattice, 0, drafts + 1)) == pytest.approx(best, abs=1e-12)


@pytest.mark.parametrize("seed", range(10))
def test_best_first_takes_the_likeliest_nodes_of_a_wide_lattice(seed: int, random_lattice) -> None:
    lattice = random_lattice(seed, 4, 6)
    likeliest = sorted(every_path(lattice).values(), reverse=True)
    tree = policies.best_first(lattice, 0, 64)
    assert np.allclose(tree.scores[1:], likeliest[:63], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("pairwise", [True, False])
def test_every_policy_gives_a_valid_tree_with_true_scores(
    name: str, pairwise: bool, random_lattice
) -> None:
    for seed in range(10):
        lattice = random_lattice(seed, 5, 6, pairwise=pairwise)
        for rows in (4, 7, 16):
            tree = ALL[name](lattice, 3, rows)
            assert 1 < tree.rows <= rows
            Tree.of(tree.tokens, tree.parent, vocab_size=VOCAB, scores=tree.scores)
            assert tree.tokens[0] == 3
            assert all(tree.depth[n] == len(tree.path(n)) - 1 for n in range(tree.rows))
            if name == "ddtree" and pairwise:
                continue  # scored by marginals, not by the lattice's edges
            for node in range(1, tree.rows):
                slots = [
                    lattice.tokens[d].tolist().index(tree.tokens[n])
                    for d, n in enumerate(tree.path(node)[1:])
                ]
                before = [0, *slots[:-1]]
                want = sum(lattice.row(d, before[d])[s] for d, s in enumerate(slots))
                assert tree.scores[node] == pytest.approx(want, abs=1e-12)


@pytest.mark.parametrize("name", ["chain", "ddtree", "eagle2"])
def test_no_policy_beats_best_first(name: str, random_lattice) -> None:
    for seed in range(10):
        lattice = random_lattice(seed, 5, 6)
        best = policies.best_first(lattice, 0, 16)
        other = ALL[name](lattice, 0, 16)
        paths = every_path(lattice)
        worth = 0.0
        for node in range(1, other.rows):
            slots = tuple(
                lattice.tokens[d].tolist().index(other.tokens[n])
                for d, n in enumerate(other.path(node)[1:])
            )
            worth += math.exp(paths[slots])
        assert worth <= value(best) + 1e-12


def test_exact_ties_keep_parents() -> None:
    certain = np.zeros((6, 3))  # log-prob 0 everywhere: every path ties with its prefix
    tokens = np.arange(18).reshape(6, 3)
    lattice = Lattice.marginal(tokens, certain, VOCAB)
    for name in ("best_first", "eagle2"):
        tree = ALL[name](lattice, 49, 12)
        Tree.of(tree.tokens, tree.parent, vocab_size=VOCAB, scores=tree.scores)
        assert tree.rows == 12


def test_fewer_rows_give_a_prefix(random_lattice) -> None:
    lattice = random_lattice(1, 6, 8)
    whole = policies.best_first(lattice, 0, 64)
    for rows in (1, 2, 9, 33):
        part = policies.best_first(lattice, 0, rows)
        assert part.tokens == whole.tokens[:rows] and part.parent == whole.parent[:rows]


def test_impossible_candidates_are_left_out() -> None:
    logp = np.array([[0.0, -np.inf], [-np.inf, -np.inf]])
    lattice = Lattice.marginal([[1, 2], [3, 4]], logp, VOCAB)
    assert policies.best_first(lattice, 0, 8).tokens == (0, 1)
    assert policies.eagle2(lattice, 0, 8).tokens == (0, 1)


def test_size_stops_where_tokens_a_second_stop_rising(random_lattice) -> None:
    scores = policies.best_first(random_lattice(0, 6, 8), 0, 64).scores
    tokens = np.cumsum(np.exp(scores))
    flat = dict.fromkeys((8, 16, 32, 64), 1.0)
    assert policies.best_size(scores, flat) == 64
    assert policies.best_size(scores, {rows: float(rows) for rows in flat}) == 8
    steps = {8: 1.0, 16: 1.0001, 24: 3.0, 32: 3.0001, 64: 9.0}  # jumps: compare all sizes
    want = max(steps, key=lambda rows: tokens[rows - 1] / steps[rows])
    assert policies.best_size(scores, steps) == want
    with pytest.raises(InvalidInput, match="no step time"):
        policies.cost_aware({16: 1.0})(random_lattice(0, 3, 3), 0, 8)
    with pytest.raises(InvalidInput, match="positive"):
        policies.best_size(scores, {8: 0.0})


@pytest.mark.parametrize("rows", [0, 129])
def test_rows_outside_the_limit_are_refused(rows: int, random_lattice) -> None:
    for policy in ALL.values():
        with pytest.raises(InvalidInput, match="1 to 128"):
            policy(random_lattice(0, 3, 3), 0, rows)


@pytest.mark.parametrize(
    ("tokens", "logp", "word"),
    [
        ([[1, 2]], [[-1.0, float("nan")]], "NaN"),
        ([[1, 2]], [[-1.0, 0.5]], "never above 0"),
        ([[1, 50]], [[-1.0, -2.0]], "outside the vocabulary"),
        ([[1, -1]], [[-1.0, -2.0]], "outside the vocabulary"),
        ([[1, 1]], [[-1.0, -2.0]], "repeated at position 0"),
        ([[1, 2]], [[-1.0]], "shape"),
        ([1, 2], [-1.0, -2.0], "positions, candidates"),
        ([[1.0, 2.0]], [[-1.0, -2.0]], "integers"),
    ],
)
def test_a_broken_lattice_is_named(tokens: list, logp: list, word: str) -> None:
    with pytest.raises(InvalidInput, match=word):
        Lattice.marginal(tokens, logp, VOCAB)


@pytest.mark.parametrize(
    ("tokens", "parent", "word"),
    [
        ([1, 2, 3], [-1, 2, 1], "does not come before"),  # a cycle
        ([1, 2], [-1, 1], "does not come before"),  # its own parent
        ([1, 2], [-1, -1], "does not come before"),  # a second root
        ([1, 2], [0, 0], "node 0 is the anchor"),
        ([1, 2, 2], [-1, 0, 0], "two children"),
        ([1, 60], [-1, 0], "outside the vocabulary"),
        (range(1, 6), [-1, 0, 1, 2, 3], "limit is 4"),
        ([], [], "at least the anchor"),
        ([1, 2], [-1], "as many"),
    ],
)
def test_a_broken_tree_is_named(tokens: list, parent: list, word: str) -> None:
    with pytest.raises(InvalidInput, match=word):
        Tree.of(tokens, parent, vocab_size=VOCAB, limit=4)


@pytest.mark.parametrize("score", [0.1, float("nan")])
def test_a_broken_score_is_named(score: float) -> None:
    with pytest.raises(InvalidInput, match="NaN or positive"):
        Tree.of([1, 2], [-1, 0], vocab_size=VOCAB, scores=[0.0, score])


def test_a_tree_is_cut_by_depth_and_knows_its_ancestors(random_lattice) -> None:
    tree = policies.best_first(random_lattice(2, 5, 4, sharp=3.0), 7, 24)
    mask = tree.ancestors()
    for node in range(tree.rows):
        assert tuple(np.flatnonzero(mask[node])) == tree.path(node)
    cut = tree.capped(2)
    assert max(cut.depth) == 2 and cut.rows == sum(d <= 2 for d in tree.depth)
    Tree.of(cut.tokens, cut.parent, vocab_size=VOCAB, scores=cut.scores)
    assert tree.capped(5) is tree
