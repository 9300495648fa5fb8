"""From logits to one token: greedy, or temperature, top-k and top-p with keyed noise.

The noise of a token depends on the request's seed and the token's absolute position alone, so plain
decoding and every way of speculation draw the same tokens (rule R3: Daliri, Musco and Suresh,
arXiv 2408.07978).
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specpilot.harness.engines.backend import GenerateRequest
from specpilot.mechanisms.trees.acceptance import Walk, greedy, keyed_choice, walk
from specpilot.mechanisms.trees.tree import Tree

__all__ = ["accept", "filtered", "likeliest"]


def likeliest(logits: Tensor) -> NDArray[np.int64]:
    """Token ids [...] of the largest ``logits`` [..., vocabulary], on the host."""
    if logits.device.type == "cpu" and logits.dtype in (torch.float32, torch.float64):
        return logits.numpy().argmax(-1)  # an eighth of torch's time
    found: NDArray[np.int64] = logits.argmax(-1).cpu().numpy()
    return found


def filtered(
    logits: NDArray[np.float64], temperature: float, top_k: int, top_p: float
) -> NDArray[np.float64]:
    """Log-probs [vocabulary] up to a constant; -inf outside top-k or top-p.

    Temperature comes first. Both cuts are made on the same sorted distribution: top-p keeps the
    fewest likeliest tokens whose probability reaches ``top_p``. Ties go to the lower id.
    """
    scores = logits / temperature
    if top_k == -1 and top_p >= 1.0:
        return scores
    order = np.argsort(-scores, kind="stable")
    kept = len(order) if top_k == -1 else min(top_k, len(order))
    if top_p < 1.0:
        mass = np.exp(scores[order] - scores[order[0]]).cumsum()
        kept = min(kept, int(np.searchsorted(mass, top_p * mass[-1])) + 1)
    out = np.full_like(scores, -np.inf)
    out[order[:kept]] = scores[order[:kept]]
    return out


def accept(
    request: GenerateRequest, tree: Tree, anchor_position: int, argmax: list[int], logits: Tensor
) -> Walk:
    """Walk ``tree`` as plain decoding would emit.

    ``argmax`` holds the target's likeliest token at each node; ``logits`` [rows, vocabulary] on the
    host are read only for the nodes reached, and only when the request samples.
    """
    if request.temperature == 0.0:
        return greedy(tree, argmax)

    def choose(node: int) -> int:
        row = logits[node].double().numpy()
        scores = filtered(row, request.temperature, request.top_k, request.top_p)
        return keyed_choice(scores, request.seed, anchor_position + tree.depth[node] + 1)

    return walk(tree, choose)
