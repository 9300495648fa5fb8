"""An HTTP client of one engine server: timed generation and teacher-forced scoring.

Speaks SGLang's native subset, so the same calls work on the reference engine, the mock engine and
SGLang itself. The clock is this process's ``time.perf_counter``; nothing that a server says about
time or token counts is believed. Replies are bounded in size and checked before use: whatever is
wrong with one becomes an ``EngineFailure`` that says what was wrong.
"""

import contextlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NoReturn, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from specpilot.errors import EngineFailure, InvalidInput
from specpilot.harness.engines.backend import FinishReason, ScoreRequest, ScoreResult
from specpilot.harness.engines.replies import (
    Event,
    HealthReply,
    Scored,
    complaint,
    score_result,
    server_error,
)

__all__ = ["EngineClient", "Generation", "SamplingParams"]

BASE_BYTES = 1 << 20
EVENT_BYTES_PER_TOKEN = 256
SCORE_BYTES_PER_VALUE = 64
FLUSH_PATIENCE_S = 2.0

Reply = TypeVar("Reply", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to pick tokens. Temperature 0 is greedy; ``top_k`` -1 and ``top_p`` 1.0 mean off.

    ``sampling_seed`` keys the request's own noise; None leaves it to the server.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = -1
    top_p: float = 1.0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    sampling_seed: int | None = None

    def body(self) -> dict[str, Any]:
        """The ``sampling_params`` object of a request."""
        body: dict[str, Any] = {
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "ignore_eos": self.ignore_eos,
        }
        if self.stop_token_ids:
            body["stop_token_ids"] = list(self.stop_token_ids)
        if self.sampling_seed is not None:
            body["sampling_seed"] = self.sampling_seed
        return body


@dataclass(frozen=True, slots=True)
class Generation:
    """One timed output: the tokens that the client received, and when.

    Times are ``time.perf_counter`` seconds of this process: just before the request was handed to
    the socket, and when the bytes that carried the first and the last token arrived. ``meta`` is
    the server's own account (``spec_verify_ct``, ...): evidence, never a measurement.
    """

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    sent_s: float
    first_token_s: float
    last_token_s: float
    finish_reason: FinishReason
    meta: Mapping[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """From request sent to last token received."""
        return self.last_token_s - self.sent_s

    @property
    def tokens_per_pass(self) -> float | None:
        """Tokens per exact pass as the server counts passes; None if it does not say."""
        passes = self.meta.get("spec_verify_ct")
        if not isinstance(passes, int) or isinstance(passes, bool) or passes < 1:
            return None
        return len(self.output_ids) / passes


class EngineClient:
    """Calls one server. Safe to share between threads: each call has its own connection.

    ``timeout_s`` bounds the silence between two pieces of a reply and, checked at each piece, the
    whole call; a call therefore ends after at most twice that time.
    """

    def __init__(self, base_url: str, timeout_s: float = 120.0) -> None:
        self.base_url = base_url.rstrip("/")
        self.timeout_s = timeout_s
        self._http = httpx.Client(
            base_url=self.base_url,
            timeout=httpx.Timeout(timeout_s, connect=min(timeout_s, 10.0)),
            # SGLang closes idle connections after 5 s: give up ours first, so that a request never
            # meets a connection that is just being closed.
            limits=httpx.Limits(
                max_connections=None, max_keepalive_connections=64, keepalive_expiry=2.0
            ),
            headers={"accept-encoding": "identity"},
            trust_env=False,  # a proxy variable must not come between controller and server
        )

    def __enter__(self) -> "EngineClient":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def generate(self, input_ids: Sequence[int], params: SamplingParams) -> Generation:
        """Stream one request and return its tokens with the times at which they arrived.

        Takes cumulative and incremental ``output_ids`` (told apart by ``completion_tokens``).
        Raises ``EngineFailure`` where the server refuses, fails, answers with something unusable,
        or ends early: at length with fewer than ``max_new_tokens`` tokens, or at a stop although
        EOS is ignored and no stop token was given.
        """
        if params.max_new_tokens < 1:
            raise InvalidInput(f"max_new_tokens must be at least 1, not {params.max_new_tokens}.")
        prompt = tuple(input_ids)
        tokens = params.max_new_tokens
        body = {"input_ids": prompt, "sampling_params": params.body(), "stream": True}
        request = self._http.build_request("POST", "/generate", json=body)
        event_limit = BASE_BYTES + EVENT_BYTES_PER_TOKEN * tokens
        stream_limit = event_limit + tokens * (4096 + 12 * tokens)
        output: list[int] = []
        first = last = 0.0
        final: Event | None = None
        done = False
        sent = time.perf_counter()
        for arrived, payload in self._events(request, event_limit, stream_limit):
            if done or payload == b"[DONE]":
                done = True
                continue
            event = self._parse(Event, payload, f"event after {len(output)} tokens")
            if final is not None:
                self._fail("sent another event after the one with a finish reason")
            added = self._new_ids(output, event)
            if added:
                output += added
                last = arrived
                first = first or arrived
            if len(output) > tokens:
                self._fail(f"sent {len(output)} tokens, at most {tokens} were asked for")
            if event.meta_info.finish_reason is not None:
                final = event
        if final is None or not done:
            self._fail(f"ended its reply after {len(output)} tokens without saying so")
        reason = self._checked_finish(final, params, len(output))
        meta = final.meta_info.model_dump(exclude={"finish_reason"})
        try:
            json.dumps(meta, allow_nan=False)  # it goes into the ledger, which holds no NaN
        except ValueError:
            self._fail("sent a number that is not finite in its last event")
        return Generation(prompt, tuple(output), sent, first, last, reason, meta)

    def score(
        self,
        input_ids: Sequence[int],
        start: int = 0,
        top: int = 0,
        token_ids: Sequence[int] = (),
    ) -> ScoreResult:
        """Teacher-force ``input_ids``; see ``ScoreRequest`` for the meaning of the arguments."""
        return self.score_batch([ScoreRequest(tuple(input_ids), start, top, tuple(token_ids))])[0]

    def score_batch(self, requests: Sequence[ScoreRequest]) -> list[ScoreResult]:
        """Score several sequences in one call; results in the order of ``requests``.

        Raises ``EngineFailure`` if a value is missing, not finite or above 0, or if the server
        reports log-probs of other tokens than those sent.
        """
        if not requests:
            return []
        for r in requests:
            if not 0 <= r.start < len(r.input_ids):
                raise InvalidInput(
                    f"start must lie in 0..{len(r.input_ids) - 1} for {len(r.input_ids)} tokens, "
                    f"not {r.start}."
                )
        body: dict[str, Any] = {
            "input_ids": [r.input_ids for r in requests],
            "sampling_params": {"temperature": 0.0, "max_new_tokens": 0},
            "return_logprob": True,
            # The first reported position never has a log-prob: ask for one position more.
            "logprob_start_len": [max(r.start - 1, 0) for r in requests],
            "top_logprobs_num": [r.top for r in requests],
            "return_text_in_logprobs": False,
        }
        if any(r.token_ids for r in requests):
            body["token_ids_logprob"] = [list(r.token_ids) for r in requests]
        values = sum(
            (len(r.input_ids) - r.start + 1) * (1 + r.top + len(r.token_ids)) for r in requests
        )
        raw = self._call("POST", "/generate", body, BASE_BYTES + SCORE_BYTES_PER_VALUE * values)
        scored = self._parse(Scored, b'{"items":' + raw + b"}", "score reply").items
        if len(scored) != len(requests):
            self._fail(f"returned {len(scored)} results for {len(requests)} sequences")
        return [
            score_result(request, item.meta_info, self.base_url)
            for request, item in zip(requests, scored, strict=True)
        ]

    def health(self) -> bool:
        """Whether the server answers and says that it can serve."""
        try:
            with self._http.stream("GET", "/health") as response:
                return response.status_code == 200
        except httpx.HTTPError:
            return False

    def flush(self) -> None:
        """Empty the server's caches; waits up to 2 s for requests that are just ending."""
        deadline = time.perf_counter() + FLUSH_PATIENCE_S
        while True:
            try:
                self._call("POST", "/flush_cache", None, BASE_BYTES)
                return
            except EngineFailure:
                if time.perf_counter() > deadline:
                    raise
                time.sleep(0.02)

    def server_info(self) -> dict[str, Any]:
        """The server's settings and versions, as it tells them."""
        raw = self._call("GET", "/server_info", None, 4 * BASE_BYTES)
        return self._parse(HealthReply, b'{"info":' + raw + b"}", "server_info").info

    def _call(self, method: str, path: str, body: Any, limit: int) -> bytes:
        request = self._http.build_request(method, path, json=body)
        return b"".join(chunk for _, chunk in self._chunks(request, limit))

    def _chunks(self, request: httpx.Request, limit: int) -> Iterator[tuple[float, bytes]]:
        """Yield (arrival time, bytes) of a reply with status 200; every failure is typed."""
        deadline = time.perf_counter() + self.timeout_s
        received = 0
        try:
            response = self._http.send(request, stream=True)
            with contextlib.closing(response):
                if response.status_code != 200:
                    detail = server_error(next(response.iter_raw(2048), b""))
                    self._fail(f"answered {response.status_code} to {request.url.path}: {detail}")
                for chunk in response.iter_raw():
                    now = time.perf_counter()
                    received += len(chunk)
                    if received > limit:
                        self._fail(f"sent more than {limit} bytes to {request.url.path}")
                    if now > deadline:
                        self._fail(f"took more than {self.timeout_s:g} s for {request.url.path}")
                    yield now, chunk
        except httpx.TimeoutException as error:
            raise EngineFailure(
                f"{self.base_url} was silent for {self.timeout_s:g} s on {request.url.path} "
                f"after {received} bytes."
            ) from error
        except httpx.HTTPError as error:
            raise EngineFailure(
                f"Lost the connection to {self.base_url} on {request.url.path} after {received} "
                f"bytes: {error}."
            ) from error

    def _events(
        self, request: httpx.Request, event_limit: int, stream_limit: int
    ) -> Iterator[tuple[float, bytes]]:
        """Yield (arrival time, payload) of the ``data:`` lines of a server-sent event stream."""
        rest = b""
        for arrived, chunk in self._chunks(request, stream_limit):
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > event_limit:
                self._fail(f"sent an event of more than {event_limit} bytes")
            for line in lines:
                if line.startswith(b"data:"):
                    yield arrived, line[5:].strip()
                elif line.strip() and not line.startswith((b":", b"event:", b"id:", b"retry:")):
                    self._fail(f"sent a line that is no event: {line[:80]!r}")
        if rest.strip():
            self._fail(f"ended its reply in the middle of an event: {rest[:80]!r}")

    def _new_ids(self, output: list[int], event: Event) -> list[int]:
        ids, counted = event.output_ids, event.meta_info.completion_tokens
        if counted == len(ids):
            if ids[: len(output)] != output:
                self._fail(f"changed tokens that it had already sent ({len(output)} of them)")
            return ids[len(output) :]
        if counted == len(output) + len(ids):
            return ids
        self._fail(
            f"counts {counted} tokens after sending {len(output)} and then a list of {len(ids)}"
        )

    def _checked_finish(self, final: Event, params: SamplingParams, tokens: int) -> FinishReason:
        finish = final.meta_info.finish_reason
        assert finish is not None
        reason = finish.type
        if reason == "abort":
            self._fail(
                f"aborted the request after {tokens} tokens: {finish.message or 'no reason'}"
            )
        if tokens == 0:
            self._fail("finished without a single token")
        if reason == "length" and tokens < params.max_new_tokens:
            self._fail(f"stopped at length with {tokens} of {params.max_new_tokens} tokens")
        if reason == "stop" and params.ignore_eos and not params.stop_token_ids:
            self._fail(f"stopped after {tokens} tokens although EOS was to be ignored")
        return reason

    def _parse(self, model: type[Reply], raw: bytes, what: str) -> Reply:
        if b'"error"' in raw[:64]:
            self._fail(f"reported an error in its {what}: {server_error(raw)}")
        try:
            return model.model_validate_json(raw)
        except ValidationError as error:
            self._fail(f"sent an unusable {what}: {complaint(error)}")

    def _fail(self, what: str) -> NoReturn:
        raise EngineFailure(f"{self.base_url} {what.rstrip('.')}.")
