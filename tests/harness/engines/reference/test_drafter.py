"""The block drafter against its definition written out, and its cache against recomputation."""

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from specpilot.errors import InvalidInput, NotFound, Unsupported
from specpilot.harness.engines.reference.drafter import BlockDrafter, Place
from specpilot.harness.engines.reference.target import Target


@pytest.fixture(scope="module")
def target(folder):
    return Target(folder("hybrid"), torch.float64, capture=(0, 2))


def norm(x, weight):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def rotate(x, positions, theta=10000.0):
    dim = x.shape[-1]
    angle = positions[:, None] / theta ** (torch.arange(0, dim, 2).double() / dim)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def written_out(folder, embedding, features, anchor, block):
    """Hidden states [block - 1, hidden] after ``features`` [T, layers * hidden], no cache."""
    config = json.loads((folder / "config.json").read_text())
    w = {k: v.double() for k, v in load_file(folder / "model.safetensors").items()}
    dim, length = config["head_dim"], len(features)
    context = norm(features @ w["fc.weight"].T, w["hidden_norm.weight"])
    ids = torch.tensor([anchor] + [config["dflash_config"]["mask_token_id"]] * (block - 1))
    x = embedding[ids]
    positions = torch.arange(length + block).double()
    for i in range(config["num_hidden_layers"]):
        p = {
            k.removeprefix(f"layers.{i}."): v for k, v in w.items() if k.startswith(f"layers.{i}.")
        }
        y = norm(x, p["input_layernorm.weight"])
        both = torch.cat((context, y))

        def heads(z, kind, p=p):
            return (z @ p[f"self_attn.{kind}_proj.weight"].T).view(len(z), -1, dim)

        q = rotate(norm(heads(y, "q"), p["self_attn.q_norm.weight"]), positions[length:])
        k = rotate(norm(heads(both, "k"), p["self_attn.k_norm.weight"]), positions)
        k, v = (z.repeat_interleave(2, 1) for z in (k, heads(both, "v")))
        scores = torch.einsum("qhd,khd->hqk", q, k) / dim**0.5
        out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        x = x + out @ p["self_attn.o_proj.weight"].T
        y = norm(x, p["post_attention_layernorm.weight"])
        gate, up = (y @ p[f"mlp.{kind}_proj.weight"].T for kind in ("gate", "up"))
        x = x + (F.silu(gate) * up) @ p["mlp.down_proj.weight"].T
    return norm(x, w["norm.weight"])[1:]


@torch.inference_mode()
def test_blocks_of_several_requests_equal_the_definition(target, drafter_folder):
    folder = drafter_folder()
    drafter = BlockDrafter(folder, target, 96)
    drafter.allocate(3, 96)
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(0, 97, (n,), generator=generator) for n in (9, 40, 1)]
    pool = target.pool(3, 96)
    features = []
    for slot, ids in enumerate(texts):
        features.append(target.prefill(ids, pool, slot, 0).features[0])
        for start in range(0, len(ids), 7):  # committed in pieces, as decoding does
            piece = features[-1][start : start + 7]
            drafter.extend(piece, [Place(slot, start, len(piece))])
        held = [len(text) for text in texts[: slot + 1]]
        drafter.hidden([0] * (slot + 1), held, 4)  # a block leaves nothing behind
    for block in (8, 3):
        got = drafter.hidden([5, 6, 7], [9, 40, 1], block)
        for r, anchor in enumerate((5, 6, 7)):
            expected = written_out(folder, target.embedding, features[r], anchor, block)
            torch.testing.assert_close(got[r], expected, atol=1e-10, rtol=0)


@torch.inference_mode()
def test_lattices_hold_the_likeliest_tokens_and_their_log_probs(target, drafter_folder):
    drafter = BlockDrafter(drafter_folder(), target, 64)
    drafter.allocate(1, 64)
    drafter.extend(torch.randn(4, 2 * 48, dtype=torch.float64), [Place(0, 0, 4)])
    table = target.logits(drafter.hidden([5], [4], 8))[0].log_softmax(-1)
    (lattice,) = drafter.propose([5], [4], 8, 6)
    for d in range(7):
        row = lattice.row(d, 0)
        expected, ids = table[d].topk(6)
        assert lattice.tokens[d].tolist() == ids.tolist()
        torch.testing.assert_close(torch.from_numpy(row), expected, atol=1e-5, rtol=0)


@torch.inference_mode()
def test_selector_edges_equal_the_definition(target, drafter_folder):
    folder = drafter_folder({"selector_rank": 4, "selector_top_k": 5})
    w = {k: v.double() for k, v in load_file(folder / "model.safetensors").items()}
    drafter = BlockDrafter(folder, target, 64)
    drafter.allocate(1, 64)
    drafter.extend(torch.randn(4, 2 * 48, dtype=torch.float64), [Place(0, 0, 4)])
    hidden = drafter.hidden([5], [4], 8)[0]
    logits = target.logits(hidden)
    (lattice,) = drafter.propose([5], [4], 8, 1)
    name = "candidate_selector"
    for d in range(7):
        ids = lattice.tokens[d].tolist()
        state = hidden[d] @ w[f"{name}.hidden_projection.weight"].T
        mass = (logits[d].softmax(-1)[ids]).sum().log()
        for a, before in enumerate(lattice.tokens[d - 1].tolist() if d else [5]):
            left = w[f"{name}.predecessor_codebook"][before] * state
            scores = logits[d][ids] + w[f"{name}.successor_codebook"][ids] @ left
            expected = scores.log_softmax(-1) + mass
            got = torch.from_numpy(lattice.row(d, a))
            torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("changes", "nested", "error", "complaint"),
    [
        ({"architectures": ["EagleModel"]}, {}, Unsupported, "EagleModel"),
        ({"vocab_size": 96}, {}, InvalidInput, "vocab_size is 96"),
        ({"hidden_size": 32}, {}, InvalidInput, "hidden_size is 32"),
        ({"num_target_layers": 8}, {}, InvalidInput, "num_target_layers is 8"),
        ({}, {"target_layer_ids": [0, 4]}, InvalidInput, "outside 0 to 3"),
        ({}, {"mask_token_id": 97}, InvalidInput, "mask_token_id 97"),
        ({}, {"mask_token_id": None}, InvalidInput, "mask_token_id"),
        ({}, {"conv_kernel_size": 2}, Unsupported, "conv_kernel_size"),
        ({"layer_types": ["sliding_attention"] * 2}, {}, Unsupported, "layer_types"),
        ({}, {"selector_rank": 4}, InvalidInput, "come together"),
    ],
)
def test_a_drafter_that_does_not_fit_is_refused(
    target, drafter_folder, changes, nested, error, complaint
):
    folder = drafter_folder()
    config = json.loads((folder / "config.json").read_text()) | changes
    config["dflash_config"] |= nested
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(error, match=complaint):
        BlockDrafter(folder, target, 64)


def test_a_drafter_without_weights_is_refused(target, drafter_folder):
    folder = drafter_folder()
    (folder / "model.safetensors").unlink()
    with pytest.raises(NotFound, match=r"model\.safetensors"):
        BlockDrafter(folder, target, 64)
