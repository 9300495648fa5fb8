"""Where a step's time goes, by component, beside the floor of each.

Timed wrappers are put around an engine's functions while a profile runs and taken away after it:
off, nothing is there and nothing costs. Time is exclusive: what a wrapped function spends inside
another wrapped one counts there. What no wrapper covers is overhead: sampling, tree building, host
gaps. Knows no engine: hooks come from one (``reference`` has those of the reference engine).
"""

import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from specpilot.errors import InvalidInput
from specpilot.harness.cost_model.floors import ComponentFloor, step_shares
from specpilot.types import StepShares

__all__ = ["Hook", "Profile", "ProfileRow", "Timer", "installed", "profile_steps"]

COMPONENTS = ("weights", "lm_head", "attention", "gdn", "drafter", "activations")


@dataclass(frozen=True, slots=True)
class Hook:
    """A function to time: attribute ``name`` of ``owner`` (a class or module).

    ``component`` None is a matrix product: it counts as weights of the part that calls it (as
    ``lm_head`` or ``drafter`` within those).
    """

    owner: Any
    name: str
    component: str | None
    part: str = ""


@dataclass
class Timer:
    """Collects exclusive times in ms by (component, part), and how often each was entered."""

    synchronise: Callable[[], None] | None = None
    spent: dict[tuple[str, str], float] = field(default_factory=dict)
    calls: dict[tuple[str, str], int] = field(default_factory=dict)
    paused: bool = False
    _stack: list[tuple[str, str]] = field(default_factory=list)
    _since: float = 0.0

    def enter(self, component: str | None, part: str) -> None:
        above = self._stack[-1] if self._stack else None
        if above is not None and above[0] == "drafter":
            key = above if component is None else (above[0], part or above[1])
        elif component is not None:
            key = (component, part)
        elif above is None:
            key = ("weights", part or "other")
        else:
            key = above if above[0] == "lm_head" else ("weights", above[1])
        self._tick(above)
        self._stack.append(key)
        self.calls[key] = self.calls.get(key, 0) + 1

    def leave(self) -> None:
        self._tick(self._stack.pop())

    def _tick(self, key: tuple[str, str] | None) -> None:
        if self.synchronise is not None:
            self.synchronise()
        now = perf_counter()
        if key is not None:
            self.spent[key] = self.spent.get(key, 0.0) + (now - self._since) * 1e3
        self._since = perf_counter()


@contextmanager
def installed(hooks: Sequence[Hook], timer: Timer) -> Iterator[None]:
    """Put timed wrappers in place of the hooked functions, and the originals back at the end."""
    originals: list[tuple[Hook, Any]] = []
    try:
        for hook in hooks:
            original = vars(hook.owner).get(hook.name)
            if not callable(original):
                raise InvalidInput(
                    f"{hook.owner!r} has no function {hook.name!r} of its own to time.",
                    hint="The engine changed: bring its hooks up to date.",
                )
            originals.append((hook, original))
            setattr(hook.owner, hook.name, _timed(original, hook, timer))
        yield
    finally:
        for hook, original in reversed(originals):
            setattr(hook.owner, hook.name, original)


def _timed(original: Callable[..., Any], hook: Hook, timer: Timer) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        if timer.paused:
            return original(*args, **kwargs)
        timer.enter(hook.component, hook.part)
        try:
            return original(*args, **kwargs)
        finally:
            timer.leave()

    return timed


@dataclass(frozen=True, slots=True)
class ProfileRow:
    """One part of a component: measured ms of a step, its floor, their ratio, share of the step.

    ``floor_ms`` 0 and ``ratio`` None: the model has no floor for it (overhead, commits).
    """

    component: str
    part: str
    ms: float
    floor_ms: float
    ratio: float | None
    share: float


@dataclass(frozen=True, slots=True)
class Profile:
    """A typical step out of ``steps``: the mean of their middle half.

    ``plain_step_ms`` is the median of as many steps without any wrapper.
    """

    title: str
    steps: int
    step_ms: float
    plain_step_ms: float
    rows: tuple[ProfileRow, ...]

    @property
    def kernels_ms(self) -> float:
        """Time in components: the step without overhead."""
        return sum(row.ms for row in self.rows if row.component != "overhead")

    def shares(self) -> StepShares:
        parts = [(row.component, row.ms) for row in self.rows if row.component != "overhead"]
        return step_shares(parts, self.step_ms)

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "kernels_ms": self.kernels_ms}, indent=2)

    def table(self) -> Any:
        """Return a rich table: component, part, measured, floor, ratio, share."""
        from rich.table import Table

        table = Table(title=f"{self.title}: {self.step_ms:.2f} ms a step of {self.steps}")
        for name in ("component", "part"):
            table.add_column(name)
        for name in ("ms", "floor ms", "× floor", "share"):
            table.add_column(name, justify="right")
        for row in self.rows:
            table.add_row(
                row.component,
                row.part,
                f"{row.ms:.3f}",
                f"{row.floor_ms:.3f}" if row.floor_ms else "–",
                f"{row.ratio:.2f}" if row.ratio is not None else "–",
                f"{row.share:.1%}",
            )
        return table

    def picture(self, path: Path) -> None:
        """Draw the step stacked by component beside its floor (matplotlib; format by suffix)."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6.0, 4.0), layout="constrained")
        axes = figure.add_subplot()
        bottoms = [0.0, 0.0]
        for component in (*COMPONENTS, "overhead"):
            rows = [row for row in self.rows if row.component == component]
            heights = [sum(r.ms for r in rows), sum(r.floor_ms for r in rows)]
            if any(heights):
                axes.bar(["measured", "floor"], heights, 0.6, bottom=bottoms, label=component)
                bottoms = [b + h for b, h in zip(bottoms, heights, strict=True)]
        axes.set_ylabel("ms a step")
        axes.set_title(self.title)
        axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
        figure.savefig(path)


def profile_steps(
    run_step: Callable[[], object],
    hooks: Sequence[Hook],
    floors: Sequence[ComponentFloor],
    *,
    title: str,
    steps: int = 20,
    warm: int = 3,
    prepare: Callable[[], None] | None = None,
    synchronise: Callable[[], None] | None = None,
) -> Profile:
    """Run ``run_step`` ``warm`` times, ``steps`` times plainly, ``steps`` times under wrappers.

    ``prepare`` runs before each step, untimed (it keeps requests running).

    ``floors`` are those of the step being run (``step_floor``); they are joined by component and
    part (``attention_in`` and ``attention_out`` are the part ``attention``). On a GPU give
    ``synchronise``, which makes the profiled step (not the plain one) slower than life.
    """
    if steps < 1 or warm < 0:
        raise InvalidInput(f"fields 'steps' {steps} and 'warm' {warm}: profile at least one step.")

    timer = Timer(synchronise)

    def timed_step() -> float:
        if prepare is not None:
            timer.paused = True
            prepare()
            timer.paused = False
        start = perf_counter()
        run_step()
        if synchronise is not None:
            synchronise()
        return (perf_counter() - start) * 1e3

    for _ in range(warm):
        timed_step()
    plain = statistics.median(timed_step() for _ in range(steps))
    taken: list[tuple[float, dict[tuple[str, str], float]]] = []
    with installed(hooks, timer):
        for _ in range(steps):
            timer.spent = {}
            taken.append((timed_step(), timer.spent))
    step, spent = _typical(taken)
    return Profile(title, steps, step, plain, _join(spent, floors, step))


def _typical(
    taken: Sequence[tuple[float, dict[tuple[str, str], float]]],
) -> tuple[float, dict[tuple[str, str], float]]:
    """Mean of the middle half of the steps by their time: parts still add up to the step."""
    ordered = sorted(taken, key=lambda one: one[0])
    cut = len(ordered) // 4
    kept = ordered[cut : len(ordered) - cut]
    spent: dict[tuple[str, str], float] = {}
    for _, parts in kept:
        for key, ms in parts.items():
            spent[key] = spent.get(key, 0.0) + ms / len(kept)
    return sum(whole for whole, _ in kept) / len(kept), spent


def _part(floor: ComponentFloor) -> tuple[str, str]:
    if floor.component == "weights":
        return "weights", floor.part.removesuffix("_in").removesuffix("_out")
    return floor.component, ""


def _join(
    spent: dict[tuple[str, str], float], floors: Sequence[ComponentFloor], step_ms: float
) -> tuple[ProfileRow, ...]:
    bounds: dict[tuple[str, str], float] = {}
    for floor in floors:
        key = _part(floor)
        bounds[key] = bounds.get(key, 0.0) + floor.floor_ms
    measured: dict[tuple[str, str], float] = {}
    for (component, part), ms in spent.items():
        key = (component, part if component == "weights" else "")
        measured[key] = measured.get(key, 0.0) + ms
    rows = []
    keys = sorted(measured.keys() | bounds.keys(), key=lambda k: (COMPONENTS.index(k[0]), k[1]))
    for key in keys:
        ms, bound = measured.get(key, 0.0), bounds.get(key, 0.0)
        ratio = ms / bound if bound and ms else None
        rows.append(ProfileRow(key[0], key[1], ms, bound, ratio, ms / step_ms))
    rest = step_ms - sum(measured.values())
    rows.append(ProfileRow("overhead", "host, sampling, trees", rest, 0.0, None, rest / step_ms))
    return tuple(rows)
