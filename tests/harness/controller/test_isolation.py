"""Isolation: what each tier forbids, and that a tier counts only if its probe held."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from specpilot.harness.controller import isolation
from specpilot.harness.controller.enter import EXIT_NOT_CONFINED
from specpilot.harness.controller.isolation import (
    Confinement,
    Tier,
    available_tier,
    code_trees,
    confine,
    probe,
)
from specpilot.harness.controller.landlock import abi_version

needs_landlock = pytest.mark.skipif(abi_version() < 4, reason="this kernel has no Landlock ABI 4")


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    folder = tmp_path / "controller"
    folder.mkdir()
    (folder / "key").write_text("secret")
    return folder


@pytest.fixture
def work(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


def run_confined(work: Path, code: str, *ports: int, tier: Tier = Tier.LANDLOCK) -> str:
    rights = Confinement(read=code_trees(), write=(str(work),), bind_ports=ports)
    command = confine(tier, rights, [sys.executable, "-P", "-c", code])
    done = subprocess.run(command, cwd=work, capture_output=True, text=True, timeout=60)
    return done.stdout.strip() or done.stderr.strip().splitlines()[-1]


@needs_landlock
def test_landlock_hides_the_controllers_files(secret: Path, work: Path) -> None:
    assert probe(Tier.LANDLOCK, [secret, secret / "key"], work) is None


def test_a_probe_that_can_read_a_secret_denies_the_tier(
    secret: Path, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolation, "system_paths", lambda: ("/",))
    problem = probe(Tier.LANDLOCK, [secret / "key"], work)
    assert problem is not None
    if abi_version():
        assert "could read" in problem


def test_no_tier_is_claimed_without_landlock(
    secret: Path, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolation, "abi_version", lambda: 0)
    tier, reasons = available_tier([secret], work)
    assert tier is Tier.NONE
    assert set(reasons) == {"user", "bubblewrap", "landlock"}


@needs_landlock
def test_a_confined_process_serves_its_port_and_no_other(work: Path) -> None:
    code = "import socket; socket.create_server(('127.0.0.1', {})).close(); print('ok')"
    assert run_confined(work, code.format(20123), 20123) == "ok"
    assert "PermissionError" in run_confined(work, code.format(20124), 20123)


@needs_landlock
def test_a_confined_process_opens_no_connection(work: Path) -> None:
    code = "import socket; socket.create_connection(('127.0.0.1', 9), timeout=2)"
    assert "PermissionError" in run_confined(work, code)


@needs_landlock
def test_a_confined_process_sends_no_signal_to_others(work: Path) -> None:
    if abi_version() < 6:
        pytest.skip("signals are in scope from Landlock ABI 6 on")
    assert "PermissionError" in run_confined(work, f"import os; os.kill({os.getpid()}, 0)")


@needs_landlock
def test_a_confined_process_reads_facts_about_itself_and_the_cpu(work: Path) -> None:
    code = "print(len(open('/proc/self/stat').read()) > 0 and open('/proc/cpuinfo').read(1) != '')"
    assert run_confined(work, code) == "True"


def test_a_sandbox_that_cannot_be_entered_starts_nothing(work: Path) -> None:
    policy = json.dumps(asdict(Confinement(read=(), write=())) | {"uid": -5})
    command = [sys.executable, "-P", "-m", "specpilot.harness.controller.enter", policy]
    done = subprocess.run([*command, "/bin/echo", "started"], capture_output=True, text=True)
    assert done.returncode != 0
    assert "started" not in done.stdout
    assert EXIT_NOT_CONFINED == 125


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process as another user")
@needs_landlock
def test_at_tier_3_a_process_has_a_user_of_its_own(tmp_path: Path) -> None:
    python = shutil.which("python3", path="/usr/bin:/bin")
    if python is None:
        pytest.skip("no Python that every user can read")
    enter = Path(isolation.__file__).parent
    work = tmp_path / "work"
    work.mkdir()
    package = work / "specpilot" / "harness" / "controller"
    package.mkdir(parents=True)
    for name in ("enter.py", "landlock.py"):
        shutil.copy(enter / name, package / name)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    rights = Confinement(read=isolation.system_paths(), write=(str(work),), uid=isolation.FIRST_UID)
    command = [python, "-m", "specpilot.harness.controller.enter", json.dumps(asdict(rights))]
    done = subprocess.run(
        [*command, "/usr/bin/id", "-u"],
        cwd=work,
        env={"PYTHONPATH": str(work)},
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == str(isolation.FIRST_UID), done.stderr
