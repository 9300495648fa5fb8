"""The mechanism ``w12``: keep the target's linear layers in 12 bits a weight, without loss.

Reading weights is most of a single request's step on a GPU; a quarter fewer bytes is a quarter less
of that time for a kernel that decodes on the way. A CPU without such a kernel gains memory only.
"""

from collections.abc import Mapping
from pathlib import Path

from specpilot.errors import SpecPilotError
from specpilot.mechanisms.base import Mechanism, ParamSpec, Setting
from specpilot.types import Deployment

__all__ = ["W12"]


def _settings(params: Mapping[str, Setting]) -> dict[str, Setting]:
    return {"weights": "w12"} if params["weights"] == "w12" else {}


def _reasons(deployment: Deployment) -> tuple[str, ...]:
    """W12 stores BF16 values; a target folder of another dtype cannot be packed exactly."""
    from specpilot.mechanisms.w12.container import W12Shard, convertible  # loads NumPy

    for path in sorted(Path(deployment.target).glob("*.safetensors")):
        try:
            spans = W12Shard(path).spans
        except SpecPilotError as error:
            return (str(error),)
        for name, span in spans.items():
            if convertible(name, span) and span.dtype != "BF16":
                return (f"it needs BF16 weights, and {name!r} of the target is {span.dtype}",)
    return ()


W12 = Mechanism(
    id="w12",
    title="Lossless 12-bit weights",
    summary=(
        "Keeps the target's linear layers in 12 bits a weight, bit for bit the same output. The "
        "reference engine decodes each matrix when it is used: less memory, but slower than plain "
        "weights. The gain in time needs a GPU kernel that decodes inside the product."
    ),
    params={
        "weights": ParamSpec("plain", "how the target's matrices are kept", choices=("w12",)),
    },
    check=_reasons,
    render={"reference": _settings},
    counter="w12_matrices",
    cost="weights",
    source="SpecPilot paper, Figure 5",
)
