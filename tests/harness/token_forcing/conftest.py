"""A language model small enough to be a table, as stock, faulty and noisy systems, and its scorer.

Logits depend on the last two tokens and the position, so every system here can be generated and
scored exactly, in microseconds, without an engine.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from specpilot.harness.engines.backend import ScoreRequest, ScoreResult
from specpilot.harness.token_forcing import Calibration, Scorer, calibrate

VOCAB = 96


@dataclass(frozen=True)
class Output:
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    finish_reason: str = "length"


@dataclass
class TableModel:
    """``noise`` is the sd of a context-keyed disturbance of each logit: other honest numerics."""

    noise: float = 0.0
    key: int = 0
    vocab_size: int = VOCAB
    last: np.ndarray = field(init=False)
    before: np.ndarray = field(init=False)
    place: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(11)
        self.last = rng.normal(0, 1.3, (VOCAB, VOCAB))
        self.before = rng.normal(0, 1.3, (VOCAB, VOCAB))
        self.place = rng.normal(0, 1.3, (61, VOCAB))

    def logits(self, ids: Sequence[int], position: int) -> np.ndarray:
        """Logits of ``ids[position]`` given what comes before it."""
        last, before = ids[position - 1], ids[position - 2] if position > 1 else 0
        found = self.last[last] + self.before[before] + self.place[position % 61]
        if self.noise:
            rng = np.random.default_rng([self.key, last, before, position])
            found = found + rng.normal(0, self.noise, VOCAB)
        return found

    def sample(
        self,
        prompt: Sequence[int],
        tokens: int,
        seed: int,
        noise: Callable[[int, int, int], np.ndarray],
        temperature: float = 1.0,
        top_k: int = VOCAB,
        bias: float = 0.0,
    ) -> Output:
        """Keyed sampling: argmax of logits / temperature + noise over the ``top_k`` best."""
        ids = list(prompt)
        boost = bias * (np.arange(VOCAB) % 7 == 0)
        for _ in range(tokens):
            logits = self.logits(ids, len(ids)) + boost
            scores = logits / temperature + noise(seed, len(ids), VOCAB)
            scores[np.argsort(-logits)[top_k:]] = -np.inf
            ids.append(int(np.argmax(scores)))
        return Output(tuple(prompt), tuple(ids[len(prompt) :]))

    def generate(
        self, prompt: Sequence[int], tokens: int, bias: float = 0.0, after: int = 0
    ) -> Output:
        ids = list(prompt)
        boost = bias * (np.arange(VOCAB) % 7 == 0)
        for i in range(tokens):
            logits = self.logits(ids, len(ids))
            ids.append(int(np.argmax(logits + boost if i >= after else logits)))
        return Output(tuple(prompt), tuple(ids[len(prompt) :]))


@dataclass
class TableClient:
    """Scores with a ``TableModel``; the protocol of ``ScoreClient``."""

    model: TableModel
    info: Mapping[str, Any] = field(default_factory=lambda: {"model": "table"})
    calls: list[int] = field(default_factory=list)

    def score_batch(self, requests: Sequence[ScoreRequest]) -> list[ScoreResult]:
        self.calls.append(sum(len(r.input_ids) for r in requests))
        return [self._score(request) for request in requests]

    def server_info(self) -> Mapping[str, Any]:
        return self.info

    def _score(self, request: ScoreRequest) -> ScoreResult:
        ids = request.input_ids
        rows = np.array([self.model.logits(ids, i) for i in range(request.start, len(ids))])
        rows -= np.log(np.exp(rows).sum(1, keepdims=True))
        order = np.argsort(-rows, axis=1)[:, : request.top]
        return ScoreResult(
            logprobs=[float(row[i]) for row, i in zip(rows, ids[request.start :], strict=True)],
            top_ids=order.tolist(),
            top_logprobs=np.take_along_axis(rows, order, 1).tolist(),
            token_logprobs=rows[:, list(request.token_ids)].tolist(),
        )


def make_prompts(count: int, seed: int = 3) -> list[tuple[int, ...]]:
    rng = np.random.default_rng(seed)
    return [tuple(int(i) for i in rng.integers(0, VOCAB, 6)) for _ in range(count)]


@pytest.fixture(scope="session")
def new_model() -> type[TableModel]:
    return TableModel


@pytest.fixture(scope="session")
def new_scorer() -> Callable[..., Scorer]:
    """Make a scorer of a model; keyword arguments go to the client."""
    return lambda model, **client: Scorer(TableClient(model, **client), VOCAB)


@pytest.fixture(scope="session")
def prompts() -> list[tuple[int, ...]]:
    return make_prompts(60)


@pytest.fixture(scope="session")
def stock(prompts: list[tuple[int, ...]]) -> list[Output]:
    """Greedy outputs of the exact model: 60 requests of 64 tokens."""
    model = TableModel()
    return [model.generate(p, 64) for p in prompts]


@pytest.fixture(scope="session")
def scorer() -> Scorer:
    return Scorer(TableClient(TableModel()), VOCAB)


@pytest.fixture(scope="session")
def calibration(stock: list[Output], scorer: Scorer) -> Calibration:
    return calibrate(stock, scorer, {})
