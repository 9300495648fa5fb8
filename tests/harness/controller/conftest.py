"""A controller in this process with a fast mock deployment, and helpers to drive it."""

import contextlib
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from specpilot.harness.controller import protocol as p
from specpilot.harness.controller.paths import socket_path
from specpilot.harness.controller.service import Server, Service
from specpilot.harness.deployments import mock as mock_package
from specpilot.harness.deployments import registry

MOCK = Path(mock_package.__file__).parent


@dataclass(frozen=True)
class Controller:
    """A service and one owner's view of it."""

    service: Service
    folder: Path
    deployment: str = "quick"
    owner: str = "tester"

    def open(self) -> str:
        ask = p.RoundOpen(deployment=self.deployment, owner=self.owner)
        return self.service.round_open(ask).round

    def status(self, round_id: str) -> p.RoundView:
        return self.service.round_status(p.RoundStatus(round=round_id))

    def trial(self, round_id: str, *folders: Path) -> p.JobView:
        return self.wait(self.start_trial(round_id, *folders))

    def start_trial(self, round_id: str, *folders: Path) -> str:
        stack = [str(folder) for folder in folders]
        ask = p.TrialStart(round=round_id, owner=self.owner, patches=stack)
        return self.service.trial_start(ask).job

    def final(self, round_id: str, *, allow_unsealed: bool = False) -> p.JobView:
        ask = p.FinalStart(round=round_id, owner=self.owner, allow_unsealed=allow_unsealed)
        return self.wait(self.service.final_start(ask).job)

    def leftovers(self) -> list[int]:
        """Processes that this controller's systems left behind."""
        found = []
        mark = f"TMPDIR={self.folder}".encode()
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and mark in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
        return found

    def wait(self, job: str, until: Callable[[p.JobView], bool] | None = None) -> p.JobView:
        done = until or (lambda view: False)
        view = self.service.job_status(p.JobStatus(job=job))
        while view.state in ("queued", "running") and not done(view):
            view = self.service.job_status(p.JobStatus(job=job, wait_s=30.0, seen=view.version))
        return view


def register_quick(stock: dict[str, object] | None = None, name: str = "quick") -> None:
    """Register the mock deployment with short passes under another id."""
    registry.add(
        {
            "id": name,
            "title": "mock with short passes",
            "engine": "mock",
            "target": str(MOCK / "target"),
            "drafter": str(MOCK / "drafter"),
            "drafter_kind": "block",
            "hardware": "cpu",
            "dtype": "float32",
            "regime": {"prompt_tokens": 16, "output_tokens": 64},
            "workload": "mock",
            "stock": stock or {"speculation": "chain", "block": 8},
            "launch": {"threads": 1, "delay_ms": 0.5},
        }
    )


@pytest.fixture
def quick_deployment(specpilot_home: Path) -> str:
    """The quick mock deployment in this test's own state."""
    register_quick()
    return "quick"


@pytest.fixture(scope="module")
def controller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Controller]:
    """One controller for a module's tests: its rounds are independent."""
    home = tmp_path_factory.mktemp("controller")
    folder = tmp_path_factory.mktemp("systems")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(folder))
        patch.setenv("SPECPILOT_HOME", str(home))
        register_quick()
        service = Service(home)
        server = Server(service, socket_path(home))
        thread = threading.Thread(target=server.serve)
        thread.start()
        yield Controller(service, folder)
        server.stop()
        thread.join()
        service.close()


@pytest.fixture(autouse=True)
def specpilot_home(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """The shared controller's state where a test uses it, else a fresh one."""
    path = tmp_path / "home"
    if "controller" in request.fixturenames:
        path = request.getfixturevalue("controller").service.home
    monkeypatch.setenv("SPECPILOT_HOME", str(path))
    return path
