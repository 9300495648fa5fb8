"""Byte floors: the least time that each component of a speculative step can take on a machine.

A floor is the larger of the FLOP time at 60 % of the dense peak and the byte time at 90 % of peak
bandwidth (SpecPilot paper, phase 0). The floor of a step is the sum over its components; host time
and launches have no floor here, they are what the gap calls overhead.

``rows`` counts rows of the exact pass, anchor included; AR is rows = 1 without a drafter.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from specpilot.errors import InvalidInput, Unsupported
from specpilot.harness.cost_model.drafters import DrafterShape
from specpilot.harness.cost_model.hardware import Efficiency, achievable
from specpilot.harness.cost_model.shapes import LinearGroup, ModelShape
from specpilot.types import Hardware, Regime, StepShares

__all__ = ["Component", "ComponentFloor", "check_regime", "step_floor", "step_shares", "total_ms"]

Component = Literal["weights", "lm_head", "attention", "gdn", "drafter", "activations"]

_LOGIT_BYTES = 4  # logits are fp32: written by the head, read by the sampler


@dataclass(frozen=True, slots=True)
class ComponentFloor:
    """One component of a step: what it moves and multiplies, and the least time for it.

    ``part`` says which piece of the component (``mlp``, ``gdn_in``, ``kv``...). Times in ms.
    """

    component: Component
    part: str
    bytes: float
    flops: float
    byte_ms: float
    flop_ms: float

    @property
    def floor_ms(self) -> float:
        return max(self.byte_ms, self.flop_ms)

    @property
    def bound(self) -> Literal["bytes", "flops"]:
        return "bytes" if self.byte_ms >= self.flop_ms else "flops"


def total_ms(floors: Iterable[ComponentFloor], component: str | None = None) -> float:
    """Sum the floors in ms, of one component or of the whole step."""
    return sum(f.floor_ms for f in floors if component in (None, f.component))


def check_regime(regime: Regime) -> None:
    """Raise ``InvalidInput`` naming the field if a regime cannot be."""
    if regime.requests < 1:
        raise InvalidInput(f"regime: field 'requests' is {regime.requests}; give at least 1.")
    for name in ("prompt_tokens", "output_tokens"):
        value = getattr(regime, name)
        if value < 0:
            raise InvalidInput(f"regime: field {name!r} is {value}; a length is at least 0.")
    if regime.prompt_tokens + regime.output_tokens < 1:
        raise InvalidInput("regime: fields 'prompt_tokens' and 'output_tokens' are both 0.")


class _Meter:
    """Turns bytes and FLOPs into floors for one machine and one matrix dtype."""

    def __init__(self, hardware: Hardware, compute: str, efficiency: Efficiency) -> None:
        if compute not in hardware.peak_tflops:
            raise Unsupported(
                f"{hardware.name} has no dense {compute} peak on record; it has "
                f"{', '.join(sorted(hardware.peak_tflops))}.",
                hint="Choose another dtype, or calibrate the machine for this one.",
            )
        self.bytes_per_ms = hardware.bandwidth_gbs * 1e6 * efficiency.bytes
        self.flops_per_ms = hardware.peak_tflops[compute] * 1e9 * efficiency.flops

    def floor(self, component: Component, part: str, moved: float, flops: float) -> ComponentFloor:
        return ComponentFloor(
            component, part, moved, flops, moved / self.bytes_per_ms, flops / self.flops_per_ms
        )


def step_floor(
    shape: ModelShape,
    drafter: DrafterShape | None,
    hardware: Hardware,
    regime: Regime,
    rows: int,
    *,
    block: int = 0,
    efficiency: Efficiency | None = None,
) -> tuple[ComponentFloor, ...]:
    """Return the floors of one step: a draft of ``block`` rows, then one exact pass over ``rows``.

    ``rows`` and ``block`` are rows of each request, anchor included; ``drafter`` None (or block 0)
    is a step without a draft. The context is the regime's prompt with half its output. GDN layers
    read the state once and write it once for each request and pass (the WY form of tree verify).
    ``efficiency`` replaces the floor's 90 % and 60 % for predictions of real kernels.

    Raises:
        InvalidInput: rows, block or the regime are out of range (named).
        Unsupported: the machine has no dense peak for the model's dtype.
    """
    check_regime(regime)
    if rows < 1:
        raise InvalidInput(f"field 'rows' is {rows}; an exact pass has at least the anchor's row.")
    if block < 0:
        raise InvalidInput(f"field 'block' is {block}; give 0 for no draft.")
    how = efficiency or achievable(hardware)
    meter = _Meter(hardware, shape.compute, how)
    context = regime.prompt_tokens + regime.output_tokens / 2
    floors = _pass(meter, shape, regime.requests, rows, context)
    if drafter is not None and block > 0:
        draft_meter = _Meter(hardware, drafter.body.compute, how)
        floors += _draft(draft_meter, drafter, regime.requests, block, context)
    return tuple(floors)


def _matrices(
    meter: _Meter, component: Component, group: LinearGroup, rows: float, bits: float
) -> ComponentFloor:
    """A GEMM reads its weights and its input rows and writes its output rows."""
    moved = group.bytes_read(rows) + (group.inputs + group.outputs) * rows * bits / 8
    return meter.floor(component, group.name, moved, group.flops(rows))


def _pass(
    meter: _Meter, shape: ModelShape, requests: int, rows: int, context: float
) -> list[ComponentFloor]:
    every = rows * requests
    bits = shape.activation_bits
    floors = [_matrices(meter, "weights", g, every, bits) for g in shape.groups]
    small = shape.small_parameters * bits / 8
    # The residual stream is read and written by both halves of every layer; one row of the
    # embedding is gathered for every row.
    stream = (4 * shape.layers + 1) * shape.hidden * every * bits / 8
    floors.append(meter.floor("activations", "norms and residual", small + stream, 0.0))
    if shape.head is not None:
        head = shape.head
        moved = head.bytes_read(every) + head.inputs * every * bits / 8
        moved += head.outputs * every * _LOGIT_BYTES
        floors.append(meter.floor("lm_head", "lm_head", moved, head.flops(every)))
    floors += _attention(meter, "attention", shape, requests, rows, context)
    if shape.gdn is not None:
        floors.append(_recurrence(meter, shape, requests, rows))
    return floors


def _attention(
    meter: _Meter,
    component: Component,
    shape: ModelShape,
    requests: int,
    rows: int,
    context: float,
) -> list[ComponentFloor]:
    """Keys and values are read once for a request, not once for a row, and written once a row."""
    floors = []
    for kind in shape.attention:
        seen = kind.visible(context)
        moved = kind.kv_bytes_per_token() * requests * (seen + rows)
        io = 2 * kind.layers * kind.query_heads * kind.head_dim * shape.activation_bits / 8
        flops = 4.0 * kind.layers * kind.query_heads * kind.head_dim * rows * seen * requests
        part = "kv" if kind.window is None else f"kv of window {kind.window}"
        floors.append(meter.floor(component, part, moved + io * rows * requests, flops))
    return floors


def _recurrence(meter: _Meter, shape: ModelShape, requests: int, rows: int) -> ComponentFloor:
    gdn = shape.gdn
    assert gdn is not None, "called for hybrid shapes only"
    moved = 2 * (gdn.state_bytes() + gdn.conv_bytes()) * requests
    channels = gdn.conv_channels + 2 * gdn.value_heads * gdn.value_dim
    moved += gdn.layers * channels * rows * requests * shape.activation_bits / 8
    if rows > 1:
        moved += 2 * gdn.node_bytes() * rows * requests  # kept for the commit, then read
    return meter.floor("gdn", "state and convolution", moved, gdn.flops(rows * requests))


def _draft(
    meter: _Meter, drafter: DrafterShape, requests: int, block: int, context: float
) -> list[ComponentFloor]:
    passes, rows = drafter.passes(block), drafter.rows(block)
    if passes == 0:
        return []
    body, every = drafter.body, rows * requests
    bits = body.activation_bits
    parts = [_matrices(meter, "drafter", g, every, bits) for g in body.groups]
    small = (
        body.small_parameters * bits / 8 + (4 * body.layers + 1) * body.hidden * every * bits / 8
    )
    parts.append(meter.floor("drafter", "norms and residual", small, 0.0))
    parts += _attention(meter, "drafter", body, requests, rows, context)
    head, head_rows = drafter.head, drafter.head_rows(block) * requests
    moved = head.bytes_read(head_rows) + head.inputs * head_rows * bits / 8
    moved += head.outputs * head_rows * _LOGIT_BYTES
    parts.append(meter.floor("drafter", "lm_head", moved, head.flops(head_rows)))
    return [meter.floor("drafter", p.part, passes * p.bytes, passes * p.flops) for p in parts]


def step_shares(parts_ms: Iterable[tuple[str, float]], step_ms: float) -> StepShares:
    """Return each component's share of a step that took ``step_ms``.

    ``parts_ms`` are (component, ms) pairs, measured or floors; activations count as weights, whose
    kernels move them. What the parts do not explain is overhead.

    Raises ``InvalidInput`` if the parts add up to more than the step.
    """
    sums = dict.fromkeys(("weights", "lm_head", "attention", "gdn", "drafter"), 0.0)
    for component, ms in parts_ms:
        name = "weights" if component == "activations" else component
        if name not in sums:
            raise InvalidInput(f"component {component!r} is unknown; known: {', '.join(sums)}.")
        sums[name] += ms
    spent = sum(sums.values())
    if not 0 < spent <= step_ms * (1 + 1e-9):
        raise InvalidInput(
            f"the components add up to {spent:.4g} ms, but the step takes {step_ms:.4g} ms.",
            hint="A step cannot be shorter than its parts: measure both in the same run.",
        )
    shares = {name: ms / step_ms for name, ms in sums.items()}
    return StepShares(**shares, overhead=max(0.0, 1.0 - spent / step_ms))
