"""Servers for tests: a live one over any backend, and one that answers with scripted bytes."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest
import uvicorn

from specpilot.harness.engines.app import EngineApp
from specpilot.harness.engines.backend import Backend
from specpilot.harness.engines.client import EngineClient
from specpilot.harness.engines.mock.backend import MockBackend
from specpilot.harness.engines.server import Server, listen
from specpilot.harness.engines.settings import MockSettings


class Live:
    """An ``EngineApp`` on a free port, in a thread of this process."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.dead = threading.Event()
        self.app = EngineApp(backend, {"engine": "test"}, on_death=self.dead.set)
        self._sock = listen("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._sock.getsockname()[1]}"
        self._server: Server
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()))
        self._thread.start()
        assert self._ready.wait(10)

    async def _main(self) -> None:
        config = uvicorn.Config(self.app.asgi, log_config=None, lifespan="off", ws="none")
        self._server = Server(config)
        self.app.engine.start()
        self._sock.listen(64)
        self._ready.set()
        await self._server.serve(sockets=[self._sock])

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(10)
        assert self.app.engine.close(5)


@pytest.fixture
def live() -> Iterator[Callable[[Backend], Live]]:
    with contextlib.ExitStack() as stack:

        def start(backend: Backend) -> Live:
            server = Live(backend)
            stack.callback(server.close)
            return server

        yield start


@pytest.fixture(scope="module")
def mock_url() -> Iterator[str]:
    """A mock engine without delays, shared by a module's tests."""
    server = Live(MockBackend(MockSettings(delay_ms=0.0, tokens_per_pass=3)))
    yield server.url
    server.close()


class Scripted:
    """Answers each request with the next script's pieces of bytes, then closes the connection."""

    def __init__(self, scripts: Sequence[Sequence[bytes]]) -> None:
        self._sock = socket.socket()
        self._sock.bind(("127.0.0.1", 0))
        self._sock.listen(8)
        self.url = f"http://127.0.0.1:{self._sock.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, args=(scripts,), daemon=True)
        self._thread.start()

    def _serve(self, scripts: Sequence[Sequence[bytes]]) -> None:
        for script in scripts:
            try:
                connection, _ = self._sock.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                self._read_request(connection)
                for piece in script:
                    connection.sendall(piece)

    @staticmethod
    def _read_request(connection: socket.socket) -> None:
        data = b""
        while b"\r\n\r\n" not in data:
            data += connection.recv(65536)
        head, _, body = data.partition(b"\r\n\r\n")
        length = 0
        for line in head.lower().split(b"\r\n"):
            if line.startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        while len(body) < length:
            body += connection.recv(65536)

    def close(self) -> None:
        self._sock.close()


@pytest.fixture
def scripted_many() -> Iterator[Callable[[Sequence[Sequence[bytes]]], EngineClient]]:
    """Like ``scripted``, for one script a request."""
    with contextlib.ExitStack() as stack:

        def start(scripts: Sequence[Sequence[bytes]]) -> EngineClient:
            server = Scripted(scripts)
            stack.callback(server.close)
            return stack.enter_context(EngineClient(server.url, timeout_s=5.0))

        yield start


@pytest.fixture
def scripted() -> Iterator[Callable[..., EngineClient]]:
    """``scripted(*pieces)``: a client of a server that answers one request with these bytes."""
    with contextlib.ExitStack() as stack:

        def start(*pieces: bytes, timeout_s: float = 5.0) -> EngineClient:
            server = Scripted([pieces])
            stack.callback(server.close)
            return stack.enter_context(EngineClient(server.url, timeout_s=timeout_s))

        yield start
