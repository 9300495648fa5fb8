"""What task accuracy can see of a fault: exact match of short completions.

The SpecPilot paper's Figure 2c: accuracy's interval includes zero for a faulty system too. Here a
task is to complete a cut of the workload's own text, right if all tokens are those of the text; the
fault begins halfway through the completion, as it does in the paper's outputs.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from scipy import stats

from specpilot.errors import InvalidInput
from specpilot.harness.deployments.workload import load_workload
from specpilot.harness.engines.client import EngineClient, SamplingParams
from specpilot.types import Deployment

__all__ = ["AFTER", "AccuracyChange", "accuracy_change", "questions", "right_answers"]

TOKENS = 8
AFTER = TOKENS // 2
PROMPT_KEY = b"specpilot forcing task"

Question = tuple[tuple[int, ...], tuple[int, ...]]


def questions(deployment: Deployment, count: int) -> list[Question]:
    """Cut ``count`` (prompt, answer of 8 tokens) pairs from the open workload."""
    length = deployment.regime.prompt_tokens
    cuts = load_workload(deployment.workload, length + TOKENS).prompts("open", count, PROMPT_KEY)
    return [(cut[:length], cut[length:]) for cut in cuts]


def right_answers(client: EngineClient, asked: Sequence[Question], running: int) -> list[bool]:
    """Ask all, ``running`` at once, and say which are right."""
    params = SamplingParams(max_new_tokens=TOKENS, ignore_eos=True)

    def right(question: Question) -> bool:
        return client.generate(question[0], params).output_ids == question[1]

    with ThreadPoolExecutor(running) as pool:
        return list(pool.map(right, asked))


@dataclass(frozen=True, slots=True)
class AccuracyChange:
    """A system's accuracy minus stock's in points of percent, with a 95 % interval."""

    points: float
    low: float
    high: float
    questions: int


def accuracy_change(
    answers: Mapping[str, Sequence[bool]], name: str, stock: str = "stock"
) -> AccuracyChange:
    """Compare paired answers: Student t on the differences by question."""
    ours, theirs = (np.asarray(answers[n], dtype=float) for n in (name, stock))
    if len(ours) != len(theirs) or len(ours) < 2:
        raise InvalidInput(f"{len(ours)} and {len(theirs)} answers cannot be paired.")
    difference = 100 * (ours - theirs)
    mean, n = float(difference.mean()), len(difference)
    half = float(stats.t.ppf(0.975, n - 1) * difference.std(ddof=1) / np.sqrt(n))
    return AccuracyChange(mean, mean - half, mean + half, n)
