"""Whether a deployment's files are there, whole, and fit each other. Loads no weights.

Reads configs and the headers of safetensors files. What only the engine can tell (a tensor that the
architecture needs and the file lacks) shows when the engine starts.
"""

import hashlib
import json
import struct
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specpilot.errors import SpecPilotError
from specpilot.harness.engines import settings as engine_settings
from specpilot.types import Deployment

__all__ = ["Health", "check_health", "check_weights", "read_config"]

MAX_HEADER_BYTES = 100 << 20


@dataclass(frozen=True, slots=True)
class Health:
    """``problems`` stop a deployment from being used; each says what to do. Empty: it is sound."""

    problems: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.problems


def check_health(deployment: Deployment) -> Health:
    """Check everything that can be checked without loading a model."""
    return Health(tuple(_problems(deployment)))


def _problems(deployment: Deployment) -> Iterator[str]:
    settings = {**deployment.launch, **deployment.stock}
    threads = settings.pop("threads", 1)
    if not isinstance(threads, int) or isinstance(threads, bool) or threads < 1:
        yield f"threads: {threads!r} is no whole number above 0."
    if deployment.engine in engine_settings.MODELS:
        known = engine_settings.known_settings(deployment.engine)
        models = {"target": deployment.target, "drafter": deployment.drafter or ""}
        settings |= {name: value for name, value in models.items() if name in known}
        try:
            engine_settings.check(deployment.engine, settings)
        except SpecPilotError as error:
            yield str(error)
    yield from _hardware_problems(deployment.hardware)
    target = yield from _folder_problems("target", deployment.target, deployment)
    if deployment.drafter is None:
        return
    drafter = yield from _folder_problems("drafter", deployment.drafter, deployment)
    if target and drafter:
        yield from _fit_problems(deployment, target, drafter)


def _hardware_problems(name: str) -> Iterator[str]:
    if name == "cpu":  # this machine's own CPU: measured, not looked up
        return
    from specpilot.harness.cost_model.hardware import load_hardware

    try:
        load_hardware(name)
    except SpecPilotError as error:
        yield f"hardware: {error}"


def _folder_problems(
    role: str, folder: str, deployment: Deployment
) -> Generator[str, None, dict[str, Any] | None]:
    """Yield problems, return the config (None if there is none to read)."""
    path = Path(folder)
    if not path.is_dir():
        yield f"{role}: the folder {path} does not exist; give a Hugging Face model folder."
        return None
    try:
        config = read_config(path)
    except ValueError as error:
        yield f"{role}: {error}"
        return None
    if deployment.engine != "mock" and deployment.launch.get("load_format") != "dummy":
        yield from (f"{role}: {problem}" for problem in check_weights(path))
    return config


def read_config(folder: Path) -> dict[str, Any]:
    """The language model's part of ``folder/config.json``. Raises ``ValueError`` in words."""
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}.") from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}.") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{path} holds no JSON object.")
    text = raw.get("text_config")
    return {**raw, **text} if isinstance(text, dict) else raw


def check_weights(folder: Path) -> list[str]:
    """Problems of a folder's safetensors files: missing, truncated, shards that the index lacks."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = [folder / name for name in sorted(set(shards.values()))]
        except (ValueError, KeyError, TypeError, AttributeError):
            return [f"{index} is no safetensors index."]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        return [f"no *.safetensors in {folder}; put the weights there."]
    return [problem for file in files if (problem := _file_problem(file))]


def _file_problem(file: Path) -> str | None:
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = struct.unpack("<Q", stream.read(8))[0]
            if length > min(size - 8, MAX_HEADER_BYTES):
                return f"{file} is truncated: {size} bytes, its header alone has {length}."
            header = json.loads(stream.read(length))
        end = max(
            (t["data_offsets"][1] for n, t in header.items() if n != "__metadata__"), default=0
        )
    except OSError as error:
        return f"cannot read {file}: {error.strerror}."
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, IndexError):
        return f"{file} is no safetensors file; copy or download it again."
    expected = 8 + length + end
    if size != expected:
        return f"{file} has {size} bytes, its header says {expected}; copy or download it again."
    return None


def _fit_problems(
    deployment: Deployment, target: dict[str, Any], drafter: dict[str, Any]
) -> Iterator[str]:
    for name in ("hidden_size", "vocab_size"):
        ours, theirs = target.get(name), drafter.get(name)
        if ours != theirs:
            yield f"drafter: its {name} is {theirs}, the target's is {ours}: it is another model's."
    dflash = drafter.get("dflash_config")
    if isinstance(dflash, dict):
        layers, taken = target.get("num_hidden_layers"), dflash.get("target_layer_ids")
        if isinstance(layers, int) and isinstance(taken, list):
            wrong = [i for i in taken if not isinstance(i, int) or not 0 <= i < layers]
            if wrong:
                yield f"drafter: it reads target layer {wrong[0]}, the target has {layers}."
        mask, size = dflash.get("mask_token_id"), target.get("vocab_size")
        if isinstance(mask, int) and isinstance(size, int) and not 0 <= mask < size:
            yield f"drafter: its mask token {mask} is outside the target's vocabulary of {size}."
    digests = [_tokenizer_digest(Path(f)) for f in (deployment.target, deployment.drafter or "")]
    if None not in digests and digests[0] != digests[1]:
        yield "drafter: its tokenizer.json differs from the target's."


def _tokenizer_digest(folder: Path) -> str | None:
    """Hash of a tokenizer's meaning (its JSON, whatever the spacing); None if there is none."""
    try:
        value = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
