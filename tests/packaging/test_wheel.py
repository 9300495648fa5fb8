"""What is installed is what the tree holds, under `specpilot` and nowhere else."""

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("harness", "kernels", "mcp_server", "mechanisms", "memory")


def tracked_files() -> set[str]:
    listing = subprocess.run(
        ["git", "ls-files", "--", *FOLDERS, "specpilot"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split("\n")  # fmt: skip
    kept = {f for f in listing if f and not f.endswith((".md", ".png"))}
    return {f if f.startswith("specpilot/") else f"specpilot/{f}" for f in kept}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    out = tmp_path_factory.mktemp("wheel")
    source = tmp_path_factory.mktemp("source") / "tree"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(source)], check=True)
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", str(out), str(source)],
        check=True, capture_output=True,
    )  # fmt: skip
    return zipfile.ZipFile(next(out.glob("*.whl")))


def test_the_wheel_holds_every_tracked_file_of_the_packages(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    missing = sorted(tracked_files() - names)
    assert not missing, f"in the tree but not in the wheel: {missing}"


def test_the_wheel_installs_nothing_outside_specpilot(wheel: zipfile.ZipFile) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {t for t in tops if not t.endswith(".dist-info")} == {"specpilot"}


@pytest.mark.parametrize("name", FOLDERS)
def test_no_bare_top_level_module_gets_installed(name: str) -> None:
    spec = importlib.util.find_spec(name)
    assert spec is None or ROOT not in Path(spec.origin or "/").parents
