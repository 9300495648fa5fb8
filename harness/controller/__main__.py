"""``python -P -m specpilot.harness.controller``: run the controller of a state directory.

Ends on SIGTERM or SIGINT, with every system under test. Exit status 3: another controller has the
directory.
"""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from specpilot.errors import Conflict, SpecPilotError
from specpilot.harness.controller.paths import EXIT_TAKEN, socket_path
from specpilot.harness.controller.service import Server, Service
from specpilot.home import home

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until told to end; returns the exit status."""
    parser = argparse.ArgumentParser(prog="specpilot controller", description=__doc__)
    parser.add_argument("--home", type=Path, default=None, help="state directory")
    parser.add_argument(
        "--idle-exit-s", type=float, default=None, help="end after this long without a request"
    )
    parser.add_argument("--socket", type=Path, default=None, help="where clients reach it")
    parser.add_argument("--group", default=None, help="group whose members may use the socket")
    options = parser.parse_args(argv)
    if options.home is not None:
        os.environ["SPECPILOT_HOME"] = str(options.home.absolute())
    state = home()
    try:
        service = Service(state)
    except Conflict as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_TAKEN
    except SpecPilotError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    path = options.socket.absolute() if options.socket else socket_path(state)
    server = Server(service, path, options.idle_exit_s, options.group)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.stop())
    print(f"The controller of {state} serves {server.path}.", flush=True)
    try:
        server.serve()
    finally:
        service.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
