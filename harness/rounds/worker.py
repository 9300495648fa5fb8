"""The worker process of ``work``: loads engines, so it must not live in a server.

Run as ``python -P -m specpilot.harness.rounds.worker JOB_FOLDER``.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specpilot.harness.deployments import registry
from specpilot.harness.rounds.profile import measure_profile
from specpilot.harness.rounds.work import run_worker

Report = Callable[[int, int, str], None]


def profile(arguments: Mapping[str, str], report: Report, folder: Path) -> dict[str, Any]:
    found = measure_profile(registry.load(arguments["deployment"]), report, folder)
    return {
        **asdict(found),
        "picture": str(folder / "step.png"),
        "trace": str(folder / "lattices.jsonl.gz"),
    }


if __name__ == "__main__":
    sys.exit(run_worker(Path(sys.argv[1]), {"profile": profile}))
