"""Teacher forcing reports what ``transformers`` would, and disturbs nobody."""

import pytest
import torch

from specpilot.errors import InvalidInput
from specpilot.harness.engines.backend import GenerateRequest, ScoreRequest
from specpilot.harness.engines.reference import scoring
from specpilot.harness.engines.reference.engine import ReferenceEngine
from specpilot.harness.engines.settings import ReferenceSettings

IDS = tuple(torch.randint(0, 97, (80,), generator=torch.Generator().manual_seed(2)).tolist())


@pytest.fixture(scope="module")
def engine(folder):
    return ReferenceEngine(ReferenceSettings(target=str(folder("hybrid")), context=128))


def test_scores_equal_the_log_softmax_of_transformers(engine, hf_model, monkeypatch):
    monkeypatch.setattr(scoring, "CHUNK", 32)
    monkeypatch.setattr(scoring, "HEAD_ROWS", 7)
    with torch.inference_mode():
        table = hf_model("hybrid")(torch.tensor([IDS])).logits[0].log_softmax(-1)
    for start in (0, 1, 33, 79, 80):
        got = engine.score(ScoreRequest(IDS, start=start, top=3, token_ids=(4, 90)))
        assert len(got.logprobs) == len(got.top_ids) == 80 - start
        for row, position in enumerate(range(start, 80)):
            if position == 0:
                assert got.logprobs[0] is None and got.token_logprobs[0] == []
                continue
            expected = table[position - 1]
            assert got.logprobs[row] == pytest.approx(expected[IDS[position]].item(), abs=1e-4)
            assert got.token_logprobs[row] == pytest.approx(expected[[4, 90]].tolist(), abs=1e-4)
            assert got.top_logprobs[row] == pytest.approx(
                expected.topk(3).values.tolist(), abs=1e-4
            )
            assert len(set(got.top_ids[row])) == 3


def test_scoring_does_not_disturb_a_running_request(engine):
    request = GenerateRequest("a", IDS[:20], max_new_tokens=20, ignore_eos=True)

    def run(interrupt: bool) -> list[int]:
        engine.add(request)
        out: list[int] = []
        while engine.has_work():
            if interrupt:
                engine.score(ScoreRequest(IDS, top=1))
            for event in engine.step():
                out.extend(event.new_ids)
        return out

    assert run(True) == run(False)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"input_ids": ()}, "empty"),
        ({"input_ids": (1,) * 129}, "exceed"),
        ({"start": 81}, "start"),
        ({"top": 98}, "top"),
        ({"token_ids": (97,)}, "97 lies outside"),
    ],
)
def test_a_score_request_that_cannot_be_served_is_refused(engine, change, complaint):
    with pytest.raises(InvalidInput, match=complaint):
        engine.score(ScoreRequest(**{"input_ids": IDS, **change}))


def test_bfloat16_engines_score_with_a_float32_head(folder):
    engine = ReferenceEngine(
        ReferenceSettings(target=str(folder("hybrid")), context=128, dtype="bfloat16")
    )
    values = engine.score(ScoreRequest(IDS, start=1)).logprobs
    assert any(v != float(torch.tensor(v).bfloat16()) for v in values)
    probs = engine.score(ScoreRequest(IDS[:2], start=1, token_ids=tuple(range(97))))
    total = torch.tensor(probs.token_logprobs[0], dtype=torch.float64).exp().sum().item()
    assert total == pytest.approx(1.0, abs=1e-5)
