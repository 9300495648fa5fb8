"""A request inside the engine: what it holds, when it ends, what it reports."""

from dataclasses import dataclass, field
from typing import Any

from specpilot.errors import InvalidInput
from specpilot.harness.engines.backend import FinishReason, GenerateRequest, ScoreRequest

__all__ = ["Running", "check_generate", "check_score"]


@dataclass(slots=True)
class Running:
    """A request with a slot. ``length`` tokens are committed; the last output is the anchor."""

    request: GenerateRequest
    stop_ids: frozenset[int]
    slot: int
    length: int = 0
    output: list[int] = field(default_factory=list)
    passes: int = 0
    rows: int = 0
    drafts: int = 0
    selected: int = 0

    @property
    def prefilled(self) -> bool:
        return self.length >= len(self.request.input_ids)

    @property
    def left(self) -> int:
        """Tokens that may still be emitted."""
        return self.request.max_new_tokens - len(self.output)

    def take(self, tokens: tuple[int, ...]) -> tuple[tuple[int, ...], FinishReason | None]:
        """Append tokens up to a stop token or the length limit; return those that were taken."""
        for count, token in enumerate(tokens, start=1):
            self.output.append(token)
            if token in self.stop_ids:
                return tokens[:count], "stop"
            if self.left == 0:
                return tokens[:count], "length"
        return tokens, None

    def meta(self, tree: bool) -> dict[str, Any]:
        """Counters of the request's last event; the token of the prefill counts for no pass."""
        return {
            "spec_verify_ct": self.passes,
            "spec_accept_length": (len(self.output) - 1) / self.passes if self.passes else 0.0,
            "verify_rows": self.rows,
            "spec_tree_passes": self.passes if tree else 0,
            "drafter_calls": self.drafts,
            "spec_selector_passes": self.selected,
        }


def check_generate(request: GenerateRequest, vocab_size: int, context: int) -> None:
    """Raise ``InvalidInput`` for a request that the engine cannot take."""
    _check_ids(request.input_ids, vocab_size)
    if request.max_new_tokens < 1:
        raise InvalidInput(f"max_new_tokens must be at least 1, got {request.max_new_tokens}.")
    total = len(request.input_ids) + request.max_new_tokens
    if total > context:
        raise InvalidInput(
            f"{len(request.input_ids)} prompt tokens and {request.max_new_tokens} new ones exceed "
            f"the context of {context}.",
            hint="Shorten the prompt or lower max_new_tokens.",
        )
    if not 0.0 <= request.temperature < float("inf"):
        raise InvalidInput(f"temperature must be 0 or more, got {request.temperature}.")
    if not 0.0 < request.top_p <= 1.0:
        raise InvalidInput(f"top_p must lie in (0, 1], got {request.top_p}.")
    if request.top_k != -1 and request.top_k < 1:
        raise InvalidInput(f"top_k must be -1 (off) or at least 1, got {request.top_k}.")


def check_score(request: ScoreRequest, vocab_size: int, context: int) -> None:
    """Raise ``InvalidInput`` for a scoring request that the engine cannot take."""
    _check_ids(request.input_ids, vocab_size)
    _check_ids((0, *request.token_ids), vocab_size)
    if len(request.input_ids) > context:
        raise InvalidInput(
            f"{len(request.input_ids)} tokens to score exceed the context of {context}."
        )
    if not 0 <= request.start <= len(request.input_ids):
        raise InvalidInput(f"start must lie in 0 to {len(request.input_ids)}, got {request.start}.")
    if not 0 <= request.top <= vocab_size:
        raise InvalidInput(f"top must lie in 0 to {vocab_size}, got {request.top}.")


def _check_ids(ids: tuple[int, ...], vocab_size: int) -> None:
    if not ids:
        raise InvalidInput("the prompt is empty; give at least one token id.")
    if min(ids) < 0 or max(ids) >= vocab_size:
        bad = next(i for i in ids if not 0 <= i < vocab_size)
        raise InvalidInput(f"token id {bad} lies outside the vocabulary of {vocab_size}.")
