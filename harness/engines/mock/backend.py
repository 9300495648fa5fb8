"""The mock engine: a ``Backend`` whose speed is a setting and whose output is known.

One pass takes ``delay_ms + rows * row_ms`` for the whole batch. With ``tokens_per_pass`` it gives
every running request that many tokens, so the speeds of two systems can be set to any ratio; else
drafted tokens are right by a chance that depends on the context alone. For hostile or faulty
systems, subclass it: ``choose`` picks each token, ``rest`` spends a pass's time,
``tokens_this_pass`` sets how many a pass gives, ``score`` answers teacher forcing.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specpilot.errors import InvalidInput
from specpilot.harness.engines.backend import (
    FinishReason,
    GenerateRequest,
    ScoreRequest,
    ScoreResult,
    StepEvent,
)
from specpilot.harness.engines.mock.model import (
    EOS,
    VOCAB,
    HashModel,
    drafted_right,
    extend,
    log_softmax,
    sample,
)
from specpilot.harness.engines.settings import MockSettings

__all__ = ["MockBackend", "Running"]


@dataclass(slots=True)
class Running:
    """A request in the mock: its output so far and the digest of prompt and output."""

    request: GenerateRequest
    digest: int
    last: int
    output: list[int] = field(default_factory=list)
    passes: int = 0


class MockBackend:
    """Implements ``Backend`` with a ``HashModel``."""

    def __init__(self, settings: MockSettings) -> None:
        self.settings = settings
        self.vocab_size = VOCAB
        self.context_length = settings.context
        self.model = HashModel(settings.noise, settings.noise_seed)
        self.waiting: list[Running] = []
        self.running: list[Running] = []

    def add(self, request: GenerateRequest) -> None:
        total = len(request.input_ids) + request.max_new_tokens
        if total > self.context_length:
            raise InvalidInput(f"{total} tokens do not fit into {self.context_length}.")
        ids = request.input_ids
        self.waiting.append(Running(request, extend(0, ids), ids[-1]))

    def abort(self, rid: str) -> None:
        self.waiting = [r for r in self.waiting if r.request.rid != rid]
        self.running = [r for r in self.running if r.request.rid != rid]

    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def step(self) -> list[StepEvent]:
        free = self.settings.max_running - len(self.running)
        self.running += self.waiting[:free]
        del self.waiting[:free]
        self.rest()
        events = [self.advance(r) for r in self.running]
        ended = {event.rid for event in events if event.finished}
        self.running = [r for r in self.running if r.request.rid not in ended]
        return events

    def advance(self, r: Running) -> StepEvent:
        """Give one request the tokens of one pass."""
        r.passes += 1
        new: list[int] = []
        finished: FinishReason | None = None
        for _ in range(self.tokens_this_pass(r)):
            token = self.choose(r, self.model.logits(r.last, r.digest))
            r.output.append(token)
            new.append(token)
            r.last, r.digest = token, extend(r.digest, (token,))
            finished = self.finish(r)
            if finished:
                break
        meta: dict[str, Any] = {}
        if finished:
            accepted = len(r.output) / r.passes
            meta = {"spec_verify_ct": r.passes, "spec_accept_length": accepted}
            if self.settings.speculation == "tree":
                meta["spec_tree_passes"] = r.passes
        return StepEvent(r.request.rid, tuple(new), finished, meta)

    def rest(self) -> None:
        """Spend the time of one pass without using the CPU."""
        s = self.settings
        if pass_ms := s.delay_ms + s.row_ms * s.pass_rows:
            time.sleep(pass_ms / 1e3)

    def tokens_this_pass(self, r: Running) -> int:
        """How many tokens this pass gives, bonus included.

        A tree's rows beyond one chain are second chances at each depth.
        """
        s = self.settings
        if s.tokens_per_pass:
            return s.tokens_per_pass
        if s.speculation == "none":
            return 1
        depth = min(s.block, s.pass_rows) - 1
        chance = 1.0 - (1.0 - s.accept) ** max(1.0, s.pass_rows / s.block)
        return 1 + drafted_right(r.digest, depth, chance)

    def choose(self, r: Running, logits: NDArray[np.float32]) -> int:
        """The next token of ``r`` given its logits [vocab], fp32."""
        q = r.request
        return sample(logits, q.temperature, q.top_k, q.top_p, q.seed, len(r.output))

    def finish(self, r: Running) -> FinishReason | None:
        q = r.request
        if r.last in q.stop_token_ids or (r.last == EOS and not q.ignore_eos):
            return "stop"
        return "length" if len(r.output) == q.max_new_tokens else None

    def logits_of(self, ids: Sequence[int], start: int) -> NDArray[np.float32]:
        """Logits [len(ids) - start, vocab] that predict positions ``start`` (>= 1) and later."""
        digest = extend(0, ids[:start])
        rows = np.empty((len(ids) - start, self.vocab_size), np.float32)
        for r, position in enumerate(range(start, len(ids))):
            rows[r] = self.model.logits(ids[position - 1], digest)
            digest = extend(digest, ids[position : position + 1])
        return rows

    def score(self, request: ScoreRequest) -> ScoreResult:
        ids, first = request.input_ids, max(request.start, 1)
        table = log_softmax(self.logits_of(ids, first))
        rows = np.arange(len(table))
        logprobs: list[float | None] = table[rows, list(ids[first:])].tolist()
        order = np.argsort(-table, axis=1, kind="stable")[:, : request.top]
        undefined = first - request.start  # position 0, if asked for, has no log-prob
        return ScoreResult(
            logprobs=[None] * undefined + logprobs,
            top_ids=[[]] * undefined + order.tolist(),
            top_logprobs=[[]] * undefined + np.take_along_axis(table, order, 1).tolist(),
            token_logprobs=[[]] * undefined + table[:, list(request.token_ids)].tolist(),
        )

    def flush(self) -> None:
        """Nothing is cached."""

    def info(self) -> dict[str, Any]:
        return {"engine": "mock", "running": len(self.running), "waiting": len(self.waiting)}
