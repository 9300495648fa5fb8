"""Recorded lattices replay to exactly the passes that the engine itself needs."""

from dataclasses import replace

import pytest

from specpilot.errors import InvalidInput
from specpilot.harness.engines.backend import GenerateRequest
from specpilot.harness.engines.reference.engine import ReferenceEngine
from specpilot.harness.engines.reference.traces import record
from specpilot.harness.engines.reference.trees_bench import table
from specpilot.harness.engines.settings import ReferenceSettings
from specpilot.mechanisms.trees import policies
from specpilot.mechanisms.trees.replay import replay

PROMPTS = [(5, 6, 7, 8), (40, 41, 42), tuple(range(10, 30))]
TOKENS = 24


@pytest.fixture
def settings(folder, drafter_folder) -> ReferenceSettings:
    target = folder("hybrid")
    return ReferenceSettings(
        target=str(target), drafter=str(drafter_folder()), dtype="float64", block=6, top_k=5,
        context=80, max_running=2,
    )  # fmt: skip


def live_passes(settings: ReferenceSettings) -> tuple[int, ...]:
    engine = ReferenceEngine(settings)
    for n, prompt in enumerate(PROMPTS):
        engine.add(GenerateRequest(str(n), prompt, TOKENS, ignore_eos=True))
    passes = {}
    while engine.has_work():
        passes.update({e.rid: e.meta["spec_verify_ct"] for e in engine.step() if e.finished})
    return tuple(passes[str(n)] for n in range(len(PROMPTS)))


@pytest.mark.parametrize("rows", [6, 20])
def test_replay_needs_the_engines_own_passes(settings: ReferenceSettings, rows: int) -> None:
    traces = record(settings, PROMPTS, TOKENS)
    assert [len(t.tokens) for t in traces] == [TOKENS] * 3
    tree = replay(traces, policies.best_first, rows)
    assert tree.passes == live_passes(replace(settings, speculation="tree", rows=rows))
    if rows == 6:
        chain = replay(traces, policies.chain, rows)
        assert chain.passes == live_passes(replace(settings, speculation="chain"))


def test_the_table_compares_policies_on_the_same_text(settings: ReferenceSettings) -> None:
    traces = record(settings, PROMPTS * 2, TOKENS)
    results = {r["id"]: r["value"] for r in table({6: traces})}
    assert results["trees.pico.tau.best_first.n64"] <= results["trees.pico.tau.oracle"]
    assert results["trees.pico.best_first_over_chain_tau"] == pytest.approx(
        results["trees.pico.tau.best_first.n64"] / results["trees.pico.tau.chain.n6"], abs=1e-3
    )


def test_recording_needs_a_drafter(settings: ReferenceSettings) -> None:
    bare = ReferenceSettings(target=settings.target)
    with pytest.raises(InvalidInput, match="needs a drafter"):
        record(bare, PROMPTS, TOKENS)
