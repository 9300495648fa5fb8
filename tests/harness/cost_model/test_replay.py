"""Replay agrees with live runs, shares budgets well, and refuses damaged traces."""

import itertools
import json
import types

import numpy as np
import pytest

from specpilot.errors import InvalidInput, NotFound
from specpilot.harness.cost_model.replay import (
    bias,
    oracle,
    profile,
    replay,
    replay_batched,
    spearman,
)
from specpilot.harness.cost_model.traces import TraceHeader, TraceWriter, read_trace
from specpilot.mechanisms.trees.lattice import Lattice
from specpilot.mechanisms.trees.policies import best_first, chain

VOCAB = 50
HEADER = TraceHeader("made", "dflash", VOCAB, block=6, policy="tree", rows=1, every_position=True)


def write(path, *, requests=8, length=40, header=HEADER, pairwise=False, seed=0, skip=None):
    """A trace whose drafter is right about the target more often the deeper its certainty."""
    rng = np.random.default_rng(seed)
    depth, width = header.block - 1, 5
    with TraceWriter(path, header) as writer:
        for r in range(requests):
            output = rng.integers(0, VOCAB, length).tolist()
            certainty = rng.uniform(0.2, 0.9)  # requests differ: a shared budget has work to do
            for at in range(length - 1):
                if (r, at) == skip:
                    continue
                tokens = np.empty((depth, width), dtype=int)
                logp = np.empty((depth, width))
                for d in range(depth):
                    true = output[at + 1 + d] if at + 1 + d < length else 0
                    others = rng.choice([t for t in range(VOCAB) if t != true], width, False)
                    p = rng.dirichlet(np.full(width, 0.3)) * 0.98
                    p = np.sort(p)[::-1] * (1 - certainty) + certainty * (np.arange(width) == 0)
                    p /= p.sum() * 1.02
                    rank = rng.choice(width + 1, p=[*p, 1 - p.sum()])
                    tokens[d] = others
                    if rank < width:
                        tokens[d, rank] = true
                    logp[d] = np.log(p)
                if pairwise:
                    edges = np.repeat(logp[1:, None], width, axis=1)
                    lattice = Lattice.pairwise(tokens, logp[0], edges, VOCAB)
                else:
                    lattice = Lattice.marginal(tokens, logp, VOCAB)
                writer.cycle(f"r{r}", at, output[at], lattice)
            writer.output(f"r{r}", output)
    return path


@pytest.fixture
def trace(tmp_path):
    return read_trace(write(tmp_path / "made.jsonl"))


def test_every_output_token_is_emitted_once(trace) -> None:
    for policy, rows in itertools.product((chain, best_first), (2, 4, 6)):
        found = replay(trace, policy, rows)
        assert found.exact
        assert found.tokens == sum(len(o) - 1 for o in trace.outputs.values())
        assert found.low is not None and found.low < found.tokens_per_pass < found.high


def test_more_rows_accept_more_and_the_oracle_bounds_them_all(trace) -> None:
    values = [replay(trace, best_first, r).tokens_per_pass for r in (1, 2, 4, 8, 16, 32)]
    assert values[0] == 1.0
    assert all(a <= b + 0.02 for a, b in itertools.pairwise(values))
    top = oracle(trace).tokens_per_pass
    assert values[-1] <= top + 0.02
    assert values[4] > replay(trace, chain, 6).tokens_per_pass


def test_a_replay_on_paper_counts_as_by_hand(tmp_path) -> None:
    header = TraceHeader("hand", "dflash", 9, block=3, policy="tree", rows=1, every_position=True)
    with TraceWriter(tmp_path / "t.jsonl", header) as writer:
        logp = np.log([[0.6, 0.3], [0.6, 0.3]])
        output = [1, 2, 3, 4, 5, 6]
        proposals = [[[2, 8], [3, 8]], [[8, 3], [4, 7]], [[4, 8], [8, 5]], [[8, 7], [8, 7]],
                     [[6, 7], [7, 8]]]  # fmt: skip
        for at, tokens in enumerate(proposals):
            writer.cycle("r", at, output[at], Lattice.marginal(tokens, logp, 9))
        writer.output("r", output)
    trace = read_trace(tmp_path / "t.jsonl")
    found = replay(trace, chain, 3)
    # at 0: 2 and 3 accepted, bonus 4; at 3: nothing, bonus 5; at 4: 6 accepted and the end.
    assert (found.tokens, found.passes) == (5, 3)
    assert found.low is None
    short = replay(trace, chain, 3, block=2)  # at 0: 2, bonus 3; at 2: 4, bonus 5; at 4: 6
    assert (short.tokens, short.passes, short.block) == (5, 3, 2)


def test_a_profile_is_a_replay_at_each_size(trace) -> None:
    found = profile(trace, best_first, (4, 16), name="best_first")
    assert found.at(16) == replay(trace, best_first, 16).tokens_per_pass
    assert "made" in found.source


def test_a_shared_budget_beats_equal_shares(tmp_path) -> None:
    trace = read_trace(write(tmp_path / "b.jsonl", requests=24, length=60, seed=5))
    rows = 4 * 6
    arguments = {"requests": 4, "rows": rows}
    equal = replay_batched(trace, best_first, shared=False, **arguments)
    shared = replay_batched(trace, best_first, shared=True, **arguments)
    assert shared.tokens == equal.tokens
    assert shared.tokens_per_pass > equal.tokens_per_pass
    assert shared.rows_per_pass <= rows and equal.rows_per_pass <= rows
    alone = replay_batched(trace, best_first, requests=1, rows=6, shared=True)
    assert alone.tokens_per_pass == replay(trace, best_first, 6).tokens_per_pass
    with pytest.raises(InvalidInput, match="rows"):
        replay_batched(trace, best_first, requests=4, rows=3, shared=True)


def test_traces_survive_the_disk_with_pairwise_edges_and_compressed(tmp_path) -> None:
    plain = read_trace(write(tmp_path / "p.jsonl", requests=2, pairwise=True))
    packed = read_trace(write(tmp_path / "p.jsonl.gz", requests=2, pairwise=True))
    lattice = plain.cycles["r0"][0].lattice
    assert lattice.edges.shape == (4, 5, 5)
    assert np.array_equal(lattice.edges, packed.cycles["r0"][0].lattice.edges)
    assert (tmp_path / "p.jsonl.gz").stat().st_size < (tmp_path / "p.jsonl").stat().st_size / 2


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_a_trace_cut_off_in_the_middle_is_refused(tmp_path, share: float, suffix: str) -> None:
    path = write(tmp_path / f"t{suffix}", requests=3)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(InvalidInput, match="cut off"):
        read_trace(path)


def test_a_trace_without_its_end_or_with_lines_gone_is_refused(tmp_path) -> None:
    path = write(tmp_path / "t.jsonl", requests=2)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]))  # cut exactly between two lines
    with pytest.raises(InvalidInput, match="end line"):
        read_trace(path)
    path.write_text("".join(lines[:5] + lines[6:]))
    with pytest.raises(InvalidInput, match="end line says"):
        read_trace(path)
    with pytest.raises(RuntimeError), TraceWriter(path, HEADER):
        raise RuntimeError("the run died")
    with pytest.raises(InvalidInput, match="cut off"):
        read_trace(path)


@pytest.mark.parametrize(
    ("line", "change", "what"),
    [
        (0, {"format": "other"}, "format"),
        (0, {"block": "six"}, "block"),
        (1, {"tokens": None}, "line 2"),
        (1, {"anchor": 49_000}, "position"),
        (1, {"first": [0.5] * 5}, "line 2"),
    ],
)
def test_a_malformed_record_is_named(tmp_path, line: int, change: dict, what: str) -> None:
    path = write(tmp_path / "t.jsonl", requests=1)
    lines = path.read_text().splitlines()
    lines[line] = json.dumps({**json.loads(lines[line]), **change})
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(InvalidInput, match=what):
        read_trace(path)


def test_bad_requests_of_a_replay_are_refused(trace, tmp_path) -> None:
    with pytest.raises(InvalidInput, match="block"):
        replay(trace, chain, 4, block=7)
    with pytest.raises(InvalidInput, match="rows"):
        replay(trace, chain, 0)
    with pytest.raises(NotFound, match="no trace"):
        read_trace(tmp_path / "none.jsonl")
    holey = read_trace(write(tmp_path / "h.jsonl", requests=1, skip=(0, 3)))
    with pytest.raises(InvalidInput, match="position 3"):
        replay(holey, chain, 1)


def test_bias_and_ranks() -> None:
    assert bias(3.09, 3.0) == pytest.approx(0.03)
    assert spearman([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    with pytest.raises(InvalidInput):
        spearman([1, 2], [1, 2])
    with pytest.raises(InvalidInput, match="live"):
        bias(3.0, 0.0)


def test_a_replayed_policy_gives_the_tokens_per_pass_of_the_live_engine(
    tiny, prompts, tmp_path
) -> None:
    from specpilot.harness.cost_model.reference import record_lattices

    live_path, dense_path = tmp_path / "live.jsonl", tmp_path / "dense.jsonl.gz"
    settings = {"speculation": "tree", "rows": 12, "block": 8}
    live = record_lattices(tiny, prompts, live_path, output_tokens=40, settings=settings, top_k=8)
    steps = record_lattices(tiny, prompts, dense_path, output_tokens=40, block=8, top_k=8)
    assert steps == 1.0
    own = replay(read_trace(live_path), best_first, 12)
    assert not own.exact
    assert own.tokens_per_pass == pytest.approx(live)
    # Recorded at every position, without the policy: the same walk.
    dense = replay(read_trace(dense_path), best_first, 12)
    assert dense.exact
    assert dense.tokens_per_pass == pytest.approx(live, rel=0.02)


def test_replay_is_compared_with_live_runs_of_the_same_policies(tiny, prompts) -> None:
    from specpilot.harness.cost_model.bench import compare_with_live

    policies = (
        {"speculation": "chain", "block": 4},
        {"speculation": "tree", "block": 8, "rows": 8},
        {"speculation": "tree", "block": 8, "rows": 32},
    )
    rows = compare_with_live(tiny, prompts, output_tokens=30, policies=policies)
    assert [settings for settings, _, _ in rows[:3]] == list(policies)
    assert all(abs(bias(replayed, live)) < 0.1 for _, replayed, live in rows)


def test_the_bench_reports_ranks_and_bias_of_twelve_policies(tiny, prompts, monkeypatch) -> None:
    from specpilot.harness.cost_model import bench
    from specpilot.harness.deployments import registry, workload

    offered = types.SimpleNamespace(prompts=lambda split, n, key: prompts[:n])
    monkeypatch.setattr(registry, "load", lambda name: tiny)
    monkeypatch.setattr(workload, "load_workload", lambda name, length: offered)
    results = bench._pico(requests=3, output_tokens=20)
    ids = [r["id"] for r in results]
    assert ids[:2] == ["replay.pico.spearman", "replay.pico.oracle_tokens_per_pass"]
    live = {r["id"]: r["value"] for r in results if r["id"].endswith("rows64.tokens_per_pass")}
    assert len(ids) == 12 + 3
    assert 1.0 <= live["replay.pico.tree.block16.rows64.tokens_per_pass"] <= results[1]["value"]
    assert results[-1]["id"] == "replay.pico.worst_bias" and results[-1]["value"] < 0.1
