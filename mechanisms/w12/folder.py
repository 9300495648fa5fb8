"""Whole model folders to W12 and back, shard by shard, resumable, the source never touched.

One shard is written at a time and one matrix held in memory at a time. A shard appears under its
name only when it is whole and has been decoded and compared; running again goes on after the last.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specpilot.errors import CheckFailed, Conflict, InvalidInput, NotFound, SpecPilotError
from specpilot.mechanisms.w12.codec import decode, encode
from specpilot.mechanisms.w12.container import (
    FORMAT,
    KEY,
    PARTS,
    Output,
    W12Shard,
    convertible,
    sha256_of,
)
from specpilot.mechanisms.w12.statistics import TensorStatistics, statistics_of

__all__ = ["decode_folder", "encode_folder", "info_folder", "verify_folder"]

Progress = Callable[[int, int, str], None]


def _quiet(done: int, planned: int, message: str) -> None:
    """Progress that nobody looks at."""


def encode_folder(
    source: Path,
    target: Path,
    *,
    head: bool = False,
    convert_exact: bool = False,
    progress: Progress = _quiet,
) -> list[TensorStatistics]:
    """Write ``source`` to the folder ``target`` with its BF16 matrices in W12; return statistics.

    Embeddings stay BF16, and so does the LM head unless ``head``. FP32 matrices are taken only
    with ``convert_exact``, and only if every value is a BF16 value. Shards that are already there
    and belong to the same source are kept.

    Raises:
        InvalidInput: source or target do not fit, or a matrix is of another dtype.
        CheckFailed: a written matrix did not decode to its source. ``source`` is never touched.
    """
    _check_folders(source, target)
    shards = _shard_files(source)
    target.mkdir(parents=True, exist_ok=True)
    statistics: list[TensorStatistics] = []
    names: dict[str, str] = {}
    for number, name in enumerate(shards):
        shard = W12Shard(source / name)
        if shard.matrices:
            raise InvalidInput(f"{source / name} is in W12 already.")
        identity = _identity(source / name, head=head, convert_exact=convert_exact)
        done = _finished(target / name, identity)
        if done is None:
            writer = _Writer(shard, target / name, identity, head, convert_exact)
            with _disk(target):
                writer.write(partial(progress, number, len(shards)))
            done = W12Shard(target / name)
        statistics += [statistics_of(m, done.matrix(m)) for m in done.matrices]
        names |= dict.fromkeys(done.spans, name)
    with _disk(target):
        _copy_rest(source, target, shards)
        _write_index(source, target, names)
        _write_config(source, target)
    return statistics


def decode_folder(source: Path, target: Path, *, progress: Progress = _quiet) -> int:
    """Write a W12 folder back as BF16, every matrix checked; return how many matrices there were.

    Raises ``CheckFailed`` for a matrix that does not match its checksum.
    """
    _check_folders(source, target)
    shards = _shard_files(source)
    target.mkdir(parents=True, exist_ok=True)
    count, names = 0, {}
    for number, name in enumerate(shards):
        shard = W12Shard(source / name)
        with _disk(target), Output(target / name) as out:
            for key in sorted(_logical(shard)):
                progress(number, len(shards), key)
                if key in shard.matrices:
                    out.add(key, "BF16", tuple(shard.matrices[key]["shape"]), shard.bits(key))
                    count += 1
                else:
                    span = shard.spans[key]
                    out.add(key, span.dtype, span.shape, shard.raw(key))
                names[key] = name
            out.close({k: v for k, v in shard.metadata.items() if k != KEY})
    with _disk(target):
        _copy_rest(source, target, shards)
        _write_index(source, target, names)
        _write_config(source, target, remove=True)
    return count


def verify_folder(folder: Path, *, progress: Progress = _quiet) -> int:
    """Decode every matrix and compare it with its checksum; return how many there were.

    Raises ``CheckFailed`` for the first that differs, ``NotFound`` for a folder without W12.
    """
    count = 0
    shards = _shard_files(folder)
    for number, name in enumerate(shards):
        shard = W12Shard(folder / name)
        for matrix in shard.matrices:
            progress(number, len(shards), matrix)
            shard.bits(matrix)
            count += 1
    if not count:
        raise NotFound(f"{folder} holds no W12 matrix.", hint="Make one: specpilot w12 encode.")
    return count


def info_folder(folder: Path) -> list[TensorStatistics]:
    """Return statistics of every matrix of a W12 folder. Raises ``NotFound`` if there is none."""
    shards = [W12Shard(folder / name) for name in _shard_files(folder)]
    found = [statistics_of(name, shard.matrix(name)) for shard in shards for name in shard.matrices]
    if not found:
        raise NotFound(f"{folder} holds no W12 matrix.", hint="Make one: specpilot w12 encode.")
    return found


class _Writer:
    """Encodes one shard."""

    def __init__(
        self, shard: W12Shard, path: Path, identity: str, head: bool, convert_exact: bool
    ) -> None:
        self._shard = shard
        self._path = path
        self._identity = identity
        self._head = head
        self._convert_exact = convert_exact

    def write(self, progress: Callable[[str], None]) -> None:
        table: dict[str, Any] = {}
        with Output(self._path) as out:
            names = sorted(self._shard.spans)
            for number, name in enumerate(names):
                progress(f"{name} ({number + 1} of {len(names)})")
                bits = self._bits(name)
                if bits is None:
                    span = self._shard.spans[name]
                    out.add(name, span.dtype, span.shape, self._shard.raw(name))
                    continue
                matrix = encode(bits)
                if not np.array_equal(decode(matrix), bits):
                    raise CheckFailed(f"{name!r} did not survive encoding; {self._path} unwritten.")
                table[name] = {"shape": list(bits.shape), "sha256": sha256_of(bits)}
                for part, (dtype, _) in PARTS.items():
                    array = getattr(matrix, part)
                    if array.size:
                        out.add(f"{name}.w12.{part}", dtype, array.shape, array)
            record = {"format": FORMAT, "source": self._identity, "matrices": table}
            out.close({**self._shard.metadata, KEY: json.dumps(record)})

    def _bits(self, name: str) -> NDArray[np.uint16] | None:
        """BF16 patterns of a tensor that is to be converted; None for one that stays as it is."""
        span = self._shard.spans[name]
        if not convertible(name, span, self._head):
            return None
        if span.dtype == "BF16":
            return self._shard.raw(name).view(np.uint16).reshape(span.shape)
        if span.dtype in ("F32", "F16") and not self._convert_exact:
            raise InvalidInput(
                f"{self._shard.path}: {name!r} is {span.dtype}; W12 stores BF16.",
                hint="Convert the model to BF16 first, or pass --convert-exact for FP32 weights "
                "that are BF16 values.",
            )
        if span.dtype == "F32":
            wide = self._shard.raw(name).view(np.uint32).reshape(span.shape)
            if (wide & np.uint32(0xFFFF)).any():
                raise InvalidInput(
                    f"{self._shard.path}: {name!r} has FP32 values that BF16 cannot hold.",
                    hint="Rounding them would change the model; do that knowingly elsewhere.",
                )
            return (wide >> np.uint32(16)).astype(np.uint16)
        raise InvalidInput(f"{self._shard.path}: {name!r} is {span.dtype}; W12 stores BF16.")


def _logical(shard: W12Shard) -> Iterator[str]:
    """Names of the tensors that a shard stands for."""
    yield from shard.matrices
    yield from (name for name in shard.spans if name.partition(".w12.")[0] not in shard.matrices)


def _identity(path: Path, **options: bool) -> str:
    """What a finished shard must have come from, to be kept: the file and the options."""
    stat = path.stat()
    return json.dumps([path.name, stat.st_size, stat.st_mtime_ns, options])


def _finished(path: Path, identity: str) -> W12Shard | None:
    if not path.exists():
        return None
    shard = W12Shard(path)
    record = json.loads(shard.metadata.get(KEY, "{}"))
    if record.get("source") != identity:
        raise Conflict(
            f"{path} exists and was made from another source or with other options.",
            hint="Choose an empty folder, or remove it.",
        )
    return shard


def _check_folders(source: Path, target: Path) -> None:
    if not source.is_dir():
        raise NotFound(f"{source} is no folder of a model.")
    if source.resolve() == target.resolve():
        raise InvalidInput("Source and target are the same folder.", hint="Name a new folder.")


def _shard_files(folder: Path) -> list[str]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            return sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise InvalidInput(f"{index} is malformed: {error!r}.") from None
    if not (folder / "model.safetensors").exists():
        raise NotFound(f"{folder} holds no model.safetensors and no index of shards.")
    return ["model.safetensors"]


def _copy_rest(source: Path, target: Path, shards: list[str]) -> None:
    for path in sorted(source.iterdir()):
        made = {*shards, "model.safetensors.index.json", "config.json"}
        if path.is_file() and path.name not in made:
            shutil.copyfile(path, target / path.name)


def _write_index(source: Path, target: Path, names: Mapping[str, str]) -> None:
    if (source / "model.safetensors.index.json").exists():
        text = json.dumps({"metadata": {}, "weight_map": dict(sorted(names.items()))}, indent=1)
        (target / "model.safetensors.index.json").write_text(text + "\n", "utf-8")


def _write_config(source: Path, target: Path, *, remove: bool = False) -> None:
    path = source / "config.json"
    if not path.exists():
        return
    config = json.loads(path.read_text("utf-8"))
    if remove:
        config.pop("quantization_config", None)
    else:
        config["quantization_config"] = {"quant_method": "w12", "format": FORMAT}
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")


class _disk:
    """Turn a full or read-only disk into an error that names the folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            raise SpecPilotError(
                f"Writing to {self._folder} failed: {error.strerror}.",
                hint="What is whole was kept; make room and run the command again.",
            ) from error
