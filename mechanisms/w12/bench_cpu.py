"""Measure the W12 codec on trained weights, beside ZipNN: bits per weight and speed of one core.

``SPECPILOT_W12_MODELS`` lists safetensors files or model folders, ``name=path`` joined by the
path separator; those that do not exist are passed over with a note. The deployment ``pico`` is
always there. FP32 and FP16 weights are rounded to BF16 first, which no deployment should do but
which gives their exponents. ZipNN is measured if it can be imported.

Speeds are BF16 bytes over seconds of CPU time of this process, so that neighbours on the machine
count little; the two codecs take turns.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specpilot.mechanisms.w12 import codec
from specpilot.mechanisms.w12.container import W12Shard
from specpilot.mechanisms.w12.statistics import TensorStatistics, statistics_of, total

__all__ = ["MODELS", "PICO", "run"]

MODELS = "SPECPILOT_W12_MODELS"
PICO = Path(__file__).parents[2] / "harness" / "deployments" / "pico" / "target"
_MIN_WEIGHTS = 1 << 14
_REPEATS = 9
_SHAPE = (4096, 4096)

U16 = NDArray[np.uint16]
Codec = tuple[Callable[[Any], Any], Callable[[Any], Any]]


def run() -> list[dict[str, Any]]:
    """Measure every model that is present, and the speed on random Gaussian weights."""
    results: list[dict[str, Any]] = []
    every: list[TensorStatistics] = []
    means: list[float] = []
    zipnn = _zipnn()
    for name, path in _models():
        if not path.exists():
            print(f"w12_cpu: {name} passed over, {path} does not exist")
            continue
        rows, found = _measure(name, path, zipnn)
        results += rows
        every += found
        means.append(total(found).bits_per_weight)
    if means:
        results.append({
            "id": "w12.bits_per_weight.real", "value": total(every).bits_per_weight,
            "low": min(means), "high": max(means), "unit": "bits/weight",
            "note": f"all linear layers of {len(means)} models together, bases, "
            "escapes and raw rows counted; low and high are models",
        })  # fmt: skip
    return results + _speed(zipnn)


def _models() -> Iterator[tuple[str, Path]]:
    yield "pico", PICO
    for entry in filter(None, os.environ.get(MODELS, "").split(os.pathsep)):
        name, _, path = entry.partition("=")
        yield name, Path(path)


def _measure(
    name: str, path: Path, zipnn: Codec | None
) -> tuple[list[dict[str, Any]], list[TensorStatistics]]:
    found, origins, zipped = [], set(), 0
    for tensor, origin, bits in _matrices(path):
        matrix = codec.encode(bits)
        codec.verify(bits, matrix)
        found.append(statistics_of(tensor, matrix))
        origins.add(origin)
        if zipnn:
            zipped += len(zipnn[0](bits))
    whole = total(found)
    weights = sum(each.weights for each in found)
    note = f"{len(found)} linear layers, {weights / 1e6:.1f} M weights, {_origin(origins)}"
    rows = [
        {"id": f"w12.bits_per_weight.{name}", "value": whole.bits_per_weight,
         "low": min(f.bits_per_weight for f in found),
         "high": max(f.bits_per_weight for f in found), "unit": "bits/weight",
         "note": f"{note}; decoded and compared; low and high are layers"},
        {"id": f"w12.escapes_per_million.{name}", "value": whole.escapes / weights * 1e6,
         "unit": "1/million", "note": f"{whole.raw_rows} of {whole.rows} rows stay BF16"},
        {"id": f"w12.entropy_bits.{name}", "value": whole.entropy_bits, "unit": "bits/weight",
         "note": "8 + H(exponent) of each layer: the bound with sign and mantissa as they are"},
    ]  # fmt: skip
    if zipnn:
        rows.append({
            "id": f"w12.zipnn_bits_per_weight.{name}", "value": 8 * zipped / weights,
            "unit": "bits/weight", "note": f"ZipNN {version('zipnn')} on the same matrices",
        })  # fmt: skip
    return rows, found


def _origin(origins: set[str]) -> str:
    if origins == {"BF16"}:
        return "stored as BF16"
    return f"of {' and '.join(sorted(origins - {'BF16'}))} origin, rounded to BF16"


def _matrices(path: Path) -> Iterator[tuple[str, str, U16]]:
    """Linear layers of a safetensors file or folder: name, stored dtype, BF16 patterns."""
    for file in sorted(path.glob("*.safetensors")) if path.is_dir() else [path]:
        shard = W12Shard(file)
        for name, span in shard.spans.items():
            small = len(span.shape) != 2 or int(np.prod(span.shape)) < _MIN_WEIGHTS
            if small or not name.endswith(".weight") or "embed" in name:
                continue
            if span.dtype == "BF16":
                bits = shard.raw(name).view(np.uint16)
            elif span.dtype in ("F32", "F16"):
                kind = np.float32 if span.dtype == "F32" else np.float16
                bits = _round(shard.raw(name).view(kind).astype(np.float32))
            else:
                continue
            yield name, span.dtype, bits.reshape(span.shape)


def _round(values: NDArray[np.float32]) -> U16:
    """BF16 patterns of fp32, to nearest even."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _zipnn() -> Codec | None:
    """ZipNN's compression and decompression, one thread, BF16 bytes; None where it is missing."""
    try:
        from zipnn import ZipNN
    except ImportError:
        print("w12_cpu: ZipNN is not installed and not compared")
        return None
    engine = ZipNN(input_format="byte", bytearray_dtype="bfloat16", threads=1)
    # It reorders bytes in place, so that each call gets a copy.
    return (lambda bits: engine.compress(bytearray(bits.tobytes())), engine.decompress)


def _speed(zipnn: Codec | None) -> list[dict[str, Any]]:
    values = np.random.default_rng(0).standard_normal(_SHAPE, np.float32) * np.float32(0.02)
    bits = _round(values)
    matrix = codec.encode(bits)
    arms: dict[str, Callable[[], Any]] = {
        "w12.encode_gbs_per_thread": lambda: codec.encode(bits),
        "w12.decode_gbs_per_thread": lambda: codec.decode(matrix),
    }
    if zipnn:
        compress, decompress = zipnn
        zipped = compress(bits)
        assert bytes(decompress(zipped)) == bits.tobytes()
        arms["w12.zipnn_encode_gbs_per_thread"] = lambda: compress(bits)
        arms["w12.zipnn_decode_gbs_per_thread"] = lambda: decompress(zipped)
    speeds: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(_REPEATS):
        for name, call in arms.items():
            start = time.process_time()
            call()
            speeds[name].append(bits.nbytes / (time.process_time() - start) / 1e9)
    rows = [_row(name, repeats, "GB/s of BF16") for name, repeats in speeds.items()]
    for kind in ("encode", "decode") if zipnn else ():
        pairs = zip(
            speeds[f"w12.{kind}_gbs_per_thread"],
            speeds[f"w12.zipnn_{kind}_gbs_per_thread"],
            strict=True,
        )
        rows.append(_row(f"w12.{kind}_over_zipnn", [ours / theirs for ours, theirs in pairs], "x"))
    return rows


def _row(name: str, repeats: list[float], unit: str) -> dict[str, Any]:
    return {
        "id": name, "value": statistics.median(repeats), "low": min(repeats),
        "high": max(repeats), "unit": unit, "repeats": repeats,
        "note": f"CPU time, {_SHAPE[0]}x{_SHAPE[1]} Gaussian weights",
    }  # fmt: skip
