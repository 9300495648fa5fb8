"""A round's directory of its owner: the owner's secret name, patches, what was learned, the report.

``$SPECPILOT_HOME/rounds/<id>``, readable by the owner alone. The controller has its own record of
the round; nothing here can promote anything.
"""

import json
import secrets
from dataclasses import dataclass
from pathlib import Path

from specpilot.errors import InvalidInput, NotFound
from specpilot.harness.controller.client import ensure_running
from specpilot.harness.controller.protocol import RoundView
from specpilot.harness.deployments import registry
from specpilot.home import home
from specpilot.types import Deployment

__all__ = ["RoundFolder", "open_round"]


@dataclass(frozen=True, slots=True)
class RoundFolder:
    """The directory of one round. ``owner`` goes with every request that changes the round."""

    path: Path
    owner: str
    deployment: str

    @staticmethod
    def of(round_id: str) -> "RoundFolder":
        """Open the folder of a round of this user. Raises ``NotFound`` for any other."""
        if Path(round_id).name != round_id or round_id.startswith("."):
            raise InvalidInput(f"{round_id!r} is no round id.", hint="round_start returns one.")
        path = home() / "rounds" / round_id
        try:
            stored = json.loads((path / "round.json").read_text("utf-8"))
        except FileNotFoundError:
            raise NotFound(
                f"There is no round {round_id!r} of yours.", hint="Open one with round_start."
            ) from None
        return RoundFolder(path, stored["owner"], stored["deployment"])

    @property
    def patches(self) -> Path:
        return self.path / "patches"

    def load_deployment(self) -> Deployment:
        return registry.load(self.deployment)

    def patch_folders(self, names: list[str]) -> list[str]:
        """Return the folders of patches, by name. Raises ``NotFound`` that lists the others."""
        for name in names:
            if not (self.patches / name / "manifest.json").is_file():
                made = ", ".join(sorted(p.name for p in self.patches.glob("*"))) or "none"
                raise NotFound(
                    f"The round has no patch {name[:80]!r}.",
                    hint=f"Made so far: {made}. Make one with mechanism_apply.",
                )
        return [str(self.patches / name) for name in names]


def open_round(deployment: str) -> tuple[RoundView, RoundFolder]:
    """Open a round with the controller and make its folder."""
    owner = secrets.token_hex(16)
    with ensure_running() as controller:
        view = controller.round_open(deployment, owner)
    path = home() / "rounds" / view.round
    path.mkdir(mode=0o700, parents=True)
    (path / "patches").mkdir()
    stored = path / "round.json"
    stored.touch(mode=0o600)
    stored.write_text(json.dumps({"owner": owner, "deployment": deployment}) + "\n", "utf-8")
    return view, RoundFolder(path, owner, deployment)
