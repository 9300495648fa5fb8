"""What a server's replies must look like, and how they become values of ours.

Strict: ids are integers, log-probs finite numbers that are not above 0. Fields that this project
does not use are ignored, because SGLang sends more of them with every version.
"""

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from specpilot.errors import EngineFailure
from specpilot.harness.engines.backend import ScoreRequest, ScoreResult

__all__ = ["Event", "HealthReply", "Scored", "complaint", "score_result", "server_error"]

ROUNDING = 1e-4
"""A log-prob may exceed 0 by this much: the rounding of an FP32 log-softmax."""

TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
LogprobRow = tuple[float | None, TokenId, str | None]


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="ignore", frozen=True)


class Finish(Strict):
    type: Literal["stop", "length", "abort"]
    message: str | None = None


class EventMeta(Strict):
    model_config = ConfigDict(extra="allow")
    completion_tokens: int = Field(ge=0)
    finish_reason: Finish | None = None


class Event(Strict):
    """One event of a stream. ``output_ids``: all tokens so far, or only the new ones."""

    output_ids: list[TokenId]
    meta_info: EventMeta


class ScoreMeta(Strict):
    input_token_logprobs: list[LogprobRow]
    input_top_logprobs: list[list[LogprobRow] | None] = []
    input_token_ids_logprobs: list[list[LogprobRow] | None] = []


class ScoreItem(Strict):
    meta_info: ScoreMeta


class Scored(Strict):
    items: list[ScoreItem]


class HealthReply(Strict):
    info: dict[str, Any]


def complaint(error: ValidationError) -> str:
    """The first thing that was wrong, in one line, with the place and the value."""
    first = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in first["loc"]) or "the reply"
    return f"{place}: {first['msg']} (got {str(first['input'])[:60]!r})"


def server_error(raw: bytes) -> str:
    """The message inside a server's error reply, whatever its form, at most 400 characters."""
    text = raw.decode("utf-8", "replace").strip()
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text[:400] or "no explanation"
    while isinstance(value, dict):
        value = value.get("error", value.get("message", value.get("detail", str(value))))
    return str(value)[:400]


def score_result(request: ScoreRequest, meta: ScoreMeta, server: str) -> ScoreResult:
    """Check a reply against what was asked and drop the position before ``request.start``."""

    def fail(what: str) -> EngineFailure:
        return EngineFailure(f"{server} sent an unusable score: {what}.")

    def value(row: LogprobRow, position: int) -> float:
        if row[0] is None:
            raise fail(f"no log-prob for token {row[1]} at position {position}")
        if row[0] > ROUNDING:
            raise fail(f"log-prob {row[0]} above 0 at position {position}")
        return row[0]

    first = max(request.start - 1, 0)
    expected = request.input_ids[first:]
    got = tuple(row[1] for row in meta.input_token_logprobs)
    if len(got) != len(expected):
        raise fail(f"{len(got)} positions for {len(expected)}")
    wrong = [i for i, (a, b) in enumerate(zip(got, expected, strict=True)) if a != b]
    # SGLang reports the vocabulary's last id as 0; one id may therefore hide behind a 0.
    if any(got[i] != 0 for i in wrong) or len({expected[i] for i in wrong}) > 1:
        at = wrong[0]
        raise fail(f"token {got[at]} at position {first + at}, {expected[at]} was sent")

    def columns(
        rows: list[list[LogprobRow] | None], width: int, name: str
    ) -> list[list[LogprobRow]]:
        if width == 0:
            return []
        if len(rows) != len(expected):
            raise fail(f"{name} has {len(rows)} positions for {len(expected)}")
        checked: list[list[LogprobRow]] = []
        for i in range(request.start - first, len(rows)):
            row = rows[i] or []
            if first + i > 0 and len(row) != width:
                raise fail(f"{name} has {len(row)} of {width} entries at position {first + i}")
            checked.append(row if first + i > 0 else [])
        return checked

    start = request.start
    logprobs = [
        None if first + i == 0 else value(row, first + i)
        for i, row in enumerate(meta.input_token_logprobs)
        if first + i >= start
    ]
    top = columns(meta.input_top_logprobs, request.top, "input_top_logprobs")
    asked = len(request.token_ids)
    chosen = columns(meta.input_token_ids_logprobs, asked, "input_token_ids_logprobs")
    token_logprobs = []
    for r, row in enumerate(chosen):
        by_id = {entry[1]: value(entry, start + r) for entry in row}
        missing = [t for t in request.token_ids if row and t not in by_id]
        if missing:
            raise fail(f"no log-prob for the token {missing[0]} asked for at position {start + r}")
        token_logprobs.append(tuple(by_id[t] for t in request.token_ids) if row else ())
    return ScoreResult(
        logprobs=tuple(logprobs),
        top_ids=tuple(tuple(entry[1] for entry in row) for row in top),
        top_logprobs=tuple(
            tuple(value(entry, start + r) for entry in row) for r, row in enumerate(top)
        ),
        token_logprobs=tuple(token_logprobs),
    )
