"""`docs/structure.md` has one line for each module, and no line for a module that is gone."""

import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_structure_is_what_the_generator_writes() -> None:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec and spec.loader
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    page = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")
    assert page == generate.structure(), "run: python docs/generate.py"


def test_every_module_says_what_it_is_for() -> None:
    page = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")
    assert not re.findall(r"^- `[^`]+`: *$", page, flags=re.MULTILINE)
