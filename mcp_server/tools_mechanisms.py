"""Tools about mechanisms: what exists and applies, and making a patch from them."""

import shutil
from typing import Annotated

from pydantic import BaseModel, Field

from specpilot.errors import SpecPilotError
from specpilot.harness import patches
from specpilot.harness.deployments import registry
from specpilot.harness.rounds.folder import RoundFolder
from specpilot.mechanisms import registry as mechanisms

__all__ = ["mechanism_apply", "mechanism_list"]

Setting = str | int | float | bool


class ParamReply(BaseModel):
    default: Setting
    takes: str
    help: str


class MechanismReply(BaseModel):
    id: str
    title: str
    summary: str
    params: dict[str, ParamReply]
    source: str
    applies: bool | None = Field(description="on the deployment asked for; null if none was")
    reasons: list[str] = Field(description="why it does not apply")


class MechanismList(BaseModel):
    mechanisms: list[MechanismReply]


class Use(BaseModel):
    id: str
    params: dict[str, Setting] = {}


class PatchReply(BaseModel):
    patch: str = Field(description="name it in trial_start")
    folder: str
    settings: dict[str, Setting] = Field(description="what the candidate runs with")
    sha256: str


def mechanism_list(
    deployment: Annotated[
        str | None, Field(description="say for each whether it applies to this deployment")
    ] = None,
) -> MechanismList:
    """List validated mechanisms with their parameters, and whether they apply here and why not."""
    target = registry.load(deployment) if deployment else None
    replies = []
    for found in mechanisms.all_mechanisms():
        verdict = found.applies_to(target) if target else None
        replies.append(
            MechanismReply(
                id=found.id,
                title=found.title,
                summary=found.summary,
                params={
                    name: ParamReply(default=spec.default, takes=spec.describe(), help=spec.help)
                    for name, spec in found.params.items()
                },
                source=found.source,
                applies=verdict.ok if verdict else None,
                reasons=list(verdict.reasons) if verdict else [],
            )
        )
    return MechanismList(mechanisms=replies)


def mechanism_apply(
    round: Annotated[str, Field(description="id from round_start")],
    patch: Annotated[str, Field(description="a new name: lower case letters, digits, - . _")],
    title: Annotated[str, Field(description="what it does, in a line")],
    mechanisms: Annotated[list[Use], Field(description="ids with parameters")],
    launch_args: Annotated[
        dict[str, Setting] | None, Field(description="engine settings beside the mechanisms")
    ] = None,
) -> PatchReply:
    """Make a patch from mechanisms and parameters in the round's folder; nothing runs yet."""
    folder = RoundFolder.of(round)
    uses = [patches.MechanismUse(use.id, use.params) for use in mechanisms]
    made = patches.create(folder.patches, patch, title, uses, launch_args)
    try:
        settings = patches.resolve(folder.load_deployment(), [made])
    except SpecPilotError:
        shutil.rmtree(made.folder)  # a patch that cannot apply leaves its name free
        raise
    return PatchReply(patch=made.id, folder=str(made.folder), settings=settings, sha256=made.sha256)
