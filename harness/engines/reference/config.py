"""What a Hugging Face ``config.json`` says about a target: shapes, layer kinds, special tokens.

Two families are known. *Hybrid* is Qwen3.5's text model: Gated DeltaNet layers with a
full-attention layer every few, gated attention output, q/k norm, partial rotary positions, norms
that store w - 1. *Dense* is Llama and Qwen3. Everything else is refused here, before any weight is
read.

Sources: the configuration classes of ``transformers`` (qwen3_5, qwen3, llama).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from specpilot.errors import InvalidInput, NotFound, Unsupported

__all__ = ["Fields", "GdnConfig", "TargetConfig", "read_json"]

LayerKind = Literal["linear_attention", "full_attention"]

HYBRID = ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration")
DENSE = ("LlamaForCausalLM", "Qwen3ForCausalLM")


@dataclass(frozen=True, slots=True)
class GdnConfig:
    """Shape of the Gated DeltaNet layers. ``value_heads`` is a multiple of ``key_heads``."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int

    @property
    def conv_channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class TargetConfig:
    """A target's shape. ``rotary_dim`` leading dimensions of each head carry positions."""

    architecture: str
    prefix: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layer_types: tuple[LayerKind, ...]
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    rms_norm_eps: float
    max_positions: int
    tied: bool
    attention_bias: bool
    qk_norm: bool
    output_gate: bool
    norm_offset: float
    gdn: GdnConfig | None
    eos_ids: tuple[int, ...]

    @classmethod
    def load(cls, folder: Path) -> "TargetConfig":
        """Parse ``folder/config.json`` (and the EOS ids of ``generation_config.json``).

        Raises ``NotFound``, ``InvalidInput`` (missing or contradicting fields) or ``Unsupported``
        (another architecture, activation, rotary scaling or layer kind).
        """
        raw = read_json(folder / "config.json")
        names = raw.get("architectures") or ["?"]
        known = [name for name in names if name in HYBRID + DENSE]
        if not known:
            raise Unsupported(
                f"{folder / 'config.json'}: architecture {names[0]!r} is not supported.",
                hint=f"The reference engine runs {', '.join(HYBRID + DENSE)}.",
            )
        composed = known[0] == "Qwen3_5ForConditionalGeneration"
        text = raw.get("text_config") if composed else raw
        if not isinstance(text, Mapping):
            raise InvalidInput(f"{folder / 'config.json'}: text_config is missing.")
        if composed:
            text = {"tie_word_embeddings": raw.get("tie_word_embeddings", False), **text}
        eos = text.get("eos_token_id", raw.get("eos_token_id"))
        generation = folder / "generation_config.json"
        more = read_json(generation).get("eos_token_id") if generation.exists() else None
        return cls.parse(
            known[0],
            Fields(text, str(folder / "config.json")),
            prefix="model.language_model." if composed else "model.",
            eos_ids=tuple(dict.fromkeys(_id_list(eos) + _id_list(more))),
        )

    @classmethod
    def parse(
        cls, architecture: str, fields: "Fields", prefix: str, eos_ids: tuple[int, ...]
    ) -> "TargetConfig":
        """Build from the text model's fields. Raises as ``load`` does."""
        hybrid = architecture in HYBRID
        if (act := fields.text("hidden_act", "silu")) != "silu":
            raise Unsupported(f"{fields.where}: hidden_act {act!r} is not supported, only 'silu'.")
        if fields.flag("mlp_bias", False):
            raise Unsupported(f"{fields.where}: mlp_bias is not supported.")
        hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
        kv_heads = fields.count("num_key_value_heads", None if hybrid else heads)
        if heads % kv_heads:
            raise InvalidInput(
                f"{fields.where}: num_attention_heads {heads} is not a multiple of "
                f"num_key_value_heads {kv_heads}."
            )
        if fields.get("head_dim") is None and hidden % heads:
            raise InvalidInput(
                f"{fields.where}: hidden_size {hidden} is not a multiple of "
                f"num_attention_heads {heads} and head_dim is not given."
            )
        head_dim = fields.count("head_dim", hidden // heads)
        theta, rotary = fields.rope(0.25 if hybrid else 1.0)
        rotary_dim = int(head_dim * rotary)
        if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
            raise InvalidInput(
                f"{fields.where}: partial_rotary_factor {rotary} of head_dim {head_dim} gives "
                f"{rotary_dim} rotary dimensions; an even number from 2 to {head_dim} is needed."
            )
        return cls(
            architecture=architecture,
            prefix=prefix,
            vocab_size=fields.count("vocab_size"),
            hidden_size=hidden,
            intermediate_size=fields.count("intermediate_size"),
            layer_types=_layer_types(fields, hybrid),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            rotary_dim=rotary_dim,
            rope_theta=theta,
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            max_positions=fields.count("max_position_embeddings"),
            tied=fields.flag("tie_word_embeddings", False),
            attention_bias=fields.flag("attention_bias", False),
            qk_norm=architecture != "LlamaForCausalLM",
            output_gate=hybrid,
            norm_offset=1.0 if hybrid else 0.0,
            gdn=_gdn(fields) if hybrid else None,
            eos_ids=eos_ids,
        )


class Fields:
    """Typed access to a parsed ``config.json``; every error names the file, field and value."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw = raw
        self.where = where

    def get(self, name: str) -> Any:
        return self.raw.get(name)

    def count(self, name: str, default: int | None = None) -> int:
        """Return a positive integer. Raises ``InvalidInput`` if it is missing or anything else."""
        value = self._value(name, default)
        if type(value) is not int or value < 1:
            raise InvalidInput(f"{self.where}: {name} must be a positive integer, got {value!r}.")
        return value

    def number(self, name: str, default: float) -> float:
        """Return a positive number."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise InvalidInput(f"{self.where}: {name} must be a positive number, got {value!r}.")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise InvalidInput(f"{self.where}: {name} must be true or false, got {value!r}.")
        return value

    def text(self, name: str, default: str) -> str:
        value = self._value(name, default)
        if not isinstance(value, str):
            raise InvalidInput(f"{self.where}: {name} must be a string, got {value!r}.")
        return value

    def rope(self, default_factor: float) -> tuple[float, float]:
        """Return (theta, fraction of the head that rotates), from either place that holds them.

        ``rope_parameters`` (transformers 5) wins over the top-level ``rope_theta`` and
        ``partial_rotary_factor``. Raises ``Unsupported`` for scaled rotary positions.
        """
        nested = self.raw.get("rope_parameters") or self.raw.get("rope_scaling") or {}
        if not isinstance(nested, Mapping):
            raise InvalidInput(f"{self.where}: rope_parameters must be an object, got {nested!r}.")
        kind = nested.get("rope_type", nested.get("type", "default"))
        if kind != "default":
            raise Unsupported(
                f"{self.where}: rotary positions of type {kind!r} are not supported.",
                hint="Only 'default' is.",
            )
        merged = Fields({**self.raw, **nested}, self.where)
        return (
            merged.number("rope_theta", 10000.0),
            merged.number("partial_rotary_factor", default_factor),
        )

    def _value(self, name: str, default: Any) -> Any:
        value = self.raw.get(name)
        if value is None:
            value = default
        if value is None:
            raise InvalidInput(f"{self.where}: field {name!r} is missing.")
        return value


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in ``path``. Raises ``NotFound`` or ``InvalidInput``."""
    if not path.is_file():
        raise NotFound(
            f"{path} does not exist.", hint="Give a Hugging Face model folder that holds it."
        )
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidInput(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(value, dict):
        raise InvalidInput(f"{path} must hold a JSON object, got {type(value).__name__}.")
    return value


def _layer_types(fields: Fields, hybrid: bool) -> tuple[LayerKind, ...]:
    layers = fields.count("num_hidden_layers")
    listed = fields.get("layer_types")
    if listed is None:
        every = fields.count("full_attention_interval", 4) if hybrid else 1
        return tuple(
            "full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(layers)
        )
    if not isinstance(listed, list) or len(listed) != layers:
        raise InvalidInput(
            f"{fields.where}: layer_types lists "
            f"{len(listed) if isinstance(listed, list) else listed!r} layers, "
            f"num_hidden_layers is {layers}."
        )
    allowed = ("linear_attention", "full_attention") if hybrid else ("full_attention",)
    for i, kind in enumerate(listed):
        if kind not in allowed:
            raise Unsupported(
                f"{fields.where}: layer_types[{i}] is {kind!r}; this architecture runs "
                f"{' and '.join(allowed)} only."
            )
    return tuple(listed)


def _gdn(fields: Fields) -> GdnConfig:
    gdn = GdnConfig(
        key_heads=fields.count("linear_num_key_heads"),
        value_heads=fields.count("linear_num_value_heads"),
        key_dim=fields.count("linear_key_head_dim"),
        value_dim=fields.count("linear_value_head_dim"),
        conv_width=fields.count("linear_conv_kernel_dim"),
    )
    if gdn.value_heads % gdn.key_heads:
        raise InvalidInput(
            f"{fields.where}: linear_num_value_heads {gdn.value_heads} is not a multiple of "
            f"linear_num_key_heads {gdn.key_heads}."
        )
    if gdn.conv_width < 2:
        raise Unsupported(f"{fields.where}: linear_conv_kernel_dim must be at least 2.")
    return gdn


def _id_list(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if any(type(i) is not int or i < 0 for i in ids):
        raise InvalidInput(f"eos_token_id must be an id or a list of ids, got {value!r}.")
    return tuple(ids)
