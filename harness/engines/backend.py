"""What an engine offers to the HTTP server: requests in, steps out.

The server owns one thread that calls ``step`` while there is work and sleeps on a condition
otherwise; an engine is never called from two threads at once. Nothing here knows about HTTP.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

__all__ = ["Backend", "FinishReason", "GenerateRequest", "ScoreRequest", "ScoreResult", "StepEvent"]

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One request for new tokens. ``top_k`` -1 and ``top_p`` 1.0 mean off; temperature 0 is greedy.

    ``seed`` keys the request's own noise; ``stop_token_ids`` come on top of the model's EOS unless
    ``ignore_eos`` (which turns off EOS alone).
    """

    rid: str
    input_ids: tuple[int, ...]
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = -1
    top_p: float = 1.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class StepEvent:
    """Tokens that one step added to one request; ``finished`` is set on the request's last event.

    ``meta`` of the last event carries ``spec_verify_ct`` (exact passes), ``spec_accept_length``
    (tokens emitted per exact pass, bonus included) and the mechanisms' own counters.
    """

    rid: str
    new_ids: tuple[int, ...]
    finished: FinishReason | None = None
    meta: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """Teacher-force ``input_ids`` and report log-probs of positions ``start`` and later.

    Position i is the token ``input_ids[i]`` given all before it; ``start`` >= 0 (position 0 has
    no log-prob). ``token_ids`` are extra ids to report at each position.
    """

    input_ids: tuple[int, ...]
    start: int = 0
    top: int = 0
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ScoreResult:
    """FP32 log-softmax values. Row r belongs to position ``start + r``; None where undefined."""

    logprobs: Sequence[float | None]
    top_ids: Sequence[Sequence[int]] = ()
    top_logprobs: Sequence[Sequence[float]] = ()
    token_logprobs: Sequence[Sequence[float]] = ()


class Backend(Protocol):
    """An engine as the server sees it. Raises ``InvalidInput`` for requests it cannot take."""

    vocab_size: int
    context_length: int

    def add(self, request: GenerateRequest) -> None: ...

    def abort(self, rid: str) -> None: ...

    def has_work(self) -> bool: ...

    def step(self) -> list[StepEvent]: ...

    def score(self, request: ScoreRequest) -> ScoreResult: ...

    def flush(self) -> None: ...

    def info(self) -> dict[str, Any]: ...
