"""The ledger finds any edit, reorder, truncation and fork, and survives interrupted writes."""

import json
import math
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from specpilot.errors import CheckFailed, InvalidInput, NotFound
from specpilot.harness.controller.ledger import GENESIS, Head, Ledger, canonical, verify_file
from specpilot.types import ReceiptRef

KEY = b"k" * 32


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    ledger = Ledger(tmp_path / "ledger" / "ledger.jsonl", KEY)
    for number in range(5):
        ledger.append("note", {"number": number, "text": "é", "ratio": 0.1})
    return ledger


def test_a_fresh_ledger_is_valid_and_empty(tmp_path: Path) -> None:
    found = Ledger(tmp_path / "l.jsonl", KEY).verify()
    assert (found.ok, found.records, found.head) == (True, 0, Head(-1, GENESIS))


def test_records_are_chained_and_survive_reopening(ledger: Ledger) -> None:
    again = Ledger(ledger.path, KEY)
    assert again.head == ledger.head
    assert again.append("note", {}).seq == 5
    found = again.verify()
    assert found.ok and found.records == 6 and found.keyed


def test_the_file_is_private(ledger: Ledger) -> None:
    assert ledger.path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("value", [math.nan, math.inf, object(), {1, 2}])
def test_values_without_a_canonical_spelling_are_refused(ledger: Ledger, value: object) -> None:
    with pytest.raises(InvalidInput, match="cannot be written"):
        ledger.append("note", {"value": value})
    assert ledger.verify().records == 5


def test_canonical_has_one_spelling() -> None:
    assert canonical({"b": 1, "a": [1.5, None]}) == b'{"a":[1.5,null],"b":1}'


def test_every_single_byte_edit_is_found(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l.jsonl", KEY)
    for number in range(3):
        ledger.append("note", {"number": number, "ratio": 0.1})
    anchor = ledger.anchor()
    good = ledger.path.read_bytes()
    rng = random.Random(7)
    for position in range(len(good)):
        changed = bytearray(good)
        changed[position] = (changed[position] + rng.randrange(1, 256)) % 256
        ledger.path.write_bytes(bytes(changed))
        assert not verify_file(ledger.path, KEY, anchor).ok, position


def test_an_edit_is_explained_with_its_line(ledger: Ledger) -> None:
    text = ledger.path.read_text().replace('"number":2', '"number":7')
    ledger.path.write_text(text)
    problem = ledger.verify().problem
    assert problem is not None
    assert (problem.line, problem.kind) == (3, "edit")
    assert "Line 3: its content hashes to" in problem.explanation


def test_a_chain_rebuilt_without_the_key_is_found(tmp_path: Path) -> None:
    forged = Ledger(tmp_path / "forged.jsonl", b"x" * 32)
    forged.append("result", {"gain": 9.0})
    assert verify_file(forged.path, None).ok
    problem = verify_file(forged.path, KEY).problem
    assert problem is not None and problem.kind == "key"


def test_a_reorder_is_found(ledger: Ledger) -> None:
    lines = ledger.path.read_bytes().splitlines(keepends=True)
    lines[1], lines[2] = lines[2], lines[1]
    ledger.path.write_bytes(b"".join(lines))
    problem = ledger.verify().problem
    assert problem is not None and (problem.line, problem.kind) == (2, "reorder")


def test_a_removed_record_is_found(ledger: Ledger) -> None:
    lines = ledger.path.read_bytes().splitlines(keepends=True)
    ledger.path.write_bytes(b"".join(lines[:2] + lines[3:]))
    problem = ledger.verify().problem
    assert problem is not None and (problem.line, problem.kind) == (3, "reorder")


def test_a_truncation_is_found_by_the_anchor_and_by_a_head_seen_earlier(ledger: Ledger) -> None:
    head = ledger.anchor()
    lines = ledger.path.read_bytes().splitlines(keepends=True)
    ledger.path.write_bytes(b"".join(lines[:3]))
    for anchors in ((), (head,)):
        problem = ledger.verify(*anchors).problem
        assert problem is not None and problem.kind == "truncation"
    assert verify_file(ledger.path, KEY).ok  # which is why heads are anchored


def test_a_ledger_that_lost_its_anchored_end_is_not_written_on(ledger: Ledger) -> None:
    ledger.anchor()
    ledger.close()
    lines = ledger.path.read_bytes().splitlines(keepends=True)
    ledger.path.write_bytes(b"".join(lines[:-1]))
    with pytest.raises(CheckFailed, match="the end was cut off"):
        Ledger(ledger.path, KEY)
    ledger.path.write_bytes(b"".join(lines))
    assert Ledger(ledger.path, KEY).append("note", {}).seq == len(lines)


def test_a_replaced_history_is_found_by_the_anchor(ledger: Ledger, tmp_path: Path) -> None:
    head = ledger.anchor()
    anchor = ledger.path.with_name(ledger.path.name + ".anchor")
    kept = anchor.read_bytes()
    anchor.unlink()
    lines = ledger.path.read_bytes().splitlines(keepends=True)
    ledger.path.write_bytes(b"".join(lines[:3]))
    fork = Ledger(ledger.path, KEY)
    for number in range(4):
        fork.append("note", {"other": number})
    anchor.write_bytes(kept)
    for seen in ((), (head,)):
        problem = fork.verify(*seen).problem
        assert problem is not None and problem.kind == "fork"


def test_a_fork_inside_the_file_is_found(ledger: Ledger) -> None:
    lines = ledger.path.read_bytes().splitlines(keepends=True)
    ledger.path.write_bytes(b"".join([*lines, lines[3]]))
    problem = ledger.verify().problem
    assert problem is not None and (problem.line, problem.kind) == (6, "fork")
    assert "record 2" in problem.explanation


def test_a_forged_anchor_is_refused(ledger: Ledger) -> None:
    ledger.anchor()
    path = ledger.path.with_name(ledger.path.name + ".anchor")
    fields = json.loads(path.read_text())
    path.write_text(json.dumps(fields | {"seq": 0, "hash": "0" * 64}))
    with pytest.raises(CheckFailed, match="not written by this controller"):
        ledger.verify()


def test_an_anchor_with_another_number_is_refused(ledger: Ledger) -> None:
    ledger.anchor()
    path = ledger.path.with_name(ledger.path.name + ".anchor")
    fields = json.loads(path.read_text())
    path.write_text(json.dumps(fields | {"seq": -1}))
    with pytest.raises(CheckFailed, match="not written by this controller"):
        ledger.verify()


def test_an_interrupted_write_is_noted_and_removed(ledger: Ledger) -> None:
    with ledger.path.open("ab") as file:
        file.write(b'{"body":{"gain":')
    problem = ledger.verify().problem
    assert problem is not None and problem.kind == "torn"
    again = Ledger(ledger.path, KEY)
    assert [record.kind for record in again.records()][-1] == "torn_write"
    assert again.verify().ok


def test_a_damaged_ledger_takes_no_more_records(ledger: Ledger) -> None:
    text = ledger.path.read_text().replace('"number":2', '"number":7')
    ledger.path.write_text(text)
    with pytest.raises(CheckFailed, match="damaged after record 1"):
        Ledger(ledger.path, KEY)


def test_a_ledger_that_shrank_takes_no_more_records(ledger: Ledger) -> None:
    ledger.path.write_bytes(b"")
    with pytest.raises(CheckFailed, match="shrank"):
        ledger.append("note", {})


def test_receipts_are_found_only_if_all_of_them_agrees(ledger: Ledger) -> None:
    record = ledger.append("trial", {"verdict": "promoted"})
    assert ledger.find(record.ref).body == {"verdict": "promoted"}
    for wrong in (
        ReceiptRef(record.seq, "0" * 64, "trial"),
        ReceiptRef(0, record.hash, "trial"),
        ReceiptRef(record.seq, record.hash, "final"),
    ):
        with pytest.raises(NotFound):
            ledger.find(wrong)


APPEND_20 = """
import sys
from pathlib import Path
from specpilot.harness.controller.ledger import Ledger
ledger = Ledger(Path(sys.argv[1]), b"k" * 32)
for number in range(20):
    ledger.append("note", {"number": number})
"""


def test_threads_and_processes_append_to_one_chain(tmp_path: Path) -> None:
    path = tmp_path / "l.jsonl"
    ledger = Ledger(path, KEY)
    command = [sys.executable, "-P", "-c", APPEND_20, str(path)]
    processes = [subprocess.Popen(command) for _ in range(2)]
    threads = [
        threading.Thread(target=lambda: [ledger.append("note", {}) for _ in range(20)])
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [process.wait() for process in processes] == [0, 0]
    found = ledger.verify()
    assert found.ok and found.records == 80
    assert len(list(ledger.records())) == 80
