"""The shape of a decoder as the cost model sees it: matrices, attention, recurrent state.

A shape counts parameters, bytes and FLOPs of one forward pass; it knows no machine and no time.
``layouts`` reads it from a Hugging Face config, ``drafters`` adds what a drafter needs on top.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from specpilot.errors import InvalidInput, Unsupported

__all__ = [
    "W12_BITS",
    "AttentionShape",
    "GdnShape",
    "LinearGroup",
    "ModelShape",
    "distinct_experts",
]

W12_BITS = 12.03
"""Bits a W12 weight takes, escapes and bases included: 33.58 of 44.67 GB (SpecPilot paper)."""

WEIGHT_FORMATS: Mapping[str, float] = {
    "bf16": 16.0,
    "fp32": 32.0,
    "w12": W12_BITS,
    "fp8": 8.0 + 32 / (128 * 128),  # an fp32 scale for each 128 × 128 block
    "int4": 4.0 + 32 / 128,  # an fp16 scale and an fp16 zero for each group of 128
}
"""Bits a weight takes in the formats that a what-if may name, scales included."""


def distinct_experts(experts: int, active: int, tokens: float) -> float:
    """Expected number of distinct experts that ``tokens`` tokens touch, each choosing ``active``.

    ``E (1 - (1 - k/E)^n)`` for independent, uniform routing; correlated rows of one request touch
    fewer. This is why speculation gains less on mixtures of experts: more rows read more weights.
    """
    untouched: float = (1.0 - active / experts) ** tokens
    return experts * (1.0 - untouched)


@dataclass(frozen=True, slots=True)
class LinearGroup:
    """All matrices of one kind, over all layers that have it.

    ``parameters`` counts every expert; ``inputs`` and ``outputs`` are the elements that one row
    reads and writes at these matrices, over all layers (activation traffic). A group with
    ``experts`` > 1 is read only where tokens are routed, ``active`` experts a token.
    """

    name: str
    parameters: int
    inputs: int
    outputs: int
    bits: float
    experts: int = 1
    active: int = 1

    def bytes_read(self, rows: float) -> float:
        """Weight bytes that a pass over ``rows`` rows reads."""
        share = distinct_experts(self.experts, self.active, rows) / self.experts
        return self.parameters * share * self.bits / 8

    def flops(self, rows: float) -> float:
        return 2.0 * self.parameters * self.active / self.experts * rows


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """``layers`` softmax attention layers of one kind. ``window`` None attends to everything."""

    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    kv_bits: float = 16.0

    def kv_bytes_per_token(self) -> float:
        """Bytes of keys and values of one token over these layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.kv_bits / 8

    def visible(self, context: float) -> float:
        """Tokens of ``context`` that a query sees."""
        return context if self.window is None else min(context, self.window)


@dataclass(frozen=True, slots=True)
class GdnShape:
    """``layers`` Gated DeltaNet layers with a fp32 state ``[value_heads, key_dim, value_dim]``."""

    layers: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int
    conv_bits: float = 16.0

    @property
    def conv_channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def state_bytes(self) -> float:
        """Bytes of one request's recurrent state (fp32) over these layers."""
        return self.layers * self.value_heads * self.key_dim * self.value_dim * 4.0

    def conv_bytes(self) -> float:
        """Bytes of one request's short-convolution state: ``kernel - 1`` columns."""
        return self.layers * self.conv_channels * (self.conv_kernel - 1) * self.conv_bits / 8

    def node_bytes(self) -> float:
        """Bytes that tree verification keeps for one node: k, u and G in fp32, of every head."""
        return self.layers * self.value_heads * (self.key_dim + self.value_dim + 1) * 4.0

    def flops(self, rows: float) -> float:
        """Decay, read, rank-1 update and output for each row: ``7 dk dv`` a head."""
        return 7.0 * self.layers * self.value_heads * self.key_dim * self.value_dim * rows


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder: what one pass reads, writes and multiplies.

    ``groups`` holds the matrices of the layers, ``head`` the LM head (None for a drafter that
    borrows the target's). ``small_parameters`` are norms, biases, convolutions and gates.
    ``compute`` names the dtype whose matrix peak applies: ``bf16``, ``fp8``, ``fp32``...
    ``kernels`` counts the kernels of a pass with the fusions that serving engines have.
    """

    name: str
    hidden: int
    vocab: int
    layers: int
    groups: tuple[LinearGroup, ...]
    attention: tuple[AttentionShape, ...]
    gdn: GdnShape | None
    head: LinearGroup | None
    embedding_parameters: int
    small_parameters: int
    activation_bits: float
    compute: str
    kernels: int
    tied: bool = False

    @property
    def parameters(self) -> int:
        """All parameters, as ``sum(p.numel())`` of the model; a tied head counts once."""
        head = self.head.parameters if self.head is not None and not self.tied else 0
        return self.body_parameters + self.embedding_parameters + head

    @property
    def body_parameters(self) -> int:
        """Parameters of the layers and the last norm: neither embedding nor head."""
        return sum(g.parameters for g in self.groups) + self.small_parameters

    def weight_bytes(self, rows: float = 1) -> float:
        """Bytes of weights that a pass over ``rows`` rows reads: layers and head, no embedding.

        The embedding is not counted: a pass reads ``rows`` rows of it. A tied head is read whole.
        """
        read = sum(g.bytes_read(rows) for g in self.groups)
        read += self.small_parameters * self.activation_bits / 8
        return read + (self.head.bytes_read(rows) if self.head is not None else 0.0)

    def group(self, name: str) -> LinearGroup | None:
        return next((g for g in self.groups if g.name == name), None)

    def with_bits(self, bits: Mapping[str, float]) -> "ModelShape":
        """Return the shape with other weight bits by group name (``"lm_head"`` is the head).

        Raises ``InvalidInput`` for a group that the shape does not have or bits outside (0, 64].
        """
        known = {g.name for g in self.groups} | ({"lm_head"} if self.head is not None else set())
        for name, value in bits.items():
            if name not in known:
                raise InvalidInput(
                    f"{self.name} has no weights named {name!r}.",
                    hint=f"It has {', '.join(sorted(known))}.",
                )
            if not 0 < value <= 64:
                raise InvalidInput(f"weights {name!r} cannot take {value!r} bits each.")
        groups = tuple(replace(g, bits=bits.get(g.name, g.bits)) for g in self.groups)
        head = self.head
        if head is not None:
            head = replace(head, bits=bits.get("lm_head", head.bits))
        return replace(self, groups=groups, head=head)

    def with_format(self, weight_format: str, *, head: bool = False) -> "ModelShape":
        """Return the shape with its layers' matrices (and the head if asked) in one format.

        Raises ``Unsupported`` for a format that ``WEIGHT_FORMATS`` does not have.
        """
        if weight_format not in WEIGHT_FORMATS:
            raise Unsupported(
                f"weight format {weight_format!r} is unknown.",
                hint=f"Known: {', '.join(WEIGHT_FORMATS)}.",
            )
        bits = {g.name: WEIGHT_FORMATS[weight_format] for g in self.groups}
        if head and self.head is not None:
            bits["lm_head"] = WEIGHT_FORMATS[weight_format]
        return self.with_bits(bits)

    @staticmethod
    def from_config(source: "object", *, dtype: str | None = None) -> "ModelShape":
        """Read a shape from a Hugging Face folder or config mapping: ``layouts.read_shape``."""
        from specpilot.harness.cost_model.layouts import read_shape

        return read_shape(source, dtype=dtype)
