"""The client against servers that answer well, badly, or not at all."""

import json
import random
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from specpilot.errors import EngineFailure, InvalidInput
from specpilot.harness.engines.backend import ScoreRequest
from specpilot.harness.engines.client import EngineClient, SamplingParams

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
DONE = b"data: [DONE]\n\n"
Start = Callable[..., EngineClient]


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(ids: Any, count: Any = None, finish: Any = None, **meta: Any) -> bytes:
    body = {
        "output_ids": ids,
        "meta_info": {
            "completion_tokens": len(ids) if count is None else count,
            "finish_reason": finish,
            **meta,
        },
    }
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def stream(*events: bytes) -> tuple[bytes, ...]:
    return (HEAD, *(chunk(e) for e in events), END)


LENGTH = {"type": "length", "length": 3}
THREE = SamplingParams(max_new_tokens=3)


def test_reads_cumulative_ids(scripted: Start) -> None:
    client = scripted(*stream(event([5]), event([5, 6, 7], finish=LENGTH), DONE))
    result = client.generate((1, 2), THREE)
    assert result.output_ids == (5, 6, 7)
    assert result.prompt_ids == (1, 2)
    assert result.finish_reason == "length"


def test_reads_incremental_ids(scripted: Start) -> None:
    client = scripted(*stream(event([5]), event([5, 5], 3, finish=LENGTH), DONE))
    assert client.generate((1,), THREE).output_ids == (5, 5, 5)


def test_reads_events_cut_anywhere_and_several_in_one_piece(scripted: Start) -> None:
    whole = event([5]) + event([5, 6]) + event([5, 6, 7], finish=LENGTH) + DONE
    pieces = [whole[i : i + 7] for i in range(0, len(whole), 7)]
    client = scripted(HEAD, *(chunk(p) for p in pieces), END)
    assert client.generate((1,), THREE).output_ids == (5, 6, 7)


def test_times_follow_the_arrival_of_tokens_not_of_the_end() -> None:
    server = socket.socket()
    server.bind(("127.0.0.1", 0))
    server.listen(1)

    def serve() -> None:
        connection, _ = server.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(HEAD + chunk(event([5])))
            time.sleep(0.1)
            connection.sendall(chunk(event([5, 6, 7])))
            time.sleep(0.3)
            connection.sendall(chunk(event([5, 6, 7], finish=LENGTH)) + chunk(DONE) + END)

    thread = threading.Thread(target=serve)
    thread.start()
    with EngineClient(f"http://127.0.0.1:{server.getsockname()[1]}") as client:
        result = client.generate((1,), THREE)
    thread.join()
    server.close()
    assert result.sent_s < result.first_token_s < result.last_token_s
    assert 0.09 < result.last_token_s - result.first_token_s < 0.25


@pytest.mark.parametrize(
    ("events", "wrong"),
    [
        ([b"data: <html>\n\n"], "unusable event"),
        ([b"data: []\n\n"], "unusable event"),
        ([b"hello\n"], "no event"),
        ([event(["5"])], "output_ids.0"),
        ([event([5.5])], "output_ids.0"),
        ([event([True])], "output_ids.0"),
        ([event([-1])], "output_ids.0"),
        ([event([1 << 70])], "output_ids.0"),
        ([b'data: {"error":' + b"[" * 100_000 + b"\n\n"], "error"),
        ([b'data: {"output_ids":' + b"[" * 100_000 + b"\n\n"], "unusable event"),
        ([event([5], "1")], "completion_tokens"),
        ([b'data: {"output_ids":[5]}\n\n'], "meta_info"),
        ([event([5], 4)], "counts 4 tokens"),
        ([event([5]), event([6, 7])], "changed tokens"),
        ([event([5, 6, 7, 8])], "4 tokens, at most 3"),
        ([event([5, 6], finish=LENGTH), DONE], "2 of 3 tokens"),
        ([event([5], finish={"type": "abort", "message": "no memory"}), DONE], "no memory"),
        ([event([], finish={"type": "stop"}), DONE], "without a single token"),
        ([event([5], finish={"type": "bored"}), DONE], "finish_reason"),
        ([event([5, 6, 7])], "after 3 tokens without saying so"),
        ([event([5, 6, 7]), DONE], "after 3 tokens without saying so"),
        ([event([5, 6, 7], finish=LENGTH)], "without saying so"),
        ([event([5, 6, 7], finish=LENGTH), event([5, 6, 7])], "another event"),
        ([b'data: {"error": {"message": "engine on fire"}}\n\n'], "engine on fire"),
        ([event([5, 6, 7], finish=LENGTH, tau=float("nan")), DONE], "not finite"),
        ([b"data: " + b"7" * 2_000_000], "more than"),
        ([b"data: {}"], "middle of an event"),
    ],
)
def test_a_bad_stream_says_what_was_wrong(scripted: Start, events: list[bytes], wrong: str) -> None:
    with pytest.raises(EngineFailure, match=wrong):
        scripted(*stream(*events)).generate((1,), THREE)


def test_damaged_streams_never_raise_anything_else(scripted_many: Any) -> None:
    rng = random.Random(5)
    whole = b"".join(stream(event([5]), event([5, 6, 7], finish=LENGTH), DONE))
    damaged = []
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(data))
            kind = rng.randrange(3)
            if kind == 0:
                data[at] = rng.randrange(256)
            elif kind == 1:
                del data[at : at + rng.randrange(1, 20)]
            else:
                data[at:at] = rng.choice([b"\n", b'"', b"9", b"data: ", b"\xff", b"null", b"{"])
        damaged.append((bytes(data),))
    client = scripted_many(damaged)
    outcomes = []
    for _ in damaged:
        try:
            outcomes.append(client.generate((1,), THREE).output_ids)
        except EngineFailure as failure:
            outcomes.append(str(failure)[:0])
    assert outcomes.count("") > 200


def test_an_early_stop_is_a_failure_only_if_eos_was_to_be_ignored(scripted: Start) -> None:
    events = stream(event([5], finish={"type": "stop"}), DONE)
    assert scripted(*events).generate((1,), THREE).finish_reason == "stop"
    ignoring = SamplingParams(max_new_tokens=3, ignore_eos=True)
    with pytest.raises(EngineFailure, match="EOS was to be ignored"):
        scripted(*events).generate((1,), ignoring)


def test_a_server_that_dies_in_mid_stream_is_a_lost_connection(scripted: Start) -> None:
    with pytest.raises(EngineFailure, match=r"Lost the connection"):
        scripted(HEAD, chunk(event([5]))).generate((1,), THREE)


def test_a_silent_server_fails_in_time() -> None:
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen(1)
        started = time.perf_counter()
        with (
            EngineClient(f"http://127.0.0.1:{mute.getsockname()[1]}", timeout_s=0.3) as client,
            pytest.raises(EngineFailure, match=r"silent for 0.3 s"),
        ):
            client.generate((1,), THREE)
        assert time.perf_counter() - started < 2


def test_nobody_there_is_an_engine_failure() -> None:
    with EngineClient("http://127.0.0.1:9") as client:
        assert client.health() is False
        with pytest.raises(EngineFailure, match=r"127.0.0.1:9"):
            client.generate((1,), THREE)


def test_a_refusal_carries_the_servers_own_words(scripted: Start) -> None:
    body = b'{"error": {"message": "prompt too long"}}'
    answer = b"HTTP/1.1 400 Bad Request\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    with pytest.raises(EngineFailure, match=r"answered 400.*prompt too long"):
        scripted(answer).generate((1,), THREE)


def rows(*values: Any) -> list[list[Any]]:
    return [[lp, token, None] for lp, token in values]


GOOD = rows((None, 7), (-0.5, 8), (-1.5, 9))


@pytest.mark.parametrize(
    ("meta", "wrong"),
    [
        ({}, "input_token_logprobs"),
        ({"input_token_logprobs": GOOD[:2]}, "2 positions for 3"),
        ({"input_token_logprobs": rows((None, 7), (-1.0, 8), (-1.0, 5))}, "token 5 at position 2"),
        ({"input_token_logprobs": rows((None, 7), (None, 8), (-1.0, 9))}, "no log-prob"),
        ({"input_token_logprobs": rows((None, 7), (0.5, 8), (-1.0, 9))}, "above 0"),
        ({"input_token_logprobs": rows((None, 7), (float("nan"), 8), (-1.0, 9))}, "finite"),
        ({"input_token_logprobs": rows((None, 7), (float("-inf"), 8), (-1.0, 9))}, "finite"),
        ({"input_token_logprobs": GOOD}, "input_top_logprobs has 0 positions"),
        (
            {"input_token_logprobs": GOOD, "input_top_logprobs": [None, rows((-0.1, 1)), []]},
            "0 of 1 entries at position 2",
        ),
    ],
)
def test_a_bad_score_says_what_was_wrong(scripted: Start, meta: dict[str, Any], wrong: str) -> None:
    body = json.dumps([{"meta_info": meta}]).encode()
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    with pytest.raises(EngineFailure, match=wrong):
        scripted(answer).score((7, 8, 9), start=1, top=1)


def test_sglangs_zero_for_the_last_id_of_the_vocabulary_is_taken(scripted: Start) -> None:
    meta = {"input_token_logprobs": rows((None, 7), (-0.5, 0), (-1.5, 9))}
    body = json.dumps([{"meta_info": meta}]).encode()
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    assert scripted(answer).score((7, 511, 9), start=1).logprobs == (-0.5, -1.5)


def test_wrong_arguments_never_reach_a_server() -> None:
    with EngineClient("http://127.0.0.1:9") as client:
        with pytest.raises(InvalidInput, match="max_new_tokens"):
            client.generate((1,), SamplingParams(max_new_tokens=0))
        with pytest.raises(InvalidInput, match=r"start must lie in 0..1"):
            client.score_batch([ScoreRequest((1, 2), start=2)])
        assert client.score_batch([]) == []
