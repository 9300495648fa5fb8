import sqlite3
import threading

import pytest

from specpilot.errors import CheckFailed, Conflict, InvalidInput, NotFound, Unsupported
from specpilot.memory.database import SCHEMA_VERSION, Database
from specpilot.memory.schema import canonical
from specpilot.memory.store import MemoryStore

BY = {"author": "a test", "origin": "person", "created": "2026-11-29"}


def test_a_proposed_entry_is_found_again_in_another_connection(store, raw):
    written = store.propose(raw())
    with MemoryStore(store.database.path) as other:
        assert other.get("narrow-tree") == written.entry
        assert [hit.id for hit in other.search("twelve rows best-first tree").hits] == [
            "narrow-tree"
        ]


def test_an_id_exists_once(store, raw):
    store.propose(raw())
    with pytest.raises(Conflict, match="exists"):
        store.propose(raw())


def test_an_unknown_id_is_not_found(store):
    with pytest.raises(NotFound):
        store.get("nothing' OR 1=1 --")
    with pytest.raises(NotFound):
        store.history("nothing")


def test_a_revision_adds_and_keeps_what_was_there(store, raw, measured):
    first = store.propose(raw()).entry
    second = store.revise("narrow-tree", 1, {"evidence": [measured()], "provenance": BY}).entry
    assert second.revision == 2
    assert second.evidence[: len(first.evidence)] == first.evidence
    assert second.body == first.body
    assert store.history("narrow-tree") == (first, second)
    assert store.get("narrow-tree", 1) == first


def test_a_revision_of_an_old_base_is_a_conflict(store, raw):
    store.propose(raw())
    store.revise("narrow-tree", 1, {"note": "seen again", "provenance": BY})
    with pytest.raises(Conflict, match="at revision 2, not 1"):
        store.revise("narrow-tree", 1, {"note": "seen elsewhere", "provenance": BY})


def test_the_body_cannot_be_changed_by_a_revision(store, raw):
    store.propose(raw())
    with pytest.raises(InvalidInput, match="body: Extra inputs"):
        store.revise("narrow-tree", 1, {"body": "other", "provenance": BY})


def test_a_verified_receipt_with_a_forcing_pass_validates(store, raw, measured):
    store.propose(raw())
    change = {"evidence": [measured()], "status": "validated", "provenance": BY}
    assert store.revise("narrow-tree", 1, change).entry.status == "validated"


def test_a_forged_receipt_changes_nothing(store, raw, measured):
    store.propose(raw())
    forged = measured(receipt={"seq": 7, "hash": "b" * 64, "kind": "final"})
    with pytest.raises(CheckFailed, match="does not verify"):
        store.revise("narrow-tree", 1, {"evidence": [forged], "provenance": BY})
    assert store.get("narrow-tree").revision == 1


def test_a_true_receipt_with_another_gain_is_refused(store, raw, measured):
    store.propose(raw())
    inflated = measured(figures=[{"metric": "speedup_over_stock", "value": 2.0, "unit": "x"}])
    with pytest.raises(CheckFailed):
        store.revise("narrow-tree", 1, {"evidence": [inflated], "provenance": BY})


@pytest.mark.parametrize("answer", [1, "yes", None, False])
def test_only_true_from_the_verifier_accepts(tmp_path, raw, measured, answer):
    with MemoryStore(tmp_path / "m.sqlite", verifier=lambda evidence: answer) as store:
        store.propose(raw())
        with pytest.raises(CheckFailed):
            store.revise("narrow-tree", 1, {"evidence": [measured()], "provenance": BY})


def test_a_verifier_that_breaks_refuses(tmp_path, raw, measured):
    def broken(evidence):
        raise RuntimeError("ledger unreadable")

    with MemoryStore(tmp_path / "m.sqlite", verifier=broken) as store:
        with pytest.raises(CheckFailed):
            store.propose(raw(evidence=[measured()]))
        assert len(store) == 0


def test_a_failed_audit_does_not_validate(store, raw, measured):
    store.propose(raw())
    change = {"evidence": [measured(forcing="fail")], "status": "validated", "provenance": BY}
    with pytest.raises(InvalidInput, match="forcing pass"):
        store.revise("narrow-tree", 1, change)


def test_an_audit_without_a_promotion_does_not_validate(store, raw, measured):
    store.propose(raw())
    for row in (measured(promoted=False), measured(promoted=False, figures=[])):
        change = {"evidence": [row], "status": "validated", "provenance": BY}
        with pytest.raises(InvalidInput, match="promoted"):
            store.revise("narrow-tree", 1, change)


def test_a_near_duplicate_is_named_when_it_is_written(store, raw):
    store.propose(raw())
    written = store.propose(
        raw(id="narrow-tree-again", title="A narrow tree beats chains on a small CPU")
    )
    assert written.similar == ("narrow-tree",)


def test_a_contradiction_is_shown_from_both_sides(store, raw):
    store.propose(raw())
    store.propose(
        raw(
            id="narrow-tree-loses",
            title="A narrow tree loses on a small CPU with four threads",
            interactions=[{"other": "narrow-tree", "relation": "contradicts"}],
        )
    )
    flags = {hit.id: hit.flags for hit in store.search("narrow tree small CPU").hits}
    assert "contradicted by narrow-tree-loses" in flags["narrow-tree"]
    assert "contradicted by narrow-tree" in flags["narrow-tree-loses"]
    assert [(link.source, link.other) for link in store.links("narrow-tree")] == [
        ("narrow-tree-loses", "narrow-tree")
    ]


def test_stored_revisions_cannot_be_changed_by_sql_either(store, raw):
    store.propose(raw())
    with pytest.raises(Unsupported, match="append-only"), store.database.write() as connection:
        connection.execute("UPDATE revisions SET body = 'x'")
    with pytest.raises(Unsupported, match="append-only"), store.database.write() as connection:
        connection.execute("DELETE FROM revisions")
    assert store.get("narrow-tree").revision == 1


def test_an_edited_body_in_the_file_is_noticed(store, raw):
    store.propose(raw())
    with store.database.write() as connection:
        connection.execute("DROP TRIGGER revisions_stay")
        connection.execute("UPDATE revisions SET body = replace(body, '1.12', '9.12')")
    with pytest.raises(CheckFailed, match="does not match its hash"):
        store.get("narrow-tree")


def test_a_store_from_a_newer_version_is_left_alone(tmp_path, raw):
    path = tmp_path / "m.sqlite"
    with MemoryStore(path) as store:
        store.propose(raw())
        with store.database.write() as connection:
            connection.execute(
                "UPDATE meta SET value = ? WHERE key = 'schema_version'", (str(SCHEMA_VERSION + 1),)
            )
    before = path.read_bytes()
    with pytest.raises(Unsupported, match="newer SpecPilot"):
        MemoryStore(path)
    assert path.read_bytes() == before


def test_files_that_are_no_memory_are_refused_and_left_alone(tmp_path):
    text = tmp_path / "text"
    text.write_text("not a database, but long enough to look at" * 30)
    with pytest.raises(InvalidInput, match="no readable SQLite file"):
        MemoryStore(text)
    assert text.read_text().startswith("not a database")
    other = tmp_path / "other.sqlite"
    with sqlite3.connect(other) as connection:
        connection.execute("CREATE TABLE theirs (x)")
    connection.close()
    with pytest.raises(InvalidInput, match="no SpecPilot memory"):
        MemoryStore(other)
    with pytest.raises(InvalidInput, match="is a directory"):
        MemoryStore(tmp_path)


def test_a_place_that_cannot_be_written_is_a_clear_error(tmp_path):
    blocker = tmp_path / "file"
    blocker.write_text("")
    with pytest.raises(Unsupported):
        MemoryStore(blocker / "memory.sqlite")


def test_a_full_disk_leaves_the_store_as_it_was(store, raw):
    store.propose(raw())
    with store.database.read() as connection:
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(Unsupported, match=r"is full; nothing was written"):
        for number in range(200):
            store.propose(raw(id=f"filler-{number}"))
    with store.database.read() as connection:
        connection.execute("PRAGMA max_page_count = 1000000")
        assert connection.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
    assert "narrow-tree" in store.ids()
    assert set(store.ids()) == {card.id for card in store.columns().cards}
    store.propose(raw(id="after-the-flood"))


def test_wal_falls_back_where_shared_memory_cannot_work(tmp_path, monkeypatch, raw):
    monkeypatch.setattr("specpilot.memory.database._filesystem", lambda path: "nfs4")
    with MemoryStore(tmp_path / "m.sqlite") as store:
        assert store.database.journal_mode == "delete"
        store.propose(raw())
        assert store.search("narrow tree").hits


def test_opening_a_current_store_writes_nothing(tmp_path, raw):
    path = tmp_path / "m.sqlite"
    with MemoryStore(path) as store:
        store.propose(raw())
        with MemoryStore(path) as other:
            before = other.database.data_version()
            MemoryStore(path).close()
            assert other.database.data_version() == before


def test_threads_share_a_store(store, raw):
    errors = []

    def write(name):
        try:
            for number in range(10):
                store.propose(raw(id=f"{name}-{number}"))
                store.search("narrow tree")
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(name,)) for name in ("one", "two", "three")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(store) == len(store.columns()) == 30


def test_restore_is_exact_and_refuses_other_content(tmp_path, store, raw):
    store.propose(raw())
    store.revise("narrow-tree", 1, {"note": "seen again", "provenance": BY})
    with MemoryStore(tmp_path / "other.sqlite") as other:
        assert other.restore(store.history("narrow-tree")) == 2
        assert other.restore(store.history("narrow-tree")) == 0
        assert canonical(other.get("narrow-tree")) == canonical(store.get("narrow-tree"))
    with MemoryStore(tmp_path / "third.sqlite") as third:
        third.propose(raw(title="A narrow tree with another title here"))
        with pytest.raises(Conflict, match="other content"):
            third.restore(store.history("narrow-tree"))


def test_a_nested_transaction_that_fails_undoes_everything(store, raw):
    with pytest.raises(Conflict), store.transaction():
        store.propose(raw())
        assert store.search("narrow tree").hits
        store.propose(raw())
    assert len(store) == 0
    assert store.columns().cards == ()


def test_the_database_module_splits_its_own_schema(tmp_path):
    database = Database(tmp_path / "m.sqlite")
    with database.read() as connection:
        names = {row[0] for row in connection.execute("SELECT name FROM sqlite_master")}
    database.close()
    assert {"revisions", "heads", "links", "fts", "revisions_stay"} <= names
