"""Deployments by id: those that ship with the package and those that a user registered.

Shipped ones lie in ``harness/deployments/<folder>/deployment.json``, registered ones in
``$SPECPILOT_HOME/deployments/<id>.json``.
"""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specpilot.errors import Conflict, InvalidInput, NotFound
from specpilot.harness.deployments.health import check_health
from specpilot.harness.deployments.schema import parse_deployment, to_json
from specpilot.home import home
from specpilot.types import Deployment

__all__ = ["add", "list_ids", "load"]

SHIPPED = Path(__file__).parent
MAX_FILE_BYTES = 1 << 20


def list_ids() -> tuple[str, ...]:
    """Every deployment's id, in order."""
    return tuple(sorted(_files()))


def load(deployment_id: str) -> Deployment:
    """Load one deployment; model paths are absolute.

    Raises ``NotFound`` that lists what exists and ``InvalidInput`` for a file that does not
    validate. Files of the models are not looked at: see ``health.check_health``.
    """
    files = _files()
    if deployment_id not in files:
        raise NotFound(
            f"There is no deployment {deployment_id!r}.",
            hint=f"Deployments: {', '.join(sorted(files)) or 'none'}.",
        )
    file = files[deployment_id]
    deployment = parse_deployment(file.read_bytes(), str(file), file.parent)
    if deployment.id != deployment_id:
        raise InvalidInput(f"{file}: its id is {deployment.id!r}, not {deployment_id!r}.")
    return deployment


def add(source: str | Path | Mapping[str, Any]) -> Deployment:
    """Register a deployment from a file (or its folder) or from a mapping, and return it.

    Relative model paths count from the file's folder; a mapping needs absolute ones. Registering
    the same again changes nothing. Raises ``InvalidInput`` with every problem that its health
    check found, ``NotFound`` for a missing file and ``Conflict`` for an id that another one has.
    """
    if isinstance(source, Mapping):
        for name in ("target", "drafter"):
            path = source.get(name)
            if isinstance(path, str) and not Path(path).is_absolute():
                raise InvalidInput(f"{name}: {path!r} must be an absolute path.")
        deployment = parse_deployment(dict(source), "the deployment", Path("/"))
    else:
        file = Path(source)
        file = file / "deployment.json" if file.is_dir() else file
        if not file.is_file():
            raise NotFound(f"There is no file {file}.", hint="Give a deployment.json.")
        if file.stat().st_size > MAX_FILE_BYTES:
            raise InvalidInput(f"{file} has more than {MAX_FILE_BYTES} bytes.")
        deployment = parse_deployment(file.read_bytes(), str(file), file.absolute().parent)
    health = check_health(deployment)
    if not health.ok:
        raise InvalidInput(
            f"The deployment {deployment.id!r} cannot be used: " + " ".join(health.problems)
        )
    if deployment.id in _files():
        if load(deployment.id) == deployment:
            return deployment
        raise Conflict(
            f"There is another deployment {deployment.id!r} ({_files()[deployment.id]}).",
            hint="Choose another id.",
        )
    _write(_registered() / f"{deployment.id}.json", to_json(deployment))
    return deployment


def _files() -> dict[str, Path]:
    """The file of each id. A registered one never replaces a shipped one."""
    files = {file.stem: file for file in _registered().glob("*.json")}
    for file in SHIPPED.glob("*/deployment.json"):
        files[file.parent.name.replace("_", "-")] = file
    return files


def _registered() -> Path:
    folder = home() / "deployments"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _write(path: Path, text: str) -> None:
    """Write at once or not at all: a reader never sees half a file."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".new", delete=False) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    Path(file.name).replace(path)
