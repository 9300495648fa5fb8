"""Generated pages are what the generator writes: the module list, the tables of figures."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_structure_is_what_the_generator_writes(generate: ModuleType) -> None:
    page = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")
    assert page == generate.structure(), "run: python -P docs/generate.py"


def test_every_module_says_what_it_is_for() -> None:
    page = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")
    assert not re.findall(r"^- `[^`]+`: *$", page, flags=re.MULTILINE)


def test_tables_are_those_of_the_committed_results(generate: ModuleType) -> None:
    for page in generate.PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        assert text == generate.with_tables(text), "run: python -P docs/generate.py"
