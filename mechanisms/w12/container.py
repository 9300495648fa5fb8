"""W12 on disk: a Hugging Face folder whose BF16 matrices are stored in W12, tensor by tensor.

A converted matrix ``x.weight`` becomes the tensors ``x.weight.w12.q``, ``.b``, ``.base`` and, where
there are any, ``.escape_place``, ``.escape_bits``, ``.raw_rows`` and ``.raw_bits``. The file's
metadata entry ``specpilot.w12`` holds, for each matrix, its shape and the sha256 of its BF16 bytes,
so that a folder is verified without its source. Everything else (norms, biases, embeddings, config,
tokenizer) is copied as it is.

Reads through memory maps and writes front to back, so files may be larger than memory.
"""

import hashlib
import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from specpilot.errors import CheckFailed, InvalidInput, NotFound
from specpilot.mechanisms.w12.codec import W12Matrix, decode

__all__ = ["FORMAT", "KEY", "PARTS", "Output", "Span", "W12Shard", "convertible", "sha256_of"]

FORMAT = "specpilot.w12/1"
KEY = "specpilot.w12"
_ITEM_BYTES = {"BF16": 2, "F16": 2, "U8": 1, "I8": 1, "I16": 2, "U16": 2, "I32": 4, "U32": 4,
               "F32": 4, "I64": 8, "U64": 8, "F64": 8, "BOOL": 1, "F8_E4M3": 1,
               "F8_E5M2": 1}  # fmt: skip
PARTS: Mapping[str, tuple[str, Any]] = {
    "q": ("U8", np.uint8),
    "b": ("U8", np.uint8),
    "base": ("U8", np.uint8),
    "escape_place": ("U32", np.uint32),
    "escape_bits": ("U16", np.uint16),
    "raw_rows": ("I32", np.int32),
    "raw_bits": ("U16", np.uint16),
}
_CHUNK = 1 << 24
_MIN_WEIGHTS = 1 << 14  # smaller matrices save nothing that anyone would notice


@dataclass(frozen=True, slots=True)
class Span:
    """One tensor in a safetensors file: its dtype name, shape and bytes ``start:end``."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class W12Shard:
    """A safetensors file, plain or with W12 matrices, read tensor by tensor through a memory map.

    Raises ``NotFound`` and ``InvalidInput`` (truncated, malformed, a newer format) on opening.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise NotFound(f"{path} does not exist.")
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
            if 8 + length > size:
                raise InvalidInput(f"{path} is truncated: its header is cut off.")
            try:
                header = json.loads(file.read(length))
            except ValueError as error:
                raise InvalidInput(f"{path} is no safetensors file: {error}.") from None
        self.metadata: dict[str, str] = header.pop("__metadata__", {})
        self.data_start = 8 + length
        self.spans = {name: _span(path, name, entry) for name, entry in header.items()}
        end = max((span.end for span in self.spans.values()), default=0)
        if self.data_start + end > size:
            raise InvalidInput(
                f"{path} is truncated: it has {size} bytes, its header calls for "
                f"{self.data_start + end}.",
                hint="Copy or encode it again.",
            )
        self._map = np.memmap(path, np.uint8, mode="r")
        self.matrices = _matrices(path, self.metadata)

    def raw(self, name: str) -> NDArray[np.uint8]:
        """The bytes of a tensor as they lie in the file (a view of the memory map)."""
        span = self.spans[name]
        return self._map[self.data_start + span.start : self.data_start + span.end]

    def matrix(self, name: str) -> W12Matrix:
        """Return a W12 matrix. Raises ``CheckFailed`` if a part is missing or does not fit."""
        rows, columns = self.matrices[name]["shape"]
        parts: dict[str, NDArray[Any]] = {}
        for part, (_, kind) in PARTS.items():
            key = f"{name}.w12.{part}"
            found = self.raw(key).view(kind) if key in self.spans else np.empty(0, kind)
            parts[part] = found.reshape(self.spans[key].shape) if key in self.spans else found
        if parts["q"].shape != (rows, columns) or parts["base"].shape != (rows,):
            raise CheckFailed(
                f"{self.path}: the parts of {name!r} do not make a {rows} x {columns} matrix.",
                hint="Encode the source again.",
            )
        parts["raw_bits"] = parts["raw_bits"].reshape(-1, columns)
        return W12Matrix(columns=columns, **parts)

    def bits(self, name: str) -> NDArray[np.uint16]:
        """Return a matrix's BF16 patterns, decoded and checked against its checksum.

        Raises ``CheckFailed`` for a file that was edited or damaged.
        """
        try:
            bits = decode(self.matrix(name))
        except (IndexError, ValueError) as error:
            raise CheckFailed(f"{self.path}: {name!r} cannot be decoded: {error}.") from None
        if sha256_of(bits) != self.matrices[name]["sha256"]:
            raise CheckFailed(
                f"{self.path}: {name!r} decodes to other weights than were encoded.",
                hint="The file was damaged or edited; encode the source again.",
            )
        return bits


class Output:
    """Writes a safetensors file front to back; the header's place is kept free and filled last."""

    def __init__(self, path: Path, room: int = 1 << 20) -> None:
        self._path = path
        self._partial = path.with_name(path.name + ".partial")
        self._room = room
        self._entries: dict[str, Any] = {}
        self._offset = 0
        self._file: IO[bytes] | None = None

    def __enter__(self) -> "Output":
        self._file = self._partial.open("wb")
        self._file.write(b"\0" * (8 + self._room))
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
            self._partial.unlink(missing_ok=True)

    def add(self, name: str, dtype: str, shape: tuple[int, ...], data: NDArray[Any]) -> None:
        assert self._file is not None
        flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        start = self._offset  # readers of the format allow no gaps
        self._file.write(flat.data)
        self._offset = start + flat.nbytes
        self._entries[name] = {
            "dtype": dtype, "shape": list(shape), "data_offsets": [start, self._offset],
        }  # fmt: skip

    def close(self, metadata: Mapping[str, str]) -> None:
        """Write the header, make the file durable and give it its name."""
        assert self._file is not None
        header = json.dumps({"__metadata__": {"format": "pt", **metadata}, **self._entries})
        if len(header) > self._room:
            raise InvalidInput(f"{self._path} has too many tensors for one file.")
        self._file.seek(0)
        self._file.write(struct.pack("<Q", self._room) + header.encode().ljust(self._room))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None
        self._partial.replace(self._path)


def convertible(name: str, span: Span, head: bool = False) -> bool:
    """Whether W12 is for a tensor: the matrix of a linear layer, the LM head only if ``head``."""
    if len(span.shape) != 2 or not name.endswith(".weight") or "embed" in name:
        return False
    if span.dtype not in ("BF16", "F32", "F16", "F64"):
        return False
    if name.startswith("lm_head.") and not head:
        return False
    return span.shape[0] * span.shape[1] >= _MIN_WEIGHTS


def _span(path: Path, name: str, entry: Any) -> Span:
    try:
        start, end = entry["data_offsets"]
        span = Span(entry["dtype"], tuple(entry["shape"]), start, end)
        wanted = int(np.prod(span.shape, dtype=np.int64)) * _ITEM_BYTES[span.dtype]
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidInput(f"{path}: the header entry of {name!r} is malformed: {error}.") from None
    if end - start != wanted:
        raise InvalidInput(
            f"{path}: {name!r} takes {wanted} bytes, its header gives {end - start}."
        )
    return span


def _matrices(path: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    if KEY not in metadata:
        return {}
    record = json.loads(metadata[KEY])
    if record.get("format") != FORMAT:
        raise InvalidInput(
            f"{path} is in format {record.get('format')!r}; this version reads {FORMAT!r}.",
            hint="Update SpecPilot, or encode the source again.",
        )
    found: dict[str, Any] = record["matrices"]
    return found


def sha256_of(bits: NDArray[np.uint16]) -> str:
    digest = hashlib.sha256()
    flat = np.ascontiguousarray(bits).reshape(-1).view(np.uint8)
    for start in range(0, flat.nbytes, _CHUNK):
        digest.update(flat[start : start + _CHUNK].data)
    return digest.hexdigest()
