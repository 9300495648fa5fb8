"""DFlash2's pairwise selector: scores of each candidate given the candidate before it.

``score[d, a, b] = logit_d(b) + <A[a] * P h_d, B[b]>`` over the top candidates of neighbouring
positions, with ``a`` the anchor at the first. Source: ``candidate_selector`` of the DFlash2
checkpoints that SGLang 0.5.20 reads. A DFlash drafter may have one beside it, trained later, in its
folder ``selector``: the same tensors, and a config of the same fields.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from specpilot.errors import InvalidInput, NotFound
from specpilot.harness.engines.reference.config import Fields, read_json
from specpilot.harness.engines.reference.drafter_config import DrafterConfig
from specpilot.harness.engines.reference.weights import WeightFolder
from specpilot.mechanisms.trees.lattice import Lattice

__all__ = ["Selector", "load_selector", "log_total"]


def log_total(logits: Tensor, best: Tensor) -> Tensor:
    """Log-sum-exp [..., 1] of ``logits`` [..., vocabulary], given their largest, best first."""
    top = best[..., :1]
    return (logits - top).exp_().sum(-1, keepdim=True).log_().add_(top)


class Selector:
    """Tables ``A`` and ``B`` [vocabulary, rank] and the projection ``P`` [rank, hidden]."""

    def __init__(self, weights: WeightFolder, config: DrafterConfig) -> None:
        table = (config.vocab_size, config.selector_rank)
        name = "candidate_selector"
        self.top_k = config.selector_top_k
        self.vocab_size = config.vocab_size
        self.before = weights.get(f"{name}.predecessor_codebook", table)
        self.after = weights.get(f"{name}.successor_codebook", table)
        self.project = weights.get(
            f"{name}.hidden_projection.weight", (config.selector_rank, config.hidden_size)
        )

    def lattices(self, hidden: Tensor, logits: Tensor, anchors: Sequence[int]) -> list[Lattice]:
        """One pairwise lattice a request.

        ``hidden`` [R, D, hidden], ``logits`` [R, D, vocabulary]. Scores are normalised over the
        candidates and then scaled by the probability that the unary logits give to all of them, so
        that paths of unlike rows compare.
        """
        values, ids = logits.topk(self.top_k)
        mass = values.logsumexp(-1, keepdim=True) - log_total(logits, values)  # [R, D, 1], <= 0
        first = torch.tensor(anchors, device=ids.device)[:, None, None].expand(-1, 1, self.top_k)
        previous = self.before[torch.cat((first, ids[:, :-1]), 1)]  # [R, D, K, rank]
        state = F.linear(hidden, self.project).unsqueeze(2)
        scores = values.unsqueeze(2) + (previous * state) @ self.after[ids].mT
        edges = (scores.log_softmax(-1) + mass.unsqueeze(2)).float().cpu().numpy()
        table = zip(ids.cpu().numpy(), edges, strict=True)
        return [Lattice.pairwise(i, e[0, 0], e[1:], self.vocab_size) for i, e in table]


def load_selector(
    folder: Path, drafter: DrafterConfig, dtype: torch.dtype, device: torch.device
) -> Selector:
    """Read the selector in ``folder``, which was trained for the drafter of that config.

    Raises ``NotFound`` where there is none and ``InvalidInput`` where it belongs to another model.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise NotFound(
            f"{folder} does not exist: this drafter has no pairwise selector.",
            hint="Leave the setting 'selector' off, or give a drafter that has one.",
        )
    raw = read_json(path)
    fields = Fields({**raw, **(raw.get("dflash_config") or {})}, str(path))
    for name in ("hidden_size", "vocab_size"):
        mine, theirs = fields.count(name), getattr(drafter, name)
        if mine != theirs:
            raise InvalidInput(
                f"{path}: {name} is {mine}, the drafter's is {theirs}.",
                hint="A selector reads the hidden states of the drafter that it was trained on.",
            )
    rank, top_k = fields.count("selector_rank"), fields.count("selector_top_k")
    config = replace(drafter, selector_rank=rank, selector_top_k=top_k)
    return Selector(WeightFolder(folder, dtype, device), config)
