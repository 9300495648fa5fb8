"""Acceptance rules have exactly the target's law, and the known wrong variants do not.

A rule takes its random decisions from a ``Coin``. ``outcomes`` runs a whole cycle once for every
sequence of decisions and adds up exact probabilities, so the very code that serves is what is
checked. A cycle emits one or more tokens; tokens that it leaves open are drawn from the target, so
that all laws are over the first two tokens.
"""

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from specpilot.errors import CheckFailed, InvalidInput
from specpilot.mechanisms.trees import acceptance
from specpilot.mechanisms.trees.acceptance import Coin, RandomCoin, Walk
from specpilot.mechanisms.trees.tree import Tree

V = 4
EXACT = 1e-12
Law = dict[tuple[int, ...], float]


class Script:
    """A coin that follows a list of choices and notes the probability of having made them."""

    def __init__(self, choices: list[int]) -> None:
        self.choices = choices
        self.weights: list[list[float]] = []
        self.chance = 1.0

    def _take(self, weights: list[float]) -> int:
        place = len(self.weights)
        self.weights.append(weights)
        if place == len(self.choices):
            self.choices.append(next(i for i, w in enumerate(weights) if w > 0))
        choice = self.choices[place]
        self.chance *= weights[choice]
        return choice

    def accept(self, chance: float) -> bool:
        chance = min(1.0, chance)
        return self._take([chance, 1.0 - chance]) == 0

    def draw(self, weights: np.ndarray) -> int:
        return self._take((weights / weights.sum()).tolist())


def outcomes(cycle: Callable[[Coin], tuple[int, ...]]) -> Iterator[tuple[tuple[int, ...], float]]:
    """Every result of ``cycle`` with the probability of the decisions that led there."""
    choices: list[int] = []
    while True:
        coin = Script(choices)
        result = cycle(coin)
        yield result, coin.chance
        while choices:  # the next sequence of decisions, in lexicographic order
            weights = coin.weights[len(choices) - 1]
            later = [i for i in range(choices[-1] + 1, len(weights)) if weights[i] > 0]
            if later:
                choices[-1] = later[0]
                break
            choices.pop()
        if not choices:
            return


def law(cycle: Callable[[Coin], tuple[int, ...]]) -> Law:
    total: Law = {}
    for result, chance in outcomes(cycle):
        total[result] = total.get(result, 0.0) + chance
    return total


class World:
    """A target and a drafter over V tokens: laws of the first, second and third token."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.p = {path: rng.dirichlet(np.ones(V)) for path in self.paths()}
        self.q = {path: rng.dirichlet(np.ones(V)) for path in self.paths()}

    @staticmethod
    def paths() -> list[tuple[int, ...]]:
        return [
            (),
            *((a,) for a in range(V)),
            *((a, b) for a in range(V) for b in range(V)),
        ]

    def target(self) -> Law:
        return {(a, b): self.p[()][a] * self.p[(a,)][b] for a in range(V) for b in range(V)}

    def rows(self, laws: dict[tuple[int, ...], np.ndarray], tree: Tree) -> np.ndarray:
        """Laws at each node; the anchor's own token is no part of a path."""
        tokens = [tuple(tree.tokens[n] for n in tree.path(node)[1:]) for node in range(tree.rows)]
        return np.stack([laws[path] for path in tokens])

    def finish(self, emitted: tuple[int, ...], coin: Coin) -> tuple[int, ...]:
        """Continue by plain decoding up to two tokens."""
        while len(emitted) < 2:
            emitted = (*emitted, coin.draw(self.p[emitted]))
        return emitted[:2]


def distance(law_a: Law, law_b: Law) -> float:
    """Total variation."""
    return 0.5 * sum(abs(law_a.get(x, 0.0) - law_b.get(x, 0.0)) for x in {*law_a, *law_b})


def grow(world: World, counts: tuple[int, ...], coin: Coin) -> Tree:
    """A tree of drawn children: ``counts[d]`` without replacement at each node of depth d."""
    tokens, parent, layer = [0], [-1], [((), 0)]
    for count in counts:
        below = []
        for path, node in layer:
            for token in acceptance.draw_children(world.q[path], count, coin):
                tokens.append(token)
                parent.append(node)
                below.append(((*path, token), len(tokens) - 1))
        layer = below
    return Tree.of(tokens, parent, vocab_size=V)


def draft_chain(world: World, length: int, coin: Coin) -> tuple[int, ...]:
    drafts: tuple[int, ...] = ()
    for _ in range(length):
        drafts = (*drafts, coin.draw(world.q[drafts]))
    return drafts


def ratio(world: World, drafts: tuple[int, ...], coin: Coin, q: dict | None = None) -> Walk:
    rows = len(drafts)
    laws = world.q if q is None else q
    return acceptance.chain_ratio(
        drafts,
        np.stack([laws[drafts[:d]] for d in range(rows)]) if rows else np.empty((0, V)),
        np.stack([world.p[drafts[:d]] for d in range(rows + 1)]),
        coin,
    )


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("length", [0, 1, 2])
def test_chain_ratio_has_the_targets_law(seed: int, length: int) -> None:
    world = World(seed)

    def cycle(coin: Coin) -> tuple[int, ...]:
        return world.finish(ratio(world, draft_chain(world, length, coin), coin).emitted, coin)

    assert distance(law(cycle), world.target()) < EXACT


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("counts", [(1,), (2,), (3,), (4,), (1, 1), (2, 1)])
def test_recursive_rejection_has_the_targets_law(seed: int, counts: tuple[int, ...]) -> None:
    world = World(seed)

    def cycle(coin: Coin) -> tuple[int, ...]:
        tree = grow(world, counts, coin)
        q, p = world.rows(world.q, tree), world.rows(world.p, tree)
        return world.finish(acceptance.recursive_rejection(tree, q, p, coin).emitted, coin)

    assert distance(law(cycle), world.target()) < EXACT


@pytest.mark.parametrize("seed", range(5))
def test_sample_and_walk_has_the_targets_law_on_any_tree(seed: int) -> None:
    world = World(seed)
    fixed = Tree.of([0, 1, 2, 3, 0], [-1, 0, 0, 1, 1], vocab_size=V)

    def cycle(coin: Coin) -> tuple[int, ...]:
        walk = acceptance.sample_and_walk(fixed, world.rows(world.p, fixed), coin)
        return world.finish(walk.emitted, coin)

    assert distance(law(cycle), world.target()) < EXACT

    def drawn(coin: Coin) -> tuple[int, ...]:
        """The tree may depend on anything but the target's own draws."""
        tree = grow(world, (2, 1), coin)
        walk = acceptance.sample_and_walk(tree, world.rows(world.p, tree), coin)
        return world.finish(walk.emitted, coin)

    assert distance(law(drawn), world.target()) < EXACT


def test_sample_and_walk_accepts_the_probability_of_the_tree() -> None:
    world = World(0)
    tree = Tree.of([0, 1, 2, 3, 0], [-1, 0, 0, 1, 1], vocab_size=V)
    p = world.rows(world.p, tree)

    def accepted(coin: Coin) -> tuple[int, ...]:
        return (len(acceptance.sample_and_walk(tree, p, coin).path) - 1,)

    mean = sum(count * chance for (count,), chance in law(accepted).items())
    p1 = world.p[()]
    want = p1[1] + p1[2] + p1[1] * (world.p[(1,)][3] + world.p[(1,)][0])
    assert mean == pytest.approx(want, abs=EXACT)


def test_greedy_emits_what_plain_greedy_decoding_emits() -> None:
    for seed in range(20):
        world = World(seed)
        best = int(world.p[()].argmax())
        plain = (best, int(world.p[(best,)].argmax()))
        for counts in ((1,), (2, 2), (4, 4)):
            tree = grow(world, counts, RandomCoin(np.random.default_rng(seed)))
            tree = tree.capped(1) if seed % 2 else tree
            walk = acceptance.greedy(tree, world.rows(world.p, tree).argmax(-1).tolist())
            assert walk.emitted[:2] == plain[: len(walk.emitted)]
            assert len(walk.path) == len(walk.emitted)
            assert [tree.tokens[n] for n in walk.path[1:]] == list(walk.emitted[:-1])


def test_keyed_walks_emit_what_plain_decoding_with_the_seed_emits() -> None:
    accepted = 0
    for seed in range(40):
        world = World(seed)
        logs = {path: np.log(row) for path, row in world.p.items()}
        plain: tuple[int, ...] = ()
        for _ in range(3):
            plain = (*plain, acceptance.keyed_choice(logs[plain], seed, 7 + len(plain)))
        tree = grow(world, (2, 2), RandomCoin(np.random.default_rng(seed)))
        walk = acceptance.keyed_walk(tree, world.rows(logs, tree), seed, anchor_position=6)
        assert walk.emitted == plain[: len(walk.emitted)]
        accepted += len(walk.path) - 1
    assert accepted > 20


def test_keyed_noise_depends_on_seed_position_and_token_alone() -> None:
    noise = acceptance.keyed_noise(3, 17, 1000)
    assert np.array_equal(noise, acceptance.keyed_noise(3, 17, 1000))
    assert np.array_equal(noise[:10], acceptance.keyed_noise(3, 17, 10))
    assert not np.isin(noise, acceptance.keyed_noise(4, 17, 1000)).any()
    assert not np.isin(noise, acceptance.keyed_noise(3, 18, 1000)).any()
    assert np.isfinite(noise).all()
    assert np.array_equal(acceptance.keyed_noise(-1, 0, 4), acceptance.keyed_noise(2**64 - 1, 0, 4))
    with pytest.raises(InvalidInput, match="never negative"):
        acceptance.keyed_noise(3, -1, 10)


def test_keyed_choice_has_the_targets_law() -> None:
    p, n = np.array([0.45, 0.3, 0.2, 0.05]), 20_000
    counts = np.bincount(
        [acceptance.keyed_choice(np.log(p), 11, position) for position in range(n)], minlength=V
    )
    chi2 = ((counts - n * p) ** 2 / (n * p)).sum()
    assert chi2 < 16.3  # 99.9 % of chi-square with 3 degrees of freedom; the seed is fixed


def test_coupled_drafts_match_at_least_as_often_as_the_bound() -> None:
    p, q = np.array([0.4, 0.3, 0.2, 0.1]), np.array([0.1, 0.5, 0.3, 0.1])
    tv, n = 0.5 * np.abs(p - q).sum(), 4000
    same = sum(
        acceptance.keyed_choice(np.log(p), 5, t) == acceptance.keyed_choice(np.log(q), 5, t)
        for t in range(n)
    )
    assert same / n > (1 - tv) / (1 + tv)


def test_a_walk_is_cut_at_a_stop_token() -> None:
    walk = Walk((0, 1, 4, 6), (5, 9, 2, 7))
    assert walk.first(2) == Walk((0, 1), (5, 9))
    assert walk.first(9) == walk


# Known wrong variants. Each has been met in an engine; the laws above must not accept them.


def test_w1_accepting_a_random_draft_greedily_and_then_sampling_is_caught() -> None:
    world = World(1)

    def cycle(coin: Coin) -> tuple[int, ...]:
        draft = coin.draw(np.ones(V))
        if draft == int(world.p[()].argmax()):
            return world.finish((draft,), coin)
        return world.finish((coin.draw(world.p[()]),), coin)

    assert distance(law(cycle), world.target()) > 0.05


def test_w2_choosing_the_length_after_seeing_the_draft_is_caught() -> None:
    """DSpark, appendix A: keep a draft only if it looks good, else emit from the target."""
    world = World(6)
    p, q = world.p[()], world.q[()]
    sure = int(np.where(p > q, q, 0).argmax())  # never rejected

    def cycle(coin: Coin) -> tuple[int, ...]:
        drafts = draft_chain(world, 1, coin)
        kept = drafts if drafts[0] == sure else ()
        return world.finish(ratio(world, kept, coin).emitted, coin)

    assert distance(law(cycle), world.target()) > 0.02


def test_w3_reusing_the_drafts_noise_for_the_recovery_is_caught() -> None:
    p, q = np.array([0.30, 0.40, 0.10, 0.20]), np.array([0.29, 0.01, 0.60, 0.10])
    rng = np.random.default_rng(0)
    n = 400_000
    noise, fresh = rng.gumbel(size=(n, V)), rng.gumbel(size=(n, V))
    draft = (np.log(q) + noise).argmax(1)
    kept = rng.random(n) < np.minimum(1, p[draft] / q[draft])
    with np.errstate(divide="ignore"):
        rest = np.log(np.maximum(p - q, 0))
    errors = {}
    for name, source in (("shared", noise), ("fresh", fresh)):
        emitted = np.where(kept, draft, (rest + source).argmax(1))
        errors[name] = 0.5 * np.abs(np.bincount(emitted, minlength=V) / n - p).sum()
    assert errors["shared"] > 0.02
    assert errors["fresh"] < 0.004


class Zero:
    """A generator whose uniform draw is 0, which happens about once in 2^53."""

    def random(self) -> float:
        return 0.0


def test_w4_a_uniform_draw_of_zero_never_accepts_an_impossible_token() -> None:
    coin = RandomCoin(Zero())  # type: ignore[arg-type]
    p = np.array([[0.0, 1.0, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25]])
    q = np.array([[0.5, 0.5, 0.0, 0.0]])
    assert acceptance.chain_ratio([0], q, p, coin).emitted == (1,)
    tree = Tree.of([0, 0], [-1, 0], vocab_size=V)
    walk = acceptance.recursive_rejection(tree, np.vstack([q, q]), p, coin)
    assert walk.emitted == (1,)
    assert coin.draw(np.array([0.0, 0.0, 1.0, 0.0])) == 2
    not_strict = [ratio >= 0.0 for ratio in p[0] / np.maximum(q[0], 0.5)]
    assert not_strict[0]  # `u <= p/q` would have let token 0 through


def test_w5_a_q_that_the_sampler_did_not_use_is_caught() -> None:
    world = World(3)
    hot = {path: row**0.5 / (row**0.5).sum() for path, row in world.q.items()}

    def cycle(coin: Coin) -> tuple[int, ...]:
        drafts = draft_chain(world, 2, coin)  # sampled from q at temperature 1
        return world.finish(ratio(world, drafts, coin, q=hot).emitted, coin)

    assert distance(law(cycle), world.target()) > 0.02


def test_w6_missing_draft_probs_taken_as_one_hot_in_one_half_of_the_rule_is_caught() -> None:
    """Accepting with one-hot q but recovering with the real q, and the other way round."""
    world = World(4)
    p, q = world.p[()], world.q[()]

    def accept_one_hot(coin: Coin) -> tuple[int, ...]:
        draft = coin.draw(q)
        if coin.accept(p[draft]):
            return (draft,)
        return (coin.draw(np.maximum(p - q, 0)),)

    def recover_one_hot(coin: Coin) -> tuple[int, ...]:
        draft = coin.draw(q)
        if coin.accept(p[draft] / q[draft]):
            return (draft,)
        rest = p.copy()
        rest[draft] = 0
        return (coin.draw(rest),)

    want = {(token,): float(p[token]) for token in range(V)}
    assert distance(law(accept_one_hot), want) > 0.02
    assert distance(law(recover_one_hot), want) > 0.02

    def both(coin: Coin) -> tuple[int, ...]:
        """One-hot in both halves is lossless for a draft however made; it only accepts less."""
        draft = coin.draw(q)
        one_hot = np.eye(V)[[draft]]
        return acceptance.chain_ratio([draft], one_hot, np.stack([p, p]), coin).emitted[:1]

    assert distance(law(both), want) < EXACT


def test_w7_stopping_by_this_steps_confidence_is_caught() -> None:
    """A confidence that saw the draft decides whether the next draft is submitted."""
    world = World(2)

    def cycle(coin: Coin, *, peek: bool) -> tuple[int, ...]:
        drafts = draft_chain(world, 2, coin)
        seen = drafts[1] if peek else drafts[0]
        kept = drafts if world.q[drafts[:1]][seen] > 0.3 else drafts[:1]
        return world.finish(ratio(world, kept, coin).emitted, coin)

    assert distance(law(lambda coin: cycle(coin, peek=True)), world.target()) > 0.01
    assert distance(law(lambda coin: cycle(coin, peek=False)), world.target()) < EXACT


def test_drafts_that_q_could_not_give_are_refused() -> None:
    p = np.full((2, V), 0.25)
    coin = RandomCoin(np.random.default_rng(0))
    with pytest.raises(CheckFailed, match="drafted with probability 0"):
        acceptance.chain_ratio([3], np.array([[0.5, 0.5, 0.0, 0.0]]), p, coin)
    unscaled = np.array([[0.25, 0.5, 0.5, 0.5]])
    with pytest.raises(CheckFailed, match="sum to 1"):
        for _ in range(200):
            acceptance.chain_ratio([1], unscaled, p, coin)
