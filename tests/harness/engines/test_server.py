"""The server over HTTP: SGLang's replies, refusals by name, ends that leave nothing open."""

import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from specpilot.errors import EngineFailure
from specpilot.harness.engines.backend import (
    Backend,
    ScoreRequest,
    ScoreResult,
    StepEvent,
)
from specpilot.harness.engines.client import EngineClient, SamplingParams
from specpilot.harness.engines.mock.backend import MockBackend, Running
from specpilot.harness.engines.settings import MockSettings

from .conftest import Live

Start = Callable[[Backend], Live]


def post(url: str, body: Any) -> httpx.Response:
    return httpx.post(f"{url}/generate", json=body, timeout=30)


def scoring(ids: Any, **more: Any) -> dict[str, Any]:
    return {
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": 0},
        "return_logprob": True,
    } | more


def test_stream_and_single_reply_agree_and_have_sglangs_form(mock_url: str) -> None:
    body = {"input_ids": [1, 2], "sampling_params": {"temperature": 0, "max_new_tokens": 7}}
    whole = post(mock_url, body).json()
    assert whole["text"] == ""
    assert len(whole["output_ids"]) == 7
    meta = whole["meta_info"]
    assert meta["prompt_tokens"] == 2 and meta["completion_tokens"] == 7
    assert meta["finish_reason"] == {"type": "length"} and meta["spec_verify_ct"] == 3
    assert isinstance(meta["id"], str) and meta["e2e_latency"] > 0
    lines = [line for line in post(mock_url, body | {"stream": True}).text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert [len(e["output_ids"]) for e in events] == [3, 6, 7]
    assert events[-1]["output_ids"] == whole["output_ids"]
    assert [e["meta_info"]["finish_reason"] for e in events[:-1]] == [None, None]


def test_a_batch_comes_back_as_a_list_in_order(mock_url: str) -> None:
    params = {"temperature": 0.0, "max_new_tokens": 4}
    singles = [
        post(mock_url, {"input_ids": ids, "sampling_params": params}).json()["output_ids"]
        for ids in ([1, 2], [3])
    ]
    batch = post(mock_url, {"input_ids": [[1, 2], [3]], "sampling_params": params}).json()
    assert [item["output_ids"] for item in batch] == singles


def test_seeded_sampling_repeats_itself_and_differs_between_seeds(mock_url: str) -> None:
    with EngineClient(mock_url) as client:
        params = [SamplingParams(16, temperature=1.0, sampling_seed=s) for s in (1, 1, 2)]
        a, b, c = (client.generate((5, 6), p).output_ids for p in params)
    assert a == b != c


def test_scores_have_sglangs_form_with_a_null_first(mock_url: str) -> None:
    body = scoring([4, 5, 6, 7], logprob_start_len=1, top_logprobs_num=2, token_ids_logprob=[9])
    meta = post(mock_url, body).json()["meta_info"]
    assert [row[1] for row in meta["input_token_logprobs"]] == [5, 6, 7]
    assert meta["input_token_logprobs"][0][0] is None
    assert all(row[0] < 0 and row[2] is None for row in meta["input_token_logprobs"][1:])
    assert meta["input_top_logprobs"][0] is None and meta["input_token_ids_logprobs"][0] is None
    assert [len(row) for row in meta["input_top_logprobs"][1:]] == [2, 2]
    assert [[e[1] for e in row] for row in meta["input_token_ids_logprobs"][1:]] == [[9], [9]]


def test_a_scored_greedy_output_is_the_argmax_everywhere(mock_url: str) -> None:
    with EngineClient(mock_url) as client:
        out = client.generate((1, 2, 3), SamplingParams(32))
        ids = out.prompt_ids + out.output_ids
        result = client.score(ids, start=3, top=3, token_ids=(5, 7))
        both = client.score_batch([ScoreRequest(ids, 3, 3, (5, 7)), ScoreRequest((1, 2), 0, 1)])
    assert len(result.logprobs) == 32
    assert tuple(row[0] for row in result.top_ids) == out.output_ids
    assert tuple(row[0] for row in result.top_logprobs) == result.logprobs
    assert all(len(row) == 2 for row in result.token_logprobs)
    assert both[0] == result
    assert both[1].logprobs[0] is None and both[1].top_ids[0] == ()
    assert both[1].logprobs[1] is not None


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"input_ids": []}, "empty prompt"),
        ({"input_ids": [[1], []]}, "empty prompt"),
        ({"input_ids": "1 2"}, "input_ids: give a list"),
        ({"input_ids": [1, 2.0]}, "input_ids: give a list"),
        ({"input_ids": [True]}, "input_ids: give a list"),
        ({"input_ids": [1, 512]}, "id 512 is outside the vocabulary (0 to 511)"),
        ({"input_ids": [-1]}, "id -1 is outside"),
        ({"input_ids": [1] * 4000}, "4000 prompt tokens and 128 new ones do not fit into the con"),
        ({"text": "hello", "input_ids": [1]}, "text: this server does not know the option"),
        ({"input_ids": [1], "sampling_params": {"min_p": 0.1}}, "min_p: this server does not know"),
        ({"input_ids": [1], "sampling_params": {"temperature": -1}}, "temperature: "),
        ({"input_ids": [1], "sampling_params": {"top_p": 0}}, "top_p: "),
        ({"input_ids": [1], "sampling_params": {"max_new_tokens": "9"}}, "max_new_tokens: "),
        ({"input_ids": [1], "return_logprob": True}, "log-probs of generated tokens"),
        ({"input_ids": [[1], [2]], "stream": True}, "stream: give one prompt"),
        ({"input_ids": [[1], [2]], "sampling_params": [{}]}, "1 values for 2 prompts"),
        ({"input_ids": [1], "sampling_params": {"max_new_tokens": 0}}, "needs return_logprob"),
        (scoring([1], stream=True), "nothing to stream"),
        (scoring([1], return_text_in_logprobs=True), "no tokenizer"),
        (scoring([1], logprob_start_len=1), "logprob_start_len: 1 for a prompt of 1"),
        (scoring([1, 2], top_logprobs_num=-1), "negative"),
        (scoring([1, 2], top_logprobs_num=513), "513 of a vocabulary of 512"),
        (scoring([1, 2], token_ids_logprob=[512]), "token_ids_logprob: id 512"),
        (scoring([1] * 4097), "4097 prompt tokens"),
    ],
)
def test_a_wrong_request_is_refused_with_its_reason(
    mock_url: str, body: dict[str, Any], words: str
) -> None:
    answer = post(mock_url, body)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


def test_a_body_that_is_no_json_is_refused(mock_url: str) -> None:
    answer = httpx.post(f"{mock_url}/generate", content=b"{")
    assert answer.status_code == 400


def test_server_info_names_version_engine_and_backend(mock_url: str) -> None:
    with EngineClient(mock_url) as client:
        info = client.server_info()
    assert info["engine"] == "test" and info["version"] and info["backend"]["engine"] == "mock"


class Slow(MockBackend):
    def __init__(self, delay_ms: float = 20.0) -> None:
        super().__init__(MockSettings(delay_ms=delay_ms))
        self.aborted: list[str] = []

    def abort(self, rid: str) -> None:
        self.aborted.append(rid)
        super().abort(rid)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_request(live: Start, stream: bool) -> None:
    backend = Slow()
    server = live(backend)
    body = {"input_ids": [1], "rid": "gone", "stream": stream}
    with httpx.Client() as client:
        request = client.build_request("POST", f"{server.url}/generate", json=body)
        if stream:
            client.send(request, stream=True).close()
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post(f"{server.url}/generate", json=body, timeout=0.2)
    until(lambda: backend.aborted == ["gone"] and not backend.has_work())
    assert server.app.engine.running == 0


def test_caches_are_not_flushed_while_requests_run(live: Start) -> None:
    server = live(Slow())
    url = f"{server.url}/flush_cache"
    with httpx.stream("POST", f"{server.url}/generate", json={"input_ids": [1], "stream": True}):
        answer = httpx.post(url)
        assert answer.status_code == 400 and "1 requests are running" in answer.text
    until(lambda: httpx.post(url).status_code == 200)


def test_a_rid_in_use_is_refused(live: Start) -> None:
    server = live(Slow())
    body = {"input_ids": [1], "rid": "same", "stream": True}
    with httpx.stream("POST", f"{server.url}/generate", json=body):
        assert "still running" in post(server.url, body).text


def test_requests_run_side_by_side(live: Start) -> None:
    server = live(Slow(delay_ms=10.0))
    results: list[float] = []

    def run(first: int) -> None:
        with EngineClient(server.url) as client:
            results.append(client.generate((first,), SamplingParams(20)).seconds)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(1, 5)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert time.perf_counter() - started < 0.75 * sum(results)


def test_an_idle_engine_thread_sleeps(live: Start) -> None:
    server = live(Slow(delay_ms=0.0))
    with EngineClient(server.url) as client:
        client.generate((1,), SamplingParams(4))
        before = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - before < 0.1


class Broken(MockBackend):
    def choose(self, r: Running, logits: NDArray[np.float32]) -> int:
        if len(r.output) == 2:
            raise RuntimeError("device lost")
        return super().choose(r, logits)


def test_when_the_engine_breaks_everybody_is_told(live: Start) -> None:
    server = live(Broken(MockSettings()))
    with EngineClient(server.url) as client:
        with pytest.raises(EngineFailure, match="device lost"):
            client.generate((1,), SamplingParams(8))
        assert server.dead.wait(5)
        assert client.health() is False
        with pytest.raises(EngineFailure, match=r"answered 500.*device lost"):
            client.score((1, 2), 1)
    assert httpx.get(f"{server.url}/health").status_code == 503


class NotANumber(MockBackend):
    def score(self, request: ScoreRequest) -> ScoreResult:
        return ScoreResult([float("nan")])


def test_a_score_that_is_not_finite_is_an_error_of_the_server(live: Start) -> None:
    answer = post(live(NotANumber(MockSettings())).url, scoring([1, 2], logprob_start_len=0))
    assert answer.status_code == 500 and "not finite" in answer.text


class NoRate(MockBackend):
    def advance(self, r: Running) -> StepEvent:
        event = super().advance(r)
        return replace(event, meta={"rate": float("inf")} if event.finished else {})


def test_a_counter_that_is_not_finite_is_an_error_of_the_server(live: Start) -> None:
    server = live(NoRate(MockSettings(delay_ms=0.0)))
    with (
        EngineClient(server.url) as client,
        pytest.raises(EngineFailure, match=r"reported an error.*not finite"),
    ):
        client.generate((1,), SamplingParams(4))


class Silent(MockBackend):
    """Never says that a request has ended."""

    def advance(self, r: Running) -> StepEvent:
        time.sleep(0.01)
        return StepEvent(r.request.rid, ())


def test_a_stream_without_tokens_can_be_left(live: Start) -> None:
    server = live(Silent(MockSettings()))
    with EngineClient(server.url, timeout_s=0.3) as client, pytest.raises(EngineFailure):
        client.generate((1,), SamplingParams(8))
    until(lambda: server.app.engine.running == 0)
