"""From a command line to a serving engine: parse, bind, build, overlay, serve, exit status.

The port is taken before the engine is built, so a port in use is told at once and not after the
weights have been read. Exit status: 0 ended by a signal, 1 the engine broke, 2 wrong arguments or
an engine that cannot be built from them, 98 port in use.
"""

import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar

from specpilot.errors import Conflict, InvalidInput, SpecPilotError
from specpilot.harness.engines.backend import Backend
from specpilot.harness.engines.server import EXIT_PORT_IN_USE, listen, serve
from specpilot.harness.engines.settings import EngineSettings, as_dict, parse_args

__all__ = ["EXIT_CANNOT_BUILD", "apply_overlays", "main"]

EXIT_CANNOT_BUILD = 2
Settings = TypeVar("Settings", bound=EngineSettings)


def main(
    engine: str,
    model: type[Settings],
    build: Callable[[Settings], Backend],
    argv: Sequence[str] | None = None,
) -> NoReturn:
    """Run the server of ``engine`` until it ends; ``build`` makes the backend from the settings."""
    settings = parse_args(model, f"specpilot {engine} engine", argv)
    try:
        sock = listen(settings.host, settings.port)
    except Conflict as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_PORT_IN_USE)
    try:
        backend = apply_overlays(build(settings), settings.overlay)
    except SpecPilotError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_CANNOT_BUILD)
    facts = {
        "engine": engine,
        "settings": as_dict(settings, frozenset({"nonce"})),
        "nonce": settings.nonce,
    }
    sys.exit(serve(backend, sock, facts))


def apply_overlays(backend: Backend, folders: str) -> Backend:
    """Pass the backend through ``apply(backend) -> Backend`` of each folder's ``overlay.py``.

    An overlay is a patch's own code. It runs in the process of the system under test and nowhere
    else. ``folders`` are joined by ``os.pathsep``; the first is applied first.
    """
    for index, folder in enumerate(filter(None, folders.split(os.pathsep))):
        path = Path(folder) / "overlay.py"
        spec = importlib.util.spec_from_file_location(f"specpilot_overlay_{index}", path)
        if spec is None or spec.loader is None or not path.is_file():
            raise InvalidInput(f"The overlay {path} does not exist.")
        module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
            backend = module.apply(backend)
        except Exception as error:
            raise InvalidInput(
                f"The overlay {path} failed: {type(error).__name__}: {error}.",
                hint="It must define apply(backend) and return a backend.",
            ) from error
    return backend
