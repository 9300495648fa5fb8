"""Serve the reference engine: ``python -P -m specpilot.harness.engines.reference --target DIR``.

Torch is imported after the arguments have been checked and the port has been taken, so that a
wrong command fails at once.
"""

from specpilot.harness.engines.backend import Backend
from specpilot.harness.engines.run import main
from specpilot.harness.engines.settings import ReferenceSettings


def build(settings: ReferenceSettings) -> Backend:
    from specpilot.harness.engines.reference.engine import ReferenceEngine

    return ReferenceEngine(settings)


if __name__ == "__main__":
    main("reference", ReferenceSettings, build)
