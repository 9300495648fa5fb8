"""The engine's HTTP interface as an ASGI application: SGLang's native subset.

``POST /generate`` (tokens or scores), ``GET /health``, ``POST /flush_cache``, ``GET /server_info``.
It knows nothing of models: it checks requests, hands them to a ``Backend`` and sends what comes
back.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

import specpilot
from specpilot.errors import Conflict, EngineFailure, InvalidInput, NotFound, SpecPilotError
from specpilot.harness.engines.backend import Backend, GenerateRequest, ScoreRequest, ScoreResult
from specpilot.harness.engines.loop import EngineLoop, Ticket
from specpilot.harness.engines.requests import Batch, parse_generate

__all__ = ["EngineApp"]

MAX_BODY_BYTES = 64 << 20


class EngineApp:
    """The ASGI application over one backend. ``facts`` go into ``/server_info`` as they are."""

    def __init__(
        self,
        backend: Backend,
        facts: Mapping[str, Any],
        on_death: Callable[[], None] = lambda: None,
    ) -> None:
        self.backend = backend
        self.facts = dict(facts)
        self.engine = EngineLoop(backend, on_death)
        self.closing = False
        self.asgi = Starlette(
            routes=[
                Route("/generate", self.generate, methods=["POST"]),
                Route("/health", self.health, methods=["GET"]),
                Route("/flush_cache", self.flush_cache, methods=["POST"]),
                Route("/server_info", self.server_info, methods=["GET"]),
            ],
            exception_handlers={SpecPilotError: failed},
        )

    async def health(self, request: Request) -> Response:
        if self.engine.failure is not None:
            return refusal(503, str(self.engine.failure))
        return Response(status_code=503 if self.closing else 200)

    async def flush_cache(self, request: Request) -> Response:
        try:
            await self.engine.flush()
        except Conflict as error:
            return refusal(400, str(error))
        return Response("Cache flushed.\n")

    async def server_info(self, request: Request) -> Response:
        info = await self.engine.info()
        return reply({"version": specpilot.__version__, **self.facts, "backend": info})

    async def generate(self, request: Request) -> Response:
        if self.closing:
            return refusal(503, "The server is ending.")
        arrived = time.perf_counter()
        batch = parse_generate(await body_of(request))
        for generation in batch.generations:
            self._check_ids("input_ids", generation.input_ids)
            self._check_room(len(generation.input_ids), generation.max_new_tokens)
        for score in batch.scores:
            self._check_ids("input_ids", score.input_ids)
            self._check_ids("token_ids_logprob", score.token_ids)
            self._check_room(len(score.input_ids), 0)
            if score.top > self.backend.vocab_size:
                raise InvalidInput(
                    f"top_logprobs_num: {score.top} of a vocabulary of {self.backend.vocab_size}."
                )
        if batch.scores:
            return reply(await watched(request, self._score(batch, arrived)))
        if not batch.stream:
            return reply(await watched(request, self._generate(batch, arrived)))
        if not batch.single:
            raise InvalidInput("stream: give one prompt; a batch is answered in one piece.")
        ticket = await self.engine.add(batch.generations[0])
        events = self._stream(ticket, batch.generations[0], arrived)
        return StreamingResponse(events, media_type="text/event-stream")

    def _check_room(self, prompt: int, new: int) -> None:
        context = self.backend.context_length
        if prompt + new > context:
            raise InvalidInput(
                f"input_ids: {prompt} prompt tokens and {new} new ones do not fit into the "
                f"context of {context} tokens."
            )

    def _check_ids(self, name: str, ids: Sequence[int]) -> None:
        size = self.backend.vocab_size
        if ids and not (min(ids) >= 0 and max(ids) < size):
            wrong = next(i for i in ids if not 0 <= i < size)
            raise InvalidInput(f"{name}: id {wrong} is outside the vocabulary (0 to {size - 1}).")

    async def _stream(
        self, ticket: Ticket, job: GenerateRequest, arrived: float
    ) -> AsyncIterator[bytes]:
        sent = 0
        ids = ""  # the cumulative list as JSON: appended to, never built anew
        try:
            while True:
                event = await ticket.events.get()
                if isinstance(event, EngineFailure):
                    raise event
                if event.new_ids:
                    ids += ("," if ids else "") + ",".join(map(str, event.new_ids))
                    sent += len(event.new_ids)
                meta = meta_info(job, sent, event.finished, event.meta, arrived)
                yield b'data: {"text":"","output_ids":[%b],"meta_info":%b}\n\n' % (
                    ids.encode(),
                    encode(meta),
                )
                if event.finished is not None:
                    break
        except EngineFailure as error:
            yield b"data: " + encode({"error": {"message": str(error)}}) + b"\n\n"
        finally:
            self.engine.abort(job.rid)  # nothing happens if it has ended
        yield b"data: [DONE]\n\n"

    async def _generate(self, batch: Batch, arrived: float) -> Any:
        try:
            tickets = [await self.engine.add(job) for job in batch.generations]
            replies = [
                await self._collect(ticket, job, arrived)
                for ticket, job in zip(tickets, batch.generations, strict=True)
            ]
        finally:
            for job in batch.generations:
                self.engine.abort(job.rid)
        return replies[0] if batch.single else replies

    async def _collect(self, ticket: Ticket, job: GenerateRequest, arrived: float) -> Any:
        ids: list[int] = []
        while True:
            event = await ticket.events.get()
            if isinstance(event, EngineFailure):
                raise event
            ids += event.new_ids
            if event.finished is not None:
                meta = meta_info(job, len(ids), event.finished, event.meta, arrived)
                return {"text": "", "output_ids": ids, "meta_info": meta}

    async def _score(self, batch: Batch, arrived: float) -> Any:
        results = await self.engine.score([r for r in batch.scores if r.start < len(r.input_ids)])
        remaining = iter(results)
        replies = []
        for rid, job in zip(batch.rids, batch.scores, strict=True):
            result = next(remaining) if job.start < len(job.input_ids) else ScoreResult(())
            meta: dict[str, Any] = {
                "id": rid,
                "prompt_tokens": len(job.input_ids),
                "completion_tokens": 0,
                "finish_reason": {"type": "length", "length": 0},
                "e2e_latency": time.perf_counter() - arrived,
                **logprob_lists(job, result),
            }
            replies.append({"text": "", "output_ids": [], "meta_info": meta})
        return replies[0] if batch.single else replies


def logprob_lists(job: ScoreRequest, result: ScoreResult) -> dict[str, Any]:
    """SGLang's lists of ``[log-prob, id, null]``; their first position is always null."""
    first, rest = job.input_ids[job.start - 1], job.input_ids[job.start :]
    tokens = zip(result.logprobs, rest, strict=True)
    lists: dict[str, Any] = {
        "input_token_logprobs": [[None, first, None], *([lp, i, None] for lp, i in tokens)]
    }
    if job.top:
        rows = zip(result.top_logprobs, result.top_ids, strict=True)
        lists["input_top_logprobs"] = [
            None,
            *([[lp, i, None] for lp, i in zip(*row, strict=True)] for row in rows),
        ]
    if job.token_ids:
        lists["input_token_ids_logprobs"] = [
            None,
            *(
                [[lp, i, None] for lp, i in zip(row, job.token_ids, strict=True)]
                for row in result.token_logprobs
            ),
        ]
    return lists


def meta_info(
    job: GenerateRequest,
    tokens: int,
    finished: str | None,
    extra: Mapping[str, Any],
    arrived: float,
) -> dict[str, Any]:
    meta: dict[str, Any] = {
        "id": job.rid,
        "prompt_tokens": len(job.input_ids),
        "completion_tokens": tokens,
        "finish_reason": None,
    }
    if finished is not None:
        meta["finish_reason"] = {"type": finished}
        meta["e2e_latency"] = time.perf_counter() - arrived
        meta.update(extra)
    return meta


def encode(value: Any) -> bytes:
    """JSON that may be sent: a number that is not finite is an engine's failure."""
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
    except ValueError as error:
        raise EngineFailure("The engine returned a number that is not finite.") from error


def reply(value: Any) -> Response:
    return Response(encode(value), media_type="application/json")


def refusal(status: int, message: str) -> Response:
    kind = "BadRequest" if status < 500 else "InternalServerError"
    return JSONResponse(
        {"error": {"message": message, "type": kind, "code": status}}, status_code=status
    )


async def failed(request: Request, error: Exception) -> Response:
    if isinstance(error, EngineFailure):
        return refusal(500, str(error))
    return refusal(404 if isinstance(error, NotFound) else 400, str(error))


async def body_of(request: Request) -> bytes:
    pieces, size = [], 0
    async for piece in request.stream():
        size += len(piece)
        if size > MAX_BODY_BYTES:
            raise InvalidInput(f"The request has more than {MAX_BODY_BYTES} bytes.")
        pieces.append(piece)
    return b"".join(pieces)


async def watched(request: Request, work: Any) -> Any:
    """Await ``work``, but cancel it when the client goes away."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for pending in (task, watch):
            pending.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)
