"""Fill a large hybrid target and its drafter with pico's weights, tensor by tensor.

The residual stream is pico's, copied; layers beyond pico's give back exactly nothing; heads and
MLP channels beyond pico's cancel; ids beyond pico's vocabulary repeat the logit of its mask token,
many times over, which the target never emits. So tokens and acceptance are pico's, and a step costs
what the large shape costs. Generators: nothing of the large size lies on disk, and no more than a
few tensors are held at once. Names are those of Hugging Face folders.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from specpilot.errors import InvalidInput
from specpilot.harness.deployments.pico_27b.cancel import Filler, Plan, plan

__all__ = ["fill_drafter", "fill_target"]

Config = Mapping[str, Any]
Weights = Mapping[str, Tensor]
MASK = 1
# pico's mask logit is at most -4 where its best is at least 4.5; eight times that weighs nothing.
NEVER = 8.0


def fill_target(
    small: Config, weights: Weights, large: Config, seed: int = 0
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of an untied ``Qwen3_5ForCausalLM`` of shape ``large`` (config.json).

    ``weights`` are pico's, on the device that is to do the work. Raises ``InvalidInput`` where head
    sizes, the conv's width or the kinds of pico's layers differ, or units cannot cancel.
    """
    _same(small, large, "head_dim", "linear_key_head_dim", "linear_value_head_dim")
    _same(small, large, "linear_conv_kernel_dim", "rms_norm_eps")
    kinds, own = list(large["layer_types"]), list(small["layer_types"])
    if kinds[: len(own)] != own:
        raise InvalidInput(
            f"the large shape's first layers must be {own}, got {kinds[: len(own)]}."
        )
    embedding = weights["model.embed_tokens.weight"]
    filler = _filler(small, large, embedding.device, seed)
    mask = embedding[MASK].expand(large["vocab_size"] - small["vocab_size"], -1)
    yield "model.embed_tokens.weight", torch.cat([embedding, mask]).repeat(1, filler.copies)
    yield "lm_head.weight", filler.reads(torch.cat([embedding, NEVER * mask]))
    yield "model.norm.weight", filler.tile(weights["model.norm.weight"])
    for index, kind in enumerate(kinds):
        real = index < len(own)
        layer = _layer(weights, f"model.layers.{index if real else own.index(kind)}.")
        if kind == "linear_attention":
            parts = _delta_net(filler, layer, real, small, large)
        else:
            parts = _attention(filler, layer, real, small, large, gated=True)
        for part, tensor in (*parts, *_rest(filler, layer, real, small, large)):
            yield f"model.layers.{index}.{part}", tensor


def fill_drafter(
    small: Config, weights: Weights, large: Config, seed: int = 1
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a ``DFlashDraftModel`` of shape ``large``; as ``fill_target``."""
    _same(small, large, "head_dim", "rms_norm_eps", "rope_theta", "dflash_config")
    filler = _filler(small, large, weights["fc.weight"].device, seed)
    features = weights["fc.weight"].split(small["hidden_size"], 1)
    yield "fc.weight", filler.tile(torch.cat([filler.reads(part) for part in features], 1))
    for name in ("hidden_norm.weight", "norm.weight"):
        yield name, filler.tile(weights[name])
    for index in range(large["num_hidden_layers"]):
        real = index < small["num_hidden_layers"]
        layer = _layer(weights, f"layers.{index if real else 0}.")
        parts = _attention(filler, layer, real, small, large, gated=False)
        for part, tensor in (*parts, *_rest(filler, layer, real, small, large)):
            yield f"layers.{index}.{part}", tensor


def _filler(small: Config, large: Config, device: torch.device, seed: int) -> Filler:
    copies, rest = divmod(large["hidden_size"], small["hidden_size"])
    if rest:
        raise InvalidInput(
            f"hidden_size {large['hidden_size']} is no multiple of {small['hidden_size']}."
        )
    return Filler(copies, device, seed)


def _same(small: Config, large: Config, *names: str) -> None:
    for name in names:
        if small[name] != large[name]:
            raise InvalidInput(f"{name} is {large[name]}, and must be pico's {small[name]}.")


def _layer(weights: Weights, prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}


def _delta_net(
    filler: Filler, layer: Weights, real: bool, small: Config, large: Config
) -> Iterator[tuple[str, Tensor]]:
    """A unit is a key head with its value heads."""
    heads, dk = small["linear_num_key_heads"], small["linear_key_head_dim"]
    dv = small["linear_value_head_dim"]
    group, rest = divmod(small["linear_num_value_heads"], heads)
    if rest or large["linear_num_value_heads"] != group * large["linear_num_key_heads"]:
        raise InvalidInput(f"the large shape must have {group} value heads for each key head.")
    used = heads if real else 0
    units = plan(large["linear_num_key_heads"], range(used))
    sizes = [heads * dk, heads * dk, heads * group * dv]

    def feed(weight: Tensor, stream: bool = True) -> Tensor:
        return filler.rows(weight.unflatten(0, (heads, -1))[:used], units, stream)

    qkv = layer["linear_attn.in_proj_qkv.weight"].split(sizes)
    yield "linear_attn.in_proj_qkv.weight", torch.cat([feed(part) for part in qkv])
    taps = layer["linear_attn.conv1d.weight"][:, 0].split(sizes)
    yield "linear_attn.conv1d.weight", torch.cat([feed(part, False) for part in taps])[:, None]
    for name in ("z", "b", "a"):
        yield (
            f"linear_attn.in_proj_{name}.weight",
            feed(layer[f"linear_attn.in_proj_{name}.weight"]),
        )
    for name in ("dt_bias", "A_log"):
        yield f"linear_attn.{name}", feed(layer[f"linear_attn.{name}"][:, None], False)[:, 0]
    yield "linear_attn.norm.weight", layer["linear_attn.norm.weight"]
    back = layer["linear_attn.out_proj.weight"].unflatten(1, (heads, -1))[:, :used]
    yield "linear_attn.out_proj.weight", filler.returns(back, units)


def _attention(
    filler: Filler, layer: Weights, real: bool, small: Config, large: Config, gated: bool
) -> Iterator[tuple[str, Tensor]]:
    """Query heads beyond pico's cancel within their KV head, KV heads beyond pico's as a whole."""
    heads, kv_heads = small["num_attention_heads"], small["num_key_value_heads"]
    kv = plan(large["num_key_value_heads"], range(kv_heads if real else 0))
    each, rest = divmod(large["num_attention_heads"], large["num_key_value_heads"])
    if rest or each < heads // kv_heads:
        raise InvalidInput(
            f"the large shape needs {heads // kv_heads} query heads a KV head or more."
        )
    queries = _queries(kv, each, heads // kv_heads)
    q = layer["self_attn.q_proj.weight"].unflatten(0, (heads, -1))
    yield "self_attn.q_proj.weight", filler.rows(q[: queries.real], queries)
    for name in ("self_attn.k_proj.weight", "self_attn.v_proj.weight"):
        yield name, filler.rows(layer[name].unflatten(0, (kv_heads, -1))[: kv.real], kv)
    back = layer["self_attn.o_proj.weight"].unflatten(1, (heads, -1))[:, : queries.real]
    yield "self_attn.o_proj.weight", filler.returns(back, queries)
    for name in ("self_attn.q_norm.weight", "self_attn.k_norm.weight"):
        yield name, layer[name]


def _queries(kv: Plan, each: int, own: int) -> Plan:
    """Query heads under their KV heads' plan: ``each`` a KV head, of which pico fills ``own``."""
    within = plan(each, range(own))
    real, groups = kv.real * own, kv.real * within.groups
    source: list[int] = []
    coefficient: list[float] = []
    for head, factor in zip(kv.source, kv.coefficient, strict=True):
        for slot in range(each):
            if head >= kv.real:
                source.append(real + groups + (head - kv.real) * each + slot)
                coefficient.append(factor)
                continue
            inner = within.source[slot]
            if inner < own:
                source.append(head * own + inner)
            else:
                source.append(real + head * within.groups + inner - own)
            coefficient.append(within.coefficient[slot])
    return Plan(tuple(source), tuple(coefficient), real)


def _rest(
    filler: Filler, layer: Weights, real: bool, small: Config, large: Config
) -> Iterator[tuple[str, Tensor]]:
    channels: Sequence[int] = range(small["intermediate_size"] if real else 0)
    units = plan(large["intermediate_size"], channels)
    for name in ("mlp.gate_proj.weight", "mlp.up_proj.weight"):
        yield name, filler.rows(layer[name][:, None][: units.real], units)
    yield (
        "mlp.down_proj.weight",
        filler.returns(layer["mlp.down_proj.weight"][:, : units.real, None], units),
    )
    for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
        yield name, filler.tile(layer[name])
