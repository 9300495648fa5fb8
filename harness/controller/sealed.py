"""Prompts that only the controller can draw: sealed sets for finals, fresh ones for trials.

A workload draws prompts from a split by a key. The keys here come from the controller's secret, so
nobody else can tell which prompts will be used, and whoever is given the secret afterwards can
draw the same ones again. Sealed sets are committed by hash when a round opens and each is used
once; that it is burned before its use is the round's affair.
"""

import hashlib
import hmac
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from specpilot.errors import CheckFailed
from specpilot.harness.controller.ledger import canonical
from specpilot.harness.deployments.workload import Split

__all__ = ["Draw", "Prompt", "PromptBook", "SealedSet", "prompts_digest"]

Prompt = tuple[int, ...]
Draw = Callable[[Split, int, bytes], Sequence[Sequence[int]]]
"""A workload's ``prompts(split, n, key)``: n prompts of a split, by key."""


@dataclass(frozen=True, slots=True)
class SealedSet:
    """A sealed set by name, with the hash of its prompts and how many there are."""

    id: str
    sha256: str
    prompts: int


def prompts_digest(prompts: Sequence[Prompt]) -> str:
    return hashlib.sha256(canonical([list(prompt) for prompt in prompts])).hexdigest()


class PromptBook:
    """Draws a round's prompts. ``secret`` never leaves the controller."""

    def __init__(self, draw: Draw, secret: bytes, round_id: str) -> None:
        self._draw = draw
        self._secret = secret
        self._round = round_id

    def commit(self, sets: int, size: int) -> tuple[SealedSet, ...]:
        """Draw ``sets`` sealed sets of ``size`` prompts, all different, and return their hashes."""
        drawn = self._prompts("sealed", sets * size, "all sets")
        if len(set(drawn)) != len(drawn):
            raise CheckFailed(
                f"The workload repeats a prompt within {sets} sealed sets of {size}.",
                hint="Its held-out split is too small for sealed finals.",
            )
        slices = [drawn[number * size : (number + 1) * size] for number in range(sets)]
        return tuple(
            SealedSet(f"sealed-{number}", prompts_digest(prompts), size)
            for number, prompts in enumerate(slices)
        )

    def unseal(self, committed: Sequence[SealedSet], number: int) -> list[Prompt]:
        """Draw one of the ``committed`` sets again.

        Raises ``CheckFailed`` if it is not what was committed.
        """
        sealed = committed[number]
        drawn = self._prompts("sealed", sum(each.prompts for each in committed), "all sets")
        start = sum(each.prompts for each in committed[:number])
        prompts = drawn[start : start + sealed.prompts]
        if prompts_digest(prompts) != sealed.sha256:
            raise CheckFailed(
                f"The prompts of {sealed.id} are not those that were committed when the round "
                f"opened: the workload or the controller's secret changed.",
                hint="Open a new round.",
            )
        return prompts

    def fresh(self, purpose: str, size: int) -> Iterator[Prompt]:
        """Return ``size`` open prompts for one measurement; each purpose gets its own."""
        return iter(self._prompts("open", size, purpose))

    def seed(self, purpose: str) -> int:
        """Return the secret seed of a measurement's orders."""
        return int.from_bytes(self._key(f"seed {purpose}")[:8])

    def _prompts(self, split: Split, size: int, purpose: str) -> list[Prompt]:
        drawn = self._draw(split, size, self._key(f"{split} {purpose}"))
        prompts = [tuple(int(token) for token in prompt) for prompt in drawn]
        if len(prompts) != size or not all(prompts):
            raise CheckFailed(f"The workload gave {len(prompts)} of {size} {split} prompts.")
        return prompts

    def _key(self, purpose: str) -> bytes:
        return hmac.new(self._secret, f"{self._round} {purpose}".encode(), hashlib.sha256).digest()
