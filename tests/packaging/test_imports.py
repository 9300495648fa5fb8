"""Imports point one way, and light parts stay light."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAY_IMPORT = {
    "mcp_server": {"mcp_server", "harness", "mechanisms", "kernels", "memory"},
    "harness": {"harness", "mechanisms", "kernels", "memory"},
    "mechanisms": {"mechanisms", "kernels"},
    "kernels": {"kernels"},
    "memory": {"memory"},
}
HEAVY = {
    "torch", "triton", "transformers", "sglang", "chromadb", "sentence_transformers", "matplotlib",
}  # fmt: skip


def imported_modules(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module
            if node.module == "specpilot":
                yield from (f"specpilot.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("folder", sorted(MAY_IMPORT))
def test_imports_point_one_way(folder: str) -> None:
    wrong = []
    for path in (ROOT / folder).rglob("*.py"):
        for module in imported_modules(path):
            parts = module.split(".")
            if parts[0] == "specpilot" and len(parts) > 1 and parts[1] in MAY_IMPORT:
                if parts[1] not in MAY_IMPORT[folder]:
                    wrong.append(f"{path.relative_to(ROOT)} imports {module}")
            elif parts[0] in MAY_IMPORT:
                wrong.append(f"{path.relative_to(ROOT)} imports the bare name {module}")
    assert not wrong, "\n".join(wrong)


def test_relative_imports_are_not_used() -> None:
    """One spelling for each module, so that the rule above sees every import."""
    found = [
        str(path.relative_to(ROOT))
        for folder in MAY_IMPORT
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert not found


def modules_after(statement: str) -> set[str]:
    code = f"{statement}; import sys; print('\\n'.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True, cwd="/"
    )
    return {name.split(".")[0] for name in done.stdout.split()}


def test_the_mcp_server_imports_nothing_heavy() -> None:
    loaded = modules_after("import specpilot.mcp_server.server")
    assert not loaded & (HEAVY | {"scipy"})


@pytest.mark.parametrize(
    "module",
    [
        "specpilot.mechanisms.registry",
        "specpilot.harness.controller.service",
        "specpilot.harness.token_forcing",
        "specpilot.harness.engines.client",
        "specpilot.harness.cost_model",
    ],
)
def test_measuring_parts_need_neither_torch_nor_mcp(module: str) -> None:
    assert not modules_after(f"import {module}") & (HEAVY | {"mcp"})


@pytest.mark.parametrize("module", ["specpilot.harness.engines.reference.engine"])
def test_the_engine_needs_no_server_libraries(module: str) -> None:
    loaded = modules_after(f"import {module}")
    assert not loaded & {"mcp", "chromadb", "pydantic", "httpx", "starlette"}
