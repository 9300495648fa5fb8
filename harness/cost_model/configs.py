"""A Hugging Face config, read field by field: every error names the field and its value."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specpilot.errors import InvalidInput, NotFound

__all__ = ["Config", "open_config"]

_DTYPES = {
    "float64": ("fp64", 64.0),
    "float32": ("fp32", 32.0),
    "bfloat16": ("bf16", 16.0),
    "float16": ("fp16", 16.0),
}


class Config:
    """A config mapping whose accessors validate: a missing or lying field is ``InvalidInput``."""

    def __init__(self, values: Mapping[str, Any], where: str = "config") -> None:
        self.values = values
        self.where = where

    def _fail(self, field: str, what: str) -> InvalidInput:
        return InvalidInput(
            f"{self.where}: field {field!r} {what}.",
            hint="Compare config.json with the checkpoint's own.",
        )

    def has(self, field: str) -> bool:
        return self.values.get(field) is not None

    def integer(self, *fields: str, default: int | None = None, low: int = 1) -> int:
        """Return the first of ``fields`` that is set, as an integer of at least ``low``."""
        for field in fields:
            value = self.values.get(field)
            if value is None:
                continue
            if type(value) is not int or value < low:
                raise self._fail(field, f"is {value!r}; it must be an integer of at least {low}")
            return value
        if default is None:
            raise self._fail(fields[0], "is missing")
        return default

    def flag(self, field: str, default: bool = False) -> bool:
        value = self.values.get(field)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._fail(field, f"is {value!r}; it must be true or false")
        return value

    def mapping(self, field: str) -> "Config | None":
        value = self.values.get(field)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self._fail(field, f"is {value!r}; it must be an object")
        return Config(value, f"{self.where}.{field}")

    def integers(self, field: str) -> tuple[int, ...] | None:
        value = self.values.get(field)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or not all(type(v) is int for v in value):
            raise self._fail(field, f"is {value!r}; it must be a list of integers")
        return tuple(value)

    def strings(self, field: str) -> tuple[str, ...] | None:
        value = self.values.get(field)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or not all(isinstance(v, str) for v in value):
            raise self._fail(field, f"is {value!r}; it must be a list of strings")
        return tuple(value)

    def text(self, field: str) -> str:
        value = self.values.get(field)
        if not isinstance(value, str):
            raise self._fail(field, "is missing" if value is None else f"is {value!r}, no string")
        return value

    def dtype(self, override: str | None = None) -> tuple[str, float]:
        """Return the compute name and bits of ``dtype`` (``torch_dtype``), bfloat16 if unset."""
        field = "dtype" if self.has("dtype") else "torch_dtype"
        value = override or self.values.get(field) or "bfloat16"
        name = str(value).removeprefix("torch.")
        if name not in _DTYPES:
            raise self._fail(
                "dtype" if override else field,
                f"is {value!r}, an unknown dtype; known: {', '.join(_DTYPES)}",
            )
        return _DTYPES[name]


def open_config(source: object) -> Config:
    """Open a folder, a config.json or a mapping; a multimodal config yields its ``text_config``.

    Raises ``NotFound`` for a path without config.json, ``InvalidInput`` for one that is no JSON.
    """
    if isinstance(source, Mapping):
        values: Any = source
        where = "config"
    elif isinstance(source, str | Path):
        path = Path(source)
        path = path / "config.json" if path.is_dir() else path
        where = str(path)
        if not path.is_file():
            raise NotFound(
                f"no config at {path}.", hint="Give a Hugging Face folder or its config.json."
            )
        try:
            values = json.loads(path.read_text("utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise InvalidInput(
                f"{path} is no JSON: {error}.", hint="Fetch the checkpoint's config.json again."
            ) from error
        if not isinstance(values, Mapping):
            raise InvalidInput(f"{path} holds {type(values).__name__}, not an object.")
    else:
        raise InvalidInput(
            f"a config is a folder, a path or a mapping, got {type(source).__name__}."
        )
    text = values.get("text_config")
    if isinstance(text, Mapping):
        outer = {
            k: values[k] for k in ("quantization_config", "dtype", "torch_dtype") if k in values
        }
        if "tie_word_embeddings" in values:
            outer["tie_word_embeddings"] = values["tie_word_embeddings"]
        # Some text configs repeat the outer architectures only at the top.
        return Config({"architectures": values.get("architectures"), **outer, **text}, where)
    return Config(values, where)
