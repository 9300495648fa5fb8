"""Shapes count what the models have; lying configs are refused with the field's name."""

import json
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from specpilot.errors import InvalidInput, NotFound, Unsupported
from specpilot.harness.cost_model import ModelShape, read_drafter
from specpilot.harness.cost_model.shapes import W12_BITS, distinct_experts

from .configs27b import DRAFTER_27B, TARGET_27B

SMALL = {"hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 300, "intermediate_size": 96}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
GDN = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40}

MODELS: list[tuple[str, str, dict[str, Any]]] = [
    ("LlamaConfig", "LlamaForCausalLM", {**SMALL, **HEADS}),
    ("LlamaConfig", "LlamaForCausalLM", {**SMALL, **HEADS, "attention_bias": True,
                                         "mlp_bias": True, "tie_word_embeddings": True}),
    ("MistralConfig", "MistralForCausalLM", {**SMALL, **HEADS, "sliding_window": 32}),
    ("Qwen2Config", "Qwen2ForCausalLM", {**SMALL, **HEADS}),
    ("Qwen3Config", "Qwen3ForCausalLM", {**SMALL, **HEADS, "head_dim": 32}),
    ("GemmaConfig", "GemmaForCausalLM", {**SMALL, **HEADS, "head_dim": 32}),
    ("Gemma2Config", "Gemma2ForCausalLM", {**SMALL, **HEADS, "head_dim": 32}),
    ("Gemma3TextConfig", "Gemma3ForCausalLM", {**SMALL, **HEADS, "num_hidden_layers": 7}),
    ("MixtralConfig", "MixtralForCausalLM", {**SMALL, **HEADS, "num_local_experts": 4}),
    ("Qwen3MoeConfig", "Qwen3MoeForCausalLM",
     {**SMALL, **HEADS, **EXPERTS, "mlp_only_layers": [1], "head_dim": 32}),
    ("Qwen3NextConfig", "Qwen3NextForCausalLM", {**SMALL, **HEADS, **GDN, **EXPERTS}),
    ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", {**SMALL, **HEADS, **GDN}),
    ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", {**SMALL, **HEADS, **GDN, **EXPERTS}),
]  # fmt: skip


@pytest.mark.parametrize(("config_class", "model_class", "fields"), MODELS)
def test_parameters_equal_those_of_the_transformers_model(
    config_class: str, model_class: str, fields: dict[str, Any]
) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, config_class)(**fields)
    with torch.device("meta"):
        model = getattr(transformers, model_class)(config)
    # parameters() yields a tied head once, as the shape counts it.
    expected = sum(p.numel() for p in model.parameters())
    shape = ModelShape.from_config(config.to_dict())
    assert shape.parameters == expected
    assert shape.tied == bool(config.tie_word_embeddings)


def test_the_27b_shape_has_the_papers_parameters_and_bytes() -> None:
    shape = ModelShape.from_config(TARGET_27B)
    assert shape.parameters == 26_895_998_464  # the paper's 26.89 B
    assert shape.weight_bytes() == pytest.approx(51.24e9, rel=5e-4)


def test_w12_takes_the_papers_gigabytes() -> None:
    # The paper converts 44.67 GB: every matrix of the layers except the two output projections.
    shape = ModelShape.from_config(TARGET_27B)
    converted = [g for g in shape.groups if g.name not in ("attention_out", "gdn_out")]
    assert sum(g.bytes_read(1) for g in converted) == pytest.approx(44.67e9, rel=2e-4)
    w12 = shape.with_bits({g.name: W12_BITS for g in converted})
    packed = sum(g.bytes_read(1) for g in w12.groups if g.bits == W12_BITS)
    assert packed == pytest.approx(33.58e9, rel=5e-4)
    assert round(33.58 / 44.67 * 16, 2) == W12_BITS


def test_dflash_drafter_of_the_27b_is_3_46_gigabytes() -> None:
    target = ModelShape.from_config(TARGET_27B)
    drafter = read_drafter(DRAFTER_27B, "dflash", target)
    assert drafter.parameters * 2 == pytest.approx(3.46e9, rel=2e-3)
    assert drafter.shares_head
    own = drafter.body.weight_bytes(8)
    assert drafter.bytes_read(8) == own + target.vocab * target.hidden * 2
    assert drafter.passes(8) == 1


def test_gdn_state_of_the_27b_is_151_megabytes() -> None:
    gdn = ModelShape.from_config(TARGET_27B).gdn
    assert gdn is not None
    assert gdn.state_bytes() == pytest.approx(151e6, rel=1e-3)
    assert gdn.state_bytes() / (gdn.node_bytes()) > 60  # a snapshot against k, u and G


def test_grouped_query_attention_counts_kv_heads_only() -> None:
    shape = ModelShape.from_config(
        {
            "model_type": "llama",
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
        }
    )
    assert 8192 * shape.attention[0].kv_bytes_per_token() == pytest.approx(1.07e9, rel=5e-3)
    assert shape.weight_bytes() == pytest.approx(16.06e9 - 1.05e9, rel=2e-3)


def test_parameters_equal_those_of_a_safetensors_header(tmp_path: Any) -> None:
    numpy_save = pytest.importorskip("safetensors.numpy").save_file
    config = {"model_type": "qwen3", **SMALL, **HEADS, "head_dim": 16}
    hidden, heads, width = 64, 4 * 16, 96
    tensors = {"model.embed_tokens.weight": (300, hidden), "model.norm.weight": (hidden,),
               "lm_head.weight": (300, hidden)}  # fmt: skip
    for i in range(4):
        tensors |= {
            f"model.layers.{i}.self_attn.q_proj.weight": (heads, hidden),
            f"model.layers.{i}.self_attn.k_proj.weight": (32, hidden),
            f"model.layers.{i}.self_attn.v_proj.weight": (32, hidden),
            f"model.layers.{i}.self_attn.o_proj.weight": (hidden, heads),
            f"model.layers.{i}.self_attn.q_norm.weight": (16,),
            f"model.layers.{i}.self_attn.k_norm.weight": (16,),
            f"model.layers.{i}.mlp.gate_proj.weight": (width, hidden),
            f"model.layers.{i}.mlp.up_proj.weight": (width, hidden),
            f"model.layers.{i}.mlp.down_proj.weight": (hidden, width),
            f"model.layers.{i}.input_layernorm.weight": (hidden,),
            f"model.layers.{i}.post_attention_layernorm.weight": (hidden,),
        }
    numpy_save({k: np.zeros(v, np.float16) for k, v in tensors.items()}, tmp_path / "m.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    raw = (tmp_path / "m.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    stored = sum(int(np.prod(v["shape"])) for k, v in header.items() if k != "__metadata__")
    assert ModelShape.from_config(tmp_path).parameters == stored


def test_more_rows_touch_more_experts_but_never_more_than_there_are() -> None:
    touched = [distinct_experts(128, 8, n) for n in (1, 2, 8, 64, 10_000)]
    assert touched[0] == pytest.approx(8)
    assert all(a < b for a, b in pairwise(touched))
    assert touched[-1] == pytest.approx(128)


def test_fp8_and_int4_checkpoints_count_their_scales() -> None:
    block = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    fp8 = ModelShape.from_config({**TARGET_27B, "quantization_config": block})
    assert fp8.compute == "fp8"
    mlp = fp8.group("mlp")
    assert mlp is not None and mlp.bits == pytest.approx(8.00195, abs=1e-5)
    assert fp8.head is not None and fp8.head.bits == 16
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128}
    int4 = ModelShape.from_config({**TARGET_27B, "quantization_config": awq})
    mlp = int4.group("mlp")
    assert mlp is not None and mlp.bits == pytest.approx(4 + 20 / 128)


def test_sliding_layers_see_their_window_only() -> None:
    gemma = ModelShape.from_config(
        {"model_type": "gemma3_text", **SMALL, **HEADS, "head_dim": 32, "sliding_window": 128,
         "num_hidden_layers": 6}
    )  # fmt: skip
    full, sliding = gemma.attention
    assert (full.layers, sliding.layers) == (1, 5)
    assert (full.visible(1000), sliding.visible(1000)) == (1000, 128)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"layer_types": ["full_attention"] * 63}, "layer_types"),
        ({"layer_types": ["full_attention"] * 63 + ["mamba"]}, "layer_types"),
        ({"num_key_value_heads": 5}, "num_key_value_heads"),
        ({"linear_num_value_heads": 17}, "linear_num_value_heads"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": -1}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"linear_conv_kernel_dim": None}, "linear_conv_kernel_dim"),
        ({"dtype": "float7"}, "dtype"),
        ({"vocab_size": 3.5}, "vocab_size"),
        ({"model_type": None}, "model_type"),
    ],
)
def test_a_lying_config_is_refused_with_the_field(change: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput, match=field):
        ModelShape.from_config({**TARGET_27B, **change})


def test_unknown_layouts_formats_and_files_are_refused(tmp_path: Any) -> None:
    with pytest.raises(Unsupported, match="mamba2"):
        ModelShape.from_config({**TARGET_27B, "model_type": "mamba2"})
    with pytest.raises(Unsupported, match="nvfp4"):
        quantization = {"quant_method": "nvfp4"}
        ModelShape.from_config({**TARGET_27B, "quantization_config": quantization})
    with pytest.raises(Unsupported, match="w13"):
        ModelShape.from_config(TARGET_27B).with_format("w13")
    with pytest.raises(InvalidInput, match="experts"):
        ModelShape.from_config(TARGET_27B).with_bits({"experts": 8})
    with pytest.raises(NotFound, match=r"config\.json"):
        ModelShape.from_config(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": ')
    with pytest.raises(InvalidInput, match="no JSON"):
        ModelShape.from_config(tmp_path)


def test_multimodal_configs_yield_their_text_model() -> None:
    outer = {"model_type": "qwen3_5", "text_config": TARGET_27B, "vision_config": {"depth": 27}}
    assert ModelShape.from_config(outer) == ModelShape.from_config(TARGET_27B)


DRAFTERS: dict[str, dict[str, Any]] = {
    "dflash": DRAFTER_27B,
    "dflash2": {**DRAFTER_27B, "selector_rank": 64, "conv_kernel_size": 2, "conv_group_size": 64},
    "dspark": DRAFTER_27B,
    "eagle3": {"hidden_size": 5120, "intermediate_size": 17408, "num_attention_heads": 40,
               "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 248320,
               "draft_vocab_size": 32000},
    "mtp": TARGET_27B,
    "lm": {"model_type": "qwen3", **SMALL, **HEADS, "vocab_size": 248320},
}  # fmt: skip


@pytest.mark.parametrize("kind", sorted(DRAFTERS))
def test_every_drafter_kind_has_parameters_passes_and_bytes(kind: str) -> None:
    target = ModelShape.from_config(TARGET_27B)
    drafter = read_drafter(DRAFTERS[kind], kind, target)
    assert drafter.kind == kind
    assert drafter.passes(8) == (1 if kind in ("dflash", "dflash2", "dspark") else 7)
    assert 0 < drafter.parameters < target.parameters
    assert drafter.bytes_read(8) > drafter.body.weight_bytes(1)


def test_the_mtp_head_counts_the_parameters_of_one_full_attention_layer() -> None:
    target = ModelShape.from_config(TARGET_27B)
    drafter = read_drafter(TARGET_27B, "mtp", target)
    hidden, queries, keys, width = 5120, 24 * 256, 4 * 256, 17408
    layer = hidden * (2 * queries + 2 * keys) + queries * hidden + 3 * hidden * width
    norms = 2 * hidden + 2 * 256 + hidden  # layer norms, q/k norm, last norm
    assert drafter.parameters == 2 * hidden * hidden + 2 * hidden + layer + norms


def test_a_drafter_of_another_target_is_refused() -> None:
    target = ModelShape.from_config(TARGET_27B)
    with pytest.raises(InvalidInput, match="hidden_size"):
        read_drafter({**DRAFTER_27B, "hidden_size": 4096}, "dflash", target)
    with pytest.raises(InvalidInput, match="vocab_size"):
        read_drafter({**DRAFTER_27B, "vocab_size": 32000}, "dflash", target)
    with pytest.raises(InvalidInput, match="target_layer_ids"):
        bad = {"dflash_config": {"target_layer_ids": [1, 64]}}
        read_drafter({**DRAFTER_27B, **bad}, "dflash", target)
    with pytest.raises(Unsupported, match="medusa"):
        read_drafter(DRAFTER_27B, "medusa", target)
