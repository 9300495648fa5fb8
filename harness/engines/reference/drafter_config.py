"""What a DFlash or DSpark drafter's ``config.json`` says, in the fields that SGLang 0.5.20 reads.

A drafter with grouped convolutions, attention sinks, a value scale, a Domino head or causal or
sliding layers is another model; it is refused rather than run wrongly.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specpilot.errors import InvalidInput, Unsupported
from specpilot.harness.engines.reference.config import Fields, TargetConfig, read_json

__all__ = ["DrafterConfig"]

DFLASH = frozenset({"DFlashDraftModel", "DFlash2DraftModel"})
DSPARK = frozenset({"DSparkDraftModel", "Qwen3DSparkModel"})
UNSUPPORTED = (
    "attention_sink_bias",
    "attention_value_scale",
    "conv_kernel_size",
    "final_logit_softcapping",
    "projector_type",
)


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    """A block drafter's shape. ``block`` counts the anchor; ``target_layers`` are 0-based.

    ``selector_rank`` and ``selector_top_k`` belong to DFlash2's pairwise selector, ``markov_rank``
    and ``markov_gated`` to DSpark's Markov head; 0 without one. ``anchor_drafts``: the anchor's own
    row drafts the first token (DSpark), so that a block of n drafts runs n rows; else the masks'
    rows draft alone (DFlash).
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    attention_bias: bool
    block: int
    mask_id: int
    target_layers: tuple[int, ...]
    selector_rank: int
    selector_top_k: int
    markov_rank: int
    markov_gated: bool
    anchor_drafts: bool

    @classmethod
    def load(cls, folder: Path, target: TargetConfig) -> "DrafterConfig":
        """Parse ``folder/config.json`` and check it against the target it drafts for.

        Raises ``NotFound``, ``InvalidInput`` (fields missing, or another hidden size, vocabulary or
        layer count than the target's) or ``Unsupported``.
        """
        path = folder / "config.json"
        raw = read_json(path)
        names = raw.get("architectures") or ["?"]
        dspark = not DSPARK.isdisjoint(names)
        if not dspark and DFLASH.isdisjoint(names):
            raise Unsupported(
                f"{path}: drafter architecture {names[0]!r} is not supported.",
                hint=f"The reference engine runs {', '.join(sorted(DFLASH | DSPARK))}.",
            )
        merged = dict(raw)
        for name in ("dflash_config", "dspark_config") if dspark else ("dflash_config",):
            nested = raw.get(name) or {}
            if not isinstance(nested, dict):
                raise InvalidInput(f"{path}: {name} must be an object, got {nested!r}.")
            merged |= nested
        fields = Fields(merged, str(path))
        _refuse(fields)
        config = cls(
            vocab_size=fields.count("vocab_size"),
            hidden_size=fields.count("hidden_size"),
            intermediate_size=fields.count("intermediate_size"),
            layers=fields.count("num_hidden_layers"),
            heads=fields.count("num_attention_heads"),
            kv_heads=fields.count("num_key_value_heads", fields.count("num_attention_heads")),
            head_dim=fields.count("head_dim"),
            rope_theta=fields.rope(1.0)[0],
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            attention_bias=fields.flag("attention_bias", False),
            block=fields.count("block_size", 16) + dspark,  # DSpark counts drafts alone
            mask_id=_mask_id(fields),
            target_layers=_target_layers(fields, len(target.layer_types)),
            selector_rank=fields.count("selector_rank") if fields.get("selector_rank") else 0,
            selector_top_k=fields.count("selector_top_k") if fields.get("selector_top_k") else 0,
            markov_rank=fields.count("markov_rank") if dspark else 0,
            markov_gated=dspark and _markov_gated(fields),
            anchor_drafts=dspark,
        )
        config._fits(target, str(path))
        return config

    def _fits(self, target: TargetConfig, where: str) -> None:
        for name in ("hidden_size", "vocab_size"):
            mine, theirs = getattr(self, name), getattr(target, name)
            if mine != theirs:
                raise InvalidInput(
                    f"{where}: {name} is {mine}, the target's is {theirs}.",
                    hint="A block drafter shares embedding and LM head with the target it was "
                    "trained on; give that pair.",
                )
        if self.mask_id >= target.vocab_size:
            raise InvalidInput(
                f"{where}: mask_token_id {self.mask_id} lies outside the vocabulary of "
                f"{target.vocab_size}."
            )
        if self.heads % self.kv_heads:
            raise InvalidInput(
                f"{where}: num_attention_heads {self.heads} is not a multiple of "
                f"num_key_value_heads {self.kv_heads}."
            )
        if bool(self.selector_rank) != bool(self.selector_top_k):
            raise InvalidInput(f"{where}: selector_rank and selector_top_k come together.")


def _refuse(fields: Fields) -> None:
    for name in UNSUPPORTED:
        if fields.get(name):
            raise Unsupported(f"{fields.where}: {name} {fields.get(name)!r} is not supported.")
    kinds = fields.get("layer_types")
    if kinds is not None and any(kind != "full_attention" for kind in kinds):
        raise Unsupported(f"{fields.where}: layer_types may list full_attention only.")
    if fields.get("is_causal") or fields.get("output_multiplier") not in (None, 1, 1.0):
        raise Unsupported(f"{fields.where}: is_causal and output_multiplier are not supported.")
    if fields.rope(1.0)[1] != 1.0:
        raise Unsupported(f"{fields.where}: partial rotary positions are not supported.")


def _markov_gated(fields: Fields) -> bool:
    """Whether the head is gated. A recurrent head has no finite lattice and is refused."""
    if fields.get("speculators_model_type") == "dspark":
        raise Unsupported(
            f"{fields.where}: this DSpark checkpoint drafts from the masks' rows (speculators' "
            "convention); the engine runs DeepSpec's, where the anchor's row drafts first."
        )
    kind = fields.text("markov_head_type", "vanilla").lower()
    if kind not in ("vanilla", "gated"):
        raise Unsupported(f"{fields.where}: markov_head_type {kind!r} is not supported.")
    return kind == "gated"


def _mask_id(fields: Fields) -> int:
    value: Any = fields.get("mask_token_id")
    if type(value) is not int or value < 0:
        raise InvalidInput(f"{fields.where}: mask_token_id must be a token id, got {value!r}.")
    return value


def _target_layers(fields: Fields, target_layers: int) -> tuple[int, ...]:
    if (stated := fields.get("num_target_layers")) not in (None, target_layers):
        raise InvalidInput(
            f"{fields.where}: num_target_layers is {stated}, the target has {target_layers}."
        )
    listed = fields.get("target_layer_ids")
    if not isinstance(listed, list) or not listed:
        raise InvalidInput(
            f"{fields.where}: target_layer_ids must list 0-based target layers, got {listed!r}."
        )
    for layer in listed:
        if type(layer) is not int or not 0 <= layer < target_layers:
            raise InvalidInput(
                f"{fields.where}: target_layer_ids holds {layer!r}, outside 0 to "
                f"{target_layers - 1}."
            )
    return tuple(listed)
