"""The block drafter as a trainable module, in the DFlash format.

A block is the anchor (the last emitted token, which the target has not seen yet) and mask tokens;
row j of a block whose anchor stands at position n predicts the token at position n + j. Rows
attend to all rows of their block and to every position before the anchor, whose keys and values
come from the target's hidden states through ``fc`` and ``hidden_norm``. Embedding and LM head are
the target's. Source: DFlash (arXiv 2602.06036).

Shapes: ``features`` ``[B, T, layers * hidden]``, ``block_ids`` ``[B, A, R]`` for A anchors of R
rows, anchors ``[A]`` shared by the batch; hidden states come back as ``[B, A, R, hidden]``.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from specpilot.harness.deployments.pico.train.model import (
    MASK,
    GatedMLP,
    rotary_table,
    rotate,
)

__all__ = ["Drafter", "DrafterConfig", "block_ids", "load_drafter", "save_drafter"]


@dataclass(frozen=True)
class DrafterConfig:
    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 480
    num_hidden_layers: int = 3
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    rope_theta: float = 10000.0
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-6
    block_size: int = 16
    num_target_layers: int = 8
    target_layer_ids: tuple[int, ...] = (1, 4, 6)

    def to_hf(self) -> dict[str, object]:
        """The config.json that SGLang's DFLASH and the reference engine read."""
        fields = asdict(self)
        theta = fields.pop("rope_theta")
        layers = fields.pop("target_layer_ids")
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            **fields,
            "rope_theta": theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": theta},
            "dflash_config": {"target_layer_ids": list(layers), "mask_token_id": MASK},
            "attention_bias": False,
            "hidden_act": "silu",
            "layer_types": ["full_attention"] * self.num_hidden_layers,
            "tie_word_embeddings": True,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "dtype": "bfloat16",
        }

    @classmethod
    def from_hf(cls, config: dict) -> "DrafterConfig":
        known = {k: config[k] for k in cls.__dataclass_fields__ if k in config}
        layers = tuple(config["dflash_config"]["target_layer_ids"])
        return cls(**known | {"target_layer_ids": layers})


class Norm(nn.Module):
    """RMSNorm with plain weight, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return (y * self.weight.float()).to(x.dtype)


class BlockAttention(nn.Module):
    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = (
            c.num_attention_heads,
            c.num_key_value_heads,
            c.head_dim,
        )
        self.q_proj = nn.Linear(c.hidden_size, self.heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, self.kv_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, self.kv_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * c.head_dim, c.hidden_size, bias=False)
        self.q_norm = Norm(c.head_dim, c.rms_norm_eps)
        self.k_norm = Norm(c.head_dim, c.rms_norm_eps)

    def keys(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        k = self.k_proj(x).unflatten(-1, (self.kv_heads, self.head_dim))
        v = self.v_proj(x).unflatten(-1, (self.kv_heads, self.head_dim))
        return rotate(self.k_norm(k), cos, sin), v

    def forward(
        self,
        x: Tensor,
        context: Tensor,
        block_rope: tuple[Tensor, Tensor],
        context_rope: tuple[Tensor, Tensor],
        mask: Tensor,
    ) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (self.heads, self.head_dim))
        q = rotate(self.q_norm(q), *block_rope)
        pairs = [self.keys(context, *context_rope), self.keys(x, *block_rope)]
        k, v = (torch.cat(parts, 1).to(q.dtype) for parts in zip(*pairs, strict=True))
        repeat = self.heads // self.kv_heads
        k, v = k.repeat_interleave(repeat, 2), v.repeat_interleave(repeat, 2)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.o_proj(o.transpose(1, 2).flatten(-2))


class DraftLayer(nn.Module):
    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.input_layernorm = Norm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = Norm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = BlockAttention(c)
        self.mlp = GatedMLP(c.hidden_size, c.intermediate_size)

    def forward(
        self,
        x: Tensor,
        context: Tensor,
        block_rope: tuple[Tensor, Tensor],
        context_rope: tuple[Tensor, Tensor],
        mask: Tensor,
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, block_rope, context_rope, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nn.Module):
    cos: Tensor
    sin: Tensor

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config.num_hidden_layers))
        inputs = len(config.target_layer_ids) * config.hidden_size
        self.fc = nn.Linear(inputs, config.hidden_size, bias=False)
        self.hidden_norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        cos, sin = rotary_table(config.max_position_embeddings, config.head_dim, config.rope_theta)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for name, parameter in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(parameter)

    def forward(self, embedded: Tensor, features: Tensor, anchors: Tensor, rows: Tensor) -> Tensor:
        """embedded ``[B, A, R, hidden]``; rows ``[A]`` says how many rows of a block are in use."""
        batch, count, block, hidden = embedded.shape
        context = self.hidden_norm(self.fc(features))
        at = (anchors[:, None] + torch.arange(block, device=anchors.device)).flatten()
        block_rope = (self.cos[at][:, None], self.sin[at][:, None])
        length = features.shape[1]
        context_rope = (self.cos[:length, None], self.sin[:length, None])
        visible = block_mask(anchors, rows, block, length)
        # As an additive bias in the products' dtype the memory-efficient kernel takes it.
        dtype = torch.bfloat16 if torch.is_autocast_enabled(embedded.device.type) else context.dtype
        mask = torch.zeros(visible.shape, dtype=dtype, device=anchors.device)
        mask = mask.masked_fill(~visible, -torch.inf)[None, None]
        mask = mask.expand(batch, self.config.num_attention_heads, -1, -1)
        x = embedded.reshape(batch, count * block, hidden)
        for layer in self.layers:
            x = layer(x, context, block_rope, context_rope, mask)
        return self.norm(x).view(batch, count, block, hidden)


def block_mask(anchors: Tensor, rows: Tensor, block: int, length: int) -> Tensor:
    """Which keys (context, then all blocks' rows) each block row sees: bool [A*R, length + A*R]."""
    count = anchors.shape[0]
    anchor_of = torch.arange(count, device=anchors.device).repeat_interleave(block)
    row_of = torch.arange(block, device=anchors.device).repeat(count)
    context = torch.arange(length, device=anchors.device)[None, :] < anchors[anchor_of][:, None]
    own = anchor_of[:, None] == anchor_of[None, :]
    used = row_of[None, :] < rows[anchor_of][:, None]
    return torch.cat([context, own & used], 1)


def block_ids(ids: Tensor, anchors: Tensor, block: int) -> Tensor:
    """Anchor tokens of ids ``[B, T]`` followed by masks: ``[B, A, block]``."""
    out = ids.new_full((ids.shape[0], anchors.shape[0], block), MASK)
    out[:, :, 0] = ids[:, anchors]
    return out


def save_drafter(model: Drafter, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model.config.to_hf(), indent=2) + "\n")
    state = {k: v.detach().to("cpu", torch.bfloat16) for k, v in model.state_dict().items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def load_drafter(folder: Path, device: str | torch.device = "cpu") -> Drafter:
    config = DrafterConfig.from_hf(json.loads((folder / "config.json").read_text()))
    model = Drafter(config)
    state = load_file(folder / "model.safetensors")
    model.load_state_dict({k: v.float() for k, v in state.items()}, strict=True)
    return model.to(device)
