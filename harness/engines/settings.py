"""The settings of each engine: the flags of its command line and the keys of a deployment.

One frozen dataclass an engine is the single source: ``Deployment.stock``, patches' ``launch_args``,
``LaunchSpec`` and the engine's own argument parser all go through it. Standard library only: the
engine itself reads it.
"""

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from specpilot.errors import InvalidInput, SpecPilotError, Unsupported
from specpilot.mechanisms.base import ParamSpec, Setting

__all__ = [
    "PROTECTED",
    "EngineSettings",
    "MockSettings",
    "ReferenceSettings",
    "as_dict",
    "check",
    "known_settings",
    "parse_args",
    "to_flags",
]

PROTECTED = frozenset({"target", "drafter", "dtype", "device", "host", "port", "nonce", "overlay"})
"""Settings that say what is measured and where: a patch's ``launch_args`` may not touch them."""


def setting(
    help: str,
    default: Any = MISSING,
    low: float | None = None,
    high: float | None = None,
) -> Any:
    """A field with its range. The default is always taken, also outside the range: it means off."""
    return field(default=default, metadata={"help": help, "low": low, "high": high})


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """What every engine process takes. Raises ``InvalidInput`` for a value it cannot have."""

    host: str = setting("address to listen on", "127.0.0.1")
    port: int = setting("port to listen on; 0: any free one", 0, 0, 65535)
    nonce: str = setting("echoed by /server_info", "")
    overlay: str = setting(f"folders with an overlay.py, joined by {os.pathsep!r}", "")
    max_running: int = setting("requests that run at once", 8, 1, 4096)
    context: int = setting("longest prompt and output together", 4096, 2)

    def __post_init__(self) -> None:
        kinds = get_type_hints(type(self))
        for info in fields(self):
            value = _spec(info, kinds[info.name]).check(info.name, getattr(self, info.name))
            object.__setattr__(self, info.name, value)


@dataclass(frozen=True, kw_only=True)
class ReferenceSettings(EngineSettings):
    """Settings of the reference engine. ``rows`` and ``block`` count the anchor."""

    target: str = setting("Hugging Face folder of the target")
    drafter: str = setting("folder of the drafter; empty: none", "")
    dtype: Literal["float32", "bfloat16", "float64"] = setting(
        "dtype of weights and activations", "float32"
    )
    device: Literal["cpu", "cuda"] = setting("where the model runs", "cpu")
    speculation: Literal["none", "chain", "tree"] = setting(
        "none: one token a pass; chain or tree: what is verified", "none"
    )
    block: int = setting("rows of the drafter's block", 8, 2, 64)
    rows: int = setting("rows of the exact pass; 0: block", 0, 1, 1024)
    top_k: int = setting("candidates kept at each depth", 4, 1, 64)
    selector: bool = setting("draft through the pairwise selector in the drafter's folder", False)
    fp32_logits: bool = setting("compute the LM head in float32", False)
    weights: Literal["plain", "w12"] = setting(
        "how the target's layers are kept; w12: packed, decoded when used", "plain"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weights == "w12" and self.device != "cpu":
            raise InvalidInput("weights 'w12' are decoded on the CPU; device is 'cuda'.")
        if self.speculation != "none" and not self.drafter:
            raise InvalidInput(f"speculation {self.speculation!r} needs a drafter.")
        if self.speculation == "chain" and self.rows not in (0, self.block):
            raise InvalidInput(
                f"a chain of block {self.block} has {self.block} rows, not {self.rows}."
            )


@dataclass(frozen=True, kw_only=True)
class MockSettings(EngineSettings):
    """Settings of the mock engine. A pass takes ``delay_ms + rows * row_ms``."""

    target: str = setting("not read: the mock's model is built in", "")
    drafter: str = setting("not read: the mock drafts by chance", "")
    speculation: Literal["none", "chain", "tree"] = setting(
        "none: one token a pass; chain, tree: some more by chance", "none"
    )
    block: int = setting("rows of the drafter's block", 8, 2, 64)
    rows: int = setting("rows of a pass; 0: block", 0, 1, 1024)
    top_k: int = setting("candidates kept at each depth", 4, 1, 64)
    accept: float = setting("chance that a drafted token is right", 0.6, 0.0, 0.999)
    tokens_per_pass: int = setting("fixed; 0: by speculation", 0, 1, 64)
    delay_ms: float = setting("time of one pass", 1.0, 0.0, 10_000.0)
    row_ms: float = setting("and of each of its rows", 0.0, 0.0, 1000.0)
    noise: float = setting("sd of the logits' noise", 0.0, 0.0, 10.0)
    noise_seed: int = setting("which noise", 0, 0)

    @property
    def pass_rows(self) -> int:
        """Rows of one pass, anchor included."""
        return 1 if self.speculation == "none" else self.rows or self.block


MODELS: Mapping[str, type[EngineSettings]] = {"reference": ReferenceSettings, "mock": MockSettings}
Settings = TypeVar("Settings", bound=EngineSettings)


def _model(engine: str) -> type[EngineSettings]:
    if engine not in MODELS:
        raise Unsupported(
            f"The engine {engine!r} cannot be launched; engines: {', '.join(sorted(MODELS))}."
        )
    return MODELS[engine]


def known_settings(engine: str) -> frozenset[str]:
    """Names of the settings; ``Unsupported`` for an engine that cannot be launched here."""
    return frozenset(info.name for info in fields(_model(engine)))


def check(engine: str, settings: Mapping[str, Any]) -> EngineSettings:
    """Validate settings. Raises ``InvalidInput`` that names the first wrong key."""
    model = _model(engine)
    infos = {info.name: info for info in fields(model)}
    for name in settings:
        if name not in infos:
            known = ", ".join(sorted(infos))
            raise InvalidInput(f"{engine} has no setting {name!r}. Settings: {known}.")
    for name, info in infos.items():
        if info.default is MISSING and name not in settings:
            raise InvalidInput(f"{engine} needs the setting {name!r}: {info.metadata['help']}.")
    return model(**settings)


def to_flags(settings: EngineSettings) -> list[str]:
    """The command-line flags that differ from the defaults, in the model's order."""
    flags: list[str] = []
    for info in fields(settings):
        value = getattr(settings, info.name)
        if value == info.default:
            continue
        flags += [_flag(info.name)] if value is True else [_flag(info.name), str(value)]
    return flags


def as_dict(settings: EngineSettings, leave_out: frozenset[str]) -> dict[str, Setting]:
    """The settings by name, but for those to leave out."""
    return {name: value for name, value in asdict(settings).items() if name not in leave_out}


def parse_args(model: type[Settings], prog: str, argv: Sequence[str] | None = None) -> Settings:
    """Parse a command line into ``model``; a wrong one ends the process with status 2."""
    parser = argparse.ArgumentParser(prog=prog, description=model.__doc__, allow_abbrev=False)
    kinds = get_type_hints(model)
    for info in fields(model):
        spec = _spec(info, kinds[info.name])
        if isinstance(spec.default, bool):
            parser.add_argument(_flag(info.name), action="store_true", help=spec.help)
            continue
        shown = "required" if info.default is MISSING else f"default: {info.default!r}"
        parser.add_argument(
            _flag(info.name),
            type=type(spec.default),
            choices=spec.choices,
            default=info.default,
            required=info.default is MISSING,
            metavar=None if spec.choices else info.name.upper(),
            help=f"{spec.help} ({shown})".replace("%", "%%"),
        )
    try:
        return model(**vars(parser.parse_args(argv)))
    except SpecPilotError as error:
        parser.error(str(error))


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _spec(info: Field[Any], kind: Any) -> ParamSpec:
    choices = get_args(kind) if get_origin(kind) is Literal else None
    default = "" if info.default is MISSING else info.default
    meta = info.metadata
    return ParamSpec(default, meta["help"], meta["low"], meta["high"], choices)
