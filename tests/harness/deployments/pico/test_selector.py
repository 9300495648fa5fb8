"""The selector's training at tiny size: labels, start, resuming, and what the engine reads."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from specpilot.harness.deployments import pico
from specpilot.harness.deployments.pico.train import train_selector
from specpilot.harness.deployments.pico.train.drafter import (
    Drafter,
    DrafterConfig,
    block_ids,
    save_drafter,
)
from specpilot.harness.deployments.pico.train.generate import GreedyDecoder
from specpilot.harness.deployments.pico.train.lattices import Blocks, collect
from specpilot.harness.deployments.pico.train.model import Target, TargetConfig, save_target
from specpilot.harness.deployments.pico.train.train_selector import (
    PairwiseSelector,
    associations,
    selector_loss,
)
from specpilot.harness.deployments.workload import load_workload
from specpilot.harness.engines.backend import GenerateRequest
from specpilot.harness.engines.reference.engine import ReferenceEngine
from specpilot.harness.engines.settings import ReferenceSettings

VOCAB, HIDDEN, PROMPT = 96, 32, 20
TARGET = TargetConfig(
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=2,
    head_dim=32,
    linear_key_head_dim=16,
    linear_value_head_dim=8,
    max_position_embeddings=128,
)
DRAFTER = DrafterConfig(
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    intermediate_size=32,
    num_hidden_layers=1,
    head_dim=16,
    num_target_layers=4,
    target_layer_ids=(0, 1, 2),
)


@pytest.fixture(scope="module")
def models():
    torch.manual_seed(0)
    pair = Target(TARGET), Drafter(DRAFTER)
    for model in pair:
        for parameter in model.parameters():
            if parameter.ndim == 2:
                torch.nn.init.normal_(parameter, std=0.15)
        model.requires_grad_(False)
    return pair


@pytest.fixture(scope="module")
def sequences(models):
    prompts = torch.randint(2, VOCAB, (6, PROMPT), generator=torch.Generator().manual_seed(1))
    return GreedyDecoder(models[0], 6, 64).run(prompts, torch.full((6,), PROMPT))


def test_blocks_hold_the_drafters_candidates_and_the_targets_choice(models, sequences):
    target, drafter = models
    anchors, rows = torch.tensor([25, 40]), torch.tensor([16, 8])
    blocks = collect(target, drafter, sequences, anchors, rows, top_k=5)
    assert len(blocks) == 12
    _, kept = target(sequences, keep=DRAFTER.target_layer_ids)
    for number, (row, place) in enumerate((r, p) for r in range(6) for p in range(2)):
        at = int(anchors[place])
        embedded = target.model.embed_tokens(block_ids(sequences[row : row + 1], anchors, 16))
        features = torch.cat(kept, -1)[row : row + 1]
        logits = target.logits(drafter(embedded, features, anchors, rows))[0, place, 1:]
        assert torch.equal(blocks.tokens[number].long(), logits.topk(5).indices)
        following = sequences[row, at + 1 : at + 16]  # greedy: what the target would choose
        assert torch.equal(blocks.before[number].long(), sequences[row, at : at + 15])
        for d in range(15):
            candidates = blocks.tokens[number, d].tolist()
            token = int(following[d])
            there = token in candidates and d + 1 < rows[place]
            assert int(blocks.label[number, d]) == (candidates.index(token) if there else -1)


def test_scores_add_the_pair_to_the_drafters_logit():
    torch.manual_seed(2)
    selector = PairwiseSelector(VOCAB, HIDDEN, 3)
    blocks = Blocks(
        torch.randn(2, 4, HIDDEN).half(),
        torch.randint(VOCAB, (2, 4, 5)).short(),
        torch.randn(2, 4, 5),
        torch.randint(VOCAB, (2, 4)).short(),
        torch.zeros(2, 4, dtype=torch.int8),
    )
    scores = selector(blocks)
    n, d, k = 1, 2, 3
    state = selector.hidden_projection.weight @ blocks.hidden[n, d].float()
    left = selector.predecessor_codebook[int(blocks.before[n, d])]
    right = selector.successor_codebook[int(blocks.tokens[n, d, k])]
    expected = blocks.logits[n, d, k] + (left * state * right).sum()
    torch.testing.assert_close(scores[n, d, k], expected)


def test_positions_without_a_label_do_not_count():
    scores = torch.randn(1, 3, 4)
    label = torch.tensor([[1, -1, 2]], dtype=torch.int8)
    blocks = Blocks(*[torch.empty(0)] * 4, label)
    changed = scores.clone()
    changed[0, 1] += torch.randn(4)
    assert selector_loss(scores, blocks) == selector_loss(changed, blocks)
    changed[0, 2] += torch.randn(4)
    assert selector_loss(scores, blocks) != selector_loss(changed, blocks)


def test_associations_are_high_for_neighbours():
    tokens = torch.tensor([3, 4] * 200 + [5, 6, 7] * 200)
    left, right = associations(tokens, 10, 6)
    table = left @ right.T
    assert table[3].argmax() == 4 and table[5].argmax() == 6
    assert table[3, 4] > table[3, 7] + 1


@pytest.fixture
def run(models, sequences, tmp_path):
    """Train in ``tmp_path / name``; return the folder of the selector."""
    save_target(models[0], tmp_path / "target")
    save_drafter(models[1], tmp_path / "drafter")
    (tmp_path / "shards").mkdir()
    np.savez(tmp_path / "shards" / "0_0.npz", ids=sequences.numpy().astype(np.uint16))
    np.save(tmp_path / "train.npy", sequences.flatten().numpy().astype(np.uint16))

    def train(name: str, steps: int):
        options = {
            "corpus": tmp_path,
            "target": tmp_path / "target",
            "drafter": tmp_path / "drafter",
            "shards": tmp_path / "shards",
            "work": tmp_path / name,
            "steps": steps,
            "anchors": 16,
            "batch": 32,
            "rank": 4,
        }
        train_selector.main([str(x) for k, v in options.items() for x in (f"--{k}", v)])
        return tmp_path / name / "selector"

    return train


def test_training_lowers_the_loss_and_goes_on_where_it_stopped(run, tmp_path):
    folder = run("work", 60)
    curve = json.loads((folder / "curve.json").read_text())["curve"]
    assert curve[-1]["step"] == 60
    assert curve[-1]["selector_loss"] < curve[0]["plain_loss"] - 0.05
    kept = (tmp_path / "work" / "blocks_0_0.npz").stat().st_mtime_ns
    run("work", 80)
    steps = [p["step"] for p in json.loads((folder / "curve.json").read_text())["curve"]]
    assert steps == [0, 60, 80]
    assert (tmp_path / "work" / "blocks_0_0.npz").stat().st_mtime_ns == kept
    tensors = load_file(folder / "model.safetensors")
    assert {k: tuple(v.shape) for k, v in tensors.items()} == {
        "candidate_selector.predecessor_codebook": (VOCAB, 4),
        "candidate_selector.successor_codebook": (VOCAB, 4),
        "candidate_selector.hidden_projection.weight": (4, HIDDEN),
    }


SHIPPED = Path(pico.__file__).parent


def test_the_shipped_selector_is_small_and_says_how_it_was_trained():
    folder = SHIPPED / "drafter" / "selector"
    assert (folder / "model.safetensors").stat().st_size <= 600_000
    weights = [f.stat().st_size for f in SHIPPED.rglob("*.safetensors")]
    assert len(weights) == 3 and sum(weights) < 20_000_000
    record = json.loads((folder / "curve.json").read_text())
    assert record["positions"] > 100_000
    assert record["curve"][-1]["selector_loss"] < 0.8 * record["curve"][-1]["plain_loss"]


def test_pico_with_its_selector_says_what_plain_decoding_says_in_fewer_passes():
    prompts = load_workload("pico", 64).prompts("open", 3, b"selector")
    given = {
        "target": str(SHIPPED / "target"),
        "drafter": str(SHIPPED / "drafter"),
        "dtype": "float64",
        "context": 256,
        "block": 16,
    }

    def generate(**settings):
        engine = ReferenceEngine(ReferenceSettings(**given, **settings))
        for n, prompt in enumerate(prompts):
            request = GenerateRequest(str(n), tuple(prompt), 40, ignore_eos=True)
            engine.add(replace(request, temperature=0.7 if n == 2 else 0.0))
        ids, meta = {}, {}
        while engine.has_work():
            for event in engine.step():
                ids.setdefault(event.rid, []).extend(event.new_ids)
                meta[event.rid] = event.meta
        return ids, meta

    plain, _ = generate()
    for settings in ({"speculation": "chain"}, {"speculation": "tree", "rows": 24}):
        ids, meta = generate(selector=True, **settings)
        assert ids == plain
        assert all(m["spec_selector_passes"] == m["spec_verify_ct"] > 0 for m in meta.values())
        assert sum(m["spec_verify_ct"] for m in meta.values()) < 3 * 40 / 2
