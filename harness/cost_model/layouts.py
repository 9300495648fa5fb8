"""From a Hugging Face config to a ``ModelShape``: the decoder layouts whose tensors we know.

Dense (Llama, Mistral, Qwen2, Qwen3), Gemma 1 to 3, mixtures of experts (Mixtral, Qwen3-MoE,
Qwen3-Next, Qwen3.5-MoE) and hybrid GDN (Qwen3-Next, Qwen3.5). Parameter counts equal those of the
``transformers`` models. Other layouts are refused: a wrong count is worse than none.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from specpilot.errors import InvalidInput, Unsupported
from specpilot.harness.cost_model.configs import Config, open_config
from specpilot.harness.cost_model.shapes import (
    AttentionShape,
    GdnShape,
    LinearGroup,
    ModelShape,
)

__all__ = ["read_shape"]

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"

_GDN = {"qwen3_next", "qwen3_5_text", "qwen3_5", "qwen3_5_moe_text", "qwen3_5_moe"}
_QK_NORM = {"qwen3", "qwen3_moe", "gemma3_text", "gemma3"} | _GDN
_FOUR_NORMS = {"gemma2", "gemma3_text", "gemma3"}
_MOE = {"mixtral", "qwen3_moe", "qwen3_next", "qwen3_5_moe_text", "qwen3_5_moe"}
_TIED_BY_DEFAULT = {"gemma", "gemma2", "gemma3_text", "gemma3"}
_DENSE = {"llama", "mistral", "qwen2", "qwen3", "gemma"}
_KNOWN = _DENSE | _FOUR_NORMS | _MOE | _GDN

# Kernels of a decoder layer with the fusions that serving engines have (norm with residual add,
# q/k/v as one GEMM, gate and up as one GEMM, activation with product).
_MLP_KERNELS = 4  # norm, gate_up, activation, down
_MOE_KERNELS = 8  # norm, router, top-k, sort, two grouped GEMMs, activation, weighted sum
_ATTENTION_KERNELS = 7  # norm, qkv, q/k norm, rotary with cache write, split attention, merge, out
_GDN_KERNELS = 7  # norm, two input GEMMs, convolution, recurrence, gated norm, out
_HEAD_KERNELS = 3  # embedding, last norm, head


def read_shape(source: object, *, dtype: str | None = None) -> ModelShape:
    """Return the shape of the model that a Hugging Face folder or config mapping describes.

    ``dtype`` (``"bfloat16"``, ``"float32"``...) overrides the config's, for the deployment's own.

    Raises:
        InvalidInput: a field is missing, malformed or contradicts another one (named).
        Unsupported: the layout or the quantization is not one we know.
    """
    config = open_config(source)
    kind = config.text("model_type")
    if kind not in _KNOWN:
        raise Unsupported(
            f"{config.where}: model_type {kind!r} is not a layout the cost model knows.",
            hint=f"Known: {', '.join(sorted(_KNOWN))}.",
        )
    return _Reader(config, kind, dtype).shape()


def layer_types(config: Config, kind: str, layers: int) -> tuple[str, ...]:
    """Return the kind of each layer. Raises ``InvalidInput`` if the config's list lies."""
    given = config.strings("layer_types")
    if given is None:
        return tuple(_default_type(config, kind, i) for i in range(layers))
    if len(given) != layers:
        raise InvalidInput(
            f"{config.where}: field 'layer_types' has {len(given)} entries, but "
            f"num_hidden_layers is {layers}.",
            hint="One entry a layer.",
        )
    allowed = {FULL, SLIDING} | ({LINEAR} if kind in _GDN else set())
    for i, entry in enumerate(given):
        if entry not in allowed:
            raise InvalidInput(
                f"{config.where}: field 'layer_types' holds {entry!r} at {i}; {kind} has "
                f"{', '.join(sorted(allowed))}."
            )
    return given


def _default_type(config: Config, kind: str, index: int) -> str:
    if kind in _GDN:
        every = config.integer("full_attention_interval", default=4)
        return FULL if (index + 1) % every == 0 else LINEAR
    if kind == "gemma2":
        return FULL if index % 2 else SLIDING
    if kind in ("gemma3", "gemma3_text"):
        every = config.integer("sliding_window_pattern", default=6)
        return FULL if (index + 1) % every == 0 else SLIDING
    if kind in ("mistral", "mixtral"):
        return SLIDING if config.has("sliding_window") else FULL
    if kind in ("qwen2", "qwen3", "qwen3_moe") and config.flag("use_sliding_window"):
        return SLIDING if index >= config.integer("max_window_layers", default=0, low=0) else FULL
    return FULL


@dataclass(frozen=True, slots=True)
class _Bits:
    """Bits of quantized matrices, bits of everything else, and the matrix dtype that applies."""

    linear: float
    plain: float
    compute: str


def _weight_bits(config: Config, dtype: str | None) -> _Bits:
    compute, plain = config.dtype(dtype)
    quantization = config.mapping("quantization_config")
    if quantization is None:
        return _Bits(plain, plain, compute)
    method = quantization.text("quant_method")
    if method == "fp8":
        block = quantization.integers("weight_block_size")
        scale = 32 / (block[0] * block[1]) if block and len(block) == 2 else 0.0
        return _Bits(8 + scale, plain, "fp8")
    if method in ("gptq", "awq"):
        bits = quantization.integer("bits", "w_bit", default=4)
        group = quantization.integer("group_size", "q_group_size", default=128, low=-1)
        # A 16-bit scale and a packed zero point for each group; no group: one for each column.
        overhead = (16 + bits) / group if group > 0 else 0.0
        return _Bits(bits + overhead, plain, compute)
    raise Unsupported(
        f"{config.where}: quantization method {method!r} is not one the cost model knows.",
        hint="Known: fp8, gptq, awq; or give the unquantized config and state the bits.",
    )


class _Reader:
    """One config on its way to a shape. Methods are called once, in the order of ``shape``."""

    def __init__(self, config: Config, kind: str, dtype: str | None) -> None:
        self.config = config
        self.kind = kind
        self.hidden = config.integer("hidden_size")
        self.vocab = config.integer("vocab_size")
        self.layers = config.integer("num_hidden_layers")
        self.types = layer_types(config, kind, self.layers)
        self.bits = _weight_bits(config, dtype)
        self.groups: list[LinearGroup] = []
        self.small = 0
        self.kernels = _HEAD_KERNELS

    def shape(self) -> ModelShape:
        attention = self._attention()
        gdn = self._gdn()
        self._feed_forward()
        self.small += (4 if self.kind in _FOUR_NORMS else 2) * self.layers * self.hidden
        self.small += self.hidden
        tied = self.config.flag("tie_word_embeddings", self.kind in _TIED_BY_DEFAULT)
        table = self.vocab * self.hidden
        # Quantized checkpoints keep the head in the plain dtype.
        head = LinearGroup("lm_head", table, self.hidden, self.vocab, self.bits.plain)
        return ModelShape(
            name=self.kind,
            hidden=self.hidden,
            vocab=self.vocab,
            layers=self.layers,
            groups=tuple(g for g in self.groups if g.parameters),
            attention=attention,
            gdn=gdn,
            head=head,
            embedding_parameters=table,
            small_parameters=self.small,
            activation_bits=self.bits.plain,
            compute=self.bits.compute,
            kernels=self.kernels,
            tied=tied,
        )

    def _add(
        self,
        name: str,
        layers: int,
        matrices: Iterable[tuple[int, int]],
        *,
        experts: int = 1,
        active: int = 1,
        bits: float | None = None,
    ) -> None:
        """Add a group of ``layers`` times the ``matrices`` (inputs, outputs) of one expert.

        Matrices with the same input are given as one: a row's input is read once for them.
        """
        pairs = tuple(matrices)
        self.groups.append(
            LinearGroup(
                name=name,
                parameters=layers * experts * sum(i * o for i, o in pairs),
                inputs=layers * active * sum(i for i, _ in pairs),
                outputs=layers * active * sum(o for _, o in pairs),
                bits=self.bits.linear if bits is None else bits,
                experts=experts,
                active=active,
            )
        )

    def _heads(self) -> tuple[int, int, int]:
        config = self.config
        heads = config.integer("num_attention_heads")
        kv_heads = config.integer("num_key_value_heads", default=heads)
        if heads % kv_heads:
            raise InvalidInput(
                f"{config.where}: field 'num_key_value_heads' is {kv_heads}, which does not "
                f"divide num_attention_heads {heads}."
            )
        if not config.has("head_dim") and self.hidden % heads:
            raise InvalidInput(
                f"{config.where}: field 'head_dim' is missing and hidden_size {self.hidden} is no "
                f"multiple of num_attention_heads {heads}."
            )
        return heads, kv_heads, config.integer("head_dim", default=self.hidden // heads)

    def _attention(self) -> tuple[AttentionShape, ...]:
        heads, kv_heads, head_dim = self._heads()
        queries, keys = heads * head_dim, kv_heads * head_dim
        layers = sum(t != LINEAR for t in self.types)
        gate = 2 if self.kind in _GDN else 1  # q_proj also makes the output gate
        self._add(
            "attention_in",
            layers,
            [(self.hidden, gate * queries + 2 * keys)],
        )
        self._add("attention_out", layers, [(queries, self.hidden)])
        biased = self.kind == "qwen2" or self.config.flag("attention_bias")
        if biased:
            self.small += layers * (gate * queries + 2 * keys)
            self.small += layers * self.hidden if self.kind != "qwen2" else 0
        if self.kind in _QK_NORM:
            self.small += layers * 2 * head_dim
        self.kernels += layers * _ATTENTION_KERNELS
        shapes = []
        for kind in (FULL, SLIDING):
            count = sum(t == kind for t in self.types)
            if count:
                window = self.config.integer("sliding_window") if kind == SLIDING else None
                shapes.append(
                    AttentionShape(count, heads, kv_heads, head_dim, window, self.bits.plain)
                )
        return tuple(shapes)

    def _gdn(self) -> GdnShape | None:
        layers = sum(t == LINEAR for t in self.types)
        if not layers:
            return None
        config = self.config
        gdn = GdnShape(
            layers=layers,
            key_heads=config.integer("linear_num_key_heads"),
            value_heads=config.integer("linear_num_value_heads"),
            key_dim=config.integer("linear_key_head_dim"),
            value_dim=config.integer("linear_value_head_dim"),
            conv_kernel=config.integer("linear_conv_kernel_dim", low=2),
            conv_bits=self.bits.plain,
        )
        if gdn.value_heads % gdn.key_heads:
            raise InvalidInput(
                f"{config.where}: field 'linear_num_value_heads' is {gdn.value_heads}, no multiple "
                f"of linear_num_key_heads {gdn.key_heads}."
            )
        values = gdn.value_heads * gdn.value_dim
        self._add(
            "gdn_in",
            layers,
            [(self.hidden, gdn.conv_channels + values + 2 * gdn.value_heads)],
        )
        self._add("gdn_out", layers, [(values, self.hidden)])
        gates = 2 * gdn.value_heads + gdn.value_dim  # A_log and dt_bias; the gated norm
        self.small += layers * (gdn.conv_channels * gdn.conv_kernel + gates)
        self.kernels += layers * _GDN_KERNELS
        return gdn

    def _sparse_layers(self) -> int:
        if self.kind not in _MOE:
            return 0
        dense = set(self.config.integers("mlp_only_layers") or ())
        step = self.config.integer("decoder_sparse_step", default=1)
        return sum(i not in dense and (i + 1) % step == 0 for i in range(self.layers))

    def _feed_forward(self) -> None:
        config, hidden = self.config, self.hidden
        sparse = self._sparse_layers()
        dense = self.layers - sparse
        if dense:
            width = config.integer("intermediate_size")
            self._add("mlp", dense, [(hidden, 2 * width), (width, hidden)])
            if config.flag("mlp_bias"):
                self.small += dense * (2 * width + hidden)
            self.kernels += dense * _MLP_KERNELS
        if sparse:
            experts = config.integer("num_local_experts", "num_experts")
            active = config.integer("num_experts_per_tok")
            if active > experts:
                raise InvalidInput(
                    f"{config.where}: field 'num_experts_per_tok' is {active}, more than the "
                    f"{experts} experts."
                )
            width = config.integer("moe_intermediate_size", "intermediate_size")
            matrices = [(hidden, 2 * width), (width, hidden)]
            self._add("experts", sparse, matrices, experts=experts, active=active)
            self._add("router", sparse, [(hidden, experts)], bits=self.bits.plain)
            self.kernels += sparse * _MOE_KERNELS
            if self.kind in _GDN:
                shared = config.integer("shared_expert_intermediate_size")
                matrices = [(hidden, 2 * shared + 1), (shared, hidden)]
                self._add("shared_expert", sparse, matrices)
                self.kernels += sparse * _MLP_KERNELS
