"""An engine as a server process: one socket, one engine thread, an end in time.

SIGTERM and SIGINT end it within 3 s with status 0: running requests may finish for 2 s and are
aborted then. If the engine breaks, whoever waits gets an error, ``/health`` says 503 for a moment,
and the process ends with status 1.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import uvicorn

from specpilot.errors import Conflict
from specpilot.harness.engines.app import EngineApp
from specpilot.harness.engines.backend import Backend

__all__ = ["EXIT_ENGINE_BROKE", "EXIT_PORT_IN_USE", "Server", "listen", "serve"]

EXIT_ENGINE_BROKE = 1
EXIT_PORT_IN_USE = 98
FINISH_S = 2.0
"""How long running requests may go on after SIGTERM."""
LAST_WORDS_S = 0.5
"""How long a server whose engine broke still answers (with errors) before it ends."""


def listen(host: str, port: int) -> socket.socket:
    """Bind ``host:port`` (0: any free port). Raises ``Conflict`` if the port is in use."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    # Accepted sockets inherit it; without it each reply waits 40 ms for the client's delayed ACK.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise Conflict(
            f"Cannot listen on {host}:{port}: {error.strerror}.",
            hint="Choose another port or end the process that holds it.",
        ) from error
    return sock


class Server(uvicorn.Server):
    """uvicorn without its signal handling: a signal must not become the exit status."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(backend: Backend, sock: socket.socket, facts: Mapping[str, Any]) -> int:
    """Serve until SIGTERM, SIGINT or the engine's end; returns the exit status.

    Call from the main thread. ``facts`` (engine, settings, nonce, ...) appear in ``/server_info``.
    """
    return asyncio.run(_serve(backend, sock, facts))


async def _serve(backend: Backend, sock: socket.socket, facts: Mapping[str, Any]) -> int:
    loop = asyncio.get_running_loop()
    ending = asyncio.Event()
    app = EngineApp(backend, {**facts, "pid": os.getpid()}, on_death=ending.set)
    config = uvicorn.Config(
        app.asgi,
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        timeout_keep_alive=3600,
        timeout_graceful_shutdown=1,
    )
    server = Server(config)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ending.set)
    try:
        sock.listen(2048)
    except OSError as error:
        print(f"error: cannot listen on {sock.getsockname()}: {error.strerror}", file=sys.stderr)
        return EXIT_PORT_IN_USE
    app.engine.start()
    host, port = sock.getsockname()[:2]
    print(f"serving on http://{host}:{port}", flush=True)
    http = asyncio.create_task(server.serve(sockets=[sock]))
    await asyncio.wait(
        {http, ended := asyncio.create_task(ending.wait())}, return_when="FIRST_COMPLETED"
    )
    ended.cancel()
    app.closing = True
    if app.engine.failure is not None:
        print(f"error: {app.engine.failure}", file=sys.stderr, flush=True)
        await asyncio.sleep(LAST_WORDS_S)
    else:
        deadline = loop.time() + FINISH_S
        while app.engine.running and app.engine.failure is None and loop.time() < deadline:
            await asyncio.sleep(0.02)
        app.engine.abort_all()
    server.should_exit = True
    await http
    status = 0 if app.engine.failure is None else EXIT_ENGINE_BROKE
    if not await asyncio.to_thread(app.engine.close, 0.2):
        # A step that does not end holds a thread inside native code: interpreter shutdown would
        # wait for it or crash in it.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status
