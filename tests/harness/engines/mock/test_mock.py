"""The mock engine: known tokens, real log-probs, speeds by setting."""

import time

import numpy as np
import pytest

from specpilot.errors import InvalidInput
from specpilot.harness.engines.backend import GenerateRequest, ScoreRequest
from specpilot.harness.engines.mock.backend import MockBackend
from specpilot.harness.engines.mock.model import HashModel, extend, log_softmax, sample
from specpilot.harness.engines.settings import MockSettings


def backend(**settings: object) -> MockBackend:
    return MockBackend(MockSettings(**{"delay_ms": 0.0, **settings}))  # type: ignore[arg-type]


def run(engine: MockBackend, *requests: GenerateRequest) -> dict[str, list[int]]:
    output: dict[str, list[int]] = {r.rid: [] for r in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work():
        for event in engine.step():
            output[event.rid] += event.new_ids
    return output


def ask(rid: str, *ids: int, **options: object) -> GenerateRequest:
    return GenerateRequest(rid=rid, input_ids=ids, **{"max_new_tokens": 48, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "settings",
    [
        {"tokens_per_pass": 5},
        {"speculation": "chain", "drafter": "d"},
        {"speculation": "tree", "rows": 24},
        {"max_running": 1},
    ],
)
def test_no_setting_of_speed_changes_the_tokens(settings: dict[str, object]) -> None:
    requests = [ask("a", 1, 2), ask("b", 3), ask("c", 4, temperature=1.0, seed=7, top_p=0.9)]
    assert run(backend(**settings), *requests) == run(backend(), *requests)


def test_different_prompts_do_not_end_in_the_same_text() -> None:
    requests = [ask(str(i), i, 7, 7, max_new_tokens=256, ignore_eos=True) for i in range(1, 9)]
    tails = {tuple(ids[-8:]) for ids in run(backend(), *requests).values()}
    assert len(tails) == 8


def test_scores_are_the_models_log_probs_and_sum_to_one() -> None:
    result = backend().score(ScoreRequest((5, 6, 7), start=1, top=512))
    for row in result.top_logprobs:
        assert np.exp(row).sum() == pytest.approx(1.0, abs=1e-5)
        assert list(row) == sorted(row, reverse=True)
    expected = log_softmax(HashModel().logits(6, extend(0, (5, 6))))[7]
    assert result.logprobs[1] == pytest.approx(float(expected))


def test_noise_flips_near_ties_only() -> None:
    requests = [ask(str(i), i, max_new_tokens=64, ignore_eos=True) for i in range(1, 21)]
    noisy = run(backend(noise=0.01, noise_seed=3), *requests)
    clean = backend()
    margins = []
    for request in requests:
        ids = request.input_ids + tuple(noisy[request.rid])
        result = clean.score(ScoreRequest(ids, start=1, top=1))
        for top, lp in zip(result.top_logprobs, result.logprobs, strict=True):
            margins.append(top[0] - (lp or 0.0))
    assert noisy == run(backend(noise=0.01, noise_seed=3), *requests)
    assert 0 < sum(m > 0 for m in margins) < 40
    assert max(margins) < 0.1


def test_stop_tokens_and_eos_end_a_request() -> None:
    full = run(backend(), ask("a", 1, 2, ignore_eos=True))["a"]
    cut = run(backend(), ask("a", 1, 2, ignore_eos=True, stop_token_ids=(full[9],)))["a"]
    assert cut == full[: full.index(full[9]) + 1]


@pytest.mark.parametrize(("top_k", "top_p"), [(1, 1.0), (-1, 1e-6)])
def test_sampling_from_one_candidate_is_greedy(top_k: int, top_p: float) -> None:
    logits = HashModel().logits(1, 1)
    assert sample(logits, 1.0, top_k, top_p, 5, 9) == int(logits.argmax())


def test_samples_follow_the_distribution() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.2], np.float32))
    drawn = [sample(logits, 1.0, 2, 1.0, seed, 0) for seed in range(2000)]
    counts = np.bincount(drawn, minlength=3)
    assert counts[2] == 0
    assert counts[0] / 2000 == pytest.approx(0.5 / 0.8, abs=0.05)


def test_trees_give_more_tokens_a_pass_and_wider_passes_take_longer() -> None:
    def passes(**settings: object) -> int:
        engine = backend(**settings)
        engine.add(ask("a", 1, max_new_tokens=256, ignore_eos=True))
        count = 0
        while engine.has_work():
            engine.step()
            count += 1
        return count

    none, chain, tree = passes(), passes(speculation="chain"), passes(speculation="tree", rows=32)
    assert none == 256 and none > 1.8 * chain > 2.2 * tree
    engine = backend(speculation="tree", rows=32, row_ms=1.0)
    started = time.perf_counter()
    engine.rest()
    assert time.perf_counter() - started >= 0.032


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(InvalidInput, match="do not fit into 16"):
        backend(context=16).add(ask("a", 1))


def test_an_aborted_request_leaves_the_others_alone() -> None:
    engine = backend()
    alone = run(backend(), ask("b", 3))["b"]
    engine.add(ask("a", 1))
    engine.add(ask("b", 3))
    first = next(e for e in engine.step() if e.rid == "b").new_ids
    engine.abort("a")
    engine.abort("unknown")
    rest = [i for _ in range(47) for e in engine.step() for i in e.new_ids if e.rid == "b"]
    assert [*first, *rest] == alone and not engine.has_work()
