"""How an arm of a measurement is started: command line, environment, folder.

A launch holds everything that the process gets. Its environment is built here from an allow-list;
nothing of the controller's own environment (keys, tokens, paths, ``PYTHON*``, ``LD_*``) passes.
"""

import os
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from specpilot.errors import InvalidInput
from specpilot.harness.engines import settings as engine_settings
from specpilot.types import Deployment

__all__ = ["LaunchSpec", "Role", "clean_env", "launch_spec"]

Role = Literal["stock", "candidate", "scorer", "ar"]

MODULES = {
    "reference": "specpilot.harness.engines.reference",
    "mock": "specpilot.harness.engines.mock",
}
NO_DRAFT = {"speculation": "none", "rows": 0, "drafter": "", "overlay": ""}
ROLES: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "reference": {
        "ar": {**NO_DRAFT},
        "scorer": {**NO_DRAFT, "fp32_logits": True},
    },
    "mock": {
        "ar": {**NO_DRAFT},
        "scorer": {**NO_DRAFT, "delay_ms": 0.0, "noise": 0.0},
    },
}
"""What a role changes, by engine: AR drafts nothing, the scorer reads FP32 logits."""

PASSED_ON = ("CUDA_VISIBLE_DEVICES", "CUDA_HOME", "TZ")
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """One process to start. ``nonce`` must come back in the server's ``/server_info``."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str
    host: str
    port: int
    nonce: str
    settings: Mapping[str, Any]

    @property
    def base_url(self) -> str:
        return f"http://{self.host}:{self.port}"


def launch_spec(
    deployment: Deployment,
    settings: Mapping[str, Any],
    role: Role,
    port: int,
    *,
    run_dir: str | Path,
) -> LaunchSpec:
    """Say how to start one arm of ``deployment``.

    ``settings`` are engine settings that go over the deployment's own (``launch``, then
    ``stock``): those of a resolved patch stack for a candidate, else usually none. ``threads`` in
    ``deployment.launch`` sets the CPU threads (default: all that this process may use).
    ``run_dir`` is the process's folder and home. Raises ``InvalidInput`` for settings that the
    engine does not know and ``Unsupported`` for an engine that cannot be launched here.
    """
    merged: dict[str, Any] = {**deployment.launch, **deployment.stock, **settings}
    threads = merged.pop("threads", None)
    if threads is None:
        threads = len(os.sched_getaffinity(0))
    if not isinstance(threads, int) or isinstance(threads, bool) or threads < 1:
        raise InvalidInput(f"threads must be a whole number above 0, not {threads!r}.")
    merged |= {"host": "127.0.0.1", "port": port, "nonce": secrets.token_hex(16)}
    known = engine_settings.known_settings(deployment.engine)
    models = {
        "target": deployment.target,
        "drafter": deployment.drafter or "",
        "dtype": deployment.dtype,
    }
    merged |= {name: value for name, value in models.items() if name in known}
    merged |= ROLES[deployment.engine].get(role, {})
    checked = engine_settings.check(deployment.engine, merged)
    flags = engine_settings.to_flags(checked)
    folder = Path(run_dir).absolute()
    return LaunchSpec(
        argv=(sys.executable, "-P", "-m", MODULES[deployment.engine], *flags),
        env=clean_env(folder, threads),
        cwd=str(folder),
        host=checked.host,
        port=checked.port,
        nonce=checked.nonce,
        settings=engine_settings.as_dict(checked, frozenset({"host", "port", "nonce"})),
    )


def clean_env(run_dir: Path, threads: int) -> dict[str, str]:
    """The whole environment of a system under test.

    Idle threads of OpenMP and MKL sleep at once (``PASSIVE``, spin count 0): the arm that is not
    being timed must leave the CPU to the other one.
    """
    env = {
        "PATH": f"{Path(sys.executable).parent}:{SYSTEM_PATH}",
        "HOME": str(run_dir),
        "TMPDIR": str(run_dir),
        "LANG": "C.UTF-8",
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OPENBLAS_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "0",
        "KMP_BLOCKTIME": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    return env | {name: os.environ[name] for name in PASSED_ON if name in os.environ}
