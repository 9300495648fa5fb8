"""Logits agree with ``transformers`` on the same folder: whole prompts, chunks and single steps."""

import pytest
import torch

from specpilot.harness.engines.reference.target import Target

CASES = [("hybrid", False), ("hybrid", True), ("qwen3", False), ("llama", True), ("biased", False)]


@pytest.mark.parametrize(("kind", "tied"), CASES)
def test_logits_agree_with_transformers(kind, tied, hf_model, folder):
    model = hf_model(kind, tied)
    target = Target(folder(kind, tied))
    ids = torch.randint(0, 97, (90,), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        expected = model(ids[None]).logits[0]
        pool = target.pool(slots=2, capacity=128)
        got, length = [], 0
        for size in (1, 70, 2, 9):
            got.append(target.prefill(ids[length : length + size], pool, 0, length).hidden[0])
            length += size
        got += [target.decode(ids[i, None], pool, [i]).hidden[0] for i in range(length, 90)]
        torch.testing.assert_close(target.logits(torch.cat(got)), expected, atol=1e-4, rtol=0)
