"""Calibration learns from past cycles alone; replay gives what the policy would have accepted."""

import numpy as np
import pytest

from specpilot.errors import InvalidInput
from specpilot.mechanisms.trees import policies
from specpilot.mechanisms.trees.acceptance import greedy
from specpilot.mechanisms.trees.calibration import Calibration
from specpilot.mechanisms.trees.lattice import Lattice
from specpilot.mechanisms.trees.replay import Trace, oracle, replay

VOCAB = 50


def text_and_lattices(seed: int, length: int, *, after_sibling: float) -> Trace:
    """A target whose drafter is a marginal one: right while on the chain of first choices, right
    with probability ``after_sibling`` once it has been left."""
    rng = np.random.default_rng(seed)
    text = rng.integers(0, VOCAB, length).tolist()
    lattices = []
    for t in range(length - 1):
        rows, logp, spine = [], [], True
        for d in range(4):
            truth = text[t + 1 + d] if t + 1 + d < length else int(rng.integers(VOCAB))
            others = rng.permutation(np.delete(np.arange(VOCAB), truth))[:4].tolist()
            right = 0.6 if spine else after_sibling
            place = 0 if rng.random() < right else int(rng.integers(1, 5))
            others.insert(place, truth)
            rows.append(others[:5])
            logp.append(np.log([0.5, 0.2, 0.1, 0.08, 0.02]))
            spine = spine and place == 0
        lattices.append(Lattice.marginal(rows, np.stack(logp), VOCAB))
    return Trace(tuple(text), tuple(lattices))


def test_calibration_without_trials_changes_nothing(random_lattice) -> None:
    for pairwise in (True, False):
        lattice = random_lattice(0, 4, 5, pairwise=pairwise)
        same = Calibration(4, 5).apply(lattice)
        assert np.allclose(same.first, lattice.first)
        for position in range(1, 4):
            for before in range(5):
                want = lattice.row(position, before)
                assert np.allclose(same.row(position, before), want, rtol=0, atol=1e-12)


def test_calibration_finds_the_rates_on_and_off_the_spine() -> None:
    trace = text_and_lattices(1, 4000, after_sibling=0.1)
    calibration = Calibration(4, 5)
    replay([trace], policies.best_first, 16, calibration=calibration)
    fresh = trace.lattices[0]
    learned = calibration.apply(fresh)
    assert np.exp(learned.row(1, 0)[0]) == pytest.approx(0.6, abs=0.05)  # predicted 0.5
    assert np.exp(learned.row(1, 1)[0]) == pytest.approx(0.1, abs=0.05)
    assert (learned.edges <= 0).all() and (learned.first <= 0).all()
    assert calibration.trials > 1000


def test_calibration_earns_tokens_where_the_drafter_misjudges_siblings() -> None:
    traces = [text_and_lattices(seed, 1500, after_sibling=0.05) for seed in range(3)]
    plain = replay(traces, policies.best_first, 8)
    learned = replay(traces, policies.best_first, 8, calibration=Calibration(4, 5))
    assert learned.tokens_per_pass > plain.tokens_per_pass * 1.01


def test_calibration_refuses_lattices_it_has_no_room_for(random_lattice) -> None:
    with pytest.raises(InvalidInput, match="6 x 5"):
        Calibration(4, 5).apply(random_lattice(0, 6, 5))
    with pytest.raises(InvalidInput, match="above 0"):
        Calibration(0, 5)


def test_replay_equals_a_walk_by_hand() -> None:
    trace = text_and_lattices(2, 200, after_sibling=0.5)
    at = passes = 0
    while at < len(trace.lattices):
        tree = policies.best_first(trace.lattices[at], trace.tokens[at], 8)
        accepted = 0
        node = 0
        while at + 1 + accepted < len(trace.lattices):
            child = tree.children[node].get(trace.tokens[at + 1 + accepted])
            if child is None:
                break
            node, accepted = child, accepted + 1
        at, passes = at + 1 + accepted, passes + 1
    got = replay([trace], policies.best_first, 8)
    assert got.passes == (passes,) and got.tokens == (199,)
    assert got.tokens_per_pass == 199 / passes


def test_more_rows_help_and_the_oracle_bounds_them() -> None:
    traces = [text_and_lattices(seed, 400, after_sibling=0.5) for seed in range(3)]
    chain = replay(traces, policies.chain, 5).tokens_per_pass
    small = replay(traces, policies.best_first, 8).tokens_per_pass
    large = replay(traces, policies.best_first, 64).tokens_per_pass
    best = oracle(traces).tokens_per_pass
    assert 1 < chain < small < large <= best <= 5
    one_draft = replay(traces, policies.best_first, 64, block=2).tokens_per_pass
    assert 1 < one_draft <= 2


def test_replay_never_emits_past_the_end() -> None:
    text = (1, 2, 3)
    sure = [Lattice.marginal([[2], [3]], [[0.0], [0.0]], VOCAB)] * 2
    assert replay([Trace(text, tuple(sure))], policies.chain, 3).passes == (1,)
    assert oracle([Trace(text, tuple(sure))]).passes == (1,)


def test_a_trace_has_a_lattice_after_each_token_but_the_last() -> None:
    with pytest.raises(InvalidInput, match="lattice after each"):
        Trace((1, 2, 3), ())


def test_an_update_learns_every_candidate_of_rows_that_were_reached(random_lattice) -> None:
    lattice = random_lattice(3, 4, 5)
    tree = policies.chain(lattice, 0, 2)
    walk = greedy(tree, [tree.tokens[1], 49 if 49 not in lattice.tokens[1] else 48])
    calibration = Calibration(4, 5)
    calibration.update(lattice, tree, walk)
    assert calibration.trials == 10  # two rows of five: after the anchor and after the draft
