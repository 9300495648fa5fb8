"""Where an entry was seen to hold, and how well a deployment's facts agree with that.

Agreement is graded: a sibling (sm_90 and sm_100, qwen3 and qwen3.5) counts more than a stranger,
and a mismatch lowers the score without hiding the entry, because mechanisms do transfer.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, Field, model_validator

from specpilot.memory.facts import FACTS
from specpilot.memory.figures import STRICT

__all__ = [
    "EXACT",
    "FIELDS",
    "GENERAL",
    "MISMATCH",
    "SIBLING",
    "UNKNOWN",
    "Predicate",
    "Regime",
    "engine_matches",
    "grade_set",
]

EXACT: Final = 1.0
GENERAL: Final = 0.6
UNKNOWN: Final = 0.5
SIBLING: Final = 0.4
MISMATCH: Final = 0.1

Word = Annotated[str, Field(min_length=1, max_length=40, pattern=r"^[a-z0-9][a-z0-9._+-]*$")]
EngineSpec = Annotated[
    str,
    Field(
        max_length=60,
        pattern=r"^[a-z][a-z0-9_-]*((==|<=|>=|<|>)\d+(\.\d+)*(,(==|<=|>=|<|>)\d+(\.\d+)*)*)?$",
    ),
]
Count = Annotated[int, Field(ge=0, le=10_000_000)]
Positive = Annotated[float, Field(ge=0, le=1e6)]

_SIBLINGS: Final[Mapping[str, tuple[frozenset[str], ...]]] = {
    "target_arch": (
        frozenset({"hybrid-gdn", "hybrid-kda", "hybrid-mamba"}),
        frozenset({"dense", "hybrid-gdn"}),
        frozenset({"dense", "moe"}),
    ),
    "weight_dtype": (frozenset({"bf16", "fp16"}), frozenset({"fp8", "int8"}),
                     frozenset({"int4", "fp4"}), frozenset({"bf16", "fp32"})),
    "drafter": (
        frozenset({"block", "dflash", "dflash2", "dspark"}),
        frozenset({"eagle", "eagle2", "eagle3", "mtp", "medusa"}),
        frozenset({"ngram", "suffix"}),
    ),
    "gpu_arch": (
        frozenset({"sm_90", "sm_90a", "sm_100", "sm_103"}),
        frozenset({"sm_89", "sm_120"}),
        frozenset({"sm_100", "sm_103", "sm_120"}),
        frozenset({"gfx942", "gfx950"}),
        frozenset({"cpu", "apple"}),
    ),
    "engine": (frozenset({"sglang", "vllm"}), frozenset({"reference", "mock"})),
    "workload": (frozenset({"math", "code"}), frozenset({"code", "agent"})),
}  # fmt: skip


class Regime(BaseModel):
    """Where the claim was seen to hold. Empty means any; ranges are inclusive.

    ``requests`` counts requests in flight, ``context_tokens`` prompt plus output,
    ``target_params_b`` parameters in units of 1e9. ``engine`` may carry versions:
    ``sglang>=0.5,<0.6``.
    """

    model_config = STRICT

    serving: Literal["single", "batched", "any"] = "any"
    requests: tuple[Count, Count] | None = None
    context_tokens: tuple[Count, Count] | None = None
    target_params_b: tuple[Positive, Positive] | None = None
    temperature: tuple[Positive, Positive] | None = None
    target_family: Annotated[tuple[Word, ...], Field(max_length=8)] = ()
    target_arch: Annotated[tuple[Word, ...], Field(max_length=8)] = ()
    weight_dtype: Annotated[tuple[Word, ...], Field(max_length=8)] = ()
    drafter: Annotated[tuple[Word, ...], Field(max_length=8)] = ()
    gpu_arch: Annotated[tuple[Word, ...], Field(max_length=8)] = ()
    engine: Annotated[tuple[EngineSpec, ...], Field(max_length=4)] = ()
    workload: Annotated[tuple[Word, ...], Field(max_length=8)] = ()

    @model_validator(mode="after")
    def _ranges_rise(self) -> Self:
        for name in ("requests", "context_tokens", "target_params_b", "temperature"):
            bounds = getattr(self, name)
            if bounds is not None and bounds[0] > bounds[1]:
                raise ValueError(f"{name} runs from {bounds[0]} down to {bounds[1]}")
        if self.requests is not None and self.serving != "any":
            low, high = self.requests
            if (self.serving == "single") != (low == high == 1):
                raise ValueError(f"serving {self.serving!r} contradicts requests {low} to {high}")
        return self


FIELDS: Final = (
    "serving", "requests", "context_tokens", "target_params_b", "temperature", "target_family",
    "target_arch", "weight_dtype", "drafter", "gpu_arch", "engine", "workload",
)  # fmt: skip


class Predicate(BaseModel):
    """A precondition that is evaluated against facts: ``smem_per_block_kb >= 160``.

    ``hard`` ones make the entry useless where they fail; the others only make it less likely.
    """

    model_config = STRICT

    field: str
    op: Literal["<", "<=", "==", "!=", ">=", ">", "in", "not in"]
    value: float | str | bool | tuple[str, ...]
    why: Annotated[str, Field(min_length=1, max_length=160)]
    hard: bool = True

    @model_validator(mode="after")
    def _field_and_types(self) -> Self:
        spec = FACTS.get(self.field)
        if spec is None:
            raise ValueError(f"precondition on unknown fact {self.field!r}; known: {list(FACTS)}")
        many = self.op in ("in", "not in")
        if many != isinstance(self.value, tuple):
            raise ValueError(f"{self.op!r} needs {'a list' if many else 'one value'}")
        number = spec.type in (int, float)
        if many and spec.type is not str:
            raise ValueError(f"{self.op!r} compares words, but {self.field} is no word")
        if not many and number != (
            isinstance(self.value, float | int) and not isinstance(self.value, bool)
        ):
            raise ValueError(f"{self.field} is a {spec.type.__name__}, not {self.value!r}")
        if self.op in ("<", "<=", ">=", ">") and not number:
            raise ValueError(f"{self.field} has no order, {self.op!r} cannot apply")
        return self

    def holds(self, facts: Mapping[str, Any]) -> bool | None:
        """Return whether the facts satisfy it; None where they do not say."""
        if self.field not in facts:
            return None
        fact = facts[self.field]
        match self.op:
            case "<":
                return bool(fact < self.value)
            case "<=":
                return bool(fact <= self.value)
            case ">=":
                return bool(fact >= self.value)
            case ">":
                return bool(fact > self.value)
            case "==":
                return bool(fact == self.value)
            case "!=":
                return bool(fact != self.value)
            case "in":
                return fact in self.value  # type: ignore[operator]
            case "not in":
                return fact not in self.value  # type: ignore[operator]

    def __str__(self) -> str:
        value = "{" + ", ".join(self.value) + "}" if isinstance(self.value, tuple) else self.value
        return f"{self.field} {self.op} {value}"


def grade_set(field: str, wanted: tuple[str, ...], facts: Mapping[str, Any]) -> float:
    """Grade a fact against the words an entry names for that field; empty ``wanted`` is any."""
    if not wanted:
        return GENERAL
    if field not in facts:
        return UNKNOWN
    fact = str(facts[field])
    if field == "engine":
        verdicts = [engine_matches(spec, fact, facts.get("engine_version")) for spec in wanted]
        if True in verdicts:
            return EXACT
        if None in verdicts:
            return UNKNOWN
        wanted = tuple(re.split(r"[<>=]", spec)[0] for spec in wanted)
        if fact in wanted:
            return SIBLING
    elif fact in wanted:
        return EXACT
    if field == "target_family" and any(_kin(fact, word) for word in wanted):
        return SIBLING
    groups = _SIBLINGS.get(field, ())
    if any(fact in group and word in group for group in groups for word in wanted):
        return SIBLING
    return MISMATCH


def _kin(one: str, other: str) -> bool:
    """Return whether two families share their name and major version: qwen3.5 and qwen3.8."""
    strip = re.compile(r"^([a-z-]+\d*).*$")
    return strip.sub(r"\1", one) == strip.sub(r"\1", other)


def engine_matches(spec: str, engine: str, version: Any) -> bool | None:
    """Return whether an engine meets ``name>=a,<b``; None where its version is unknown."""
    name = re.split(r"[<>=]", spec)[0]
    if name != engine:
        return False
    bounds = re.findall(r"(==|<=|>=|<|>)([\d.]+)", spec)
    if not bounds:
        return True
    if version is None:
        return None
    have = _release(str(version))
    verdicts = {
        "==": lambda want: have[: len(want)] == want,
        "<=": lambda want: have <= want,
        ">=": lambda want: have >= want,
        "<": lambda want: have < want,
        ">": lambda want: have > want,
    }
    return all(verdicts[op](_release(want)) for op, want in bounds)


def _release(version: str) -> tuple[int, ...]:
    numbers = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in numbers.group().split(".")) if numbers else ()
