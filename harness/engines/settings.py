"""The settings of each engine: the flags of its command line and the keys of a deployment.

One strict model an engine is the single source: ``Deployment.stock``, patches' ``launch_args``,
``LaunchSpec`` and the engine's own argument parser all go through it.
"""

import argparse
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from specpilot.errors import InvalidInput, Unsupported

__all__ = [
    "PROTECTED",
    "EngineSettings",
    "MockSettings",
    "ReferenceSettings",
    "check",
    "parse_args",
    "settings_model",
    "to_flags",
]

PROTECTED = frozenset({"target", "drafter", "dtype", "device", "host", "port", "nonce", "overlay"})
"""Settings that say what is measured and where: a patch's ``launch_args`` may not touch them."""


class EngineSettings(BaseModel):
    """What every engine process takes."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    host: str = Field(default="127.0.0.1", description="address to listen on")
    port: int = Field(default=0, ge=0, le=65535, description="port to listen on; 0: any free one")
    nonce: str = Field(default="", description="echoed by /server_info")
    overlay: str = Field(
        default="", description=f"patch folders with an overlay.py, joined by {os.pathsep!r}"
    )
    max_running: int = Field(default=8, ge=1, description="requests that run at once")
    context: int = Field(default=4096, ge=2, description="longest prompt and output together")


class ReferenceSettings(EngineSettings):
    """Settings of the reference engine. ``rows`` and ``block`` count the anchor."""

    target: str = Field(description="Hugging Face folder of the target")
    drafter: str = Field(default="", description="folder of the drafter; empty: none")
    dtype: Literal["float32", "bfloat16", "float64"] = Field(
        default="float32", description="dtype of weights and activations"
    )
    device: Literal["cpu", "cuda"] = Field(default="cpu", description="where the model runs")
    speculation: Literal["none", "chain", "tree"] = Field(
        default="none", description="none: one token a pass; chain or tree: what is verified"
    )
    block: int = Field(default=8, ge=2, le=64, description="rows of the drafter's block")
    rows: int = Field(default=0, ge=0, le=1024, description="rows of the exact pass; 0: block")
    top_k: int = Field(default=4, ge=1, le=64, description="candidates kept at each depth")
    fp32_logits: bool = Field(default=False, description="compute the LM head in float32")

    @model_validator(mode="after")
    def _consistent(self) -> "ReferenceSettings":
        if self.speculation != "none" and not self.drafter:
            raise ValueError(f"speculation {self.speculation!r} needs a drafter")
        if self.speculation == "chain" and self.rows not in (0, self.block):
            raise ValueError(
                f"a chain of block {self.block} has {self.block} rows, not {self.rows}"
            )
        return self


class MockSettings(EngineSettings):
    """Settings of the mock engine. A pass takes ``delay_ms + rows * row_ms``."""

    target: str = Field(default="", description="not read: the mock's model is built in")
    drafter: str = Field(default="", description="not read: the mock drafts by chance")
    speculation: Literal["none", "chain", "tree"] = Field(
        default="none", description="none: one token a pass; chain, tree: some more by chance"
    )
    block: int = Field(default=8, ge=2, le=64, description="rows of the drafter's block")
    rows: int = Field(default=0, ge=0, le=1024, description="rows of a pass; 0: block")
    top_k: int = Field(default=4, ge=1, le=64, description="candidates kept at each depth")
    accept: float = Field(default=0.6, ge=0, lt=1, description="chance of a drafted token")
    tokens_per_pass: int = Field(default=0, ge=0, le=64, description="fixed; 0: by speculation")
    delay_ms: float = Field(default=1.0, ge=0.0, le=10_000.0, description="time of one pass")
    row_ms: float = Field(default=0.0, ge=0.0, le=1000.0, description="and of each of its rows")
    noise: float = Field(default=0.0, ge=0.0, le=10.0, description="sd of the logits' noise")
    noise_seed: int = Field(default=0, ge=0, description="which noise")

    @property
    def pass_rows(self) -> int:
        """Rows of one pass, anchor included."""
        return 1 if self.speculation == "none" else self.rows or self.block


MODELS: Mapping[str, type[EngineSettings]] = {"reference": ReferenceSettings, "mock": MockSettings}
Settings = TypeVar("Settings", bound=EngineSettings)


def settings_model(engine: str) -> type[EngineSettings]:
    """The settings of ``engine``; raises ``Unsupported`` for one that cannot be launched here."""
    if engine not in MODELS:
        raise Unsupported(
            f"The engine {engine!r} cannot be launched; engines: {', '.join(sorted(MODELS))}."
        )
    return MODELS[engine]


def check(engine: str, settings: Mapping[str, Any]) -> EngineSettings:
    """Validate settings. Raises ``InvalidInput`` that names the first wrong key."""
    model = settings_model(engine)
    try:
        return model.model_validate(dict(settings))
    except ValidationError as error:
        raise InvalidInput(_explain(engine, model, error)) from error


def to_flags(settings: EngineSettings) -> list[str]:
    """The command-line flags that differ from the defaults, in the model's order."""
    flags: list[str] = []
    for name, info in type(settings).model_fields.items():
        value = getattr(settings, name)
        if value == info.default:
            continue
        flag = "--" + name.replace("_", "-")
        flags += [flag] if value is True else [flag, str(value)]
    return flags


def parse_args(model: type[Settings], prog: str, argv: Sequence[str] | None = None) -> Settings:
    """Parse a command line into ``model``; a wrong one ends the process with status 2."""
    parser = argparse.ArgumentParser(prog=prog, description=model.__doc__, allow_abbrev=False)
    for name, info in model.model_fields.items():
        flag, kind = "--" + name.replace("_", "-"), info.annotation
        shown = info.description or ""
        if info.is_required():
            parser.add_argument(flag, required=True, metavar=name.upper(), help=shown)
        elif kind is bool:
            parser.add_argument(flag, action="store_true", help=shown)
        else:
            choices = get_args(kind) if get_origin(kind) is Literal else None
            parser.add_argument(
                flag,
                type=kind if choices is None and isinstance(kind, type) else str,
                choices=choices,
                default=info.default,
                metavar=None if choices else name.upper(),
                help=f"{shown} (default: {info.default!r})".replace("%", "%%"),
            )
    given = vars(parser.parse_args(argv))
    try:
        return model.model_validate(given)
    except ValidationError as error:
        parser.error(_explain(prog, model, error))


def _explain(where: str, model: type[EngineSettings], error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    name = ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        known = ", ".join(sorted(model.model_fields))
        return f"{where} has no setting {name!r}. Settings: {known}."
    if first["type"] == "missing":
        return f"{where} needs the setting {name!r}: {model.model_fields[name].description}."
    text = first["msg"].removeprefix("Value error, ")
    return f"{where}: {name or 'settings'}: {text} (got {str(first['input'])[:80]!r})."
