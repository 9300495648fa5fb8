"""Servers of a deployment for records and checks that run outside the controller.

Nothing here isolates or times anything: receipts come from the controller alone.
"""

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

from specpilot.harness.engines.client import EngineClient
from specpilot.harness.engines.launch import Role, launch_spec
from specpilot.harness.engines.process import ServerProcess, free_port
from specpilot.types import Deployment

__all__ = ["serving"]

START_S = 1200.0


@contextlib.contextmanager
def serving(
    deployment: Deployment, role: Role, settings: Mapping[str, Any]
) -> Iterator[EngineClient]:
    """Start one server of ``deployment``, wait for it, and end it on leaving."""
    with tempfile.TemporaryDirectory(prefix="specpilot-record-") as folder:
        spec = launch_spec(deployment, settings, role, free_port(), run_dir=folder)
        with ServerProcess(spec) as server:
            server.wait_healthy(START_S)
            with EngineClient(server.base_url, timeout_s=START_S) as client:
                yield client
