"""Configs that several tests share: the 27B hybrid shape and its DFlash drafter."""

import json
from importlib.resources import files

_TABLE = json.loads((files("specpilot.harness.cost_model") / "anchors.json").read_text("utf-8"))
TARGET_27B = _TABLE["configs"]["target_27b"]
DRAFTER_27B = _TABLE["configs"]["drafter_27b"]
