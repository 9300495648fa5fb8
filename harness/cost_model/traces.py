"""Recorded lattices: what a drafter proposed at each cycle, and what the target then said.

A trace is JSON Lines, written as a run goes: a header, one line a cycle, one line for each finished
request with its output, and an end line with the counts, so that a file cut off in the middle is
recognised. ``position`` is the index of the cycle's anchor in its request's output: the target's
continuation is ``output[position + 1:]``. A path that ends in ``.gz`` is compressed.
"""

import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np

from specpilot.errors import InvalidInput, NotFound
from specpilot.mechanisms.trees.lattice import Lattice

__all__ = ["Cycle", "Trace", "TraceHeader", "TraceWriter", "read_trace"]

FORMAT = "specpilot.lattices/1"
_DIGITS = 5  # of a log-prob: far below what changes the order of candidates


@dataclass(frozen=True, slots=True)
class TraceHeader:
    """What was recorded. ``policy``, ``rows`` and ``block`` are those of the run itself.

    ``every_position``: there is a lattice at each output position, not only where the recorded
    policy's cycles began, so that any policy can be walked exactly.
    """

    deployment: str
    drafter: str
    vocab_size: int
    block: int
    policy: str
    rows: int
    every_position: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Cycle:
    """One draft: the anchor at ``position`` of the request's output, and the lattice after it."""

    request: str
    position: int
    anchor: int
    lattice: Lattice


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Cycles by request in order of position, and each request's whole output."""

    header: TraceHeader
    cycles: Mapping[str, tuple[Cycle, ...]]
    outputs: Mapping[str, tuple[int, ...]]


class TraceWriter:
    """Writes a trace while a run goes on. Use as a context manager; ``close`` writes the end line.

    Left by an exception, the file stays without its end and will not be read.
    """

    def __init__(self, path: Path, header: TraceHeader) -> None:
        self._cycles = 0
        self._requests = 0
        opener = gzip.open if path.suffix == ".gz" else open
        self._file: IO[str] = opener(path, "wt", encoding="utf-8")
        self._write({"format": FORMAT, **asdict(header)})

    def _write(self, record: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(record, separators=(",", ":")) + "\n")

    def cycle(self, request: str, position: int, anchor: int, lattice: Lattice) -> None:
        """Record a draft; minus infinity is written as null."""
        self._cycles += 1
        self._write(
            {
                "request": request,
                "position": position,
                "anchor": anchor,
                "tokens": lattice.tokens.tolist(),
                "first": _numbers(lattice.first),
                "edges": [[_numbers(row) for row in table] for table in lattice.edges],
            }
        )

    def output(self, request: str, tokens: Sequence[int]) -> None:
        """Record the whole output of a finished request, its first token included."""
        self._requests += 1
        self._write({"request": request, "output": [int(t) for t in tokens]})

    def close(self) -> None:
        self._write({"end": {"cycles": self._cycles, "requests": self._requests}})
        self._file.close()

    def __enter__(self) -> "TraceWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._file.close()


def _numbers(values: Any) -> list[float | None]:
    return [round(float(v), _DIGITS) if np.isfinite(v) else None for v in values]


def read_trace(path: Path) -> Trace:
    """Read a trace.

    Raises:
        NotFound: there is no such file.
        InvalidInput: it is no trace, a line is malformed (its number and field are named), or the
            file was cut off: there is no end line, or its counts do not match.
    """
    if not path.is_file():
        raise NotFound(f"no trace at {path}.", hint="Record one while a deployment runs.")
    try:
        if path.suffix == ".gz":
            lines = gzip.decompress(path.read_bytes()).decode("utf-8").splitlines()
        else:
            lines = path.read_text("utf-8").splitlines()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise _cut(path, f"the file does not decode ({error})") from error
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise _cut(path, f"line {number} is no whole JSON record") from error
    if not records or not isinstance(records[0], dict) or records[0].get("format") != FORMAT:
        raise InvalidInput(f"{path}: field 'format' is not {FORMAT!r} on line 1; this is no trace.")
    header = _header(path, records[0])
    if not isinstance(records[-1], dict) or "end" not in records[-1]:
        raise _cut(path, f"line {len(records)} is not the end line")
    cycles: dict[str, list[Cycle]] = {}
    outputs: dict[str, tuple[int, ...]] = {}
    for number, record in enumerate(records[1:-1], start=2):
        try:
            if "output" in record:
                outputs[record["request"]] = tuple(int(t) for t in record["output"])
            else:
                cycle = _cycle(record, header.vocab_size)
                cycles.setdefault(cycle.request, []).append(cycle)
        except KeyError as error:
            raise InvalidInput(f"{path}: line {number} lacks field {error}.") from error
        except (TypeError, ValueError, InvalidInput) as error:
            raise InvalidInput(f"{path}: line {number} is malformed: {error}") from error
    counted = {"cycles": sum(map(len, cycles.values())), "requests": len(outputs)}
    if records[-1]["end"] != counted:
        raise _cut(path, f"it holds {counted}, the end line says {records[-1]['end']}")
    return Trace(header, _checked(path, cycles, outputs), outputs)


def _cut(path: Path, why: str) -> InvalidInput:
    return InvalidInput(
        f"the trace {path} is cut off or damaged: {why}.",
        hint="Record it again and let the run end; a partial trace is not replayed.",
    )


def _header(path: Path, record: Mapping[str, Any]) -> TraceHeader:
    fields = {name: record.get(name) for name in TraceHeader.__dataclass_fields__}
    kinds = {"deployment": str, "drafter": str, "policy": str, "every_position": bool}
    for name, value in fields.items():
        if not isinstance(value, kinds.get(name, int)):
            raise InvalidInput(f"{path}: field {name!r} of the header is {value!r}.")
    return TraceHeader(**fields)  # type: ignore[arg-type]


def _cycle(record: Mapping[str, Any], vocab_size: int) -> Cycle:
    tokens = np.asarray(record["tokens"])
    depth, width = tokens.shape

    def floats(values: Any) -> Any:
        array = np.asarray(values, dtype=np.float64)
        return np.where(np.isnan(array), -np.inf, array)

    first = floats(record["first"])
    edges = floats(record["edges"]) if depth > 1 else np.empty((0, 1, width))
    if edges.ndim == 3 and edges.shape[1] == width and width > 1:
        lattice = Lattice.pairwise(tokens, first, edges, vocab_size)
    else:
        lattice = Lattice.marginal(tokens, np.vstack([first[None], edges[:, 0]]), vocab_size)
    return Cycle(str(record["request"]), int(record["position"]), int(record["anchor"]), lattice)


def _checked(
    path: Path, cycles: Mapping[str, list[Cycle]], outputs: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[Cycle, ...]]:
    ordered = {}
    for request, found in cycles.items():
        if request not in outputs:
            raise _cut(path, f"request {request!r} has cycles but no output")
        output = outputs[request]
        for cycle in found:
            at = cycle.position
            if not 0 <= at < len(output) or output[at] != cycle.anchor:
                raise InvalidInput(
                    f"{path}: request {request!r}, field 'position' {at}: the output does not hold "
                    f"the anchor {cycle.anchor} there."
                )
        ordered[request] = tuple(sorted(found, key=lambda c: c.position))
    return ordered
