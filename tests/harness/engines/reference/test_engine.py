"""Speculation changes nothing but the number of passes: output equals plain decoding, exactly."""

import random
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as profile

from specpilot.errors import InvalidInput
from specpilot.harness.engines.backend import GenerateRequest
from specpilot.harness.engines.reference.engine import ReferenceEngine
from specpilot.harness.engines.reference.target import Target
from specpilot.harness.engines.settings import ReferenceSettings
from specpilot.mechanisms.trees.lattice import Lattice

CONTEXT = 160


class Oracle:
    """A drafter that knows some texts and proposes them with mistakes: good, never perfect.

    It also checks what the engine hands it: features arrive for every position, once, in order.
    """

    capture = (0,)

    def __init__(self, texts: list[list[int]], quality: float) -> None:
        self.texts, self.quality = texts, quality
        self.rng = random.Random(9)
        self.held: dict[int, int] = {}

    def allocate(self, slots: int, capacity: int) -> None:
        self.capacity = capacity

    def extend(self, features, places) -> None:
        assert features.shape[0] == sum(p.count for p in places)
        for place in places:
            assert place.start == (0 if place.start == 0 else self.held[place.slot])
            self.held[place.slot] = place.start + place.count

    def propose(self, anchors, lengths, block, top_k):
        out = []
        for slot, (anchor, length) in enumerate(zip(anchors, lengths, strict=True)):
            assert self.held[slot] == length
            known = [t for t in self.texts if length < len(t) and t[length] == anchor]
            text = self.rng.choice(known)[length + 1 :] if known else []
            tokens = np.array([self.rng.sample(range(97), top_k) for _ in range(block - 1)])
            for d, token in enumerate(text[: block - 1]):
                if self.rng.random() < self.quality and token not in tokens[d]:
                    tokens[d, min(self.rng.randrange(3), top_k - 1)] = token
            logp = -np.sort(self.rng_array(tokens.shape), axis=1)
            out.append(Lattice.marginal(tokens, logp, 97))
        return out

    def rng_array(self, shape):
        return np.array([self.rng.expovariate(1.0) for _ in range(int(np.prod(shape)))]).reshape(
            shape
        )

    def move(self, source: int, target: int, length: int) -> None:
        assert self.held[source] == length
        self.held[target] = length


def settings(speculation: str, **more) -> ReferenceSettings:
    given = {"context": CONTEXT, "max_running": 3, "dtype": "float64", "drafter": "given"}
    return ReferenceSettings(target="given", speculation=speculation, **{**given, **more})


def run(engine: ReferenceEngine, requests, arrivals=(), abort=("", -1)) -> dict:
    """Run all requests; request i is added before step ``arrivals[i]``. Returns events by rid.

    ``abort`` names a request and the step before which it is aborted.
    """
    pending = sorted(zip(arrivals or [0] * len(requests), range(len(requests)), strict=True))
    events: dict[str, list] = {r.rid: [] for r in requests}
    step = 0
    while pending or engine.has_work():
        while pending and pending[0][0] <= step:
            engine.add(requests[pending.pop(0)[1]])
        if step == abort[1]:
            engine.abort(abort[0])
        for event in engine.step():
            events[event.rid].append(event)
        step += 1
        assert step < 2000
    return events


def outputs(events: dict) -> dict:
    return {rid: [t for e in list_ for t in e.new_ids] for rid, list_ in events.items()}


@pytest.fixture(scope="module")
def targets(folder):
    return {k: Target(folder(k), torch.float64) for k in ("hybrid", "qwen3")}


@st.composite
def scenarios(draw):
    """A model, a way to speculate, a drafter's quality, requests, arrivals and one abort."""
    block = draw(st.integers(2, 12))
    speculation = draw(st.sampled_from(["chain", "tree"]))
    more = {"block": block, "max_running": draw(st.integers(1, 4))}
    if speculation == "tree":
        more |= {"rows": draw(st.integers(1, 40)), "top_k": draw(st.integers(1, 12))}
    rng = random.Random(draw(st.integers(0, 2**32)))
    requests = mixed_requests(rng, draw(st.integers(1, 6)))
    arrivals = [rng.randrange(20) for _ in requests]
    quality = draw(st.sampled_from([0.0, 0.5, 0.95, 1.0]))
    abort_at = draw(st.integers(0, 30))
    kind = draw(st.sampled_from(["hybrid", "qwen3"]))
    return kind, speculation, more, quality, requests, arrivals, abort_at


def check_scenario(targets, scenario) -> None:
    kind, speculation, more, quality, requests, arrivals, abort_at = scenario
    plain = outputs(run(ReferenceEngine(settings("none"), targets[kind]), requests))
    texts = [list(r.input_ids) + plain[r.rid] for r in requests]
    oracle = Oracle(texts, quality)
    engine = ReferenceEngine(settings(speculation, **more), targets[kind], oracle)
    victim = GenerateRequest("victim", (1, 2, 3), max_new_tokens=60, ignore_eos=True)
    events = run(engine, [victim, *requests], [0, *arrivals], abort=("victim", abort_at))
    events.pop("victim")
    assert outputs(events) == plain
    assert all(list_[-1].finished for list_ in events.values())


@profile(max_examples=25, derandomize=True, deadline=None, database=None)
@given(scenario=scenarios())
def test_any_speculation_equals_plain_decoding(targets, scenario):
    check_scenario(targets, scenario)


@pytest.mark.slow
@profile(max_examples=400, derandomize=True, deadline=None, database=None)
@given(scenario=scenarios())
def test_any_speculation_equals_plain_decoding_at_length(targets, scenario):
    check_scenario(targets, scenario)


def mixed_requests(rng: random.Random, count: int) -> list[GenerateRequest]:
    """Greedy and sampled requests of many lengths, with and without EOS and stop ids."""
    out = []
    for i in range(count):
        sampled = rng.random() < 0.5
        out.append(
            GenerateRequest(
                rid=str(i),
                input_ids=tuple(rng.choices(range(97), k=rng.choice((1, 5, 40, 90)))),
                max_new_tokens=rng.choice((1, 2, 17, 60)),
                temperature=rng.choice((0.4, 1.0)) if sampled else 0.0,
                top_k=rng.choice((-1, 7)),
                top_p=rng.choice((1.0, 0.8)),
                seed=rng.randrange(2**40),
                stop_token_ids=tuple(rng.sample(range(97), 3)) if rng.random() < 0.4 else (),
                ignore_eos=rng.random() < 0.5,
            )
        )
    return out


@pytest.mark.parametrize("kind", ["hybrid", "qwen3"])
@pytest.mark.parametrize(
    ("speculation", "block", "rows"), [("chain", 4, 0), ("tree", 8, 6), ("tree", 8, 24)]
)
@pytest.mark.parametrize("quality", [0.0, 0.9])
def test_output_equals_plain_decoding(targets, kind, speculation, block, rows, quality):
    rng = random.Random(f"{speculation}{rows}{quality}")
    requests = mixed_requests(rng, 8)
    plain = outputs(run(ReferenceEngine(settings("none"), targets[kind]), requests))
    texts = [list(r.input_ids) + plain[r.rid] for r in requests]
    engine = ReferenceEngine(
        settings(speculation, block=block, rows=rows), targets[kind], Oracle(texts, quality)
    )
    events = run(engine, requests, arrivals=[rng.randrange(12) for _ in requests])
    assert outputs(events) == plain
    for r in requests:
        last = events[r.rid][-1]
        assert last.finished is not None
        emitted = len(plain[r.rid])
        passes = last.meta["spec_verify_ct"]
        if passes:
            assert last.meta["spec_accept_length"] == (emitted - 1) / passes
        if quality and emitted > 20:
            assert passes < 0.8 * emitted
    assert not engine.running and not engine.waiting


@pytest.mark.parametrize("selector", [False, True])
@pytest.mark.parametrize("speculation", ["chain", "tree"])
def test_output_equals_plain_decoding_with_a_block_drafter(
    folder, drafter_folder, speculation, selector
):
    nested = {"selector_rank": 4, "selector_top_k": 5} if selector else None
    requests = mixed_requests(random.Random(4), 5)
    paths = {"target": str(folder("hybrid")), "drafter": str(drafter_folder(nested))}
    given = {"context": CONTEXT, "max_running": 3, "dtype": "float64", **paths}
    plain = run(ReferenceEngine(ReferenceSettings(speculation="none", **given)), requests)
    engine = ReferenceEngine(ReferenceSettings(speculation=speculation, **given))
    assert outputs(run(engine, requests)) == outputs(plain)


def check_committed(engine: ReferenceEngine, oracle: Oracle, tokens: list[int]) -> None:
    """Slot 0 holds the state after ``tokens``, neither more nor less."""
    assert oracle.held[0] == len(tokens)
    pool = engine.target.pool(1, CONTEXT)
    with torch.inference_mode():
        for i, token in enumerate(tokens):
            engine.target.decode(torch.tensor([token]), pool, [i])
    for name, got in engine.pool.snapshot(0, len(tokens)).items():
        expected = pool.snapshot(0, len(tokens))[name]
        torch.testing.assert_close(got, expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("limit", ["stop", "eos", "length"])
def test_an_accepted_path_is_cut_and_committed_only_to_the_end_of_the_output(targets, limit):
    target, prompt = targets["hybrid"], (5, 6, 7)
    request = GenerateRequest("a", prompt, max_new_tokens=40, ignore_eos=True)
    plain = outputs(run(ReferenceEngine(settings("none"), target), [request]))["a"]
    last = plain[9]
    end = plain.index(last) + 1
    config = target.config
    if limit == "stop":
        request = replace(request, stop_token_ids=(last,))
    elif limit == "eos":
        request = replace(request, ignore_eos=False)
        target.config = replace(config, eos_ids=(last,))
    else:
        request = replace(request, max_new_tokens=end)
    oracle = Oracle([[*prompt, *plain]], quality=1.0)
    engine = ReferenceEngine(settings("chain", block=16), target, oracle)
    events = run(engine, [request])["a"]
    target.config = config
    assert outputs({"a": events})["a"] == plain[:end]
    assert events[-1].finished == ("length" if limit == "length" else "stop")
    assert events[-1].meta["spec_verify_ct"] < end / 2
    # The last token was emitted and never run: it would have been the next anchor.
    check_committed(engine, oracle, [*prompt, *plain[: end - 1]])


def test_an_aborted_request_leaves_the_others_untouched(targets):
    requests = mixed_requests(random.Random(8), 3)
    plain = outputs(run(ReferenceEngine(settings("none"), targets["hybrid"]), requests))
    texts = [list(r.input_ids) + plain[r.rid] for r in requests]
    victim = GenerateRequest("victim", (1, 2, 3), max_new_tokens=60, ignore_eos=True)
    engine = ReferenceEngine(settings("tree", rows=12), targets["hybrid"], Oracle(texts, 0.8))
    events = run(engine, [victim, *requests], abort=("victim", 4))
    assert not any(event.finished for event in events.pop("victim"))
    assert outputs(events) == plain


def test_the_hook_sees_each_cycle_and_changes_nothing(targets):
    request = GenerateRequest("a", (5, 6, 7), max_new_tokens=30, ignore_eos=True)
    plain = outputs(run(ReferenceEngine(settings("none"), targets["hybrid"]), [request]))["a"]
    engine = ReferenceEngine(
        settings("chain", top_k=6), targets["hybrid"], Oracle([[5, 6, 7, *plain]], 0.7)
    )
    cycles = []
    engine.on_cycle = lambda *cycle: cycles.append(cycle)
    events = run(engine, [request])
    assert outputs(events)["a"] == plain
    assert len(cycles) == events["a"][-1].meta["spec_verify_ct"]
    assert all(lattice.width == 6 for _, lattice, _, _ in cycles)
    assert [t for _, _, _, walk in cycles for t in walk.emitted] == plain[1:]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"input_ids": ()}, "empty"),
        ({"input_ids": (97,)}, "97 lies outside"),
        ({"input_ids": (1,) * 150, "max_new_tokens": 11}, "exceed"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": 0}, "top_k"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused(targets, change, complaint):
    engine = ReferenceEngine(settings("none"), targets["qwen3"])
    with pytest.raises(InvalidInput, match=complaint):
        engine.add(GenerateRequest(**{"rid": "a", "input_ids": (1,), **change}))
