"""A larger shape that is filled from pico computes pico's function."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specpilot.errors import InvalidInput
from specpilot.harness.deployments import pico
from specpilot.harness.deployments.pico_27b.cancel import plan
from specpilot.harness.deployments.pico_27b.fill import fill_drafter, fill_target
from specpilot.harness.deployments.workload import load_workload
from specpilot.harness.engines.backend import GenerateRequest, ScoreRequest
from specpilot.harness.engines.reference.engine import ReferenceEngine
from specpilot.harness.engines.settings import ReferenceSettings

FOLDER = Path(pico.__file__).parent
COPIES = 3
TARGET = {
    "hidden_size": 256 * COPIES,
    "vocab_size": 4500,
    "intermediate_size": 1101,
    "num_hidden_layers": 12,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 3,
    "num_attention_heads": 12,
    "num_key_value_heads": 3,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 12,
    "tie_word_embeddings": False,
}
DRAFTER = {
    "hidden_size": 256 * COPIES,
    "vocab_size": 4500,
    "intermediate_size": 1000,
    "num_hidden_layers": 4,
    "num_target_layers": 12,
    "layer_types": ["full_attention"] * 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}


def read(part):
    config = json.loads((FOLDER / part / "config.json").read_text())
    weights = load_file(FOLDER / part / "model.safetensors")
    return config, {k: v.float() for k, v in weights.items()}


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    root = tmp_path_factory.mktemp("large")
    for part, changes, fill in (
        ("target", TARGET, fill_target),
        ("drafter", DRAFTER, fill_drafter),
    ):
        small, weights = read(part)
        config = small | changes
        (root / part).mkdir()
        (root / part / "config.json").write_text(json.dumps(config))
        tensors = {k: v.clone() for k, v in fill(small, weights, config)}
        save_file(tensors, root / part / "model.safetensors")
    return root


def engine(root):
    settings = {"speculation": "chain", "block": 8, "context": 256, "max_running": 2}
    return ReferenceEngine(
        ReferenceSettings(target=str(root / "target"), drafter=str(root / "drafter"), **settings)
    )


def test_log_probs_tokens_and_acceptance_are_those_of_pico(large):
    prompts = load_workload("pico", 48).prompts("open", 2, b"fill")
    results = []
    for root in (FOLDER, large):
        one = engine(root)
        scored = one.score(ScoreRequest(prompts[0], start=1))
        for i, prompt in enumerate(prompts):
            one.add(GenerateRequest(str(i), prompt, 24, ignore_eos=True))
        ids, passes = {"0": [], "1": []}, {}
        while one.has_work():
            for event in one.step():
                ids[event.rid] += event.new_ids
                if event.finished:
                    passes[event.rid] = event.meta["spec_verify_ct"]
        results.append((torch.tensor(scored.logprobs), ids, passes))
    (small_lp, *small), (large_lp, *filled) = results
    assert (small_lp - large_lp).abs().max() < 1e-4
    assert small == filled


def test_the_filled_weights_are_not_mostly_zeros_and_survive_bfloat16(large):
    for part in ("target", "drafter"):
        for name, tensor in load_file(large / part / "model.safetensors").items():
            if tensor.ndim == 2:
                assert (tensor == 0).float().mean() < 0.01, name
            assert torch.equal(tensor, tensor.bfloat16().float()), name


@pytest.mark.parametrize(("total", "real"), [(2, 0), (5, 2), (16, 1), (20, 1), (7, 7)])
def test_plans_place_the_real_units_and_cancel_the_rest(total, real):
    made = plan(total, range(real))
    assert made.source[:real] == tuple(range(real)) and made.coefficient[:real] == (1.0,) * real
    sums = [0.0] * made.groups
    for source, coefficient in zip(made.source[real:], made.coefficient[real:], strict=True):
        sums[source - real] += coefficient
    assert sums == [0.0] * made.groups


def test_a_single_unit_over_is_refused():
    with pytest.raises(InvalidInput):
        plan(3, range(2))


@pytest.mark.parametrize(
    "change", [{"hidden_size": 700}, {"head_dim": 128}, {"linear_num_value_heads": 8}]
)
def test_shapes_that_do_not_fit_are_refused(change):
    small, weights = read("target")
    with pytest.raises(InvalidInput):
        dict(fill_target(small, weights, small | TARGET | change))
