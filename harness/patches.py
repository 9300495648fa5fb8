"""Patches: what a candidate changes against stock, as a directory that can be stacked and hashed.

A patch directory holds ``manifest.json`` and perhaps a folder with an ``overlay.py``::

    {"id": "tree-24", "title": "24-row tree",
     "mechanisms": [{"id": "best_first_tree", "params": {"rows": 24}}],
     "launch_args": {}, "overlay": null}

``resolve`` turns a stack of patches into the engine settings of the candidate. It refuses, with
reasons, whatever would make the stack mean something else than its manifests say: unknown names,
mechanisms that do not apply, two patches that want different values of one setting.
"""

import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated

from pydantic import BaseModel, ConfigDict, StringConstraints, ValidationError

from specpilot.errors import Conflict, InvalidInput, NotFound, SpecPilotError, Unsupported
from specpilot.harness.engines import settings as engine_settings
from specpilot.mechanisms import registry
from specpilot.mechanisms.base import Mechanism, Setting
from specpilot.types import Deployment

__all__ = ["MechanismUse", "Patch", "counters", "create", "freeze", "load", "resolve"]

MANIFEST = "manifest.json"
OVERLAY_FILE = "overlay.py"
MAX_FILES = 1000
MAX_BYTES = 16 << 20

Id = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]
Title = Annotated[str, StringConstraints(min_length=1, max_length=200)]
Lookup = Callable[[str], Mechanism]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class _MechanismEntry(_Strict):
    id: str
    params: dict[str, str | int | float | bool] = {}


class _Manifest(_Strict):
    id: Id
    title: Title
    mechanisms: list[_MechanismEntry] = []
    launch_args: dict[str, str | int | float | bool] = {}
    overlay: str | None = None


@dataclass(frozen=True, slots=True)
class MechanismUse:
    """A mechanism with the parameters that a patch gives; the others keep their defaults."""

    id: str
    params: Mapping[str, Setting]


@dataclass(frozen=True, slots=True)
class Patch:
    """A patch as it lies in ``folder``. ``sha256`` covers every file's name and bytes."""

    id: str
    title: str
    mechanisms: tuple[MechanismUse, ...]
    launch_args: Mapping[str, Setting]
    overlay: str | None
    folder: Path
    sha256: str


def load(folder: str | Path) -> Patch:
    """Read a patch directory.

    Raises ``NotFound`` without a manifest, ``InvalidInput`` for a manifest that does not validate,
    an overlay outside the directory or without ``overlay.py``, a link, or too much data.
    """
    root = Path(folder).absolute()
    path = root / MANIFEST
    if not path.is_file():
        raise NotFound(f"There is no patch in {root}: {MANIFEST} is missing.")
    sha256 = _content_hash(root)
    manifest = _parse(path.read_bytes(), str(path))
    if manifest.overlay is not None:
        _check_overlay(root, manifest.overlay)
    return Patch(
        id=manifest.id,
        title=manifest.title,
        mechanisms=tuple(MechanismUse(m.id, dict(m.params)) for m in manifest.mechanisms),
        launch_args=dict(manifest.launch_args),
        overlay=manifest.overlay,
        folder=root,
        sha256=sha256,
    )


def create(
    parent: str | Path,
    patch_id: str,
    title: str,
    mechanisms: Sequence[MechanismUse] = (),
    launch_args: Mapping[str, Setting] | None = None,
) -> Patch:
    """Write a patch into the new folder ``parent/patch_id`` and load it.

    Raises ``InvalidInput`` for what a manifest may not hold and ``Conflict`` if the folder exists.
    """
    raw = {
        "id": patch_id,
        "title": title,
        "mechanisms": [{"id": m.id, "params": dict(m.params)} for m in mechanisms],
        "launch_args": dict(launch_args or {}),
        "overlay": None,
    }
    manifest = _parse(json.dumps(raw).encode(), f"patch {patch_id!r}")
    root = Path(parent) / manifest.id
    try:
        root.mkdir(parents=True)
    except FileExistsError:
        raise Conflict(f"The patch folder {root} exists.", hint="Choose another id.") from None
    (root / MANIFEST).write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    return load(root)


def freeze(patch: Patch, parent: str | Path) -> Patch:
    """Copy a patch into the new folder ``parent/id``, so that its author cannot change it any more.

    Raises ``Conflict`` if the folder exists or the patch changed since it was loaded.
    """
    root = Path(parent) / patch.id
    if root.exists():
        raise Conflict(f"The patch folder {root} exists.")
    try:
        shutil.copytree(patch.folder, root, symlinks=True)
        frozen = load(root)
        if frozen.sha256 == patch.sha256:
            return frozen
    except (OSError, SpecPilotError):  # shutil.Error is an OSError
        pass
    shutil.rmtree(root, ignore_errors=True)
    raise Conflict(f"Patch {patch.id!r} changed while it was being copied; submit it again.")


def resolve(
    deployment: Deployment, patches: Sequence[Patch], lookup: Lookup = registry.get
) -> dict[str, Setting]:
    """Merge a stack of patches onto stock; returns the candidate's engine settings.

    The result holds ``deployment.stock`` with the patches' changes (not ``deployment.launch``,
    which both arms share). An empty stack is stock. Raises ``InvalidInput`` (settings or
    parameters that do not exist or contradict each other), ``NotFound`` (mechanism),
    ``Unsupported`` (a mechanism that does not apply, with its reasons) and ``Conflict`` (two
    patches want different values, both named).
    """
    _check_ids(patches)
    known = engine_settings.known_settings(deployment.engine)
    changes: dict[str, tuple[Setting, str]] = {}

    def change(name: str, value: Setting, wanted_by: str) -> None:
        if name in changes and changes[name][0] != value:
            before, first = changes[name]
            raise Conflict(
                f"{first} sets {name} to {before!r}, {wanted_by} to {value!r}.",
                hint="Leave one of them out, or write one patch with the value that you mean.",
            )
        changes[name] = (value, wanted_by)

    for patch in patches:
        for use in patch.mechanisms:
            for name, value in _mechanism_settings(deployment, patch, use, lookup).items():
                change(name, value, f"mechanism {use.id!r} of patch {patch.id!r}")
        for name, value in patch.launch_args.items():
            if name in engine_settings.PROTECTED or name not in known:
                free = ", ".join(sorted(known - engine_settings.PROTECTED))
                raise InvalidInput(
                    f"Patch {patch.id!r}: launch_args may not set {name!r}.",
                    hint=f"Settings of the {deployment.engine} engine: {free}.",
                )
            change(name, value, f"launch_args of patch {patch.id!r}")
    settings = {**deployment.stock, **{name: value for name, (value, _) in changes.items()}}
    overlays = [str(p.folder / p.overlay) for p in patches if p.overlay is not None]
    if overlays:
        settings["overlay"] = os.pathsep.join(overlays)
    _check_together(deployment, settings)
    return settings


def counters(patches: Sequence[Patch], lookup: Lookup = registry.get) -> dict[str, str]:
    """The ``meta_info`` key by mechanism id that is above 0 only if the mechanism ran."""
    uses = (use for patch in patches for use in patch.mechanisms)
    return {use.id: lookup(use.id).counter for use in uses}


def _check_ids(patches: Sequence[Patch]) -> None:
    seen: set[str] = set()
    for patch in patches:
        if patch.id in seen:
            raise Conflict(f"The stack holds patch {patch.id!r} twice.")
        seen.add(patch.id)


def _mechanism_settings(
    deployment: Deployment, patch: Patch, use: MechanismUse, lookup: Lookup
) -> dict[str, Setting]:
    mechanism = lookup(use.id)
    answer = mechanism.applies_to(deployment)
    if not answer.ok:
        raise Unsupported(
            f"Patch {patch.id!r}: mechanism {use.id!r} does not apply to {deployment.id!r}: "
            + "; ".join(answer.reasons)
            + "."
        )
    return dict(mechanism.settings(deployment.engine, use.params))


def _check_together(deployment: Deployment, settings: Mapping[str, Setting]) -> None:
    """Each value may be right and the whole wrong: ask the engine's own model."""
    launch = {name: value for name, value in deployment.launch.items() if name != "threads"}
    merged = {**launch, **settings, "target": deployment.target}
    merged["drafter"] = deployment.drafter or ""
    engine_settings.check(deployment.engine, merged)


def _parse(raw: bytes, where: str) -> _Manifest:
    try:
        return _Manifest.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"])) or "the whole file"
        raise InvalidInput(
            f"{where}: {field}: {first['msg']} (got {str(first['input'])[:80]!r}).",
            hint=f"Fields: {', '.join(_Manifest.model_fields)}.",
        ) from error


def _check_overlay(root: Path, overlay: str) -> None:
    relative = PurePosixPath(overlay)
    inside = not relative.is_absolute() and ".." not in relative.parts and os.pathsep not in overlay
    if not overlay or not inside:
        raise InvalidInput(f"overlay: {overlay!r} must be a folder inside the patch.")
    if not (root / relative / OVERLAY_FILE).is_file():
        raise InvalidInput(
            f"overlay: {root / relative} has no {OVERLAY_FILE}.",
            hint="It defines apply(backend) and returns the backend to serve.",
        )


def _content_hash(root: Path) -> str:
    """sha256 over names and bytes of every file. Refuses links: they lead out of the patch."""
    digest = hashlib.sha256()
    total = 0
    files = sorted(itertools.islice(root.rglob("*"), MAX_FILES + 1))
    if len(files) > MAX_FILES:
        raise InvalidInput(f"{root} holds more than {MAX_FILES} files; a patch is small.")
    for path in files:
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise InvalidInput(f"{path} is a link or a special file; a patch has plain files.")
        if path.suffix == ".pyc" or path.name == "__pycache__":
            raise InvalidInput(f"{path} is compiled Python: it could run in place of its source.")
        if path.is_dir():
            continue
        total += path.stat().st_size
        if total > MAX_BYTES:
            raise InvalidInput(f"{root} holds more than {MAX_BYTES} bytes; a patch is small.")
        name = path.relative_to(root).as_posix().encode()
        data = path.read_bytes()
        digest.update(b"%d:%b%d:" % (len(name), name, len(data)))
        digest.update(data)
    return digest.hexdigest()
