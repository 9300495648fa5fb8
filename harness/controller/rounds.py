"""Rounds, as the ledger tells them: nothing about a round is kept anywhere else.

A round is opened for one deployment by one owner. Its state (the current best, the trials, which
sealed sets are left, what was measured once for all of it) is what its records add up to, so a
controller that was killed resumes by reading them.
"""

import math
import secrets
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specpilot.errors import Conflict, NotFound
from specpilot.harness.controller.ledger import Ledger, Record
from specpilot.harness.controller.sealed import SealedSet

__all__ = ["Noise", "Round", "Rounds"]

SEALED_SETS = 3


@dataclass(frozen=True, slots=True)
class Noise:
    """Stock against stock: the standard deviation of one cycle's log-ratio over ``cycles``."""

    shape: str
    sd: float
    cycles: int
    seq: int

    def of_mean(self, cycles: int) -> float:
        """Return the standard error of the A/A mean for a design of that many such cycles."""
        return self.sd / math.sqrt(cycles)


@dataclass(slots=True)
class Round:
    """A round's state.

    ``stock_block`` is the block that was chosen for stock, if one was. ``best`` lists the patch
    snapshots of the promoted stack, in order.
    """

    id: str
    deployment: str
    owner: str
    opened: Record
    sealed: tuple[SealedSet, ...]
    best: tuple[str, ...] = ()
    best_trial: str | None = None
    trials: list[Record] = field(default_factory=list)
    burned: set[str] = field(default_factory=set)
    noise: dict[str, Noise] = field(default_factory=dict)
    calibration: Mapping[str, Any] | None = None
    stock_block: int | None = None
    final: Record | None = None

    @property
    def open(self) -> bool:
        return self.final is None

    def next_sealed(self) -> SealedSet:
        """Return the next sealed set that was never touched, or raise ``Conflict``."""
        for sealed in self.sealed:
            if sealed.id not in self.burned:
                return sealed
        raise Conflict(
            f"Round {self.id} has burned all of its {len(self.sealed)} sealed sets.",
            hint="Open a new round.",
        )

    def check_open(self, owner: str) -> None:
        """Raise ``Conflict`` unless the round is open and ``owner`` is the one who opened it."""
        if owner != self.owner:
            raise Conflict(
                f"Round {self.id} belongs to another owner.", hint="Open a round of your own."
            )
        if not self.open:
            raise Conflict(
                f"Round {self.id} had its final; a round has one.", hint="Open a new round."
            )

    def take(self, record: Record) -> None:
        body = record.body
        match record.kind:
            case "trial":
                self.trials.append(record)
                if body["verdict"] == "promoted":
                    self.best = tuple(body["stack"])
                    self.best_trial = str(body["trial"])
            case "burn":
                self.burned.add(str(body["set"]))
            case "noise":
                noise = Noise(body["shape"], body["sd"], body["cycles"], record.seq)
                self.noise[noise.shape] = noise
            case "stock":
                self.stock_block = body["block"]
            case "calibration":
                self.calibration = body["calibration"]
            case "final":
                self.final = record


class Rounds:
    """All rounds of a ledger, kept up to date as records are added."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._rounds: dict[str, Round] = {}
        self._read = 0
        self._lock = threading.Lock()

    def all(self) -> list[Round]:
        self._catch_up()
        return list(self._rounds.values())

    def get(self, round_id: str) -> Round:
        """Return a round. Raises ``NotFound`` with the latest ones."""
        self._catch_up()
        try:
            return self._rounds[round_id]
        except KeyError:
            known = ", ".join(list(self._rounds)[-5:]) or "none"
            raise NotFound(f"There is no round {round_id!r}.", hint=f"Latest: {known}.") from None

    def new_id(self) -> str:
        return f"r{len(self.all()) + 1:04d}-{secrets.token_hex(3)}"

    def unfinished(self) -> list[Record]:
        """Return the designs whose job left neither a result nor a note that it ended."""
        designs: dict[str, Record] = {}
        for record in self._ledger.records():
            job = record.body.get("job")
            if record.kind in ("design", "burn"):
                designs[str(job)] = record
            elif record.kind in ("trial", "final", "aborted", "audit"):
                designs.pop(str(job), None)
        return list(designs.values())

    def _catch_up(self) -> None:
        with self._lock:
            for record in self._ledger.records():
                if record.seq >= self._read:
                    self._take(record)

    def _take(self, record: Record) -> None:
        self._read = record.seq + 1
        body = record.body
        if record.kind == "round_open":
            sealed = tuple(SealedSet(**entry) for entry in body["sealed"])
            self._rounds[body["round"]] = Round(
                body["round"], body["deployment"]["id"], body["owner"], record, sealed
            )
        elif body.get("round") in self._rounds:
            self._rounds[body["round"]].take(record)
