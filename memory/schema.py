"""What an entry is: one claim, where it holds, what it rests on, and how far it may be trusted.

Four kinds: a mechanism does something, an untested regime is a hole that nobody measured, a
hardware note is a fact about a device or toolchain, a negative result was tried and did not pay.
An entry is ``validated`` only by a receipt of a promotion with a forcing pass; everything from
a paper is ``proposed`` with its source.
"""

import datetime as dt
import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, Field, ValidationError, model_validator

from specpilot.errors import InvalidInput
from specpilot.memory.figures import STRICT, Figure
from specpilot.memory.regime import Predicate, Regime
from specpilot.memory.text import check_strings
from specpilot.types import ReceiptRef

__all__ = [
    "Bottleneck",
    "Change",
    "Entry",
    "Evidence",
    "Implementation",
    "Interaction",
    "Kind",
    "MAX_ENTRY_BYTES",
    "Note",
    "Port",
    "Provenance",
    "Receipt",
    "Source",
    "Status",
    "Transfer",
    "canonical",
    "parse",
    "read_entry",
]

MAX_ENTRY_BYTES = 262_144

Kind = Literal["mechanism", "untested_regime", "hardware_note", "negative_result"]
Status = Literal["proposed", "validated", "refuted", "retracted", "superseded"]
Bottleneck = Literal["weights", "lm_head", "attention", "gdn", "drafter", "overhead", "tokens",
                     "batching", "correctness", "measurement"]  # fmt: skip
Forcing = Literal["pass", "fail", "not_run"]
Relation = Literal["stacks_with", "conflicts_with", "requires", "supersedes", "contradicts",
                   "refines"]  # fmt: skip

M = TypeVar("M", bound=BaseModel)

Slug = Annotated[str, Field(max_length=64, pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")]
Name = Annotated[str, Field(min_length=1, max_length=80)]
Line = Annotated[str, Field(min_length=1, max_length=240)]
Short = Annotated[str, Field(max_length=400)]


class _Model(BaseModel):
    model_config = STRICT


class Source(_Model):
    """Where a reader finds it: a paper and its figure, an arXiv id, an issue, a file, a URL."""

    kind: Literal["paper", "arxiv", "issue", "url", "package", "file"]
    ref: Annotated[str, Field(min_length=1, max_length=200)]
    where: Annotated[str, Field(max_length=200)] = ""

    @model_validator(mode="after")
    def _followable(self) -> Self:
        pattern = {
            "arxiv": r"\d{4}\.\d{4,5}",
            "issue": r"[A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+#\d+",
            "url": r"https?://\S+",
        }.get(self.kind)
        if pattern and not re.fullmatch(pattern, self.ref):
            raise ValueError(f"{self.ref!r} is no reference of kind {self.kind} ({pattern})")
        if self.kind == "paper" and not self.where:
            raise ValueError("a paper needs where: section, figure, table or finding")
        return self

    def __str__(self) -> str:
        prefix = "arXiv " if self.kind == "arxiv" else ""
        return f"{prefix}{self.ref}" + (f", {self.where}" if self.where else "")


class Receipt(_Model):
    """A record of the controller's ledger, by position and sha256 (hex)."""

    seq: Annotated[int, Field(ge=0)]
    hash: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    kind: Name

    @property
    def ref(self) -> ReceiptRef:
        return ReceiptRef(seq=self.seq, hash=self.hash, kind=self.kind)


class Evidence(_Model):
    """One observation: figures, what they were measured against, on what, and who vouches.

    Rests on a receipt (ours, verifiable) or on a source (somebody's report). ``forcing`` is the
    audit's verdict on the very tokens that were timed, ``promoted`` what the controller made of
    it. ``together_with`` names entries that were
    part of the measured gain: the figures then belong to all of them. ``scope`` says what was
    timed: the whole system, or one kernel of it.
    """

    figures: Annotated[tuple[Figure, ...], Field(max_length=8)] = ()
    scope: Literal["system", "kernel"] = "system"
    baseline: Name
    workload: Name
    hardware: Name
    regime: Annotated[str, Field(max_length=160)] = ""
    receipt: Receipt | None = None
    source: Source | None = None
    deployment: Annotated[str, Field(max_length=64)] = ""
    together_with: Annotated[tuple[Slug, ...], Field(max_length=8)] = ()
    samples: Annotated[int, Field(ge=1)] | None = None
    tau_before: Annotated[float, Field(ge=1)] | None = None
    tau_after: Annotated[float, Field(ge=1)] | None = None
    forcing: Forcing = "not_run"
    promoted: bool = False
    engine: Annotated[str, Field(max_length=60)] = ""
    isolation: Annotated[str, Field(max_length=60)] = ""
    measured: dt.date | None = None

    @model_validator(mode="after")
    def _rests_on_something(self) -> Self:
        if self.receipt is None and self.source is None:
            raise ValueError("evidence needs a receipt or a source")
        if self.forcing != "not_run" and self.receipt is None:
            raise ValueError("a forcing verdict needs the receipt that it is bound to")
        if self.promoted and (self.forcing != "pass" or not self.figures):
            raise ValueError("a promotion has a gain and a forcing pass")
        if self.receipt is not None and not self.deployment:
            raise ValueError("evidence with a receipt names the deployment it was measured on")
        return self


class Interaction(_Model):
    """How this entry relates to another one, and the joint gain where it was measured."""

    other: Slug
    relation: Relation
    note: Annotated[str, Field(max_length=240)] = ""
    joint: Figure | None = None


class Implementation(_Model):
    """The mechanism of this project that implements the entry, and parameter values to try."""

    mechanism: Annotated[str, Field(max_length=64, pattern=r"^[a-z][a-z0-9_]*$")]
    params: dict[
        Annotated[str, Field(max_length=40, pattern=r"^[a-z][a-z0-9_]*$")],
        Annotated[tuple[int | float | str | bool, ...], Field(min_length=1, max_length=12)],
    ] = {}
    engines: Annotated[tuple[Name, ...], Field(max_length=4)] = ()


class Port(_Model):
    """What has to change for the mechanism to run on an architecture."""

    gpu_arch: Annotated[tuple[Name, ...], Field(min_length=1, max_length=8)]
    needs: Line


class Transfer(_Model):
    """What happened when the mechanism was tried on another deployment."""

    deployment: Name
    outcome: Literal["works", "works_retuned", "no_gain", "fails", "not_applicable"]
    gain: Figure | None = None
    receipt: Receipt | None = None
    source: Source | None = None
    note: Annotated[str, Field(max_length=240)] = ""
    when: dt.date | None = None

    @model_validator(mode="after")
    def _rests_on_something(self) -> Self:
        if self.receipt is None and self.source is None:
            raise ValueError("a transfer needs a receipt or a source")
        return self

    @property
    def figures(self) -> tuple[Figure, ...]:
        return () if self.gain is None else (self.gain,)


class Note(_Model):
    """A dated remark on an entry: bodies are never rewritten, remarks are added."""

    text: Short
    author: Name
    created: dt.date


class Provenance(_Model):
    """Who wrote this revision, in which run."""

    author: Name
    origin: Literal["seed", "person", "agent", "round"]
    run: Annotated[str, Field(max_length=80)] = ""
    created: dt.date


class Change(_Model):
    """What a revision adds. Title, claim, body and earlier rows stay as they were written."""

    evidence: Annotated[tuple[Evidence, ...], Field(max_length=20)] = ()
    transfers: Annotated[tuple[Transfer, ...], Field(max_length=20)] = ()
    interactions: Annotated[tuple[Interaction, ...], Field(max_length=20)] = ()
    note: Short = ""
    status: Status | None = None
    implementation: Implementation | None = None
    provenance: Provenance

    @model_validator(mode="after")
    def _changes_something(self) -> Self:
        if not (self.evidence or self.transfers or self.interactions or self.note
                or self.status or self.implementation):  # fmt: skip
            raise ValueError("the change adds nothing")
        return self


class Entry(_Model):
    """One revision of an entry. ``id`` is its identity, ``revision`` counts from 1."""

    id: Slug
    revision: Annotated[int, Field(ge=1)] = 1
    kind: Kind
    status: Status = "proposed"
    title: Annotated[str, Field(min_length=8, max_length=80)]
    claim: Annotated[str, Field(min_length=16, max_length=240)]
    body: Annotated[str, Field(min_length=40, max_length=2000)]
    bottleneck: Bottleneck
    tags: Annotated[tuple[Slug, ...], Field(max_length=8)] = ()
    applies_when: Regime = Regime()
    preconditions: Annotated[tuple[Predicate, ...], Field(max_length=8)] = ()
    evidence: Annotated[tuple[Evidence, ...], Field(max_length=200)] = ()
    interactions: Annotated[tuple[Interaction, ...], Field(max_length=40)] = ()
    implementation: Implementation | None = None
    ports: Annotated[tuple[Port, ...], Field(max_length=6)] = ()
    transfers: Annotated[tuple[Transfer, ...], Field(max_length=200)] = ()
    retry_when: Annotated[str, Field(min_length=8, max_length=240)] | None = None
    risk: Annotated[str, Field(min_length=4, max_length=240)] | None = None
    notes: Annotated[tuple[Note, ...], Field(max_length=100)] = ()
    provenance: Provenance

    @model_validator(mode="after")
    def _kind_and_status(self) -> Self:
        if self.kind == "negative_result" and self.retry_when is None:
            raise ValueError("a negative result needs retry_when: what would make it worth a retry")
        if self.kind == "untested_regime" and not any(
            link.relation == "refines" for link in self.interactions
        ):
            raise ValueError("an untested regime names the entry that it extends (refines)")
        if not self.evidence and self.kind != "untested_regime":
            raise ValueError("an entry needs evidence: a receipt, or a source a reader can follow")
        if self.status == "validated" and not any(
            row.receipt is not None and row.promoted for row in self.evidence
        ):
            raise ValueError("validated needs evidence with a receipt and a forcing pass, promoted")
        if self.status == "refuted" and not any(row.receipt for row in self.evidence):
            raise ValueError("refuted needs evidence with a receipt")
        if any(link.other == self.id for link in self.interactions):
            raise ValueError("an entry cannot relate to itself")
        return self

    @property
    def sources(self) -> tuple[Source, ...]:
        return tuple(row.source for row in self.evidence if row.source is not None)


def read_entry(data: Mapping[str, Any] | str | bytes) -> Entry:
    """Parse an entry from JSON text or a JSON-like mapping, strictly.

    Raises InvalidInput that names each wrong field: unknown fields, NaN, lone surrogates, control
    characters, sizes over the limits, wrong units, an interval that excludes its mean.
    """
    return parse(Entry, data, "entry")


def parse(model: type[M], data: Mapping[str, Any] | str | bytes, what: str) -> M:
    """Parse JSON text or a JSON-like mapping into a strict model. Raises InvalidInput."""
    try:
        raw = data if isinstance(data, str | bytes) else json.dumps(data, ensure_ascii=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInput(f"The {what} is no JSON value: {error}.") from None
    size = len(raw)
    if size > MAX_ENTRY_BYTES:
        raise InvalidInput(
            f"The {what} has {size} bytes; at most {MAX_ENTRY_BYTES} are accepted.",
            hint="Keep the body under 2000 characters and link files instead of pasting them.",
        )
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"The {what} is no JSON: {error}.") from None
    if not isinstance(value, dict):
        raise InvalidInput(f"The {what} must be a JSON object, not {type(value).__name__}.")
    check_strings(value, what)
    try:
        return model.model_validate_json(json.dumps(value))
    except ValidationError as error:
        raise InvalidInput(_explain(error, what)) from None


def _explain(error: ValidationError, what: str) -> str:
    problems = []
    for item in error.errors(include_url=False, include_context=False)[:6]:
        path = ".".join(str(part) for part in item["loc"]) or what
        shown = "" if item["type"] == "value_error" else f", got {str(item['input'])[:60]!r}"
        problems.append(f"{path}: {item['msg'].removeprefix('Value error, ')}{shown}")
    more = error.error_count() - len(problems)
    return f"The {what} is not valid: " + "; ".join(problems) + (f"; {more} more" if more else "")


def canonical(entry: BaseModel) -> str:
    """Return the one JSON text of a model: sorted keys, no spaces, unset defaults left out."""
    return json.dumps(
        entry.model_dump(mode="json", exclude_defaults=True),
        sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False,
    )  # fmt: skip
