"""Tiny random models of both families, written as Hugging Face folders."""

from pathlib import Path

import pytest
import torch

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
