"""A selector beside its drafter: off it is not there, on it scores pairs and changes no output."""

import json
import random
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from specpilot.errors import InvalidInput, NotFound
from specpilot.harness.engines.backend import GenerateRequest
from specpilot.harness.engines.reference.drafter import BlockDrafter, Place
from specpilot.harness.engines.reference.engine import ReferenceEngine
from specpilot.harness.engines.reference.target import Target
from specpilot.harness.engines.settings import ReferenceSettings
from specpilot.mechanisms import registry

VOCAB, HIDDEN, RANK, TOP_K = 97, 48, 4, 5


def write_selector(folder, **changes):
    """Random tables in ``folder / "selector"``; keyword arguments change its config."""
    (folder / "selector").mkdir()
    config = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "dflash_config": {"selector_rank": RANK, "selector_top_k": TOP_K},
        **changes,
    }
    (folder / "selector" / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(5)
    shapes = {
        "predecessor_codebook": (VOCAB, RANK),
        "successor_codebook": (VOCAB, RANK),
        "hidden_projection.weight": (RANK, HIDDEN),
    }
    tensors = {
        f"candidate_selector.{name}": torch.randn(shape, generator=generator)
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / "selector" / "model.safetensors")
    return folder


def drafts(folder, target, selector):
    drafter = BlockDrafter(folder, target, 64, selector)
    drafter.allocate(1, 64)
    features = torch.randn(
        4, 2 * HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    with torch.inference_mode():
        drafter.extend(features, [Place(0, 0, 4)])
        return drafter.propose([5], [4], 8, TOP_K)[0]


@pytest.fixture(scope="module")
def target(folder):
    return Target(folder("hybrid"), torch.float64, capture=(0, 2))


def test_it_drafts_as_a_checkpoint_that_holds_the_same_tensors(target, drafter_folder):
    beside = write_selector(drafter_folder())
    within = drafter_folder({"selector_rank": RANK, "selector_top_k": TOP_K})
    own = load_file(beside / "model.safetensors") | load_file(
        beside / "selector" / "model.safetensors"
    )
    save_file(own, within / "model.safetensors")
    got, expected = drafts(beside, target, True), drafts(within, target, False)
    assert got.is_pairwise and expected.is_pairwise
    assert (got.tokens == expected.tokens).all()
    assert (got.first == expected.first).all() and (got.edges == expected.edges).all()


def test_switched_off_it_changes_nothing(target, drafter_folder):
    plain = drafter_folder()
    got, expected = (
        drafts(write_selector(drafter_folder()), target, False),
        drafts(plain, target, False),
    )
    assert not got.is_pairwise
    assert (got.tokens == expected.tokens).all() and (got.edges == expected.edges).all()


def test_a_missing_selector_or_another_models_is_refused(target, drafter_folder):
    with pytest.raises(NotFound, match="no pairwise selector"):
        drafts(drafter_folder(), target, True)
    for changes, complaint in (
        ({"hidden_size": 64}, "hidden_size is 64, the drafter's is 48"),
        ({"vocab_size": 90}, "vocab_size is 90"),
        ({"dflash_config": {"selector_rank": RANK}}, "selector_top_k"),
        ({"dflash_config": {"selector_rank": 3, "selector_top_k": TOP_K}}, "calls for"),
    ):
        with pytest.raises(InvalidInput, match=complaint):
            drafts(write_selector(drafter_folder(), **changes), target, True)


def generate(settings, requests):
    engine = ReferenceEngine(settings)
    for request in requests:
        engine.add(request)
    ids, meta = {}, {}
    while engine.has_work():
        for event in engine.step():
            ids.setdefault(event.rid, []).extend(event.new_ids)
            meta[event.rid] = event.meta
    return ids, meta


@pytest.mark.parametrize("speculation", ["chain", "tree"])
def test_output_equals_plain_decoding_and_the_counter_tells(folder, drafter_folder, speculation):
    chance = random.Random(3)
    requests = [
        GenerateRequest(
            str(n),
            tuple(chance.randrange(2, VOCAB) for _ in range(chance.randint(1, 12))),
            chance.randint(1, 30),
            temperature=0.8 * (n % 2),
            seed=n,
        )
        for n in range(6)
    ]
    plain = ReferenceSettings(
        target=str(folder("hybrid")),
        drafter=str(write_selector(drafter_folder())),
        dtype="float64",
        context=80,
        max_running=3,
        rows=12 if speculation == "tree" else 0,
    )
    counter = registry.get("pairwise_selector").counter
    expected, _ = generate(replace(plain, speculation="none"), requests)
    for selector in (False, True):
        on = replace(plain, speculation=speculation, selector=selector)
        ids, meta = generate(on, requests)
        assert ids == expected
        for said in meta.values():
            assert said[counter] == (said["spec_verify_ct"] if selector else 0)
