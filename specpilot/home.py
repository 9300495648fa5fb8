"""Where SpecPilot keeps its state: ``$SPECPILOT_HOME``, by default ``~/.specpilot``."""

import os
from pathlib import Path

__all__ = ["home"]


def home() -> Path:
    """Return the state directory as an absolute path, made on first use with mode 0700."""
    path = Path(os.environ.get("SPECPILOT_HOME") or Path.home() / ".specpilot").absolute()
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path
