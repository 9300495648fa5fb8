"""Outputs under audit, their digests and their teacher-forced margins.

The margin of output token y_i is ``max_v z_v - z_{y_i}`` >= 0, z being the scorer's FP32 logits
after the prompt and y_<i. Log-softmax differences are logit differences, so log-probs suffice.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

__all__ = [
    "RequestMargins",
    "TimedOutput",
    "ids_digest",
    "token_digest",
]


class TimedOutput(Protocol):
    """What an audit needs of a timed output; ``harness.engines.client.Generation`` has it."""

    @property
    def prompt_ids(self) -> Sequence[int]: ...

    @property
    def output_ids(self) -> Sequence[int]: ...

    @property
    def finish_reason(self) -> str | None: ...


def _feed(digest: "hashlib._Hash", ids: Sequence[int]) -> None:
    array = np.asarray(ids, dtype="<i8")
    digest.update(len(array).to_bytes(8, "little"))
    digest.update(array.tobytes())


def ids_digest(ids: Sequence[int]) -> str:
    """Return the sha256 (hex) of one sequence of token ids: its length, then 64-bit ids."""
    digest = hashlib.sha256()
    _feed(digest, ids)
    return digest.hexdigest()


def token_digest(generations: Iterable[TimedOutput]) -> str:
    """Return the sha256 (hex) over prompts and outputs, in order.

    The controller writes it beside the times, the audit beside the verdict: equal digests bind a
    verdict to the very tokens that were timed.
    """
    digest = hashlib.sha256(b"specpilot token digest 1")
    for generation in generations:
        _feed(digest, generation.prompt_ids)
        _feed(digest, generation.output_ids)
    return digest.hexdigest()


@dataclass(frozen=True, slots=True, eq=False)
class RequestMargins:
    """The margins of one request's output tokens.

    ``margins``: [tokens] fp32 logits. ``prompt`` is the ``ids_digest`` of the prompt: requests of
    one prompt form one unit of replication. ``top_ids`` [tokens, k] int32 and ``top_margins``
    [tokens, k] fp32 (the top logit minus theirs, ascending) hold the scorer's best tokens.
    """

    prompt: str
    margins: npt.NDArray[np.float32]
    top_ids: npt.NDArray[np.int32]
    top_margins: npt.NDArray[np.float32]

    @property
    def tokens(self) -> int:
        return len(self.margins)
