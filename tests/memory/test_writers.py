"""Many processes write one memory; some are killed. Nothing may be lost or half there."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from specpilot.memory.store import MemoryStore

_WRITER = """
import json, sys
from specpilot.memory.store import MemoryStore
path, name, count, entry = sys.argv[1], sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])
with MemoryStore(path) as store:
    for number in range(count):
        store.propose(entry | {"id": f"{name}-{number}", "title": f"Entry {number} of {name} here"})
        print(f"{name}-{number}", flush=True)
"""


def start(path, name, count, entry):
    return subprocess.Popen(
        [sys.executable, "-P", "-c", _WRITER, str(path), name, str(count), json.dumps(entry)],
        stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def check_whole(path, expected):
    with MemoryStore(path) as store:
        with store.database.read() as connection:
            assert connection.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
            indexed = connection.execute("SELECT count(*) FROM fts").fetchone()[0]
        ids = store.ids()
        assert expected <= set(ids)
        assert indexed == len(ids) == len(store.columns())
        for id in ids:
            assert store.get(id).id == id
            name, number = id.rsplit("-", 1)
            assert id in {hit.id for hit in store.search(f"entry {number} {name}", limit=25).hits}


def write_together(tmp_path, raw, writers, count):
    path = tmp_path / "memory.sqlite"
    running = [start(path, f"writer{number}", count, raw()) for number in range(writers)]
    with MemoryStore(path) as reader:
        while any(process.poll() is None for process in running):
            reader.search("narrow tree")
            time.sleep(0.05)
    expected = set()
    for process in running:
        expected |= set(process.communicate()[0].split())
        assert process.returncode == 0
    assert len(expected) == writers * count
    check_whole(path, expected)


def test_four_processes_write_and_nothing_is_lost(tmp_path, raw):
    write_together(tmp_path, raw, writers=4, count=12)


@pytest.mark.slow
def test_four_processes_write_500_each_and_nothing_is_lost(tmp_path, raw):
    write_together(tmp_path, raw, writers=4, count=500)


def kill_writers(tmp_path, raw, times):
    path = tmp_path / "memory.sqlite"
    MemoryStore(path).close()
    acknowledged = set()
    for number in range(times):
        process = start(path, f"victim{number}", 10_000, raw())
        assert process.stdout is not None
        for _ in range(3 + number):
            acknowledged.add(process.stdout.readline().strip())
        os.kill(process.pid, signal.SIGKILL)
        acknowledged |= set(process.communicate()[0].splitlines()[:-1])
    check_whole(path, {id for id in acknowledged if id})


def test_killing_a_writer_loses_no_acknowledged_entry(tmp_path, raw):
    kill_writers(tmp_path, raw, times=2)


@pytest.mark.slow
def test_killing_writers_twenty_times_loses_no_acknowledged_entry(tmp_path, raw):
    kill_writers(tmp_path, raw, times=20)
