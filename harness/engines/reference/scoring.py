"""Teacher forcing: the target's FP32 log-probs of given tokens, in bounded memory."""

import torch
from torch import Tensor

from specpilot.harness.engines.backend import ScoreRequest, ScoreResult
from specpilot.harness.engines.reference.state import StatePool
from specpilot.harness.engines.reference.target import Target

__all__ = ["score"]

CHUNK = 256  # tokens a forward pass
HEAD_ROWS = 64  # rows of logits that exist at once


def score(target: Target, pool: StatePool, slot: int, request: ScoreRequest) -> ScoreResult:
    """Run ``request.input_ids`` through the scratch ``slot`` and report positions from ``start``.

    The LM head and the log-softmax run in FP32 (FP64 in an fp64 model), whatever the model's dtype.
    """
    ids = torch.tensor(request.input_ids, device=target.device)
    first = max(request.start, 1)
    extra = torch.tensor(request.token_ids, dtype=torch.int64, device=target.device)
    undefined = 1 if request.start == 0 else 0  # position 0 has no log-prob
    own: list[float | None] = [None] * undefined
    top_ids: list[list[int]] = [[]] * undefined
    top_values: list[list[float]] = [[]] * undefined
    chosen: list[list[float]] = [[]] * undefined

    def report(hidden: Tensor, actual: Tensor) -> None:
        table = target.logits(hidden, fp32=True).log_softmax(-1)
        own.extend(table.gather(-1, actual[:, None])[:, 0].tolist())
        values, best = table.topk(request.top)
        top_ids.extend(best.tolist())
        top_values.extend(values.tolist())
        chosen.extend(table[:, extra].tolist())

    pool.clear(slot)
    last = len(ids) - 1  # row i predicts position i + 1; the last row predicts nothing asked for
    for start in range(0, last, CHUNK):
        stop = min(start + CHUNK, last)
        hidden = target.prefill(ids[start:stop], pool, slot, start).hidden[0]
        for row in range(max(start, first - 1), stop, HEAD_ROWS):
            end = min(row + HEAD_ROWS, stop)
            report(hidden[row - start : end - start], ids[row + 1 : end + 1])
    return ScoreResult(own, top_ids, top_values, chosen)
