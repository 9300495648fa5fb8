"""Record what exact replay needs: the drafter's lattice after every token of the target's text.

The engine runs with trees of one row, so each pass gives one token of plain decoding and no
acceptance decides where lattices are taken.
"""

from collections.abc import Sequence
from dataclasses import replace

from specpilot.errors import InvalidInput
from specpilot.harness.engines.backend import GenerateRequest
from specpilot.harness.engines.reference.engine import ReferenceEngine
from specpilot.harness.engines.settings import ReferenceSettings
from specpilot.mechanisms.trees.acceptance import Walk
from specpilot.mechanisms.trees.lattice import Lattice
from specpilot.mechanisms.trees.replay import Trace
from specpilot.mechanisms.trees.tree import Tree

__all__ = ["record"]


def record(
    settings: ReferenceSettings, prompts: Sequence[Sequence[int]], new_tokens: int
) -> list[Trace]:
    """Decode ``new_tokens`` greedily after each prompt and keep every lattice, in order of prompts.

    Of ``settings``, speculation and rows are replaced; block and top-k decide the lattices' size.
    Requests that end before their third token leave no trace. Raises ``InvalidInput`` without a
    drafter.
    """
    if not settings.drafter:
        raise InvalidInput("recording lattices needs a drafter.")
    engine = ReferenceEngine(replace(settings, speculation="tree", rows=1))
    lattices: dict[str, list[Lattice]] = {}
    texts: dict[str, list[int]] = {}

    def keep(rid: str, lattice: Lattice, tree: Tree, walk: Walk) -> None:
        lattices.setdefault(rid, []).append(lattice)

    engine.on_cycle = keep
    for n, prompt in enumerate(prompts):
        engine.add(GenerateRequest(str(n), tuple(prompt), new_tokens, ignore_eos=True))
    while engine.has_work():
        for event in engine.step():
            texts.setdefault(event.rid, []).extend(event.new_ids)
    order = [str(n) for n in range(len(prompts)) if len(texts[str(n)]) > 2]
    return [Trace(tuple(texts[rid]), tuple(lattices[rid])) for rid in order]
