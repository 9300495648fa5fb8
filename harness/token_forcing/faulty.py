"""Servers that are wrong on purpose: the injected fault as a patch overlay, for tests and records.

A folder made by ``write_overlay`` launches a system whose logits carry the self-test's bias (see
``selftest.Fault``), speculating or not. It is how the audit is tried on a faulty system's own text.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from specpilot.errors import Unsupported
from specpilot.harness.engines.backend import GenerateRequest
from specpilot.harness.engines.mock.backend import MockBackend, Running
from specpilot.mechanisms.trees.tree import Tree

if TYPE_CHECKING:
    from specpilot.harness.engines.reference.engine import ReferenceEngine

__all__ = ["bias_mock", "bias_reference", "write_overlay"]

OVERLAY = '''"""The injected fault of a token-forcing self-test."""

from specpilot.harness.token_forcing.faulty import {function}


def apply(backend):
    return {function}(backend, bias={bias!r}, stride={stride!r}, after={after!r})
'''
FUNCTIONS = {"mock": "bias_mock", "reference": "bias_reference"}


def write_overlay(folder: Path, engine: str, *, bias: float, stride: int, after: int) -> Path:
    """Write ``overlay.py`` into ``folder`` (made if missing) and return the folder.

    From output token ``after`` on, ``bias`` logits are added to the ids divisible by ``stride``.
    """
    if engine not in FUNCTIONS:
        raise Unsupported(
            f"No fault can be injected into the engine {engine!r}.",
            hint=f"Engines with one: {', '.join(sorted(FUNCTIONS))}.",
        )
    folder.mkdir(parents=True, exist_ok=True)
    code = OVERLAY.format(function=FUNCTIONS[engine], bias=bias, stride=stride, after=after)
    (folder / "overlay.py").write_text(code)
    return folder


def bias_mock(backend: MockBackend, *, bias: float, stride: int, after: int) -> MockBackend:
    """Bias the logits that the mock engine chooses from."""
    honest = backend.choose
    boost = np.where(np.arange(backend.vocab_size) % stride == 0, bias, 0.0).astype(np.float32)

    def choose(running: Running, logits: Any) -> int:
        return honest(running, logits + boost if len(running.output) >= after else logits)

    backend.choose = choose  # type: ignore[method-assign, assignment]
    return backend


def bias_reference(
    backend: "ReferenceEngine", *, bias: float, stride: int, after: int
) -> "ReferenceEngine":
    """Bias the logits that every engine of this process accepts drafts by and emits from."""
    import torch

    from specpilot.harness.engines.reference import engine, sampling

    honest = sampling.accept
    boost = torch.zeros(backend.vocab_size)
    boost[::stride] = bias

    def accept(
        request: GenerateRequest,
        tree: Tree,
        anchor_position: int,
        argmax: list[int],
        logits: torch.Tensor,
    ) -> Any:
        first = anchor_position + 1 - len(request.input_ids)
        late = torch.tensor([first + depth >= after for depth in tree.depth])
        rows: Sequence[int] = late.nonzero()[:, 0].tolist()
        if rows:
            exact = torch.promote_types(logits.dtype, torch.float32)
            logits, argmax = logits[: tree.rows].cpu().to(exact), list(argmax)
            logits = torch.where(late[:, None], logits + boost, logits)
            for row in rows:
                argmax[row] = int(logits[row].argmax())
        return honest(request, tree, anchor_position, argmax, logits)

    vars(engine)["accept"] = accept  # the engine's own name for it, in this process alone
    return backend
