"""Keyed requests at temperature above 0, audited exactly like greedy ones.

A keyed request (rule R3: Daliri, Musco and Suresh, arXiv 2408.07978) emits argmax(z / T + g) with
Gumbel noise g that its seed and position determine. Its margin is against that argmax.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specpilot.errors import InvalidInput
from specpilot.harness.engines.backend import ScoreRequest
from specpilot.harness.token_forcing.failures import AuditFailure
from specpilot.harness.token_forcing.margins import RequestMargins, TimedOutput
from specpilot.harness.token_forcing.sampling import LISTED, SamplingLaw, support
from specpilot.harness.token_forcing.scorer import Progress, Scorer

__all__ = ["Keyed", "Noise", "keyed_margins"]

Floats = npt.NDArray[np.float64]
Noise = Callable[[int, int, int], Floats]
"""(seed, absolute position of the token, vocabulary) -> Gumbel noise [vocabulary]."""


@dataclass(frozen=True, slots=True)
class Keyed:
    """How keyed requests were sampled: the law and the engine's noise.

    Each output carries its ``seed`` in the order of the audited arm.
    """

    law: SamplingLaw
    noise: Noise
    stock_seeds: tuple[int, ...]
    system_seeds: tuple[int, ...]


def keyed_margins(
    outputs: Sequence[TimedOutput],
    seeds: Sequence[int],
    scorer: Scorer,
    law: SamplingLaw,
    noise: Noise,
    progress: Progress | None = None,
) -> list[RequestMargins]:
    """Return margins of keyed requests in logits: max(z + T g) minus the emitted token's.

    They go through the rules with the greedy thresholds; ``top_ids`` and ``top_margins`` rank
    z + T g. Noise can lift a token from outside the list; where the bound on such a token's logit
    does not rule it out, its log-prob is asked for, so the margins are exact. A token outside the
    ``top_k`` best has at least its distance to the last of them as margin.
    """
    if len(seeds) != len(outputs):
        raise InvalidInput(f"{len(seeds)} seeds for {len(outputs)} keyed outputs.")
    scored = scorer.margins(outputs, top=LISTED, progress=progress)
    return [
        _keyed(output, seed, request, scorer, law, noise)
        for output, seed, request in zip(outputs, seeds, scored, strict=True)
    ]


def _keyed(
    output: TimedOutput,
    seed: int,
    scored: RequestMargins,
    scorer: Scorer,
    law: SamplingLaw,
    noise: Noise,
) -> RequestMargins:
    start, rows = len(output.prompt_ids), np.arange(scored.tokens)
    g = law.temperature * np.array(
        [noise(seed, start + i, scorer.vocab_size) for i in range(scored.tokens)]
    )
    tokens = np.asarray(output.output_ids)
    own = -scored.margins.astype(np.float64) + g[rows, tokens]
    ids, logits = support(scored, law)
    values = logits + np.take_along_axis(g, ids.astype(np.int64), 1)
    outside = np.zeros(scored.tokens)
    if law.top_k != -1:
        listed = (ids == tokens[:, None]).any(1)
        outside = np.where(listed, 0.0, logits[:, -1] + scored.margins)
    elif ids.shape[1] < scorer.vocab_size:
        reach = logits[:, -1:] + g > values.max(1)[:, None]
        np.put_along_axis(reach, ids.astype(np.int64), False, axis=1)
        wanted = np.flatnonzero(reach.any(0))
        if len(wanted):
            lifted = np.where(reach, g, -np.inf)[:, wanted]
            lifted += _logits_of(output, scored.tokens, scorer, wanted)
            winner = lifted.argmax(1)
            wins = lifted[rows, winner] > values[:, -1]
            ids, values = ids.copy(), values.copy()
            ids[wins, -1] = wanted[winner[wins]]
            values[wins, -1] = lifted[rows, winner][wins]
    order = np.argsort(-values, axis=1, kind="stable")
    values = np.take_along_axis(values, order, 1)
    margins = np.maximum(np.maximum(values[:, 0] - own, outside), 0.0)
    return RequestMargins(
        scored.prompt,
        margins.astype(np.float32),
        np.take_along_axis(ids, order, 1),
        (values[:, :1] - values).astype(np.float32),
    )


def _logits_of(
    output: TimedOutput, tokens: int, scorer: Scorer, ids: npt.NDArray[np.int64]
) -> Floats:
    """Logits below the best [tokens, ids] of chosen ids at each output position."""
    result = scorer.score_one(
        ScoreRequest(
            input_ids=(*output.prompt_ids, *output.output_ids),
            start=len(output.prompt_ids),
            top=1,
            token_ids=tuple(ids.tolist()),
        )
    )
    table = np.array(result.token_logprobs, dtype=np.float64)
    if table.shape != (tokens, len(ids)) or len(result.top_logprobs) != tokens:
        raise AuditFailure("logprobs_missing", "The scorer left out log-probs of chosen ids.")
    found: Floats = table - np.array([row[0] for row in result.top_logprobs])[:, None]
    return found
