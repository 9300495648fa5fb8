"""What a mechanism is: a named, typed switch with reasons for where it applies.

Describing a mechanism needs no torch, so that servers and planners can list them all. How it works
lives beside its description; how an engine carries it out lives in the engine.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from specpilot.errors import InvalidInput, Unsupported
from specpilot.types import Deployment

__all__ = ["Applicability", "Mechanism", "ParamSpec", "Setting", "block_drafter_reasons"]

Setting = str | int | float | bool

BLOCK_DRAFTERS = frozenset({"block", "dflash", "dflash2", "dspark"})


@dataclass(frozen=True, slots=True)
class Applicability:
    """Whether a mechanism can run on a deployment. ``reasons`` says why not; empty when it can."""

    ok: bool
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One parameter: its default reproduces stock, its other values lie in a range or a list.

    ``default`` is always accepted, even outside ``low``..``high``: for some parameters it means
    "off". The value's type is the default's type.
    """

    default: Setting
    help: str
    low: float | None = None
    high: float | None = None
    choices: tuple[Setting, ...] | None = None

    def check(self, name: str, value: object) -> Setting:
        """Return ``value`` in the default's type. Raises ``InvalidInput`` saying what it takes."""
        kind = type(self.default)
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise InvalidInput(
                f"parameter {name!r} takes {kind.__name__}, got {value!r}.",
                hint=f"Give {self.describe()}.",
            )
        if value == self.default:
            return self.default
        inside = value in self.choices if self.choices is not None else True
        if isinstance(value, int | float) and not isinstance(value, bool):
            inside = inside and (self.low is None or value >= self.low)
            inside = inside and (self.high is None or value <= self.high)
        if not inside:
            raise InvalidInput(
                f"parameter {name!r} is {value!r}, outside what it takes.",
                hint=f"Give {self.describe()}.",
            )
        return value

    def describe(self) -> str:
        """Say in words what the parameter takes: ``8 to 64, or 0 (default)``."""
        if self.choices is not None:
            allowed = "one of " + ", ".join(map(repr, self.choices))
        elif self.low is not None and self.high is not None:
            allowed = f"{self.low:g} to {self.high:g}"
        elif self.low is not None:
            allowed = f"at least {self.low:g}"
        elif self.high is not None:
            allowed = f"at most {self.high:g}"
        else:
            allowed = f"any {type(self.default).__name__}"
        return f"{allowed}, or {self.default!r} (default)"


@dataclass(frozen=True)
class Mechanism:
    """A switch that an engine knows. With every parameter at its default it is stock.

    ``check`` lists the reasons why a deployment cannot use it (none: it can). ``render`` turns
    checked parameters into settings by engine name; an engine without an entry is unsupported.
    ``counter`` is the ``meta_info`` key that is above 0 only if the mechanism ran. ``cost`` names
    the kind of change for the cost model.
    """

    id: str
    title: str
    summary: str
    params: Mapping[str, ParamSpec]
    check: Callable[[Deployment], tuple[str, ...]]
    render: Mapping[str, Callable[[Mapping[str, Setting]], dict[str, Setting]]]
    counter: str
    cost: str
    source: str = ""

    def applies_to(self, deployment: Deployment) -> Applicability:
        """Say whether the deployment can use the mechanism, with every reason against it."""
        reasons = tuple(self.check(deployment))
        if deployment.engine not in self.render:
            works_on = ", ".join(sorted(self.render))
            reasons += (
                f"{self.id} is implemented for {works_on}; this deployment runs on "
                f"{deployment.engine}",
            )
        return Applicability(not reasons, reasons)

    def resolve(self, params: Mapping[str, object]) -> dict[str, Setting]:
        """Check given parameters and fill in defaults. Raises ``InvalidInput``."""
        unknown = sorted(set(params) - set(self.params))
        if unknown:
            raise InvalidInput(
                f"mechanism {self.id!r} has no parameter {unknown[0]!r}.",
                hint=f"It takes {', '.join(sorted(self.params))}.",
            )
        return {
            name: spec.check(f"{self.id}.{name}", params[name]) if name in params else spec.default
            for name, spec in self.params.items()
        }

    def settings(self, engine: str, params: Mapping[str, object]) -> dict[str, Setting]:
        """Return the engine settings for these parameters; empty at the defaults (off).

        Raises ``InvalidInput`` for parameters it does not take and ``Unsupported`` for an engine
        it does not work on.
        """
        if engine not in self.render:
            raise Unsupported(
                f"mechanism {self.id!r} does not work on engine {engine!r}.",
                hint=f"It works on {', '.join(sorted(self.render))}.",
            )
        return self.render[engine](self.resolve(params))


def block_drafter_reasons(deployment: Deployment) -> tuple[str, ...]:
    """Reasons why a mechanism that needs a block drafter's lattice cannot run; often none."""
    if deployment.drafter is None:
        return ("it needs a drafter, and the deployment names none",)
    if deployment.drafter_kind not in BLOCK_DRAFTERS:
        known = ", ".join(sorted(BLOCK_DRAFTERS))
        return (
            f"it needs a drafter that proposes a whole block ({known}), "
            f"not {deployment.drafter_kind!r}",
        )
    return ()
