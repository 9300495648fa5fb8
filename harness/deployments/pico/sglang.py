"""A drafter folder for stock SGLang 0.5.20 and a text-only ``Qwen3_5ForCausalLM`` target.

``target_layer_ids`` name the layers whose *outputs* the drafter was trained on. SGLang captures
what enters a layer and adds one to the ids for that, but its text-only class
(``srt/models/qwen3_5_text.py``) defines ``set_dflash_layers_to_capture`` twice, and the second
definition, which wins, adds nothing: the drafter gets the features of the layers before, and pico's
accept length at 8 rows falls from 3.3 to 2.4. Ids that are one higher make up for it.
"""

import json
import shutil
from pathlib import Path

__all__ = ["write_drafter"]


def write_drafter(drafter: Path, folder: Path) -> Path:
    """Copy the drafter to ``folder`` with the ids that SGLang's text-only class needs."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((drafter / "config.json").read_text())
    inner = config["dflash_config"]
    inner["target_layer_ids"] = [layer + 1 for layer in inner["target_layer_ids"]]
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    shutil.copy(drafter / "model.safetensors", folder / "model.safetensors")
    return folder
