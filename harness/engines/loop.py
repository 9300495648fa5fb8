"""The one thread that owns an engine, and how asyncio code reaches it.

The thread runs what was asked of it, then one engine step, then hands the step's tokens to the
event loop; with nothing to do it sleeps on a condition and uses no CPU. An exception that is not
one of ``specpilot.errors`` means that the engine is broken: the thread ends, everything that waits
gets an ``EngineFailure``, and ``on_death`` is called once.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from specpilot.errors import Conflict, EngineFailure, SpecPilotError
from specpilot.harness.engines.backend import (
    Backend,
    GenerateRequest,
    ScoreRequest,
    ScoreResult,
    StepEvent,
)

__all__ = ["EngineLoop", "Ticket"]

T = TypeVar("T")


@dataclass(slots=True)
class Ticket:
    """A request in the engine: its events arrive in ``events``, an ``EngineFailure`` ends them."""

    rid: str
    events: asyncio.Queue[StepEvent | EngineFailure] = field(default_factory=asyncio.Queue)


class EngineLoop:
    """Runs ``backend`` in a thread of its own. Its coroutines belong to one event loop."""

    def __init__(self, backend: Backend, on_death: Callable[[], None] = lambda: None) -> None:
        self.backend = backend
        self.failure: EngineFailure | None = None
        self._on_death = on_death
        self._wake = threading.Condition()
        self._commands: deque[Callable[[], None]] = deque()
        self._closing = False
        self._tickets: dict[str, Ticket] = {}
        self._waiting: set[asyncio.Future[Any]] = set()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop

    def start(self) -> None:
        """Start the thread; call from the event loop that will await results."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    @property
    def running(self) -> int:
        """Requests that have not ended."""
        return len(self._tickets)

    async def add(self, request: GenerateRequest) -> Ticket:
        """Hand a request to the engine. Raises what ``Backend.add`` raises."""
        if request.rid in self._tickets:
            raise Conflict(f"rid {request.rid!r} belongs to a request that is still running.")
        ticket = self._tickets[request.rid] = Ticket(request.rid)
        try:
            await self._call(lambda: self.backend.add(request))
        except asyncio.CancelledError:
            self.abort(request.rid)
            raise
        except BaseException:
            self._tickets.pop(request.rid, None)
            raise
        return ticket

    def abort(self, rid: str) -> None:
        """End a request: the engine forgets it, its ticket gets an ``abort`` event."""
        ticket = self._tickets.pop(rid, None)
        if ticket is None:
            return
        ticket.events.put_nowait(StepEvent(rid, (), "abort"))
        self._post(lambda: self.backend.abort(rid))

    def abort_all(self) -> None:
        for rid in list(self._tickets):
            self.abort(rid)

    async def score(self, requests: Sequence[ScoreRequest]) -> list[ScoreResult]:
        """Score each request by a command of its own, so that generation goes on in between."""
        return [await self._call(lambda r=r: self.backend.score(r)) for r in requests]  # type: ignore[misc]

    async def flush(self) -> None:
        """Empty caches. Raises ``Conflict`` while requests run."""
        if self._tickets:
            raise Conflict(f"Cannot flush: {len(self._tickets)} requests are running.")
        await self._call(self.backend.flush)

    async def info(self) -> dict[str, object]:
        return await self._call(self.backend.info)

    def close(self, timeout_s: float) -> bool:
        """End the thread after its current step; False if it has not ended in time."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _post(self, command: Callable[[], None]) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    async def _call(self, work: Callable[[], T]) -> T:
        """Run ``work`` in the engine's thread and await its result."""
        if self.failure is not None:
            raise self.failure
        future: asyncio.Future[T] = self._loop.create_future()

        def settle(result: T | None, error: SpecPilotError | None) -> None:
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)  # type: ignore[arg-type]

        def command() -> None:
            try:
                result = work()
            except SpecPilotError as error:
                self._loop.call_soon_threadsafe(settle, None, error)
            else:
                self._loop.call_soon_threadsafe(settle, result, None)

        self._waiting.add(future)
        self._post(command)
        try:
            return await future
        finally:
            self._waiting.discard(future)

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except Exception as error:
            failure = EngineFailure(f"The engine broke: {type(error).__name__}: {error}.")
            failure.__cause__ = error
            self._loop.call_soon_threadsafe(self._die, failure)

    def _turn(self) -> bool:
        with self._wake:
            while not (self._commands or self._closing or self.backend.has_work()):
                self._wake.wait()
            if self._closing:
                return False
            commands, self._commands = self._commands, deque()
        for command in commands:
            command()
        if self.backend.has_work():
            events = self.backend.step()
            if events:
                self._loop.call_soon_threadsafe(self._deliver, events)
        return True

    def _deliver(self, events: Sequence[StepEvent]) -> None:
        for event in events:
            ticket = self._tickets.get(event.rid)
            if ticket is None:
                continue
            ticket.events.put_nowait(event)
            if event.finished is not None:
                del self._tickets[event.rid]

    def _die(self, failure: EngineFailure) -> None:
        self.failure = failure
        for ticket in self._tickets.values():
            ticket.events.put_nowait(failure)
        self._tickets.clear()
        for future in list(self._waiting):
            if not future.done():
                future.set_exception(failure)
        self._on_death()
