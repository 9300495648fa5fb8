"""Teacher-forced margins of every output token, over a server that scores like SGLang.

The scorer is the stock system without speculation and with FP32 logits. It knows the tokens, not
who made them; what it cannot score it refuses with a typed reason.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from specpilot.errors import SpecPilotError
from specpilot.harness.engines.backend import ScoreRequest, ScoreResult
from specpilot.harness.token_forcing.failures import AuditFailure
from specpilot.harness.token_forcing.margins import RequestMargins, TimedOutput, ids_digest

__all__ = ["Progress", "ScoreClient", "Scorer"]

T = TypeVar("T")
Progress = Callable[[int, int], None]
"""Called with scored tokens and all tokens to score, prompts included."""

ROUNDING = 1e-4
"""Log-probs from one FP32 log-softmax may be off by this; beyond it they contradict themselves."""


class ScoreClient(Protocol):
    """What the scorer needs of ``harness.engines.client.EngineClient``."""

    def score_batch(self, requests: Sequence[ScoreRequest]) -> Sequence[ScoreResult]: ...

    def server_info(self) -> Mapping[str, Any]: ...


class Scorer:
    """Scores outputs in batches of at most ``batch_tokens`` tokens (one request at least).

    Memory holds one batch of replies and ``1 + 2 top`` numbers a token, whatever the outputs'
    length. Only self-tests and calibration need more than ``top`` 1.
    """

    def __init__(self, client: ScoreClient, vocab_size: int, *, batch_tokens: int = 8192) -> None:
        self.client = client
        self.vocab_size = vocab_size
        self.batch_tokens = batch_tokens

    def check_manifest(self, manifest: Mapping[str, Any]) -> None:
        """Raise ``manifest_differs`` unless the server reports each entry of ``manifest``."""
        try:
            info = self.client.server_info()
        except SpecPilotError as error:
            raise AuditFailure(
                "scorer_failed", f"The scorer gives no server info: {error}"
            ) from error
        for key, expected in manifest.items():
            if key not in info or info[key] != expected:
                found = repr(info[key]) if key in info else "nothing"
                raise AuditFailure(
                    "manifest_differs",
                    f"The scorer reports {found} for {key!r}, its manifest {expected!r}.",
                    hint="Start the scorer from the frozen stock manifest.",
                )

    def margins(
        self,
        outputs: Sequence[TimedOutput],
        *,
        top: int = 1,
        progress: Progress | None = None,
    ) -> list[RequestMargins]:
        """Return the margins of all output tokens, in the order of ``outputs``.

        Each result also carries the ``top`` largest logits by position. Raises
        ``AuditFailure`` on outputs that are empty or hold ids outside the vocabulary, and on
        replies with log-probs that are missing, NaN, positive or contradict each other.
        """
        for index, output in enumerate(outputs):
            self._check_ids(index, output)
        top = min(top, self.vocab_size)
        total = sum(len(o.prompt_ids) + len(o.output_ids) for o in outputs)
        done = 0
        scored: list[RequestMargins] = []
        for batch in self._batches(outputs):
            requests = [
                ScoreRequest(
                    input_ids=(*o.prompt_ids, *o.output_ids), start=len(o.prompt_ids), top=top
                )
                for o in batch
            ]
            for output, result in zip(batch, self._score(requests), strict=True):
                scored.append(_to_margins(len(scored), output, result, top))
            done += sum(len(r.input_ids) for r in requests)
            if progress is not None:
                progress(done, total)
        return scored

    def token_margins(
        self, contexts: Iterable[tuple[Sequence[int], int]]
    ) -> npt.NDArray[np.float32]:
        """Return the margin of one token after each context, fp32, for (context ids, token)."""
        requests = [
            ScoreRequest(input_ids=(*context, token), start=len(context), top=1)
            for context, token in contexts
        ]
        found = np.empty(len(requests), dtype=np.float32)
        done = 0
        for batch in _cut(requests, lambda r: len(r.input_ids), self.batch_tokens):
            for result in self._score(batch):
                found[done] = _rows(done, result, 1, 1)[0][0]
                done += 1
        return found

    def score_one(self, request: ScoreRequest) -> ScoreResult:
        """Score one request as it is. Raises ``AuditFailure`` if the server fails."""
        return self._score([request])[0]

    def _check_ids(self, index: int, output: TimedOutput) -> None:
        if not output.output_ids:
            raise AuditFailure("empty_output", f"Request {index} has no output.", request=index)
        if not output.prompt_ids:
            raise AuditFailure("prompt_differs", f"Request {index} has no prompt.", request=index)
        for name, ids in (("prompt", output.prompt_ids), ("output", output.output_ids)):
            array = np.asarray(ids)
            wrong = array[(array < 0) | (array >= self.vocab_size)]
            if len(wrong):
                raise AuditFailure(
                    "ids_outside_vocabulary",
                    f"Request {index}: {name} id {wrong[0]} lies outside the vocabulary of "
                    f"{self.vocab_size}.",
                    request=index,
                    hint="Does the system use the deployment's tokenizer?",
                )

    def _batches(self, outputs: Sequence[TimedOutput]) -> Iterator[list[TimedOutput]]:
        return _cut(outputs, lambda o: len(o.prompt_ids) + len(o.output_ids), self.batch_tokens)

    def _score(self, requests: Sequence[ScoreRequest]) -> Sequence[ScoreResult]:
        try:
            results = self.client.score_batch(requests)
        except SpecPilotError as error:
            raise AuditFailure("scorer_failed", f"The scorer failed: {error}") from error
        if len(results) != len(requests):
            raise AuditFailure(
                "scorer_failed", f"The scorer answered {len(results)} of {len(requests)} requests."
            )
        return results


def _cut(items: Sequence[T], size: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    batch: list[T] = []
    held = 0
    for item in items:
        if batch and held + size(item) > limit:
            yield batch
            batch, held = [], 0
        batch.append(item)
        held += size(item)
    if batch:
        yield batch


def _rows(
    index: int, result: ScoreResult, tokens: int, top: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Check one reply and return margins [tokens] and top log-probs [tokens, top], fp32."""

    def refuse(kind: Any, what: str) -> AuditFailure:
        return AuditFailure(kind, f"Request {index}: {what}.", request=index)

    if len(result.logprobs) != tokens or len(result.top_logprobs) != tokens:
        raise refuse(
            "logprobs_missing",
            f"{len(result.logprobs)} log-probs and {len(result.top_logprobs)} top rows for "
            f"{tokens} tokens",
        )
    if any(value is None for value in result.logprobs):
        raise refuse("logprobs_missing", "an output token has no log-prob")
    if any(len(row) < top for row in result.top_logprobs):
        raise refuse("logprobs_missing", f"a position has fewer than {top} top log-probs")
    own = np.array(result.logprobs, dtype=np.float32)
    best = np.array([row[:top] for row in result.top_logprobs], dtype=np.float32)
    if not (np.isfinite(own).all() and np.isfinite(best).all()):
        raise refuse("logprobs_nan", "a log-prob is NaN or infinite")
    if (own > ROUNDING).any() or (best > ROUNDING).any():
        raise refuse("logprobs_positive", f"a log-prob is {max(own.max(), best.max()):.4g} > 0")
    margins = best[:, 0] - own
    if (margins < -ROUNDING).any() or (np.diff(best, axis=1) > ROUNDING).any():
        raise refuse("logprobs_inconsistent", "the top log-prob is not the largest")
    return np.maximum(margins, 0.0), best


def _to_margins(index: int, output: TimedOutput, result: ScoreResult, top: int) -> RequestMargins:
    margins, best = _rows(index, result, len(output.output_ids), top)
    if len(result.top_ids) != len(margins) or any(len(row) < top for row in result.top_ids):
        raise AuditFailure(
            "logprobs_missing", f"Request {index}: top ids are missing.", request=index
        )
    ids = np.array([row[:top] for row in result.top_ids], dtype=np.int32)
    return RequestMargins(
        ids_digest(output.prompt_ids), margins, ids, np.maximum(best[:, :1] - best, 0.0)
    )
