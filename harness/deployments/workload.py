"""Prompts to measure with: random cuts of token shards, open ones and sealed ones.

*Open* cuts come from the development shard and may be seen by anyone. *Sealed* cuts come from a
held-out shard under a secret key: without the key nobody knows where the cuts lie, even with the
shard in hand. The same (split, n, key, length) gives the same prompts on every machine.

A deployment folder that offers a workload has a module ``workload.py`` with a function
``shard(split) -> Sequence[int]``: all token ids of a split, in order.
"""

import hashlib
import hmac
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from specpilot.errors import InvalidInput, NotFound

__all__ = ["Split", "Workload", "load_workload"]

Split = Literal["open", "sealed"]
PACKAGE = "specpilot.harness.deployments"


@dataclass(frozen=True, slots=True)
class Workload:
    """A source of prompts of ``length`` tokens. ``shard`` gives a split's token ids."""

    name: str
    length: int
    shard: Callable[[Split], Sequence[int]]

    def prompts(self, split: Split, n: int, key: bytes) -> list[tuple[int, ...]]:
        """Cut ``n`` different prompts at places that ``key`` decides.

        No two prompts of a call start at the same place; calls with different keys are
        independent. Raises ``InvalidInput`` if the shard is too short.
        """
        if split not in ("open", "sealed"):
            raise InvalidInput(f"split must be 'open' or 'sealed', not {split!r}.")
        ids, length = self.shard(split), self.length
        places = len(ids) - length + 1
        if n < 1 or length < 1 or places < n:
            raise InvalidInput(
                f"Cannot cut {n} prompts of {length} tokens out of the {len(ids)} tokens of "
                f"{self.name!r} ({split})."
            )
        chosen: dict[int, None] = {}
        for place in _places(f"{self.name}/{split}/{length}", key, places):
            chosen.setdefault(place)
            if len(chosen) == n:
                break
        return [tuple(int(i) for i in ids[start : start + length]) for start in chosen]


def _places(label: str, key: bytes, places: int) -> Iterator[int]:
    """Uniform numbers below ``places``, by HMAC-SHA256 in counter mode."""
    counter = 0
    while True:
        block = hmac.digest(key, f"{label}/{counter}".encode(), hashlib.sha256)
        counter += 1
        for i in range(0, len(block), 8):
            # 64 bits over a shard of some million places: the modulo's bias is below 1e-12.
            yield int.from_bytes(block[i : i + 8], "big") % places


def load_workload(name: str, length: int = 128) -> Workload:
    """Find a workload by name (``pico``, ``mock``), with prompts of ``length`` tokens.

    ``length`` is usually the deployment's ``regime.prompt_tokens``. Raises ``NotFound``.
    """
    module = f"{PACKAGE}.{name.replace('-', '_')}.workload"
    known = name.replace("-", "").replace("_", "").isalnum()
    try:
        found = known and importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        found = False
    if not found:
        raise NotFound(
            f"There is no workload {name!r}.",
            hint=f"A workload is a module {PACKAGE}.<name>.workload with shard(split).",
        )
    return Workload(name, length, importlib.import_module(module).shard)
