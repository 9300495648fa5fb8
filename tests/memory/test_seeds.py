import re
from collections import Counter
from importlib.resources import files

from specpilot.memory.seeding import as_file, load_seeds, read_seeds
from specpilot.memory.store import MemoryStore

BY = {"author": "a test", "origin": "person", "created": "2026-11-29"}


def test_every_file_is_in_the_form_that_the_project_writes():
    folder = files("specpilot.memory") / "seeds"
    for entry in read_seeds():
        assert (folder / f"{entry.id}.json").read_text(encoding="utf-8") == as_file(entry)


def test_shipped_entries_claim_nothing_that_was_not_verified():
    for entry in read_seeds():
        assert entry.status == "proposed"
        assert all(row.receipt is None and row.source for row in entry.evidence)


def test_links_between_shipped_entries_lead_somewhere():
    entries = {entry.id: entry for entry in read_seeds()}
    for entry in entries.values():
        named = [link.other for link in entry.interactions]
        named += [other for row in entry.evidence for other in row.together_with]
        assert set(named) <= set(entries), entry.id


def test_no_two_shipped_entries_share_a_title_or_a_claim():
    entries = read_seeds()
    for values in ([e.title for e in entries], [e.claim for e in entries]):
        assert [v for v, n in Counter(values).items() if n > 1] == []


def test_shipped_text_speaks_of_nothing_but_the_subject():
    private = re.compile(r"/work/|/home/|/tmp/|session|helper|claude|\bseed says\b", re.IGNORECASE)
    for entry in read_seeds():
        assert not private.search(as_file(entry)), entry.id


def test_loading_twice_keeps_and_a_changed_file_updates(store, monkeypatch):
    first = load_seeds(store)
    assert (first.updated, first.kept) == (0, 0) and first.added == len(store)
    assert load_seeds(store).kept == first.added
    entry = store.get("w12-weight-format")
    changed = entry.model_copy(update={"claim": entry.claim.replace("exactly", "perfectly")})
    assert store.reseed(changed) == "updated"
    assert store.get("w12-weight-format").revision == 2
    assert store.get("w12-weight-format", 1) == entry


def test_an_update_of_a_shipped_entry_keeps_what_was_added_here(store, measured):
    load_seeds(store)
    entry = store.get("w12-weight-format")
    store.revise(entry.id, 1, {"evidence": [measured()], "status": "validated", "provenance": BY})
    changed = entry.model_copy(update={"claim": entry.claim.replace("exactly", "perfectly")})
    assert store.reseed(changed) == "updated"
    head = store.get(entry.id)
    assert head.revision == 3 and head.status == "validated"
    assert head.evidence[-1].receipt is not None and "perfectly" in head.claim


def test_an_entry_that_a_person_wrote_under_a_shipped_id_stays(tmp_path, raw):
    with MemoryStore(tmp_path / "m.sqlite") as store:
        store.propose(raw(id="w12-weight-format"))
        load_seeds(store)
        assert store.get("w12-weight-format").title == raw()["title"]
