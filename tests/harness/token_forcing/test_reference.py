"""The audit on the reference engine: lossless speculation passes, the injected fault does not."""

import random

import numpy as np
import pytest
import torch

from specpilot.harness.engines.backend import GenerateRequest
from specpilot.harness.engines.client import Generation
from specpilot.harness.engines.reference import engine as engine_module
from specpilot.harness.engines.reference.engine import ReferenceEngine
from specpilot.harness.engines.reference.target import Target
from specpilot.harness.engines.settings import ReferenceSettings
from specpilot.harness.token_forcing import Scorer, audit, calibrate
from specpilot.harness.token_forcing.faulty import bias_reference
from specpilot.harness.token_forcing.keyed import Keyed
from specpilot.harness.token_forcing.sampling import SamplingLaw
from specpilot.mechanisms.trees.acceptance import keyed_noise
from specpilot.mechanisms.trees.lattice import Lattice

VOCAB, REQUESTS, TOKENS, AFTER = 97, 40, 56, 28


class Guesser:
    """A drafter that proposes what stock wrote after this token, among wrong candidates."""

    capture = (0,)

    def __init__(self, texts: list[tuple[int, ...]]) -> None:
        self.texts = texts
        self.rng = random.Random(3)

    def allocate(self, slots: int, capacity: int) -> None: ...

    def extend(self, features, places) -> None: ...

    def move(self, source: int, target: int, length: int) -> None: ...

    def propose(self, anchors, lengths, block, top_k):
        out = []
        for anchor, length in zip(anchors, lengths, strict=True):
            known = [t for t in self.texts if length < len(t) and t[length] == anchor]
            text = known[0][length + 1 :] if known else ()
            ids = np.array([self.rng.sample(range(VOCAB), top_k) for _ in range(block - 1)])
            for depth, token in enumerate(text[: block - 1]):
                if token not in ids[depth]:
                    ids[depth, 1] = token
            out.append(
                Lattice.marginal(ids, np.tile(-np.arange(1.0, top_k + 1), (len(ids), 1)), VOCAB)
            )
        return out


class InProcess:
    """The scorer's client, without HTTP."""

    def __init__(self, engine: ReferenceEngine) -> None:
        self.engine = engine

    def score_batch(self, requests):
        return [self.engine.score(r) for r in requests]

    def server_info(self):
        return self.engine.info()


def settings(speculation: str = "none") -> ReferenceSettings:
    return ReferenceSettings(
        target="given", drafter="given", context=128, speculation=speculation, rows=12
    )


def write(engine: ReferenceEngine, temperature: float = 0.0) -> list[Generation]:
    rng = random.Random(5)
    requests = [
        GenerateRequest(
            str(r), tuple(rng.choices(range(2, VOCAB), k=6)), TOKENS, temperature, seed=r,
            ignore_eos=True,
        )
        for r in range(REQUESTS)
    ]  # fmt: skip
    for request in requests:
        engine.add(request)
    written: dict[str, list[int]] = {r.rid: [] for r in requests}
    while engine.has_work():
        for event in engine.step():
            written[event.rid] += event.new_ids
    return [
        Generation(r.input_ids, tuple(written[r.rid]), 0.0, 0.0, 0.0, "length") for r in requests
    ]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    import transformers as hf

    torch.manual_seed(2)
    config = hf.LlamaConfig(
        vocab_size=VOCAB, hidden_size=48, intermediate_size=80, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        initializer_range=0.25, eos_token_id=1, bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("target")
    hf.LlamaForCausalLM(config).save_pretrained(folder)
    return Target(folder, torch.float32)


@pytest.fixture(scope="module")
def plain(target: Target) -> list[Generation]:
    return write(ReferenceEngine(settings(), target))


@pytest.fixture(scope="module")
def reference_scorer(target: Target) -> Scorer:
    return Scorer(InProcess(ReferenceEngine(settings(), target)), VOCAB)


def texts(outputs: list[Generation]) -> list[tuple[int, ...]]:
    return [(*o.prompt_ids, *o.output_ids) for o in outputs]


def test_a_tree_on_the_reference_engine_passes(target, plain, reference_scorer) -> None:
    system = write(ReferenceEngine(settings("tree"), target, Guesser(texts(plain))))
    calibration = calibrate(plain, reference_scorer, {})
    verdict = audit(plain, system, reference_scorer, calibration, max_new_tokens=TOKENS)
    assert verdict.status == "pass", verdict.reasons
    assert calibration.near_tie < 0.01


@pytest.mark.parametrize("speculation", ["none", "tree"])
def test_the_injected_fault_is_rejected(
    target, plain, reference_scorer, speculation, monkeypatch
) -> None:
    """Trees whose logits carry the fault emit what faulty plain decoding emits."""
    monkeypatch.setattr(engine_module, "accept", engine_module.accept)
    faulty = ReferenceEngine(settings(speculation), target, Guesser(texts(plain)))
    system = write(bias_reference(faulty, bias=2.0, stride=7, after=AFTER))
    for ours, theirs in zip(system, plain, strict=True):
        assert ours.output_ids[:AFTER] == theirs.output_ids[:AFTER]
    again = write(ReferenceEngine(settings(), target))  # the fault is in this process's accept
    assert [o.output_ids for o in system] == [o.output_ids for o in again]
    verdict = audit(plain, system, reference_scorer, calibrate(plain, reference_scorer, {}))
    assert verdict.status == "fail" and verdict.failure is None
    assert verdict.events is not None and verdict.events.status == "fail"


def test_keyed_sampling_is_audited_on_the_reference_engine(
    target, plain, reference_scorer, monkeypatch
) -> None:
    stock = write(ReferenceEngine(settings(), target), temperature=0.8)
    system = write(
        ReferenceEngine(settings("tree"), target, Guesser(texts(stock))), temperature=0.8
    )
    seeds = tuple(range(REQUESTS))
    keyed = Keyed(SamplingLaw(0.8), keyed_noise, seeds, seeds)
    calibration = calibrate(plain, reference_scorer, {})
    assert audit(stock, system, reference_scorer, calibration, keyed=keyed).status == "pass"
    monkeypatch.setattr(engine_module, "accept", engine_module.accept)
    faulty = bias_reference(ReferenceEngine(settings(), target), bias=2.0, stride=7, after=AFTER)
    wrong = write(faulty, temperature=0.8)
    assert audit(stock, wrong, reference_scorer, calibration, keyed=keyed).status == "fail"
