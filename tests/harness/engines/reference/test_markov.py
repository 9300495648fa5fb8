"""DSpark checkpoints: names, geometry and edges against the definition; refusals."""

import json
import random

import pytest
import torch
from safetensors.torch import load_file, save_file

from specpilot.errors import InvalidInput, NotFound, Unsupported
from specpilot.harness.engines.backend import GenerateRequest
from specpilot.harness.engines.reference.drafter import BlockDrafter, Place
from specpilot.harness.engines.reference.engine import ReferenceEngine
from specpilot.harness.engines.reference.target import Target
from specpilot.harness.engines.settings import ReferenceSettings

VOCAB, HIDDEN, RANK = 97, 48, 6
SHAPES = {
    "markov_head.markov_w1.weight": (VOCAB, RANK),
    "markov_head.markov_w2.weight": (VOCAB, RANK),
    "markov_head.gate_proj.weight": (RANK, HIDDEN + RANK),
    "markov_head.gate_proj.bias": (RANK,),
    "confidence_head.proj.weight": (1, HIDDEN + RANK),  # shipped with checkpoints, not read
}


@pytest.fixture(scope="module")
def target(folder):
    return Target(folder("hybrid"), torch.float64, capture=(0, 2))


@pytest.fixture
def dspark(drafter_folder):
    """Factory of random DSpark folders of 7 drafts; keyword arguments change the config."""

    def make(kind: str = "vanilla", without: str = "", **changes):
        fields = {"markov_rank": RANK, "markov_head_type": kind, "block_size": 7}
        path = drafter_folder(architectures=["Qwen3DSparkModel"], **{**fields, **changes})
        generator = torch.Generator().manual_seed(6)
        head = {k: torch.randn(v, generator=generator) for k, v in SHAPES.items() if k != without}
        save_file(load_file(path / "model.safetensors") | head, path / "model.safetensors")
        return path

    return make


def loaded(folder, target):
    drafter = BlockDrafter(folder, target, 64)
    drafter.allocate(2, 64)
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(9, 2 * HIDDEN, dtype=torch.float64, generator=generator)
    with torch.inference_mode():
        drafter.extend(features, [Place(0, 0, 4), Place(1, 0, 5)])
    return drafter


@pytest.mark.parametrize("kind", ["vanilla", "gated"])
@torch.inference_mode()
def test_edges_equal_the_definition(target, dspark, kind):
    folder = dspark(kind)
    w = {k: v.double() for k, v in load_file(folder / "model.safetensors").items()}
    drafter = loaded(folder, target)
    assert drafter.config.block == 8
    hidden = drafter.hidden([5, 9], [4, 5], 8)
    assert hidden.shape == (2, 7, HIDDEN)
    w1, w2 = w["markov_head.markov_w1.weight"], w["markov_head.markov_w2.weight"]
    gate, bias = w["markov_head.gate_proj.weight"], w["markov_head.gate_proj.bias"]
    lattices = drafter.propose([5, 9], [4, 5], 8, 4)
    for r, (lattice, anchor) in enumerate(zip(lattices, [5, 9], strict=True)):
        logits = target.logits(hidden[r])
        assert (lattice.depth, lattice.width) == (7, 16)
        for d in range(7):
            ids = lattice.tokens[d].tolist()
            assert ids == logits[d].topk(16).indices.tolist()
            for a, before in enumerate(lattice.tokens[d - 1].tolist() if d else [anchor]):
                z = w1[before]
                if kind == "gated":
                    z = z * torch.sigmoid(gate @ torch.cat((hidden[r, d], z)) + bias)
                expected = (logits[d] + w2 @ z).log_softmax(-1)[ids]
                got = torch.from_numpy(lattice.row(d, a))
                torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


@torch.inference_mode()
def test_the_anchors_row_drafts_the_first_token(target, dspark, drafter_folder):
    """DSpark's rows are those of a DFlash block one row shorter, the anchor's among them."""
    folder = dspark()
    other = drafter_folder()
    save_file(load_file(folder / "model.safetensors"), other / "model.safetensors")
    drafter, plain = loaded(folder, target), loaded(other, target)
    got = drafter.hidden([5, 9], [4, 5], 8)
    torch.testing.assert_close(got[:, 1:], plain.hidden([5, 9], [4, 5], 7))


@pytest.mark.parametrize("speculation", ["chain", "tree"])
def test_output_equals_plain_decoding(folder, dspark, speculation):
    chance = random.Random(3)
    requests = [
        GenerateRequest(
            str(n),
            tuple(chance.randrange(2, VOCAB) for _ in range(chance.randint(1, 12))),
            chance.randint(1, 30),
            temperature=0.8 * (n % 2),
            seed=n,
        )
        for n in range(5)
    ]
    given = {"target": str(folder("hybrid")), "drafter": str(dspark("gated")), "context": 80}

    def run(mode):
        engine = ReferenceEngine(
            ReferenceSettings(speculation=mode, dtype="float64", max_running=3, **given)
        )
        for request in requests:
            engine.add(request)
        ids = {}
        while engine.has_work():
            for event in engine.step():
                ids.setdefault(event.rid, []).extend(event.new_ids)
        return ids

    assert run(speculation) == run("none")


@pytest.mark.parametrize(
    ("changes", "error", "complaint"),
    [
        ({"markov_rank": 0}, InvalidInput, "markov_rank"),
        ({"markov_rank": 5}, InvalidInput, "calls for"),
        ({"kind": "rnn"}, Unsupported, "'rnn'"),
        ({"speculators_model_type": "dspark"}, Unsupported, "speculators"),
        ({"without": "markov_head.markov_w2.weight"}, NotFound, "markov_w2"),
        ({"kind": "gated", "without": "markov_head.gate_proj.bias"}, NotFound, "gate_proj"),
        ({"dspark_config": 3}, InvalidInput, "must be an object"),
    ],
)
def test_checkpoints_that_it_cannot_run_are_refused(target, dspark, changes, error, complaint):
    with pytest.raises(error, match=complaint):
        loaded(dspark(**changes), target)


def test_fields_may_stand_in_dspark_config(target, dspark):
    folder = dspark()
    config = json.loads((folder / "config.json").read_text())
    config["dspark_config"] = {"markov_rank": config.pop("markov_rank")}
    (folder / "config.json").write_text(json.dumps(config))
    assert loaded(folder, target).config.markov_rank == RANK
