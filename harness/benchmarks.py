"""Benchmarks by name, and the one file format that every figure in the docs is read from.

Knows where each part keeps its benchmark (a module with ``run() -> list[Result]``) and how a
result file is stamped with machine, versions, commit and date. Knows nothing of what is measured.
"""

import importlib
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from specpilot.errors import InvalidInput, NotFound

__all__ = ["BENCHMARKS", "document", "run", "write"]

Result = Mapping[str, Any]

BENCHMARKS = {
    "controller": "specpilot.harness.controller.bench",
    "cost": "specpilot.harness.cost_model.bench",
    "engine": "specpilot.harness.engines.reference.bench",
    "forcing": "specpilot.harness.token_forcing.bench",
    "gdn": "specpilot.kernels.gdn_tree.bench",
    "memory": "specpilot.memory.bench",
    "pico": "specpilot.harness.deployments.pico.bench",
    "tree_attention": "specpilot.kernels.tree_attention.bench",
    "trees": "specpilot.harness.engines.reference.trees_bench",
    "w12": "specpilot.mechanisms.w12.bench",
    "w12_cpu": "specpilot.mechanisms.w12.bench_cpu",
}

_PACKAGES = ("specpilot", "torch", "triton", "transformers", "numpy", "mcp")
_FIELDS = ("id", "value", "low", "high", "unit", "repeats", "note")


def run(name: str) -> list[Result]:
    """Run the benchmark ``name`` in this process and return its results.

    Raises:
        NotFound: there is no such benchmark; the message lists those that exist.
    """
    if name not in BENCHMARKS:
        raise NotFound(f"no benchmark named {name!r}.", hint=f"Known: {', '.join(BENCHMARKS)}.")
    results: list[Result] = importlib.import_module(BENCHMARKS[name]).run()
    return results


def document(name: str, command: str, results: Sequence[Result]) -> dict[str, Any]:
    """Stamp results with machine, versions, commit and date.

    Raises:
        InvalidInput: a result lacks an id or a unit, or its value is no finite number.
    """
    return {
        "name": name,
        "command": command,
        "commit": _commit(),
        "date": date.today().isoformat(),
        "machine": _machine(),
        "versions": {"python": platform.python_version(), **_versions()},
        "results": [_checked(result) for result in results],
    }


def write(path: str, payload: Mapping[str, Any]) -> None:
    """Write ``payload`` as JSON to ``path``; ``-`` prints it."""
    text = json.dumps(payload, indent=1, allow_nan=False, ensure_ascii=False)
    if path == "-":
        print(text)
    else:
        Path(path).write_text(text + "\n", encoding="utf-8")


def _checked(result: Result) -> dict[str, Any]:
    unknown = set(result) - set(_FIELDS)
    if unknown or not result.get("id") or "unit" not in result:
        raise InvalidInput(f"malformed result {dict(result)!r}: needs id, value, unit.")
    if not isinstance(result.get("value"), int | float):
        raise InvalidInput(f"result {result['id']!r} has no numeric value.")
    return {key: result[key] for key in _FIELDS if key in result}


def _commit() -> str:
    root = Path(__file__).resolve().parents[1]
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, timeout=5
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def _machine() -> dict[str, Any]:
    return {"cpu": _cpu_name(), "gpu": _gpu_name(), "cores": len(os.sched_getaffinity(0))}


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")), "")


def _gpu_name() -> str | None:
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=10,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout else None


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
