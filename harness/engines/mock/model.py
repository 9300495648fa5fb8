"""A language model of a few arrays: deterministic, instant, with real log-probs.

Next-token logits over 512 ids are ``pairs[last token] + contexts[digest % 1021]``, where the digest
is a hash chain over every token so far. So no two prompts fall into one loop, each output can be
scored by teacher forcing, and an honest numeric difference is a little noise on the logits.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "CONTEXTS",
    "EOS",
    "VOCAB",
    "HashModel",
    "drafted_right",
    "extend",
    "log_softmax",
    "sample",
]

VOCAB = 512
CONTEXTS = 1021
EOS = 0
SCALE = 1.6
"""Spread of the logits: the mode has a probability of about a third, as in a small text model."""
EOS_LOGIT = -6.0
PRIME, MODULUS = 1_000_003, (1 << 61) - 1


class HashModel:
    """The model. ``noise`` is the sd of what another numeric path would add to each logit."""

    def __init__(self, noise: float = 0.0, noise_seed: int = 0) -> None:
        rng = np.random.default_rng(20_001)
        self.pairs = rng.normal(0.0, SCALE, (VOCAB, VOCAB)).astype(np.float32)
        self.contexts = rng.normal(0.0, SCALE, (CONTEXTS, VOCAB)).astype(np.float32)
        self.pairs[:, EOS] = EOS_LOGIT
        self.noise = noise
        self.noise_seed = noise_seed

    def logits(self, last: int, digest: int) -> NDArray[np.float32]:
        """Logits [512] fp32 after the tokens that ``digest`` stands for, of which ``last`` is one.

        The noise depends on the position alone, so a run repeats itself exactly.
        """
        row: NDArray[np.float32] = self.pairs[last] + self.contexts[digest % CONTEXTS]
        if self.noise:
            rng = np.random.default_rng([self.noise_seed, digest])
            row = row + rng.normal(0.0, self.noise, VOCAB).astype(np.float32)
        return row


def extend(digest: int, ids: Sequence[int]) -> int:
    """The digest after ``ids`` more tokens; 0 is the digest of none."""
    for token in ids:
        digest = (digest * PRIME + token + 1) % MODULUS
    return digest


def drafted_right(digest: int, depth: int, chance: float) -> int:
    """How many of ``depth`` drafted tokens are right, each by ``chance`` while the last one was."""
    for right in range(depth):
        digest = extend(digest, (right,))
        if digest % 10_007 >= chance * 10_007:
            return right
    return depth


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """FP32 log-probs over the last axis."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    total: NDArray[np.float32] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return total


def sample(
    logits: NDArray[np.float32],
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    position: int,
) -> int:
    """Pick a token: greedy at temperature 0, else by Gumbel noise keyed by (seed, position).

    The noise depends on nothing else, so a request gives the same tokens in any batch.
    """
    if temperature == 0.0:
        return int(logits.argmax())
    scores = log_softmax(logits / np.float32(temperature))
    order = np.argsort(-scores, kind="stable")
    kept = len(order) if top_k == -1 else max(1, min(top_k, len(order)))
    before = np.concatenate(([0.0], np.exp(scores[order]).cumsum()[:-1]))
    kept = min(kept, max(1, int((before < top_p).sum())))
    noise = np.random.default_rng([seed, position]).gumbel(size=len(scores))
    chosen = order[:kept]
    return int(chosen[np.argmax(scores[chosen] + noise[chosen])])
