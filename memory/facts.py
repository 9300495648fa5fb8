"""The facts of a deployment that regimes and preconditions speak of: one flat, checked mapping.

A missing fact is unknown, which is neither a match nor a mismatch. Names with an underscore
only, so that a fact reads the same in Python, JSON and a predicate.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from specpilot.errors import InvalidInput
from specpilot.types import Deployment, Hardware, StepShares

__all__ = ["FACTS", "FactSpec", "Facts", "facts_of", "read_facts"]

Facts = Mapping[str, str | int | float | bool]


@dataclass(frozen=True, slots=True)
class FactSpec:
    """Type and meaning of a fact. ``unit`` is part of the meaning, numbers are never negative."""

    type: type
    meaning: str


FACTS: Final[Mapping[str, FactSpec]] = MappingProxyType(
    {
        "deployment": FactSpec(str, "id of the deployment, as receipts and transfers name it"),
        "engine": FactSpec(str, "sglang, vllm, reference, mock"),
        "engine_version": FactSpec(str, "dotted version of the engine, such as 0.5.20"),
        "target_family": FactSpec(str, "model family of the target, such as qwen3.8"),
        "target_arch": FactSpec(str, "dense, moe, hybrid-gdn, hybrid-mamba, hybrid-kda"),
        "target_params_b": FactSpec(float, "parameters of the target in units of 1e9"),
        "weight_dtype": FactSpec(str, "storage of the target's weights: bf16 fp16 fp32 fp8 int4"),
        "dtype": FactSpec(str, "dtype of activations: bf16, fp16, fp32, fp64"),
        "drafter": FactSpec(str, "family of the drafter: dflash dflash2 dspark eagle3 mtp none"),
        "drafter_top_k": FactSpec(int, "ranked candidates that the drafter gives a position"),
        "speculation": FactSpec(str, "what stock verifies: none, chain, tree"),
        "block": FactSpec(int, "rows of the drafter's block, anchor included"),
        "rows": FactSpec(int, "rows of the exact pass of stock, anchor included"),
        "device": FactSpec(str, "cuda, rocm, metal or cpu"),
        "gpu": FactSpec(str, "name of the accelerator or CPU"),
        "gpu_arch": FactSpec(str, "sm_90, sm_120, gfx942, apple, cpu"),
        "gpus": FactSpec(int, "devices that the deployment has"),
        "smem_per_block_kb": FactSpec(float, "largest shared memory of a thread block in KB"),
        "bandwidth_gbs": FactSpec(float, "peak memory bandwidth in GB/s"),
        "memory_gb": FactSpec(float, "memory of one device in GB"),
        "wgmma": FactSpec(bool, "the device has warp-group matrix instructions (sm_90)"),
        "requests": FactSpec(int, "requests in flight"),
        "serving": FactSpec(str, "single (one request) or batched"),
        "prompt_tokens": FactSpec(int, "prompt length in tokens"),
        "output_tokens": FactSpec(int, "output length in tokens"),
        "context_tokens": FactSpec(int, "prompt plus output in tokens"),
        "temperature": FactSpec(float, "sampling temperature, 0 is greedy"),
        "workload": FactSpec(str, "what is generated: math, code, chat, agent"),
        "tokens_per_pass": FactSpec(float, "measured tokens emitted per exact pass"),
        "share_weights": FactSpec(float, "share of the step spent in target weights"),
        "share_lm_head": FactSpec(float, "share of the step spent in the LM head"),
        "share_attention": FactSpec(float, "share of the step spent in attention"),
        "share_gdn": FactSpec(float, "share of the step spent in GDN layers' state"),
        "share_drafter": FactSpec(float, "share of the step spent in the drafter"),
        "share_overhead": FactSpec(float, "share of the step outside kernels"),
    }
)

_DTYPES = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_LOWER = {"engine", "target_family", "target_arch", "weight_dtype", "dtype", "drafter", "device",
          "gpu_arch", "serving", "speculation", "workload"}  # fmt: skip


def read_facts(raw: Mapping[str, Any], shares: StepShares | None = None) -> dict[str, Any]:
    """Check and normalise facts, and derive those that follow from others.

    None values mean unknown and are dropped. Raises InvalidInput for an unknown name, a wrong
    type, a non-finite or negative number, and for facts that contradict each other.
    """
    facts: dict[str, Any] = {}
    for name, value in raw.items():
        if name not in FACTS:
            raise InvalidInput(f"Unknown fact {name!r}.", hint=f"Known: {', '.join(FACTS)}.")
        if value is not None:
            facts[name] = _typed(name, value)
    if shares is not None:
        for component in ("weights", "lm_head", "attention", "gdn", "drafter", "overhead"):
            facts[f"share_{component}"] = float(getattr(shares, component))
    _derive(facts)
    return facts


def _typed(name: str, value: Any) -> Any:
    wanted = FACTS[name].type
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
        raise InvalidInput(
            f"Fact {name} is {value!r}; it must be a {wanted.__name__}: {FACTS[name].meaning}."
        )
    if isinstance(value, float | int) and not 0 <= value < float("inf"):
        raise InvalidInput(f"Fact {name} is {value!r}; it must be finite and not negative.")
    if isinstance(value, str):
        if not 0 < len(value) <= 120:
            raise InvalidInput(f"Fact {name} must have 1 to 120 characters, not {len(value)}.")
        if name in _LOWER:
            value = value.lower()
        if name in ("dtype", "weight_dtype"):
            value = _DTYPES.get(value, value)
    return value


def _derive(facts: dict[str, Any]) -> None:
    if "requests" in facts:
        if facts["requests"] < 1:
            raise InvalidInput(f"Fact requests is {facts['requests']}; at least 1 is in flight.")
        serving = "single" if facts["requests"] == 1 else "batched"
        if facts.setdefault("serving", serving) != serving:
            raise InvalidInput(
                f"Facts contradict: serving is {facts['serving']!r} with {facts['requests']} "
                "requests in flight."
            )
    if "prompt_tokens" in facts and "output_tokens" in facts:
        facts.setdefault("context_tokens", facts["prompt_tokens"] + facts["output_tokens"])
    arch = facts.get("gpu_arch", "")
    if arch:
        device = (
            "cuda" if arch.startswith("sm_") else
            "rocm" if arch.startswith("gfx") else
            "metal" if arch == "apple" else "cpu"
        )  # fmt: skip
        facts.setdefault("device", device)
        facts.setdefault("wgmma", arch in ("sm_90", "sm_90a"))
    if "speculation" in facts and facts["speculation"] == "chain" and "block" in facts:
        facts.setdefault("rows", facts["block"])


def facts_of(
    deployment: Deployment,
    hardware: Hardware | None = None,
    shares: StepShares | None = None,
    **more: str | int | float | bool | None,
) -> dict[str, Any]:
    """Return the facts that a deployment and its hardware state; ``more`` adds or overrides.

    What they do not state (family and size of the target, engine version, its storage dtype) is
    left unknown unless given in ``more``.
    """
    regime = deployment.regime
    raw: dict[str, Any] = {
        "deployment": deployment.id,
        "engine": deployment.engine,
        "drafter": deployment.drafter_kind or ("none" if deployment.drafter is None else None),
        "dtype": deployment.dtype,
        "weight_dtype": deployment.dtype,
        "gpu": deployment.hardware,
        "requests": regime.requests,
        "prompt_tokens": regime.prompt_tokens,
        "output_tokens": regime.output_tokens,
        "temperature": regime.temperature,
    }
    for key in ("speculation", "block", "rows"):
        raw[key] = deployment.stock.get(key)
    if "top_k" in deployment.stock:
        raw["drafter_top_k"] = deployment.stock["top_k"]
    if hardware is not None:
        raw |= {
            "gpu_arch": hardware.arch,
            "memory_gb": hardware.memory_gb,
            "bandwidth_gbs": hardware.bandwidth_gbs,
            "smem_per_block_kb": hardware.smem_per_block_kb,
        }
    return read_facts(raw | more, shares)
