"""DSpark's Markov head: a bias on every token's logit from the token before it.

``logits[d, a, :] = logits_d + W2 z``, with ``z = W1[a]`` (``vanilla``) or ``g * W1[a]`` where
``g = sigmoid(G [h_d; W1[a]] + b)`` (``gated``). Log-probs are over the whole vocabulary; the
candidates are the likeliest tokens before the bias. Source: ``markov_head`` of the DSpark
checkpoints in DeepSpec's convention, as SGLang 0.5.20 reads them. Its confidence head is not used:
a tree's rows are chosen by path probability.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from specpilot.harness.engines.reference.drafter_config import DrafterConfig
from specpilot.harness.engines.reference.weights import WeightFolder
from specpilot.mechanisms.trees.lattice import Lattice

__all__ = ["MarkovHead"]

CANDIDATES = 16  # at least: a chain follows the likeliest of them after the bias


class MarkovHead:
    """``W1`` and ``W2`` [vocabulary, rank], and the gate ``G`` [rank, hidden + rank], ``b``."""

    def __init__(self, weights: WeightFolder, config: DrafterConfig) -> None:
        rank, size = config.markov_rank, config.hidden_size
        table = (config.vocab_size, rank)
        self.vocab_size = config.vocab_size
        self.before = weights.get("markov_head.markov_w1.weight", table)
        self.after = weights.get("markov_head.markov_w2.weight", table)
        self.gate: Tensor | None = None
        if config.markov_gated:
            self.gate = weights.get("markov_head.gate_proj.weight", (rank, size + rank))
            self.gate_bias = weights.get("markov_head.gate_proj.bias", (rank,))

    def lattices(
        self, hidden: Tensor, logits: Tensor, anchors: Sequence[int], top_k: int
    ) -> list[Lattice]:
        """One pairwise lattice a request of at least ``CANDIDATES`` candidates a position.

        ``hidden`` [R, D, hidden], ``logits`` [R, D, vocabulary]. The biased logits of one request
        at a time take D * K * vocabulary values.
        """
        ids = logits.topk(min(max(top_k, CANDIDATES), self.vocab_size)).indices
        width = ids.shape[-1]
        first = torch.tensor(anchors, device=ids.device)[:, None, None].expand(-1, 1, width)
        state = self.before[torch.cat((first, ids[:, :-1]), 1)]  # [R, D, K, rank]
        if self.gate is not None:
            own = hidden.unsqueeze(2).expand(-1, -1, width, -1)
            state = (
                state * F.linear(torch.cat((own, state), -1), self.gate, self.gate_bias).sigmoid()
            )
        found = []
        for row, chosen, left in zip(logits, ids, state, strict=True):
            scores = (row.unsqueeze(1) + F.linear(left, self.after)).log_softmax(-1)
            edges = scores.gather(-1, chosen.unsqueeze(1).expand(-1, width, -1)).float().cpu()
            table = edges.numpy()
            tokens = chosen.cpu().numpy()
            found.append(Lattice.pairwise(tokens, table[0, 0], table[1:], self.vocab_size))
        return found
