"""The shape of a drafter: its own layers, what it borrows from the target, and its passes a step.

Block drafters (DFlash, DFlash2, DSpark) draft a whole block in one pass over ``block`` rows, anchor
included; EAGLE-3, MTP heads and small language models take one pass for each drafted token. Whoever
borrows the target's LM head reads it again in every pass: it is a large share of a draft's bytes.
"""

from dataclasses import dataclass, replace

from specpilot.errors import InvalidInput, Unsupported
from specpilot.harness.cost_model.configs import Config, open_config
from specpilot.harness.cost_model.layouts import read_shape
from specpilot.harness.cost_model.shapes import LinearGroup, ModelShape

__all__ = ["BLOCK_KINDS", "DRAFTER_KINDS", "DrafterShape", "read_drafter"]

BLOCK_KINDS = ("dflash", "dflash2", "dspark")
DRAFTER_KINDS = (*BLOCK_KINDS, "eagle3", "mtp", "lm")
_ALIASES = {"block": "dflash"}
_MARKOV_RANK = 256  # DSpark's low-rank Markov head (DeepSpec paper, eq. 5)


@dataclass(frozen=True, slots=True)
class DrafterShape:
    """A drafter's own ``body`` and the head that it uses.

    ``head`` is the target's when ``shares_head``. ``gathered_parameters`` are tables of which a
    pass reads a few rows: they count as parameters, not as bytes.
    """

    kind: str
    body: ModelShape
    head: LinearGroup
    shares_head: bool
    gathered_parameters: int = 0

    @property
    def parameters(self) -> int:
        """The drafter's own parameters; what it borrows from the target is not counted."""
        own_head = 0 if self.shares_head else self.head.parameters
        return self.body.parameters + own_head + self.gathered_parameters

    def passes(self, block: int) -> int:
        """Forward passes that a draft of ``block`` rows (anchor included) takes."""
        return 1 if self.kind in BLOCK_KINDS else max(block - 1, 0)

    def rows(self, block: int) -> int:
        """Rows of each pass."""
        return block if self.kind in BLOCK_KINDS else 1

    def head_rows(self, block: int) -> int:
        """Rows of each pass that go through the head: the anchor's row drafts nothing."""
        return max(block - 1, 1) if self.kind in BLOCK_KINDS else 1

    def bytes_read(self, block: int, requests: int = 1) -> float:
        """Weight bytes that one draft reads, over all its passes."""
        own = self.body.weight_bytes(self.rows(block) * requests)
        return self.passes(block) * (own + self.head.bytes_read(self.head_rows(block) * requests))


def read_drafter(
    source: object, kind: str, target: ModelShape, *, dtype: str | None = None
) -> DrafterShape:
    """Return the shape of a drafter of ``kind`` for ``target``.

    ``source`` is a Hugging Face folder or config mapping. For ``mtp`` it is the target's own
    config: its MTP layers are full-attention layers of the target's size.

    Raises:
        InvalidInput: a field is missing or malformed, or the drafter does not fit the target.
        Unsupported: the kind is unknown.
    """
    kind = _ALIASES.get(kind, kind)
    if kind not in DRAFTER_KINDS:
        raise Unsupported(
            f"drafter kind {kind!r} is unknown.", hint=f"Known: {', '.join(DRAFTER_KINDS)}."
        )
    config = open_config(source)
    if kind == "lm":
        shape = read_shape(config.values, dtype=dtype)
        assert shape.head is not None, "read_shape always gives a head"
        _same(config, "vocab_size", shape.vocab, target.vocab)
        body = replace(shape, head=None)
        # A tied head is the embedding: its parameters are counted there already.
        return DrafterShape(kind, body, shape.head, shares_head=shape.tied)
    if kind == "eagle3":
        return _eagle3(config, target, dtype)
    if kind == "mtp":
        return _mtp(config, target, dtype)
    return _block(config, kind, target, dtype)


def _same(config: Config, field: str, value: int, wanted: int) -> None:
    if value != wanted:
        raise InvalidInput(
            f"{config.where}: field {field!r} is {value}, but the target's is {wanted}.",
            hint="Take the drafter that was trained for this target.",
        )


def _target_head(target: ModelShape) -> LinearGroup:
    if target.head is None:
        raise InvalidInput(f"{target.name} has no LM head that a drafter could borrow.")
    return target.head


def _body(config: Config, dtype: str | None, extra: list[LinearGroup], small: int) -> ModelShape:
    """The layers alone, with ``extra`` matrices: no embedding, no head."""
    values = dict(config.values)
    values.setdefault("model_type", "qwen3")
    shape = read_shape(values, dtype=dtype)
    return replace(
        shape,
        groups=shape.groups + tuple(extra),
        head=None,
        embedding_parameters=0,
        small_parameters=shape.small_parameters + small,
        kernels=shape.kernels + len(extra),
    )


def _matrix(name: str, inputs: int, outputs: int, bits: float, count: int = 1) -> LinearGroup:
    return LinearGroup(name, count * inputs * outputs, count * inputs, count * outputs, bits)


def _inner(config: Config, name: str) -> Config:
    """The config that holds field ``name``: ``dflash_config`` if it does, else the config."""
    inner = config.mapping("dflash_config")
    return inner if inner is not None and inner.has(name) else config


def _block(config: Config, kind: str, target: ModelShape, dtype: str | None) -> DrafterShape:
    hidden = config.integer("hidden_size")
    vocab = config.integer("vocab_size")
    _same(config, "hidden_size", hidden, target.hidden)
    _same(config, "vocab_size", vocab, target.vocab)
    bits = config.dtype(dtype)[1]
    layers = config.integer("num_hidden_layers")
    ids = _inner(config, "target_layer_ids").integers("target_layer_ids")
    if ids is not None:
        for i in ids:
            if not 0 <= i < target.layers:
                raise InvalidInput(
                    f"{config.where}: field 'target_layer_ids' holds {i}, but the target has "
                    f"layers 0 to {target.layers - 1}."
                )
    taps = len(ids) if ids is not None else layers
    extra = [_matrix("fc", taps * hidden, hidden, bits)]
    small, gathered = hidden, 0  # the norm of the injected features
    if kind == "dflash2":
        rank = _inner(config, "selector_rank").integer("selector_rank")
        extra.append(_matrix("selector", hidden, rank, bits))
        convolved = _inner(config, "conv_kernel_size")
        if convolved.has("conv_kernel_size"):
            kernel = convolved.integer("conv_kernel_size")
            group = _inner(config, "conv_group_size").integer("conv_group_size")
            # Two dynamic convolutions a layer: a projection and a base kernel (in and out) each.
            dynamic = 2 * kernel * (hidden // group)
            extra.append(_matrix("conv", hidden, dynamic, bits, count=2 * layers))
            small += 2 * layers * 2 * kernel * hidden
        gathered = 2 * vocab * rank
    elif kind == "dspark":
        rank = config.integer("markov_rank", default=_MARKOV_RANK)
        extra.append(_matrix("markov", rank, vocab, bits))
        extra.append(_matrix("confidence", hidden + rank, 1, bits))
        gathered = vocab * rank
    body = _body(config, dtype, extra, small)
    return DrafterShape(kind, body, _target_head(target), True, gathered)


def _eagle3(config: Config, target: ModelShape, dtype: str | None) -> DrafterShape:
    values = {"num_hidden_layers": 1, **config.values, "model_type": "llama"}
    config = Config(values, config.where)
    hidden = config.integer("hidden_size")
    bits = config.dtype(dtype)[1]
    fused = config.integer("target_hidden_size", default=target.hidden)
    body = _body(config, dtype, [_matrix("fc", 3 * fused, hidden, bits)], hidden)
    # The layer's q, k and v read the embedding and the feature side by side: twice the inputs.
    groups = tuple(
        replace(g, parameters=2 * g.parameters, inputs=2 * g.inputs)
        if g.name == "attention_in"
        else g
        for g in body.groups
    )
    vocab = config.integer("draft_vocab_size", "vocab_size")
    head = _matrix("lm_head", hidden, vocab, bits)
    return DrafterShape("eagle3", replace(body, groups=groups), head, False)


def _mtp(config: Config, target: ModelShape, dtype: str | None) -> DrafterShape:
    layers = config.integer("mtp_num_hidden_layers", "num_nextn_predict_layers", default=1)
    hidden = config.integer("hidden_size")
    _same(config, "hidden_size", hidden, target.hidden)
    bits = config.dtype(dtype)[1]
    values = {
        **config.values,
        "num_hidden_layers": layers,
        "layer_types": ["full_attention"] * layers,
    }
    one = Config(values, config.where)
    body = _body(one, dtype, [_matrix("fc", 2 * hidden, hidden, bits)], 2 * hidden)
    return DrafterShape("mtp", body, _target_head(target), True)
