"""A tiny random deployment of the reference engine: hybrid target and DFlash drafter on disk."""

import json

import pytest

from specpilot.types import Deployment, Regime

SIZE = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
}
DRAFTER = {
    **SIZE,
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "block_size": 16,
    "dflash_config": {"target_layer_ids": [1, 3], "mask_token_id": 96},
}


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    """Each test has its own state directory: no calibration of this machine leaks in."""
    monkeypatch.setenv("SPECPILOT_HOME", str(tmp_path / "home"))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Deployment:
    """A deployment whose stock is a chain of 8 rows."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from safetensors.torch import save_file

    torch.manual_seed(3)
    target = tmp_path_factory.mktemp("target")
    config = transformers.Qwen3_5TextConfig(
        **SIZE,
        num_hidden_layers=4,
        initializer_range=0.2,
        linear_num_key_heads=2,
        linear_num_value_heads=6,
        linear_key_head_dim=16,
        linear_value_head_dim=8,
        full_attention_interval=2,
        eos_token_id=1,
    )
    transformers.Qwen3_5ForCausalLM(config).save_pretrained(target)

    hidden, inner, width = 48, 80, 4 * 32
    shapes = {
        "fc.weight": (hidden, 2 * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
        "layers.0.input_layernorm.weight": (hidden,),
        "layers.0.post_attention_layernorm.weight": (hidden,),
        "layers.0.mlp.gate_proj.weight": (inner, hidden),
        "layers.0.mlp.up_proj.weight": (inner, hidden),
        "layers.0.mlp.down_proj.weight": (hidden, inner),
        "layers.0.self_attn.q_proj.weight": (width, hidden),
        "layers.0.self_attn.k_proj.weight": (width // 2, hidden),
        "layers.0.self_attn.v_proj.weight": (width // 2, hidden),
        "layers.0.self_attn.o_proj.weight": (hidden, width),
        "layers.0.self_attn.q_norm.weight": (32,),
        "layers.0.self_attn.k_norm.weight": (32,),
    }
    tensors = {
        name: torch.ones(shape) if "norm" in name else 0.2 * torch.randn(shape)
        for name, shape in shapes.items()
    }
    drafter = tmp_path_factory.mktemp("drafter")
    save_file(tensors, drafter / "model.safetensors")
    (drafter / "config.json").write_text(json.dumps(DRAFTER))
    return Deployment(
        id="tiny",
        title="tiny",
        engine="reference",
        target=str(target),
        drafter=str(drafter),
        drafter_kind="dflash",
        hardware="cpu",
        dtype="float32",
        regime=Regime(requests=1, prompt_tokens=24, output_tokens=40),
        workload="mock",
        stock={"speculation": "chain", "block": 8},
        launch={"context": 192},
    )


@pytest.fixture(scope="session")
def prompts() -> list[tuple[int, ...]]:
    return [tuple((7 * i + 13 * j) % 95 + 2 for i in range(24)) for j in range(6)]
