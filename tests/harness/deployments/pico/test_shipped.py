"""What ships as pico: sizes, shapes, and the same greedy tokens in every engine."""

import json
import lzma
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from specpilot.harness.deployments import pico, registry
from specpilot.harness.deployments.health import check_health
from specpilot.harness.deployments.pico.sglang import write_drafter
from specpilot.harness.deployments.pico.train.drafter import load_drafter
from specpilot.harness.deployments.pico.train.evaluate import accepted_rows, chain_tau
from specpilot.harness.deployments.pico.train.model import load_target
from specpilot.harness.deployments.workload import load_workload
from specpilot.harness.engines.backend import GenerateRequest
from specpilot.harness.engines.reference.engine import ReferenceEngine
from specpilot.harness.engines.settings import ReferenceSettings

FOLDER = Path(pico.__file__).parent
RECORD = json.loads(Path(__file__).with_name("sglang_0_5_20.json").read_text())
# Two implementations may pick different tokens only where the logits are this near.
NEAR_TIE = 0.05


@pytest.fixture(scope="module")
def target():
    return load_target(FOLDER / "target")


@pytest.fixture(scope="module")
def drafter():
    return load_drafter(FOLDER / "drafter")


def generate(speculation, prompts, tokens, block=8):
    """Output ids and exact passes of each prompt on the reference engine in float32."""
    engine = ReferenceEngine(
        ReferenceSettings(
            target=str(FOLDER / "target"),
            drafter=str(FOLDER / "drafter"),
            speculation=speculation,
            block=block,
            context=512,
        )
    )
    for i, prompt in enumerate(prompts):
        engine.add(GenerateRequest(str(i), tuple(prompt), tokens, ignore_eos=True))
    ids = {str(i): [] for i in range(len(prompts))}
    passes = {}
    while engine.has_work():
        for event in engine.step():
            ids[event.rid] += event.new_ids
            if event.finished:
                passes[event.rid] = event.meta["spec_verify_ct"]
    return list(ids.values()), [passes[rid] for rid in ids]


def gaps(target, prompt, output):
    """How far each token lies below the target's best one, in logits, given all before it."""
    ids = torch.tensor([[*prompt, *output]])
    with torch.no_grad():
        logits = target.logits(target(ids)[0])[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
    return logits.max(-1).values - chosen


def test_the_deployment_is_known_and_sound():
    deployment = registry.load("pico")
    assert check_health(deployment).ok
    assert deployment.stock == {"speculation": "chain", "block": 8}


def test_weights_are_small_and_of_the_stated_shape():
    sizes = [f.stat().st_size for f in FOLDER.glob("*/model.safetensors")]
    assert len(sizes) == 2 and max(sizes) < 16 << 20 and sum(sizes) < 19_300_000
    counts = {}
    for part in ("target", "drafter"):
        with safe_open(FOLDER / part / "model.safetensors", "pt") as file:
            tensors = [file.get_slice(name) for name in file.keys()]  # noqa: SIM118
            assert {t.get_dtype() for t in tensors} == {"BF16"}
            counts[part] = sum(int(np.prod(t.get_shape())) for t in tensors)
    assert counts == {"target": 7_436_324, "drafter": 1_894_784}
    config = json.loads((FOLDER / "target/config.json").read_text())
    assert config["hidden_size"] * 20 == 5120
    assert config["layer_types"].count("full_attention") * 4 == config["num_hidden_layers"] == 8


def test_held_out_shards_share_no_file_and_compress_under_their_limit():
    files = json.loads((FOLDER / "corpus.json").read_text())["shipped"]["files"]
    tokens = {s: sum(f["tokens"] for f in files if f["split"] == s) for s in ("open", "sealed")}
    workload = load_workload("pico")
    for split, count in tokens.items():
        shard = np.array(workload.shard(split), dtype=np.uint16)
        assert len(shard) == count > 200_000 and shard.max() < 4096
        assert len(lzma.compress(shard.tobytes())) < 300_000
    names = [(f["package"], f["path"]) for f in files]
    assert len(names) == len(set(names))
    notices = (FOLDER / "THIRD_PARTY.txt").read_text()
    assert all(f"{f['package']} " in notices for f in files)


def test_every_package_of_the_corpus_has_version_licence_and_hash():
    packages = json.loads((FOLDER / "corpus.json").read_text())["packages"]
    assert len(packages) > 100
    for package in packages:
        assert package["version"] and package["licence"] and len(package["sha256"]) == 64
        assert "gpl" not in package["licence"]


def test_tokenizer_gives_the_text_back():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(FOLDER / "target")
    text = "def f(x):\n\treturn {'ä': x ** 2}  # été\r\n\n"
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert (tokenizer.eos_token_id, len(tokenizer)) == (0, 4096)


def test_transformers_and_the_engine_emit_the_same_greedy_tokens(target):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(FOLDER / "target", dtype=torch.float32)
    prompts = load_workload("pico", 64).prompts("open", 3, b"parity")
    ours, _ = generate("none", prompts, 24)
    with torch.no_grad():
        theirs = model.generate(
            torch.tensor(prompts),
            attention_mask=torch.ones(3, 64, dtype=torch.int64),
            max_new_tokens=24,
            do_sample=False,
            eos_token_id=None,
        )
    for prompt, mine, other in zip(prompts, ours, theirs[:, 64:].tolist(), strict=True):
        assert gaps(target, prompt, mine).max() < 1e-3
        assert gaps(target, prompt, other).max() < 1e-3
        assert mine == other or gaps(target, prompt, mine).max() > 0


@pytest.mark.parametrize("request_", RECORD["requests"][:3])
def test_sglang_emitted_the_same_greedy_tokens_up_to_near_ties(target, request_):
    for key in ("ar_ids", "dflash_ids"):
        difference = gaps(target, request_["prompt_ids"], request_[key])
        assert difference.max() < NEAR_TIE
        assert (difference > 0).sum() <= 3


def test_sglang_accepted_what_features_one_layer_early_would_give(target, drafter, tmp_path):
    """Its text-only class captures layer inputs; ids that are one higher undo that."""
    shipped = drafter.config.target_layer_ids
    early = load_drafter(FOLDER / "drafter")
    early.config = replace(early.config, target_layer_ids=tuple(i - 1 for i in shipped))
    passes = {"recorded": 0, "early": 0, "meant": 0}
    for request in RECORD["requests"][:4]:
        ids = torch.tensor([[*request["prompt_ids"], *request["dflash_ids"], *[0] * 8]])
        for name, model in (("early", early), ("meant", drafter)):
            chain, _ = accepted_rows(target, model, ids, 128, 8)
            passes[name] += chain_tau(chain, 127)[1]
        passes["recorded"] += request["verify_ct"]
    assert abs(passes["early"] / passes["recorded"] - 1) < 0.02
    assert passes["meant"] < 0.9 * passes["recorded"]
    folder = write_drafter(FOLDER / "drafter", tmp_path / "drafter")
    assert load_drafter(folder).config.target_layer_ids == tuple(i + 1 for i in shipped)


def test_the_engine_accepts_what_the_evaluation_predicts(target, drafter):
    prompts = load_workload("pico", 96).prompts("open", 4, b"live")
    outputs, passes = generate("chain", prompts, 64)
    plain, _ = generate("none", prompts, 64)
    assert outputs == plain
    predicted = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = torch.tensor([[*prompt, *output, *[0] * 8]])
        chain, _ = accepted_rows(target, drafter, ids, 96, 8)
        predicted += chain_tau(chain, 63)[1]
    # Engines may count the pass that emits the first token.
    assert abs(sum(passes) - predicted) <= len(prompts) + 1
    assert 4 * 64 / sum(passes) > 2.0
