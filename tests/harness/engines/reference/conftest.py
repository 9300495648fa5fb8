"""Tiny random models of both families, written as Hugging Face folders."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

TINY = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "eos_token_id": 1,
    "bos_token_id": None,
    "pad_token_id": None,
}


def _hf_model(kind: str, tied: bool = False):
    """A random ``transformers`` model: ``hybrid``, ``llama``, ``qwen3`` or ``biased`` (Llama)."""
    import transformers as hf

    torch.manual_seed(7)
    common = {**TINY, "tie_word_embeddings": tied}
    if kind == "hybrid":
        config = hf.Qwen3_5TextConfig(
            **common,
            head_dim=32,
            linear_num_key_heads=2,
            linear_num_value_heads=6,
            linear_key_head_dim=16,
            linear_value_head_dim=8,
            linear_conv_kernel_dim=4,
            full_attention_interval=2,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.25,
            },
        )
        model = hf.Qwen3_5ForCausalLM(config)
    elif kind == "qwen3":
        model = hf.Qwen3ForCausalLM(hf.Qwen3Config(**common, head_dim=16))
    else:
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**common, attention_bias=kind == "biased"))
    with torch.no_grad():  # initialisers leave norms at 1 and biases at 0, which would hide errors
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


@pytest.fixture(scope="session")
def hf_model():
    """Factory of random ``transformers`` models; see ``_hf_model``."""
    return _hf_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Factory of model folders by kind, each written once a session."""
    made: dict[tuple[str, bool], Path] = {}

    def make(kind: str, tied: bool = False) -> Path:
        if (kind, tied) not in made:
            made[kind, tied] = tmp_path_factory.mktemp(kind)
            _hf_model(kind, tied).save_pretrained(made[kind, tied])
        return made[kind, tied]

    return make


DRAFTER = {
    "architectures": ["DFlashDraftModel"],
    "vocab_size": TINY["vocab_size"],
    "hidden_size": TINY["hidden_size"],
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rope_theta": 10000.0,
    "block_size": 8,
    "num_target_layers": TINY["num_hidden_layers"],
    "dflash_config": {"target_layer_ids": [0, 2], "mask_token_id": 96},
}


def drafter_tensors(config: dict) -> dict[str, torch.Tensor]:
    """Random weights under the names of a DFlash checkpoint (and DFlash2's, with a selector)."""
    generator = torch.Generator().manual_seed(11)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    dim = config["head_dim"]
    own, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    features = len(config["dflash_config"]["target_layer_ids"]) * hidden
    shapes = {"fc.weight": (hidden, features), "hidden_norm.weight": (hidden,)}
    shapes["norm.weight"] = (hidden,)
    for i in range(config["num_hidden_layers"]):
        name = f"layers.{i}"
        shapes |= {
            f"{name}.input_layernorm.weight": (hidden,),
            f"{name}.post_attention_layernorm.weight": (hidden,),
            f"{name}.self_attn.q_proj.weight": (own, hidden),
            f"{name}.self_attn.k_proj.weight": (kv, hidden),
            f"{name}.self_attn.v_proj.weight": (kv, hidden),
            f"{name}.self_attn.o_proj.weight": (hidden, own),
            f"{name}.self_attn.q_norm.weight": (dim,),
            f"{name}.self_attn.k_norm.weight": (dim,),
            f"{name}.mlp.gate_proj.weight": (inner, hidden),
            f"{name}.mlp.up_proj.weight": (inner, hidden),
            f"{name}.mlp.down_proj.weight": (hidden, inner),
        }
    if rank := config["dflash_config"].get("selector_rank"):
        table = (config["vocab_size"], rank)
        shapes["candidate_selector.predecessor_codebook"] = table
        shapes["candidate_selector.successor_codebook"] = table
        shapes["candidate_selector.hidden_projection.weight"] = (rank, hidden)
    return {
        name: torch.randn(shape, generator=generator) * 0.2 + (len(shape) == 1)
        for name, shape in shapes.items()
    }


@pytest.fixture(scope="session")
def drafter_folder(tmp_path_factory):
    """Factory of random DFlash drafter folders; keyword arguments change the config."""

    def make(nested: dict | None = None, **changes) -> Path:
        path = tmp_path_factory.mktemp("drafter")
        config = {**DRAFTER, **changes}
        config["dflash_config"] = {**DRAFTER["dflash_config"], **(nested or {})}
        (path / "config.json").write_text(json.dumps(config))
        save_file(drafter_tensors(config), path / "model.safetensors")
        return path

    return make
