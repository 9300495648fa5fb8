"""The reference engine: continuous batching, draft, verify, accept, commit.

One ``step`` is at most one chunk of a waiting prompt and one exact pass for all requests that run.
Plain decoding is the same cycle with trees of one row and no drafter. The engine keeps nothing
between requests. It does not schedule for throughput and does not share prefixes.
"""

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specpilot.errors import InvalidInput, Unsupported
from specpilot.harness.engines.backend import (
    FinishReason,
    GenerateRequest,
    ScoreRequest,
    ScoreResult,
    StepEvent,
)
from specpilot.harness.engines.reference.drafter import BlockDrafter, Drafter, Place
from specpilot.harness.engines.reference.requests import Running, check_generate, check_score
from specpilot.harness.engines.reference.sampling import accept, likeliest
from specpilot.harness.engines.reference.scoring import score
from specpilot.harness.engines.reference.target import Target, Verified
from specpilot.harness.engines.reference.tokens import check_tokenizers
from specpilot.harness.engines.settings import ReferenceSettings
from specpilot.mechanisms.trees import policies
from specpilot.mechanisms.trees.acceptance import Walk
from specpilot.mechanisms.trees.lattice import Lattice
from specpilot.mechanisms.trees.tree import MAX_ROWS, Tree

__all__ = ["CycleHook", "ReferenceEngine"]

CHUNK = 256  # prompt tokens a step, so that running requests never wait for a whole prompt

CycleHook = Callable[[str, Lattice, Tree, Walk], None]
"""Called with (rid, lattice, verified tree, accepted walk) after each cycle: what replay needs."""


class ReferenceEngine:
    """Implements ``Backend``. ``target`` and ``drafter`` are loaded from the settings' folders
    unless they are given.

    ``on_cycle`` records lattices; while it is set, chains too get ``top_k`` candidates. Raises
    ``NotFound``, ``InvalidInput`` or ``Unsupported`` for folders and settings that do not fit.
    """

    def __init__(
        self,
        settings: ReferenceSettings,
        target: Target | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        self.settings = settings
        self.rows = _rows(settings)
        extra = max(self.rows, settings.block)
        self.context_length = settings.context
        capacity = self.context_length + extra
        if settings.device == "cuda" and not torch.cuda.is_available():
            raise Unsupported("device 'cuda' was asked for, and torch sees no CUDA device.")
        self.target = target or Target(
            Path(settings.target),
            getattr(torch, settings.dtype),
            settings.device,
            max_positions=capacity,
            packed=settings.weights == "w12",
        )
        config = self.target.config
        if self.context_length > config.max_positions:
            raise InvalidInput(
                f"context {self.context_length} exceeds max_position_embeddings "
                f"{config.max_positions} of {settings.target}."
            )
        self.vocab_size = config.vocab_size
        self.drafter: Drafter | None = None
        if settings.speculation != "none":
            self.drafter = drafter or self._load_drafter(capacity)
            self.target.capture = self.drafter.capture
            self.drafter.allocate(settings.max_running, capacity)
        self.policy = policies.best_first if settings.speculation == "tree" else policies.chain
        # The last slot is scratch for scoring; requests take 0 to max_running - 1.
        self.pool = self.target.pool(settings.max_running + 1, capacity)
        self.waiting: deque[GenerateRequest] = deque()
        self.running: list[Running] = []
        self.on_cycle: CycleHook | None = None

    def _load_drafter(self, positions: int) -> Drafter:
        folder, target = Path(self.settings.drafter), Path(self.settings.target)
        check_tokenizers(target, folder, self.vocab_size)
        drafter = BlockDrafter(folder, self.target, positions, self.settings.selector)
        if self.settings.block > drafter.config.block:
            raise InvalidInput(
                f"block {self.settings.block} exceeds the {drafter.config.block} rows that "
                f"{folder} was trained for."
            )
        return drafter

    def add(self, request: GenerateRequest) -> None:
        check_generate(request, self.vocab_size, self.context_length)
        self.waiting.append(request)

    def abort(self, rid: str) -> None:
        self.waiting = deque(r for r in self.waiting if r.rid != rid)
        for running in [r for r in self.running if r.request.rid == rid]:
            self._release(running)

    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @torch.inference_mode()
    def step(self) -> list[StepEvent]:
        ready = [r for r in self.running if r.prefilled]
        if len(ready) == len(self.running) < self.settings.max_running and self.waiting:
            self._admit(self.waiting.popleft())
        events = self._prefill(self.running[-1]) if len(ready) < len(self.running) else []
        return events + (self._cycle(ready) if ready else [])

    @torch.inference_mode()
    def score(self, request: ScoreRequest) -> ScoreResult:
        check_score(request, self.vocab_size, self.context_length)
        return score(self.target, self.pool, self.settings.max_running, request)

    def flush(self) -> None:
        """Nothing outlives a request, so there is nothing to forget."""

    def info(self) -> dict[str, Any]:
        config = self.target.config
        return {
            "architecture": config.architecture,
            "vocab_size": self.vocab_size,
            "context_length": self.context_length,
            "eos_token_ids": list(config.eos_ids),
            "threads": torch.get_num_threads(),
            "rows": self.rows,
            "running": len(self.running),
            "waiting": len(self.waiting),
        }

    def _admit(self, request: GenerateRequest) -> None:
        stops = set(request.stop_token_ids)
        if not request.ignore_eos:
            stops.update(self.target.config.eos_ids)
        slot = len(self.running)
        self.pool.clear(slot)
        self.running.append(Running(request, frozenset(stops), slot))

    def _release(self, ended: Running) -> None:
        """Free a slot; the requests in the slots above it move down by one."""
        self.running.remove(ended)
        for r in self.running[ended.slot :]:
            self.pool.move(r.slot, r.slot - 1, r.length)
            if self.drafter is not None:
                self.drafter.move(r.slot, r.slot - 1, r.length)
            r.slot -= 1

    def _prefill(self, r: Running) -> list[StepEvent]:
        ids = r.request.input_ids[r.length : r.length + CHUNK]
        chunk = torch.tensor(ids, device=self.target.device)
        output = self.target.prefill(chunk, self.pool, r.slot, r.length)
        if self.drafter is not None:
            assert output.features is not None
            self.drafter.extend(output.features[0], [Place(r.slot, r.length, len(ids))])
        r.length += len(ids)
        if not r.prefilled:
            return []
        logits = self._logits(output.hidden[:, -1:])[0]
        root = Tree((ids[-1],), (-1,), (0,), (0.0,))
        walk = accept(r.request, root, r.length - 1, likeliest(logits).tolist(), logits.cpu())
        event = self._event(r, *r.take(walk.emitted))
        if event.finished is not None:
            self._release(r)
        return [event]

    def _cycle(self, ready: list[Running]) -> list[StepEvent]:
        """One exact pass for the requests in slots 0, 1, ..., and the tokens it gives."""
        lengths = [r.length for r in ready]
        anchors = [r.output[-1] for r in ready]
        if self.drafter is None:
            trees = [Tree((anchor,), (-1,), (0,), (0.0,)) for anchor in anchors]
            ids = torch.tensor(anchors, device=self.target.device)
            hidden = self.target.decode(ids, self.pool, lengths).hidden
            return self._conclude(ready, trees, hidden, None, [])
        wide = self.settings.speculation == "tree" or self.on_cycle is not None
        lattices = self.drafter.propose(
            anchors, lengths, self.settings.block, self.settings.top_k if wide else 1
        )
        trees = [
            self.policy(lattice, anchor, self.rows).capped(r.left - 1)
            for r, lattice, anchor in zip(ready, lattices, anchors, strict=True)
        ]
        verified = self.target.verify(trees, self.pool, lengths)
        return self._conclude(ready, trees, verified.output.hidden, verified, lattices)

    def _conclude(
        self,
        ready: list[Running],
        trees: list[Tree],
        hidden: Tensor,
        verified: Verified | None,
        lattices: list[Lattice],
    ) -> list[StepEvent]:
        """Accept, commit what was emitted and no more, and release what has ended."""
        logits = self._logits(hidden)
        argmax = likeliest(logits).tolist()
        if any(r.request.temperature > 0 for r in ready):
            logits = logits.cpu()
        walks, events = [], []
        for i, (r, tree) in enumerate(zip(ready, trees, strict=True)):
            walk = accept(r.request, tree, r.length, argmax[i], logits[i])
            r.passes += 1
            r.rows += tree.rows
            r.drafts += len(lattices) > 0
            r.selected += len(lattices) > 0 and lattices[i].is_pairwise
            taken, finished = r.take(walk.emitted)
            walk = walk.first(len(taken))
            if self.on_cycle is not None and lattices:
                self.on_cycle(r.request.rid, lattices[i], tree, walk)
            walks.append(walk)
            events.append(self._event(r, taken, finished))
        if verified is not None:
            self._commit(ready, verified, [walk.path for walk in walks])
        for r, walk in zip(ready, walks, strict=True):
            r.length += len(walk.path)
        for r, event in zip(ready, events, strict=True):
            if event.finished is not None:
                self._release(r)
        return events

    def _commit(
        self, ready: list[Running], verified: Verified, paths: list[tuple[int, ...]]
    ) -> None:
        self.target.commit(verified, self.pool, paths)
        features = verified.output.features
        assert self.drafter is not None and features is not None
        count = features.shape[1]
        taken = [r * count + node for r, path in enumerate(paths) for node in path]
        rows = torch.tensor(taken, device=features.device)
        places = [Place(r.slot, r.length, len(p)) for r, p in zip(ready, paths, strict=True)]
        self.drafter.extend(features.flatten(0, 1).index_select(0, rows), places)

    def _logits(self, hidden: Tensor) -> Tensor:
        return self.target.logits(hidden, fp32=self.settings.fp32_logits)

    def _event(
        self, r: Running, taken: tuple[int, ...], finished: FinishReason | None
    ) -> StepEvent:
        meta = r.meta(self.settings.speculation == "tree") if finished else {}
        if finished:
            meta["w12_matrices"] = self.target.packed_matrices
        return StepEvent(r.request.rid, taken, finished, meta)


def _rows(settings: ReferenceSettings) -> int:
    """Rows of the exact pass. Raises ``InvalidInput`` where they exceed what a tree may hold."""
    if settings.speculation == "none":
        return 1
    rows = settings.rows or settings.block
    if rows > MAX_ROWS:
        raise InvalidInput(f"rows {rows} exceeds the {MAX_ROWS} rows of an exact pass.")
    return rows
