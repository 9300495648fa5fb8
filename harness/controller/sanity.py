"""The sanity floor: timed outputs that cannot be true are typed failures, never a score.

A failure names its kind, so that a report can say what a system did. Nothing here compares a
system with stock; token forcing does that on the same outputs.
"""

import math
from collections.abc import Sequence
from enum import StrEnum

from specpilot.errors import CheckFailed
from specpilot.harness.engines.client import Generation

__all__ = [
    "FailureKind",
    "InsaneOutput",
    "check_answers",
    "check_busy",
    "check_generation",
    "check_idle",
]


class FailureKind(StrEnum):
    NOT_FINITE = "not_finite"
    NOT_POSITIVE = "not_positive"
    MISSING_TOKENS = "missing_tokens"
    EXTRA_TOKENS = "extra_tokens"
    EARLY_STOP = "early_stop"
    BAD_ID = "bad_id"
    WRONG_PROMPT = "wrong_prompt"
    REPEATED_ANSWER = "repeated_answer"
    FASTER_THAN_FLOOR = "faster_than_floor"
    BUSY_WHILE_IDLE = "busy_while_idle"
    TOO_MANY_CORES = "too_many_cores"


class InsaneOutput(CheckFailed):
    """A system's timed output failed the sanity floor. ``kind`` says how, ``arm`` who."""

    def __init__(self, kind: FailureKind, arm: str, detail: str) -> None:
        super().__init__(f"The {arm} system failed the sanity floor ({kind}): {detail}")
        self.kind = kind
        self.arm = arm


def check_generation(
    generation: Generation,
    prompt: Sequence[int],
    *,
    arm: str,
    tokens: int,
    vocab_size: int,
    floor_s_per_token: float = 0.0,
) -> None:
    """Raise ``InsaneOutput`` unless ``generation`` is ``tokens`` real ids in a possible time.

    ``tokens`` were demanded with EOS ignored, so fewer is always a failure. ``floor_s_per_token``
    is the physical floor of the deployment: no system may be faster.
    """

    def fail(kind: FailureKind, detail: str) -> InsaneOutput:
        return InsaneOutput(kind, arm, detail)

    times = (generation.sent_s, generation.first_token_s, generation.last_token_s)
    if not all(math.isfinite(value) for value in times):
        raise fail(FailureKind.NOT_FINITE, f"its times are {times}.")
    seconds = generation.last_token_s - generation.sent_s
    if seconds <= 0 or not times[0] < times[1] <= times[2]:
        raise fail(FailureKind.NOT_POSITIVE, f"sent, first and last token at {times} seconds.")
    if tuple(generation.prompt_ids) != tuple(prompt):
        raise fail(FailureKind.WRONG_PROMPT, "the recorded prompt is not the one that was sent.")
    ids = generation.output_ids
    if len(ids) < tokens:
        stopped = generation.finish_reason == "stop"
        kind = FailureKind.EARLY_STOP if stopped else FailureKind.MISSING_TOKENS
        raise fail(kind, f"{len(ids)} tokens instead of {tokens} ({generation.finish_reason}).")
    if len(ids) > tokens:
        raise fail(FailureKind.EXTRA_TOKENS, f"{len(ids)} tokens instead of {tokens}.")
    for position, token in enumerate(ids):
        if type(token) is not int or not 0 <= token < vocab_size:
            raise fail(
                FailureKind.BAD_ID,
                f"token {position} is {token!r}; ids are integers from 0 to {vocab_size - 1}.",
            )
    if seconds < floor_s_per_token * tokens:
        raise fail(
            FailureKind.FASTER_THAN_FLOOR,
            f"{tokens} tokens in {seconds:.4g} s; the machine needs at least "
            f"{floor_s_per_token * tokens:.4g} s.",
        )


def check_answers(
    answers: Sequence[Generation], reference: Sequence[Generation], *, arm: str
) -> None:
    """Raise if ``answers`` repeats itself over different prompts where ``reference`` does not.

    Both served the same prompts in the same order. A small model may truly end in the same text
    for two prompts; then the reference does as well.
    """
    first_with: dict[tuple[int, ...], int] = {}
    for index, answer in enumerate(answers):
        earlier = first_with.setdefault(tuple(answer.output_ids), index)
        if earlier == index or answers[earlier].prompt_ids == answer.prompt_ids:
            continue
        if reference[earlier].output_ids != reference[index].output_ids:
            raise InsaneOutput(
                FailureKind.REPEATED_ANSWER,
                arm,
                f"requests {earlier} and {index} have different prompts and the same "
                f"{len(answer.output_ids)} tokens, which the compared system does not give.",
            )


def check_idle(cpu_seconds: float, wall_seconds: float, *, arm: str, max_cores: float) -> None:
    """Raise if a system computed while the other one was being timed, which would slow that."""
    if wall_seconds > 0 and cpu_seconds / wall_seconds > max_cores:
        raise InsaneOutput(
            FailureKind.BUSY_WHILE_IDLE,
            arm,
            f"it used {cpu_seconds:.2f} s of CPU in {wall_seconds:.2f} s in which only the other "
            f"system had work; {max_cores:.2f} cores are allowed.",
        )


def check_busy(cpu_seconds: float, wall_seconds: float, *, arm: str, max_cores: float) -> None:
    """Raise if a system used more cores than its deployment gives: that is no gain of a patch."""
    if wall_seconds > 0 and cpu_seconds / wall_seconds > max_cores:
        raise InsaneOutput(
            FailureKind.TOO_MANY_CORES,
            arm,
            f"it used {cpu_seconds:.2f} s of CPU in {wall_seconds:.2f} s of its own blocks; the "
            f"deployment's threads allow {max_cores:.2f} cores.",
        )
