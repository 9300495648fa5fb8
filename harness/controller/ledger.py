"""The controller's memory of what it did: an append-only file of chained, keyed records.

One record a line, canonical JSON. Each record carries the hash of the one before it, so that an
edit, a reorder or an insertion breaks the chain, and an HMAC with the controller's key, so that a
chain rebuilt by somebody else is recognised. A chain alone cannot show that its end was cut off:
for that the head is anchored in a second file and returned with every reply.

The ledger knows nothing of what the records mean.
"""

import fcntl
import hashlib
import hmac
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal

from specpilot.errors import CheckFailed, InvalidInput, NotFound
from specpilot.types import ReceiptRef

__all__ = [
    "GENESIS",
    "Head",
    "Ledger",
    "Problem",
    "Record",
    "Verification",
    "canonical",
    "verify_file",
]

GENESIS: Final = "0" * 64
_FIELDS: Final = frozenset({"body", "hash", "kind", "mac", "prev", "seq", "time"})

ProblemKind = Literal["edit", "fork", "key", "malformed", "reorder", "torn", "truncation"]


def canonical(value: object) -> bytes:
    """Encode ``value`` as JSON with one spelling: sorted keys, no spaces, ASCII, no NaN.

    Raises ``InvalidInput`` for values without such a spelling (NaN, infinity, other types).
    """
    try:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"This value cannot be written to the ledger: {error}.") from error
    return text.encode("ascii")


@dataclass(frozen=True, slots=True)
class Head:
    """The end of a ledger: number of its last record (-1 when empty) and that record's hash."""

    seq: int
    hash: str


@dataclass(frozen=True, slots=True)
class Record:
    """One record. ``time`` is UTC, ISO 8601; ``hash`` and ``mac`` are hex SHA-256 values."""

    seq: int
    time: str
    kind: str
    body: Mapping[str, Any]
    prev: str
    hash: str
    mac: str

    @property
    def ref(self) -> ReceiptRef:
        return ReceiptRef(seq=self.seq, hash=self.hash, kind=self.kind)

    def line(self) -> bytes:
        return canonical({name: getattr(self, name) for name in _FIELDS}) + b"\n"


@dataclass(frozen=True, slots=True)
class Problem:
    """The first thing that is wrong with a ledger; ``line`` counts from 1."""

    line: int
    kind: ProblemKind
    explanation: str


@dataclass(frozen=True, slots=True)
class Verification:
    """What a check of a whole ledger found. ``keyed`` says whether the HMACs were checked."""

    path: Path
    records: int
    head: Head
    keyed: bool
    problem: Problem | None

    @property
    def ok(self) -> bool:
        return self.problem is None


def _digest(prev: str, seq: int, time: str, kind: str, body: object) -> str:
    core = canonical({"body": body, "kind": kind, "seq": seq, "time": time})
    return hashlib.sha256(prev.encode("ascii") + core).hexdigest()


def _mac(key: bytes, digest: str) -> str:
    return hmac.new(key, digest.encode("ascii"), hashlib.sha256).hexdigest()


class _Chain:
    """Checks records one after another and names the first one that does not fit."""

    def __init__(self, key: bytes | None, head: Head) -> None:
        self._key = key
        self.head = head
        self.positions: dict[str, int] = {head.hash: head.seq}

    def take(self, line: bytes) -> Record | tuple[ProblemKind, str]:
        """Return the record on ``line``, or what is wrong with it."""
        expected = self.head.seq + 1
        try:
            fields = json.loads(line)
        except ValueError:
            return "malformed", "it is not JSON: bytes were changed, or it was not written by us"
        if not isinstance(fields, dict) or fields.keys() != _FIELDS:
            return "malformed", f"it does not have exactly the fields {sorted(_FIELDS)}"
        try:
            record = Record(**fields)
            spelled = record.line() == line + b"\n"
            digest = _digest(record.prev, record.seq, record.time, record.kind, record.body)
        except (AttributeError, InvalidInput, UnicodeEncodeError):
            return "malformed", "a field has the wrong type"
        if not spelled:
            return "edit", "it is not in canonical spelling, so bytes were changed after writing"
        if digest != record.hash:
            stated = str(record.hash)[:16]
            return "edit", f"its content hashes to {digest[:16]}…, but it states {stated}…"
        if self._key is not None and not hmac.compare_digest(
            _mac(self._key, record.hash), str(record.mac)
        ):
            return "key", "its HMAC does not fit the controller's key: somebody else wrote it"
        if record.prev != self.head.hash:
            if record.prev in self.positions:
                return "fork", (
                    f"it continues record {self.positions[record.prev]}, which the record after "
                    f"that one already continues: two histories were joined, or one was replayed"
                )
            return "reorder", (
                f"it follows a record with hash {str(record.prev)[:16]}…, but the line before it "
                f"has {self.head.hash[:16]}…: records were moved, removed or inserted"
            )
        if record.seq != expected:
            return "reorder", f"it has number {record.seq}, expected {expected}"
        self.head = Head(record.seq, record.hash)
        self.positions[record.hash] = record.seq
        return record


def verify_file(
    path: Path, key: bytes | None, *anchors: Head, visit: Callable[[Record], None] | None = None
) -> Verification:
    """Check every byte of the ledger at ``path`` and explain the first bad record.

    ``anchors`` are heads that were seen earlier: each must still be in the ledger at its place,
    which is how a cut-off end or a replaced history is found. Without ``key`` only the chain is
    checked. ``visit`` receives each good record. A missing file is an empty ledger.
    """
    data = path.read_bytes() if path.exists() else b""
    chain = _Chain(key, Head(-1, GENESIS))
    hashes: list[str] = []
    lines = data.split(b"\n")
    tail = lines.pop()
    problem: Problem | None = None
    for number, line in enumerate(lines, start=1):
        taken = chain.take(line)
        if not isinstance(taken, Record):
            problem = Problem(number, taken[0], f"Line {number}: {taken[1]}.")
            break
        hashes.append(taken.hash)
        if visit is not None:
            visit(taken)
    if problem is None and tail:
        number = len(lines) + 1
        problem = Problem(
            number,
            "torn",
            f"Line {number} has {len(tail)} bytes and no end: a write was interrupted or the file "
            f"was cut. Opening the ledger for writing notes and removes an interrupted write.",
        )
    if problem is None:
        problem = _missing_anchor(hashes, anchors)
    return Verification(path, len(hashes), chain.head, key is not None, problem)


def _missing_anchor(hashes: list[str], anchors: tuple[Head, ...]) -> Problem | None:
    for anchor in anchors:
        if anchor.seq < 0:
            continue
        if anchor.seq >= len(hashes):
            return Problem(
                len(hashes),
                "truncation",
                f"The ledger ends at record {len(hashes) - 1}, but record {anchor.seq} "
                f"({anchor.hash[:16]}…) was anchored: the end was cut off.",
            )
        if hashes[anchor.seq] != anchor.hash:
            return Problem(
                anchor.seq + 1,
                "fork",
                f"Record {anchor.seq} has hash {hashes[anchor.seq][:16]}…, but "
                f"{anchor.hash[:16]}… was anchored: the history after some earlier record was "
                f"replaced.",
            )
    return None


class Ledger:
    """A ledger file opened for appending. Safe for threads, and for processes by ``flock``.

    The head is kept in memory; when another process appended, the new lines are read and checked
    before the next append. ``key`` is the HMAC key. Raises ``CheckFailed`` for a damaged file and
    for one that lost the record that was anchored last: the next anchor would hide the loss.
    """

    def __init__(self, path: Path, key: bytes) -> None:
        self.path = path
        self._key = key
        self._lock = threading.Lock()
        self._anchor_path = path.with_name(path.name + ".anchor")
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._size = 0
        self._chain = _Chain(key, Head(-1, GENESIS))
        self._records: list[Record] = []
        with self._locked():
            self._catch_up()
        hashes = [record.hash for record in self._records]
        if (anchor := self.anchored()) and (problem := _missing_anchor(hashes, (anchor,))):
            self.close()
            raise CheckFailed(
                problem.explanation,
                hint="Nothing is recorded until it is restored.",
            )

    def close(self) -> None:
        os.close(self._fd)

    @property
    def head(self) -> Head:
        """The last record that this process has seen."""
        return self._chain.head

    def append(self, kind: str, body: Mapping[str, Any]) -> Record:
        """Write one record and return it once it is on disk.

        Raises ``InvalidInput`` for a body that is not JSON and ``CheckFailed`` when the file was
        changed under us in another way than by appending.
        """
        plain = json.loads(canonical(dict(body)))
        with self._locked():
            self._catch_up()
            return self._put(kind, plain)

    def records(self, kind: str | None = None) -> Iterator[Record]:
        """Yield the records, oldest first, with those that other processes wrote."""
        with self._locked():
            self._catch_up()
            snapshot = tuple(self._records)
        return (record for record in snapshot if kind is None or record.kind == kind)

    def find(self, ref: ReceiptRef) -> Record:
        """Return the record that ``ref`` names. Raises ``NotFound`` unless all of it agrees."""
        for record in self.records(ref.kind):
            if record.seq == ref.seq and record.hash == ref.hash:
                return record
        raise NotFound(
            f"The ledger {self.path} has no {ref.kind!r} record {ref.seq} with hash "
            f"{ref.hash[:16]}….",
            hint="A receipt counts only on the machine whose controller wrote it.",
        )

    def anchor(self) -> Head:
        """Note the present head in the anchor file, so that a cut-off end is seen later."""
        head = self.head
        text = canonical({"hash": head.hash, "mac": self._anchor_mac(head), "seq": head.seq})
        temporary = self._anchor_path.with_suffix(".new")
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, text + b"\n")
            os.fsync(fd)
        finally:
            os.close(fd)
        temporary.replace(self._anchor_path)
        return head

    def anchored(self) -> Head | None:
        """Return the head noted last, None if none. Raises ``CheckFailed`` if it was forged."""
        if not self._anchor_path.exists():
            return None
        try:
            fields = json.loads(self._anchor_path.read_bytes())
            head = Head(int(fields["seq"]), str(fields["hash"]))
            genuine = hmac.compare_digest(self._anchor_mac(head), str(fields["mac"]))
        except (KeyError, TypeError, ValueError):
            genuine = False
        if not genuine:
            raise CheckFailed(
                f"The anchor {self._anchor_path} was not written by this controller.",
                hint="Restore it from a backup, or treat the ledger as untrusted.",
            )
        return head

    def verify(self, *expected: Head) -> Verification:
        """Check the whole file against its chain, the key, the anchor and heads seen earlier."""
        anchor = self.anchored()
        anchors = expected if anchor is None else (anchor, *expected)
        return verify_file(self.path, self._key, *anchors)

    def _anchor_mac(self, head: Head) -> str:
        return _mac(self._key, f"anchor {head.seq} {head.hash}")

    def _locked(self) -> "_FileLock":
        return _FileLock(self._lock, self._fd)

    def _put(self, kind: str, body: dict[str, Any]) -> Record:
        prev, seq = self._chain.head.hash, self._chain.head.seq + 1
        time = datetime.now(UTC).isoformat(timespec="milliseconds")
        digest = _digest(prev, seq, time, kind, body)
        record = Record(seq, time, kind, body, prev, digest, _mac(self._key, digest))
        line = record.line()
        written = 0
        while written < len(line):
            written += os.write(self._fd, line[written:])
        os.fsync(self._fd)
        self._size += len(line)
        self._chain.head = Head(seq, digest)
        self._chain.positions[digest] = seq
        self._records.append(record)
        return record

    def _catch_up(self) -> None:
        size = os.fstat(self._fd).st_size
        if size == self._size:
            return
        if size < self._size:
            raise CheckFailed(
                f"The ledger {self.path} shrank from {self._size} to {size} bytes.",
                hint="Run `specpilot ledger verify`; nothing is recorded until it is restored.",
            )
        data = os.pread(self._fd, size - self._size, self._size)
        *lines, tail = data.split(b"\n")
        for line in lines:
            taken = self._chain.take(line)
            if not isinstance(taken, Record):
                raise CheckFailed(
                    f"The ledger {self.path} is damaged after record {self.head.seq}: the next "
                    f"line is bad ({taken[0]}): {taken[1]}.",
                    hint="Run `specpilot ledger verify`; nothing is recorded until it is restored.",
                )
            self._records.append(taken)
            self._size += len(line) + 1
        if tail:
            self._mend(tail)

    def _mend(self, tail: bytes) -> None:
        """Replace a line that a crash cut short, hence never acknowledged, by a note of it."""
        os.ftruncate(self._fd, self._size)
        body = {"bytes": len(tail), "sha256": hashlib.sha256(tail).hexdigest()}
        self._put("torn_write", body)


class _FileLock:
    """Holds a thread lock and an exclusive ``flock`` of the ledger's file."""

    def __init__(self, lock: threading.Lock, fd: int) -> None:
        self._lock = lock
        self._fd = fd

    def __enter__(self) -> None:
        self._lock.acquire()
        fcntl.flock(self._fd, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        self._lock.release()
