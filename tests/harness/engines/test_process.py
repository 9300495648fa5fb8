"""Servers as processes: ready in time or a clear error, and nothing is left behind."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from specpilot.errors import Conflict, EngineFailure
from specpilot.harness.deployments import registry
from specpilot.harness.engines import keeper
from specpilot.harness.engines.client import EngineClient, SamplingParams
from specpilot.harness.engines.launch import LaunchSpec, clean_env, launch_spec
from specpilot.harness.engines.process import ServerProcess, free_port
from specpilot.harness.engines.procfs import port_holders

HTTP = """
import http.server, json, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"nonce": NONCE}).encode()
        self.send_response(200); self.send_header("content-length", str(len(body)))
        self.end_headers(); self.wfile.write(body)
    def log_message(self, *args): pass
def serve(): http.server.HTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
"""


@pytest.fixture(autouse=True)
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "logs").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "logs"))


def script(tmp_path: Path, code: str, nonce: str = "n") -> LaunchSpec:
    """A launch of a Python script that knows its PORT and NONCE."""
    port = free_port()
    source = f"PORT, NONCE = {port}, {nonce!r}\n" + HTTP + textwrap.dedent(code)
    return LaunchSpec(
        argv=(sys.executable, "-c", source, "--nonce", nonce),
        env=clean_env(tmp_path, 1),
        cwd=str(tmp_path),
        host="127.0.0.1",
        port=port,
        nonce="n",
        settings={},
    )


def mock_spec(tmp_path: Path, **settings: object) -> LaunchSpec:
    return launch_spec(registry.load("mock"), settings, "candidate", free_port(), run_dir=tmp_path)


def gone(pid: int, within_s: float = 5.0) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not Path(f"/proc/{pid}").exists():
            return True
        time.sleep(0.02)
    return False


def wait_for(condition: Callable[[], bool], within_s: float = 10.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_mock_server_starts_serves_and_ends_cleanly(tmp_path: Path) -> None:
    spec = mock_spec(tmp_path, delay_ms=1.0)
    with ServerProcess(spec) as server:
        server.wait_healthy(30)
        assert server.alive and port_holders(spec.port) == [server.pid]
        with EngineClient(server.base_url) as client:
            assert len(client.generate((1, 2), SamplingParams(5)).output_ids) == 5
            assert client.server_info()["nonce"] == spec.nonce
    assert server.exit_status == 0 and not server.alive
    assert port_holders(spec.port) == []
    server.stop()  # again: nothing happens


def test_running_requests_are_finished_or_aborted_on_sigterm(tmp_path: Path) -> None:
    with ServerProcess(mock_spec(tmp_path, delay_ms=100.0)) as server:
        server.wait_healthy(30)
        assert server.pid is not None
        with EngineClient(server.base_url) as client:
            started = time.monotonic()
            threading.Timer(0.3, os.kill, (server.pid, signal.SIGTERM)).start()
            with pytest.raises(EngineFailure, match=r"aborted|Lost the connection"):
                client.generate((1,), SamplingParams(1000))
            wait_for(lambda: not server.alive)
        assert time.monotonic() - started < 5
    assert server.exit_status == 0


def test_a_step_that_hangs_does_not_hold_up_the_end(tmp_path: Path) -> None:
    (tmp_path / "overlay.py").write_text(
        "import time\ndef apply(b):\n    b.step = lambda: time.sleep(99)\n    return b\n"
    )
    with ServerProcess(mock_spec(tmp_path, overlay=str(tmp_path))) as server:
        server.wait_healthy(30)
        with (
            EngineClient(server.base_url, timeout_s=0.5) as client,
            pytest.raises(EngineFailure, match="silent"),
        ):
            client.generate((1,), SamplingParams(8))
        started = time.monotonic()
    assert server.exit_status == 0 and time.monotonic() - started < 3


def test_a_server_that_ends_at_once_is_quoted(tmp_path: Path) -> None:
    spec = script(tmp_path, "print('no weights here'); sys.exit(7)")
    with (
        ServerProcess(spec) as server,
        pytest.raises(EngineFailure, match=r"(?s)ended with status 7.*no weights here"),
    ):
        server.wait_healthy(30)


def test_a_command_that_does_not_exist_is_an_engine_failure(tmp_path: Path) -> None:
    spec = script(tmp_path, "")
    with (
        ServerProcess(spec, wrap=lambda argv: ["/no/such/program", *argv]) as server,
        pytest.raises(EngineFailure, match=r"(?s)status 127.*cannot start /no/such/program"),
    ):
        server.wait_healthy(30)


def test_a_server_that_never_gets_healthy_fails_at_the_deadline(tmp_path: Path) -> None:
    spec = script(tmp_path, "import time; print('loading', flush=True); time.sleep(60)")
    started = time.monotonic()
    with (
        ServerProcess(spec) as server,
        pytest.raises(EngineFailure, match=r"(?s)not healthy within 1 s.*loading"),
    ):
        server.wait_healthy(1.0)
    assert time.monotonic() - started < 6


def test_a_port_in_use_is_told_before_anything_starts(tmp_path: Path) -> None:
    spec = mock_spec(tmp_path)
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", spec.port))
        holder.listen()
        with pytest.raises(Conflict, match=f"Port {spec.port} is in use by process {os.getpid()}"):
            ServerProcess(spec).start()
        command = [*spec.argv[:4], "--port", str(spec.port)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=30)
        assert result.returncode == 98
        assert f"Cannot listen on 127.0.0.1:{spec.port}" in result.stderr


def test_a_stranger_on_the_port_is_found_out(tmp_path: Path) -> None:
    spec = script(tmp_path, "import time; time.sleep(60)")
    with ServerProcess(spec) as server:
        stranger = script(tmp_path, "serve()")
        code = stranger.argv[2].replace(str(stranger.port), str(spec.port))
        other = subprocess.Popen([sys.executable, "-c", code])
        try:
            with pytest.raises(EngineFailure, match=f"Process {other.pid} answers on port"):
                server.wait_healthy(10)
        finally:
            other.kill()
            other.wait()


def test_a_server_with_another_nonce_is_found_out(tmp_path: Path) -> None:
    with (
        ServerProcess(script(tmp_path, "serve()", nonce="another")) as server,
        pytest.raises(EngineFailure, match="does not know its launch's nonce"),
    ):
        server.wait_healthy(10)


def test_a_flood_of_output_stays_within_the_cap(tmp_path: Path) -> None:
    code = """
    for i in range(4000): os.write(1, b'x' * 9999 + b'\\n')
    os.write(2, b'the end\\n')
    serve()
    """
    with ServerProcess(script(tmp_path, code), log_cap=1 << 20) as server:
        server.wait_healthy(30)
        wait_for(lambda: server.tail().endswith("the end"))
        (folder,) = (tmp_path / "logs").glob("specpilot-log-*")
        assert sum(file.stat().st_size for file in folder.iterdir()) <= 1 << 20
    assert not folder.exists() and server.tail().endswith("the end")


def test_a_server_cannot_reach_its_log(tmp_path: Path) -> None:
    with ServerProcess(script(tmp_path, "print('hello', flush=True); serve()")) as server:
        server.wait_healthy(20)
        assert server.tail() == "hello"
        assert list(tmp_path.iterdir()) == [tmp_path / "logs"]
        (folder,) = (tmp_path / "logs").glob("specpilot-log-*")
        assert folder.stat().st_mode & 0o777 == 0o700


STUBBORN = """
import signal, subprocess, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(99)"])
escaped = subprocess.Popen([sys.executable, "-c", '''
import os, time
os.setsid()
if os.fork(): os._exit(0)
open("orphan", "w").write(str(os.getpid()))
time.sleep(99)
'''])
escaped.wait()
open("child", "w").write(str(child.pid))
serve()
"""


def test_children_orphans_and_the_deaf_are_ended(tmp_path: Path) -> None:
    with ServerProcess(script(tmp_path, STUBBORN)) as server:
        server.wait_healthy(20)
        pids = [int((tmp_path / name).read_text()) for name in ("child", "orphan")]
        assert server.pid is not None
        started = time.monotonic()
    assert 2.5 < time.monotonic() - started < 8
    assert all(gone(pid) for pid in (server.pid, *pids))
    assert server.exit_status == -signal.SIGKILL


def test_orphans_of_a_server_are_below_the_root_that_is_watched(tmp_path: Path) -> None:
    with ServerProcess(script(tmp_path, STUBBORN)) as server:
        server.wait_healthy(20)
        orphan = int((tmp_path / "orphan").read_text())
        assert server.pid is not None and server.root_pid is not None
        assert orphan not in keeper.descendants(server.pid)
        assert {server.pid, orphan} <= set(keeper.descendants(server.root_pid))


def test_a_server_that_kills_its_keeper_gains_nothing(tmp_path: Path) -> None:
    code = STUBBORN.replace("serve()", "os.kill(os.getppid(), 9); serve()")
    with (
        ServerProcess(script(tmp_path, code)) as server,
        pytest.raises(EngineFailure, match="ended with status unknown"),
    ):
        server.wait_healthy(20)
    pids = [int((tmp_path / name).read_text()) for name in ("child", "orphan")]
    assert all(gone(pid) for pid in pids)
    assert port_holders(server.spec.port) == []


CONTROLLER = """
import sys, time
from specpilot.harness.engines.launch import LaunchSpec
from specpilot.harness.engines.process import ServerProcess
spec = LaunchSpec(**eval(sys.argv[1]))
server = ServerProcess(spec)
server.start()
server.wait_healthy(20)
print(server.pid, flush=True)
time.sleep(99)
"""


def test_nothing_survives_a_controller_that_is_killed(tmp_path: Path) -> None:
    spec = script(tmp_path, STUBBORN)
    fields = {name: getattr(spec, name) for name in spec.__dataclass_fields__}
    controller = subprocess.Popen(
        [sys.executable, "-P", "-c", CONTROLLER, repr(fields)], stdout=subprocess.PIPE, text=True
    )
    assert controller.stdout is not None
    server = int(controller.stdout.readline())
    pids = [int((tmp_path / name).read_text()) for name in ("child", "orphan")]
    controller.kill()
    controller.wait()
    controller.stdout.close()
    assert all(gone(pid, within_s=8) for pid in (server, *pids))
    assert port_holders(spec.port) == []


def test_an_engine_that_breaks_ends_its_process_with_status_1(tmp_path: Path) -> None:
    overlay = tmp_path / "patch"
    overlay.mkdir()
    (overlay / "overlay.py").write_text(
        textwrap.dedent(
            """
            def apply(backend):
                def step():
                    raise RuntimeError("device lost")
                backend.step = step
                return backend
            """
        )
    )
    with ServerProcess(mock_spec(tmp_path, overlay=str(overlay))) as server:
        server.wait_healthy(30)
        with (
            EngineClient(server.base_url) as client,
            pytest.raises(EngineFailure, match="device lost"),
        ):
            client.generate((1,), SamplingParams(8))
        wait_for(lambda: not server.alive)
        with pytest.raises(EngineFailure, match=r"(?s)ended with status 1.*device lost"):
            server.check_alive()


def test_an_overlay_that_fails_is_told_before_serving(tmp_path: Path) -> None:
    (tmp_path / "overlay.py").write_text("1 / 0\n")
    with (
        ServerProcess(mock_spec(tmp_path, overlay=str(tmp_path))) as server,
        pytest.raises(EngineFailure, match=r"(?s)status 2.*ZeroDivisionError"),
    ):
        server.wait_healthy(30)


def test_the_environment_holds_nothing_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hush")
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    monkeypatch.setenv("LD_PRELOAD_X", "x")
    with ServerProcess(mock_spec(tmp_path)) as server:
        server.wait_healthy(30)
        raw = Path(f"/proc/{server.pid}/environ").read_bytes().split(b"\0")
        cwd = Path(f"/proc/{server.pid}/cwd").readlink()
    names = {entry.partition(b"=")[0].decode() for entry in raw if entry}
    assert not names & {"SECRET_TOKEN", "PYTHONPATH", "LD_PRELOAD_X", "SPECPILOT_HOME"}
    assert b"OMP_NUM_THREADS=1" in raw and b"OMP_WAIT_POLICY=PASSIVE" in raw
    assert cwd == tmp_path
