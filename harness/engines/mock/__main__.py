"""``python -P -m specpilot.harness.engines.mock --port P --delay-ms 2``: serve the mock engine."""

from specpilot.harness.engines.mock.backend import MockBackend
from specpilot.harness.engines.run import main
from specpilot.harness.engines.settings import MockSettings

if __name__ == "__main__":
    main("mock", MockSettings, MockBackend)
