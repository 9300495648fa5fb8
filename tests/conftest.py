"""Shared set-up: nothing is imported from the working directory, state goes to a fresh home."""

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:] = [p for p in sys.path if p and Path(p).resolve() != ROOT]


@pytest.fixture(autouse=True)
def specpilot_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state directory of its own for each test."""
    path = tmp_path / "home"
    monkeypatch.setenv("SPECPILOT_HOME", str(path))
    return path
