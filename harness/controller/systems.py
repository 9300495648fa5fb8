"""Start systems under test inside their sandboxes, and end them whatever happens.

Each system gets a folder, a port and (at tier 3) a user of its own. What it may read is the
engine's code, the weights and a copy of the patches' overlays that nobody can edit any more.
"""

import contextlib
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specpilot.errors import EngineFailure
from specpilot.harness.controller.isolation import (
    FIRST_UID,
    Confinement,
    Tier,
    code_trees,
    confine,
)
from specpilot.harness.controller.measure import Arm, ArmFailure
from specpilot.harness.engines.client import EngineClient
from specpilot.harness.engines.launch import LaunchSpec, Role, launch_spec
from specpilot.harness.engines.process import ServerProcess, free_port
from specpilot.types import Deployment

__all__ = ["Running", "Starter", "SystemSpec"]

SETTLE_S = 1.0
"""How long after a lost connection its process may take to have ended."""
START_S = {"mock": 30.0, "reference": 120.0, "sglang": 1200.0}


@dataclass(frozen=True, slots=True)
class SystemSpec:
    """One system to start: its name in reports, its role, and settings over the deployment's."""

    name: str
    role: Role
    settings: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Running:
    """A healthy system: its process, its client, and the settings that it was started with."""

    spec: SystemSpec
    process: ServerProcess
    client: EngineClient
    settings: Mapping[str, Any]

    @property
    def arm(self) -> Arm:
        return Arm(self.spec.name, self.client, self.process.root_pid)


class Starter:
    """Starts the systems of one job. ``kill`` ends them from another thread."""

    def __init__(self, deployment: Deployment, tier: Tier, request_timeout_s: float) -> None:
        self._deployment = deployment
        self._tier = tier
        self._timeout_s = request_timeout_s
        self._lock = threading.Lock()
        self._processes: list[ServerProcess] = []
        self._killed = False

    @contextlib.contextmanager
    def running(self, specs: Sequence[SystemSpec]) -> Iterator[list[Running]]:
        """Start all of ``specs`` at once, wait until they are healthy, end them on leaving.

        Raises ``ArmFailure`` with the log's tail if one does not get healthy or dies later, and
        ``InvalidInput`` if an engine does not take its settings.
        """
        with contextlib.ExitStack() as stack:
            base = Path(tempfile.mkdtemp(prefix="specpilot-"))
            stack.callback(shutil.rmtree, base, ignore_errors=True)
            base.chmod(0o711)
            started = []
            for number, spec in enumerate(specs):
                process = self._start(base, number, spec)
                stack.callback(process.stop)
                started.append(process)
            systems = []
            for spec, process in zip(specs, started, strict=True):
                try:
                    process.wait_healthy(START_S[self._deployment.engine])
                except EngineFailure as error:
                    raise ArmFailure(spec.name, str(error)) from error
                client = stack.enter_context(EngineClient(process.base_url, self._timeout_s))
                systems.append(Running(spec, process, client, process.spec.settings))
            try:
                yield systems
            except ArmFailure as failure:
                raise _with_log(failure, systems) from failure

    def kill(self) -> None:
        """End every system of this job now, and let none start any more."""
        with self._lock:
            self._killed = True
            processes = list(self._processes)
        for process in processes:
            process.stop()

    def _start(self, base: Path, number: int, spec: SystemSpec) -> ServerProcess:
        folder = base / f"{number}"
        folder.mkdir(mode=0o700)
        settings = _with_own_overlays(spec.settings, base / f"{number}-overlays")
        launch = launch_spec(self._deployment, settings, spec.role, free_port(), run_dir=folder)
        uid = FIRST_UID + 1 + number
        if self._tier is Tier.USER:
            os.chown(folder, uid, uid)
        rights = Confinement(
            read=(*code_trees(), *_trees_of(launch)),
            write=(str(folder),),
            bind_ports=(launch.port,),
            uid=uid,
        )
        gpu = self._deployment.engine == "sglang" or launch.settings.get("device") == "cuda"
        process = ServerProcess(
            launch,
            name=spec.name,
            wrap=lambda argv: confine(self._tier, rights, argv, gpu=gpu),
        )
        with self._lock:
            if not self._killed:
                process.start()
                self._processes.append(process)
        return process


def _with_log(failure: ArmFailure, systems: Sequence[Running]) -> ArmFailure:
    """Return the failure with the end of the log, if it came from the process having ended."""
    failed = next(system for system in systems if system.spec.name == failure.arm)
    deadline = time.monotonic() + SETTLE_S
    while failed.process.alive and time.monotonic() < deadline:
        time.sleep(0.05)
    try:
        failed.process.check_alive()
    except EngineFailure as ended:
        return ArmFailure(failure.arm, f"{ended}\n({failure})")
    return failure


def _with_own_overlays(settings: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Copy the overlays that ``settings`` name to ``folder``, where every tier can read them."""
    overlays = [path for path in str(settings.get("overlay", "")).split(os.pathsep) if path]
    copies = []
    for number, overlay in enumerate(overlays):
        copy = folder / str(number)
        shutil.copytree(overlay, copy)
        for path in (folder, copy, *copy.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        copies.append(str(copy))
    return {**settings, "overlay": os.pathsep.join(copies)} if copies else dict(settings)


def _trees_of(launch: LaunchSpec) -> tuple[str, ...]:
    """Return the folders that a launch names: weights and patches' code."""
    overlays = str(launch.settings.get("overlay", "")).split(os.pathsep)
    named = [launch.settings.get("target"), launch.settings.get("drafter"), *overlays]
    return tuple(str(path) for path in named if path)
