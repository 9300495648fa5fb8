"""The server as a process: answers over stdio, ends on signals and when its input closes."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

HELLO = {
    "jsonrpc": "2.0", "id": 1, "method": "initialize",
    "params": {
        "protocolVersion": "2025-11-25", "capabilities": {},
        "clientInfo": {"name": "test", "version": "1"},
    },
}  # fmt: skip


@pytest.fixture
def server(specpilot_home: Path) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "specpilot.mcp_server.server"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, "SPECPILOT_HOME": str(specpilot_home)},
    )  # fmt: skip
    yield process
    process.kill()
    process.communicate()


def hello(server: subprocess.Popen[bytes]) -> dict:
    assert server.stdin and server.stdout
    server.stdin.write(json.dumps(HELLO).encode() + b"\n")
    server.stdin.flush()
    return json.loads(server.stdout.readline())


def test_it_introduces_itself(server: subprocess.Popen[bytes]) -> None:
    answer = hello(server)
    assert answer["result"]["serverInfo"]["name"] == "specpilot"
    assert "final_start" in answer["result"]["instructions"]


def test_it_ends_when_its_input_closes(server: subprocess.Popen[bytes]) -> None:
    hello(server)
    assert server.stdin
    server.stdin.close()
    server.stdin = None
    assert server.wait(timeout=20) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_on_a_signal(server: subprocess.Popen[bytes], number: signal.Signals) -> None:
    hello(server)
    server.send_signal(number)
    assert server.wait(timeout=20) == 128 + number
