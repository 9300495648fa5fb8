"""Enter a sandbox and become a system under test.

``python -P -m specpilot.harness.controller.enter POLICY ARGV...`` with ``POLICY`` the JSON of a
``Confinement``. Standard library only, and nothing is started before the restrictions hold. Exit
status 125 means that they could not be applied; the program is then not started.
"""

import ctypes
import json
import os
import resource
import signal
import sys

from specpilot.harness.controller.landlock import Rules, no_new_privileges, restrict

_PR_SET_PDEATHSIG = 1
EXIT_NOT_CONFINED = 125


def main(argv: list[str]) -> None:
    policy = json.loads(argv[0])
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        limit = policy["max_file_bytes"]
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        if policy["uid"] is not None:
            os.setgroups([])
            os.setresgid(policy["uid"], policy["uid"], policy["uid"])
            os.setresuid(policy["uid"], policy["uid"], policy["uid"])
            # The change of user cleared what the keeper had set: to end when the keeper ends.
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if policy["landlock"]:
            restrict(Rules(policy["read"], policy["write"], policy["bind_ports"]))
        else:
            no_new_privileges()
    except OSError as error:
        print(f"error: could not enter the sandbox: {error}", file=sys.stderr)
        sys.exit(EXIT_NOT_CONFINED)
    os.execvp(argv[1], argv[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
