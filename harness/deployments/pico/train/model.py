"""The target as a trainable module whose parameters carry Hugging Face's names.

Layout of ``Qwen3_5ForCausalLM`` (text part): blocks of a token mixer and a gated MLP, where the
mixer is a Gated DeltaNet or, every fourth layer, attention with an output gate. Written for
training on whole sequences: nothing here decodes (see ``generate``).

Shapes: ids ``[B, T]`` int64, hidden states ``[B, T, hidden]``; the residual stream stays in the
parameters' dtype (float32 in training), matrix products follow autocast.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from specpilot.kernels.gdn_chunk.naive import chunk_gated_delta_rule

__all__ = ["Target", "TargetConfig", "load_target", "rotate", "rotary_table", "save_target"]

END_OF_TEXT, MASK = 0, 1


@dataclass(frozen=True)
class TargetConfig:
    """The 27B's shape in small: hidden is a 20th of 5120, heads keep their full size."""

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 512
    num_hidden_layers: int = 8
    full_attention_interval: int = 4
    num_attention_heads: int = 2
    num_key_value_heads: int = 1
    head_dim: int = 256
    partial_rotary_factor: float = 0.25
    rope_theta: float = 10000.0
    linear_num_key_heads: int = 1
    linear_num_value_heads: int = 3
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_conv_kernel_dim: int = 4
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-6

    @property
    def layer_types(self) -> list[str]:
        every = self.full_attention_interval
        return [
            "linear_attention" if (i + 1) % every else "full_attention"
            for i in range(self.num_hidden_layers)
        ]

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)

    def to_hf(self) -> dict[str, object]:
        """The config.json that transformers, SGLang and the reference engine read."""
        fields = asdict(self)
        rope = {
            "rope_type": "default",
            "rope_theta": fields.pop("rope_theta"),
            "partial_rotary_factor": fields["partial_rotary_factor"],
        }
        return {
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            **fields,
            "layer_types": self.layer_types,
            "rope_parameters": rope,
            "attention_bias": False,
            "attn_output_gate": True,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "tie_word_embeddings": True,
            "bos_token_id": END_OF_TEXT,
            "eos_token_id": END_OF_TEXT,
            "dtype": "bfloat16",
        }

    @classmethod
    def from_hf(cls, config: dict) -> "TargetConfig":
        known = {k: config[k] for k in cls.__dataclass_fields__ if k in config}
        return cls(**known | {"rope_theta": config["rope_parameters"]["rope_theta"]})


class ZeroCentredNorm(nn.Module):
    """RMSNorm with weight ``1 + w``, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return (y * (1.0 + self.weight.float())).to(x.dtype)


class GatedNorm(nn.Module):
    """``rmsnorm(x) * w * silu(gate)`` over a head's values, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return y * self.weight.float() * F.silu(gate.float())


class CausalConv(nn.Module):
    """Holds the depthwise taps under the name and shape that Conv1d gives them."""

    def __init__(self, channels: int, taps: int) -> None:
        super().__init__()
        bound = taps**-0.5
        self.weight = nn.Parameter(torch.empty(channels, 1, taps).uniform_(-bound, bound))

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, C] -> [B, T, C]; shifted products, since Conv1d's backward is slow for one tap a
        channel."""
        taps = self.weight.shape[-1]
        tokens = x.shape[1]
        padded = F.pad(x.float(), (0, 0, taps - 1, 0))
        y = padded[:, :tokens] * self.weight[:, 0, 0].float()
        for j in range(1, taps):
            y = y + padded[:, j : j + tokens] * self.weight[:, 0, j].float()
        return F.silu(y)


class GatedDeltaNet(nn.Module):
    def __init__(self, c: TargetConfig) -> None:
        super().__init__()
        self.key_heads, self.value_heads = c.linear_num_key_heads, c.linear_num_value_heads
        self.dk, self.dv = c.linear_key_head_dim, c.linear_value_head_dim
        self.key_size, self.value_size = self.key_heads * self.dk, self.value_heads * self.dv
        channels = 2 * self.key_size + self.value_size
        self.in_proj_qkv = nn.Linear(c.hidden_size, channels, bias=False)
        self.in_proj_z = nn.Linear(c.hidden_size, self.value_size, bias=False)
        self.in_proj_b = nn.Linear(c.hidden_size, self.value_heads, bias=False)
        self.in_proj_a = nn.Linear(c.hidden_size, self.value_heads, bias=False)
        self.conv1d = CausalConv(channels, c.linear_conv_kernel_dim)
        # Decay as in Mamba 2: A in [1, 16], step in [0.001, 0.1] through softplus.
        step = torch.exp(torch.empty(self.value_heads).uniform_(math.log(1e-3), math.log(0.1)))
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))
        self.A_log = nn.Parameter(torch.empty(self.value_heads).uniform_(1, 16).log())
        self.norm = GatedNorm(self.dv, c.rms_norm_eps)
        self.out_proj = nn.Linear(self.value_size, c.hidden_size, bias=False)

    def gates(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Log decay g and write strength beta, ``[..., Hv]`` float32."""
        step = F.softplus(self.in_proj_a(x).float() + self.dt_bias.float())
        return -self.A_log.float().exp() * step, self.in_proj_b(x).float().sigmoid()

    def split(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Convolved channels ``[..., C]`` -> unit q (scaled), unit k, v with their heads."""
        q, k, v = mixed.split([self.key_size, self.key_size, self.value_size], -1)
        q, k = (x.unflatten(-1, (self.key_heads, self.dk)) for x in (q, k))
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        return q * self.dk**-0.5, k, v.unflatten(-1, (self.value_heads, self.dv))

    def finish(self, o: Tensor, x: Tensor) -> Tensor:
        gate = self.in_proj_z(x).unflatten(-1, (self.value_heads, self.dv))
        return self.out_proj(self.norm(o, gate).flatten(-2).to(gate.dtype))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        g, beta = self.gates(x)
        q, k, v = self.split(self.conv1d(self.in_proj_qkv(x)))
        with torch.autocast(x.device.type, enabled=False):
            o, _ = chunk_gated_delta_rule(q, k, v, g, beta)
        return self.finish(o, x)


class GatedAttention(nn.Module):
    def __init__(self, c: TargetConfig) -> None:
        super().__init__()
        self.head_dim, self.heads, self.kv_heads = (
            c.head_dim,
            c.num_attention_heads,
            c.num_key_value_heads,
        )
        self.q_proj = nn.Linear(c.hidden_size, 2 * self.heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, self.kv_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, self.kv_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * c.head_dim, c.hidden_size, bias=False)
        self.q_norm = ZeroCentredNorm(c.head_dim, c.rms_norm_eps)
        self.k_norm = ZeroCentredNorm(c.head_dim, c.rms_norm_eps)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        """q ``[..., H, D]``, k, v ``[..., Hkv, D]`` and the gate ``[..., H * D]``."""
        q, gate = self.q_proj(x).unflatten(-1, (self.heads, 2 * self.head_dim)).chunk(2, -1)
        k = self.k_proj(x).unflatten(-1, (self.kv_heads, self.head_dim))
        v = self.v_proj(x).unflatten(-1, (self.kv_heads, self.head_dim))
        q, k = rotate(self.q_norm(q), cos, sin), rotate(self.k_norm(k), cos, sin)
        return q, k, v, gate.flatten(-2)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v, gate = self.project(x, cos, sin)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(o.transpose(1, 2).flatten(-2) * gate.sigmoid())


class GatedMLP(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    linear_attn: GatedDeltaNet
    self_attn: GatedAttention

    def __init__(self, c: TargetConfig, kind: str) -> None:
        super().__init__()
        self.input_layernorm = ZeroCentredNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = ZeroCentredNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = GatedMLP(c.hidden_size, c.intermediate_size)
        if kind == "linear_attention":
            self.linear_attn = GatedDeltaNet(c)
        else:
            self.self_attn = GatedAttention(c)
        self.kind = kind

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        mixer = self.linear_attn if self.kind == "linear_attention" else self.self_attn
        x = x + mixer(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    def __init__(self, c: TargetConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Block(c, kind) for kind in c.layer_types)
        self.norm = ZeroCentredNorm(c.hidden_size, c.rms_norm_eps)


class Target(nn.Module):
    """The trainable target; the embedding is also the LM head."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Body(config)
        cos, sin = rotary_table(
            config.max_position_embeddings, config.rotary_dim, config.rope_theta
        )
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for name, parameter in self.named_parameters():
            if "embed_tokens" in name:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(parameter)  # every block starts as the identity
            elif parameter.ndim == 2:
                bound = math.sqrt(3 / parameter.shape[1])
                nn.init.uniform_(parameter, -bound, bound)

    def forward(self, ids: Tensor, keep: tuple[int, ...] = ()) -> tuple[Tensor, list[Tensor]]:
        """Final normalised hidden states, and the residual stream after the layers ``keep``."""
        x = self.model.embed_tokens(ids)
        cos, sin = self.cos[: ids.shape[1], None], self.sin[: ids.shape[1], None]
        kept = []
        for index, layer in enumerate(self.model.layers):
            x = layer(x, cos, sin)
            if index in keep:
                kept.append(x)
        return self.model.norm(x), kept

    def blocks(self) -> Iterator[Block]:
        for layer in self.model.layers:
            assert isinstance(layer, Block)
            yield layer

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.model.embed_tokens.weight)


def rotary_table(length: int, dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin ``[length, dim]`` float32 in the half-split layout."""
    inverse = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * inverse
    angle = torch.cat([angle, angle], -1)
    return angle.cos().float(), angle.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first ``cos.shape[-1]`` features of x ``[..., D]`` and keep x's dtype."""
    turned, kept = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], -1)
    left, right = turned.float().chunk(2, -1)
    turned = turned.float() * cos + torch.cat([-right, left], -1) * sin
    return torch.cat([turned.to(x.dtype), kept], -1)


def save_target(model: Target, folder: Path) -> None:
    """Write config.json and model.safetensors (bfloat16) as an ordinary Hugging Face folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model.config.to_hf(), indent=2) + "\n")
    state = {k: v.detach().to("cpu", torch.bfloat16) for k, v in model.state_dict().items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def load_target(folder: Path, device: str | torch.device = "cpu") -> Target:
    """Read such a folder into a float32 module (the values stay what bfloat16 can hold)."""
    config = TargetConfig.from_hf(json.loads((folder / "config.json").read_text()))
    model = Target(config)
    state = load_file(folder / "model.safetensors")
    model.load_state_dict({k: v.float() for k, v in state.items()}, strict=True)
    return model.to(device)
