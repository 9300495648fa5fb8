"""The training code, at sizes that train in no time."""

import json

import numpy as np
import pytest
import torch

from specpilot.harness.deployments.pico.train import corpus, data, optim
from specpilot.harness.deployments.pico.train.drafter import Drafter, DrafterConfig, block_ids
from specpilot.harness.deployments.pico.train.evaluate import chain_tau
from specpilot.harness.deployments.pico.train.generate import GreedyDecoder
from specpilot.harness.deployments.pico.train.model import (
    Target,
    TargetConfig,
    load_target,
    save_target,
)

TINY = TargetConfig(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=2,
    head_dim=32,
    linear_key_head_dim=16,
    linear_value_head_dim=8,
    max_position_embeddings=128,
)


@pytest.fixture(scope="module")
def tiny():
    torch.manual_seed(0)
    model = Target(TINY)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.15)
    return model


def test_transformers_reads_the_exported_folder_and_agrees(tiny, tmp_path):
    from transformers import AutoModelForCausalLM

    save_target(tiny, tmp_path)
    ours = load_target(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.randint(96, (2, 75), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        difference = ours.logits(ours(ids)[0]) - theirs(ids).logits
    assert difference.abs().max() < 1e-4


def test_decoding_step_by_step_equals_the_whole_sequence(tiny):
    prompts = torch.randint(2, 96, (3, 9), generator=torch.Generator().manual_seed(2))
    lengths = torch.tensor([4, 9, 6])
    ids = GreedyDecoder(tiny, 3, 30).run(prompts, lengths)
    with torch.no_grad():
        best = tiny.logits(tiny(ids)[0]).argmax(-1)
    for row, given, length in zip(range(3), prompts, lengths.tolist(), strict=True):
        assert torch.equal(ids[row, :length], given[:length])
        assert torch.equal(ids[row, length:], best[row, length - 1 : -1])


def test_blocks_of_one_call_do_not_see_each_other_nor_what_follows(tiny):
    torch.manual_seed(3)
    config = DrafterConfig(
        vocab_size=96, hidden_size=32, intermediate_size=32, head_dim=16, target_layer_ids=(0, 1, 2)
    )
    drafter = Drafter(config)
    for parameter in drafter.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.2)
    ids = torch.randint(2, 96, (2, 40))
    anchors, rows = torch.tensor([5, 11, 20]), torch.tensor([4, 8, 16])
    with torch.no_grad():
        _, kept = tiny(ids, keep=config.target_layer_ids)
        features = torch.cat(kept, -1)
        embedded = tiny.model.embed_tokens(block_ids(ids, anchors, 16))
        together = drafter(embedded, features, anchors, rows)
        for i, (anchor, used) in enumerate(zip(anchors.tolist(), rows.tolist(), strict=True)):
            alone = drafter(
                embedded[:, i : i + 1, :used],
                features[:, :anchor],
                anchors[i : i + 1],
                rows[i : i + 1],
            )
            assert (alone[:, 0] - together[:, i, :used]).abs().max() < 1e-5


def test_walking_a_chain_counts_bonus_tokens_and_stops_at_the_limit():
    accepted = torch.tensor([[2, 0, 0, 1, 0, 5], [0, 0, 0, 0, 0, 0]])
    # First row: 3 tokens, then 2, then 1 of 6; second row: one token a pass.
    assert chain_tau(accepted, 6) == (12, 3 + 6)


@pytest.mark.parametrize(
    ("expression", "classifiers", "text", "licence"),
    [
        ("MIT", [], "", "mit"),
        ("BSD-3-Clause AND MIT", [], "", "bsd-3-clause and mit"),
        ("GPL-3.0-or-later OR MIT", [], "", "mit"),
        ("LGPL-2.1-only", [], "MIT", None),
        ("", ["License :: OSI Approved :: MIT License"], "", "mit"),
        (
            "",
            ["License :: OSI Approved :: MIT License", "License :: OSI Approved :: GPL"],
            "",
            None,
        ),
        ("", [], "Apache 2.0", "apache-2.0"),
        ("", [], "", None),
    ],
)
def test_only_packages_with_permissive_licences_count(expression, classifiers, text, licence):
    assert corpus.permissive_licence(expression, classifiers, text) == licence


def test_tokenizer_and_encoding_are_lossless_and_close_each_file():
    texts = ["def f():\n    return 1\n" * 5, "x = 'é'\n" * 5]
    tokenizer = corpus.train_tokenizer(texts, 300)
    ids, starts = corpus.encode(
        tokenizer, [corpus.Source("p", str(i), t) for i, t in enumerate(texts)]
    )
    assert ids[starts[1] - 1] == ids[-1] == 0
    assert tokenizer.decode(ids[: starts[1] - 1].tolist(), skip_special_tokens=False) == texts[0]


def test_one_file_in_fifty_is_held_out_by_its_name_alone():
    held = sum(corpus.Source("p", f"{i}.py", "").held_out for i in range(5000))
    assert 60 < held < 140
    assert corpus.Source("p", "a.py", "x").held_out == corpus.Source("p", "a.py", "y").held_out


def test_orthogonalised_updates_have_singular_values_near_one():
    stack = torch.randn(3, 24, 64, generator=torch.Generator().manual_seed(4))
    values = torch.linalg.svdvals(optim.orthogonalise(stack).float())
    assert values.min() > 0.6 and values.max() < 1.3


def test_the_schedule_falls_to_zero_by_steps_or_by_time():
    schedule = optim.Schedule(seconds=1e9, steps=100, warmup=10, cooldown=0.5)
    optimizer = optim.Muon([torch.nn.Parameter(torch.zeros(16, 16))], lr=1.0)
    optimizer.param_groups[0]["peak_lr"] = 1.0
    factors = [schedule.apply([optimizer], s, schedule.progress(s)) for s in (0, 9, 50, 75, 100)]
    assert factors == [0.1, 1.0, 1.0, 0.5, 0.0]
    schedule.seconds = 1e-9
    assert schedule.progress(0) >= 1


def test_random_cuts_are_whole_and_depend_on_the_seed_alone(tmp_path):
    np.save(tmp_path / "t.npy", np.arange(1000, dtype=np.uint16))
    tokens = data.load_tokens(tmp_path / "t.npy", torch.device("cpu"))
    first, again = (data.cuts(tokens, 4, 32, torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(first, again)
    assert torch.equal(first - first[:, :1], torch.arange(32).expand(4, -1))


def test_the_target_learns_a_repeating_text(monkeypatch, tmp_path):
    from specpilot.harness.deployments.pico.train import train_target

    text = np.tile(np.arange(2, 34, dtype=np.uint16), 200)
    for name in ("train", "heldout"):
        np.save(tmp_path / f"{name}.npy", text)
    fields = {k: getattr(TINY, k) for k in TINY.__dataclass_fields__}
    arguments = ["--corpus", tmp_path, "--work", tmp_path / "w", "--steps", 60, "--batch", 4]
    arguments += ["--length", 64, "--no-compile", "--seconds", 300, "--config", json.dumps(fields)]
    monkeypatch.setattr("sys.argv", ["train_target", *map(str, arguments)])
    train_target.main()
    curve = json.loads((tmp_path / "w/target_curve.json").read_text())
    assert curve[-1]["step"] == 60 and curve[-1]["heldout_loss"] < 2.5  # guessing gives 3.47
    assert (tmp_path / "w/target/model.safetensors").exists()
