"""Run the autopilot as a client of our own server, over stdio, with progress on a terminal."""

import asyncio
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import anyio
from mcp import Client, StdioServerParameters
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from specpilot.errors import SpecPilotError
from specpilot.harness.rounds import autopilot, report
from specpilot.harness.rounds.folder import RoundFolder
from specpilot.home import home

__all__ = ["call_tool", "run_round"]


class ToolFailed(SpecPilotError):
    """A tool answered with an error; the message is the tool's."""


class _StdioTools:
    def __init__(self, client: Client) -> None:
        self._client = client

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        reply = await self._client.call_tool(tool, dict(arguments))
        if reply.is_error:
            raise ToolFailed("\n".join(getattr(block, "text", "") for block in reply.content))
        content: dict[str, Any] = reply.structured_content or {}
        return content


class _Screen:
    """Progress on a terminal: a line for each step that ended, a bar for the one that runs."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=24),
            TextColumn("{task.fields[message]}"), TimeElapsedColumn(), console=console,
        )  # fmt: skip
        self._task: TaskID | None = None

    def __enter__(self) -> "_Screen":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def step(self, title: str) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._console.print(f"[bold]{title}[/bold]")
        self._task = self._progress.add_task(title, total=None, message="")

    def update(self, done: int, planned: int, message: str) -> None:
        if self._task is not None:
            self._progress.update(self._task, completed=done, total=planned, message=message)

    def say(self, line: str) -> None:
        self._console.print(f"  {line}", markup=False, highlight=False)


def _server() -> StdioServerParameters:
    return StdioServerParameters(
        command=sys.executable,
        args=["-P", "-m", "specpilot.mcp_server.server"],
        env={"SPECPILOT_HOME": str(home())},
    )


async def _call(tool: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    async with Client(_server()) as client:
        return await _StdioTools(client).call(tool, arguments)


def call_tool(tool: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Start the server, call one tool and return its structured result."""
    reply: dict[str, Any] = _unwrapped(_call, tool, arguments)
    return reply


def run_round(deployment: str, console: Console, *, resume: str | None = None) -> dict[str, Any]:
    """Run one round, write ``report.md`` and ``report.json`` into its folder, return the latter."""

    async def drive() -> autopilot.Round:
        async with Client(_server()) as client:
            with _Screen(console) as screen:
                return await autopilot.drive(_StdioTools(client), deployment, screen, resume=resume)

    finished = asdict(_unwrapped(drive))
    folder = RoundFolder.of(finished["status"]["round"]).path
    (folder / "report.json").write_text(json.dumps(finished, indent=1) + "\n", "utf-8")
    (folder / "report.md").write_text(report.markdown(finished), "utf-8")
    return finished


def report_path(round_id: str) -> Path:
    return RoundFolder.of(round_id).path / "report.md"


def _unwrapped(function: Any, *arguments: Any) -> Any:
    """Run a coroutine function; an error of ours comes out of the task groups around it."""
    try:
        return asyncio.run(function(*arguments))
    except BaseExceptionGroup as group:
        inner: BaseException = group
        while isinstance(inner, BaseExceptionGroup):
            inner = inner.exceptions[0]
        if isinstance(inner, SpecPilotError):
            raise inner from None
        if isinstance(inner, anyio.get_cancelled_exc_class()):
            raise KeyboardInterrupt from None
        raise
