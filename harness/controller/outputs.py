"""Timed outputs on disk, so that the very tokens that were timed can be audited later."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from specpilot.errors import CheckFailed, NotFound
from specpilot.harness.engines.backend import FinishReason
from specpilot.harness.engines.client import Generation

__all__ = ["load_outputs", "save_outputs"]


class _Row(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    prompt_ids: list[int]
    output_ids: list[int]
    sent_s: float
    first_token_s: float
    last_token_s: float
    finish_reason: FinishReason


class _File(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    arms: dict[str, list[_Row]]


def save_outputs(path: Path, arms: Mapping[str, Sequence[Generation]]) -> None:
    """Write the outputs of each arm to ``path``, for the controller's user alone."""
    rows = {
        arm: [
            {
                "prompt_ids": list(g.prompt_ids),
                "output_ids": list(g.output_ids),
                "sent_s": g.sent_s,
                "first_token_s": g.first_token_s,
                "last_token_s": g.last_token_s,
                "finish_reason": g.finish_reason,
            }
            for g in outputs
        ]
        for arm, outputs in arms.items()
    }
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w", encoding="ascii") as file:
        json.dump({"arms": rows}, file, separators=(",", ":"), allow_nan=False)


def load_outputs(path: Path) -> dict[str, list[Generation]]:
    """Read outputs back. Their binding to a receipt is the token digest, which callers compare."""
    try:
        parsed = _File.model_validate_json(path.read_bytes())
    except FileNotFoundError as error:
        raise NotFound(f"The timed outputs {path.name} are not kept any more.") from error
    except ValidationError as error:
        raise CheckFailed(f"The timed outputs {path} were damaged: {error}.") from error
    return {
        arm: [
            Generation(
                prompt_ids=tuple(row.prompt_ids),
                output_ids=tuple(row.output_ids),
                sent_s=row.sent_s,
                first_token_s=row.first_token_s,
                last_token_s=row.last_token_s,
                finish_reason=row.finish_reason,
            )
            for row in rows
        ]
        for arm, rows in parsed.arms.items()
    }
