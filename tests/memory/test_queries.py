import json
from collections import Counter
from importlib.resources import files

from specpilot.memory.evaluate import read_queries
from specpilot.memory.facts import read_facts
from specpilot.memory.seeding import read_seeds

QUERIES = read_queries()


def notes() -> dict[str, dict]:
    text = (files("specpilot.memory") / "evaluation" / "notes.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    return {row["id"]: row for row in rows}


def test_forty_queries_tune_and_a_hundred_are_held_out():
    assert Counter(query.split for query in QUERIES) == {"tune": 40, "heldout": 100}


def test_every_kind_of_query_is_split_in_the_same_proportion():
    kinds = Counter(query.id.rsplit("-", 1)[0] for query in QUERIES)
    tuned = Counter(query.id.rsplit("-", 1)[0] for query in QUERIES if query.split == "tune")
    for kind, count in kinds.items():
        assert abs(tuned[kind] - count * 40 / 140) < 1, kind


def test_no_query_is_asked_twice():
    texts = [query.query.casefold() for query in QUERIES if query.query]
    assert len(set(texts)) == len(texts)
    deployments = [json.dumps(query.facts, sort_keys=True) for query in QUERIES if not query.query]
    assert len(set(deployments)) == len(deployments)


def test_grades_name_entries_that_exist_and_something_answers():
    known = {entry.id for entry in read_seeds()}
    for query in QUERIES:
        assert set(query.grades) <= known, query.id
        assert set(query.grades.values()) <= {1, 2, 3}, query.id
        assert max(query.grades.values()) == 3, query.id


def test_facts_of_queries_are_facts_that_search_accepts():
    for query in QUERIES:
        assert not query.facts or read_facts(query.facts, query.step_shares), query.id


def test_harmful_entries_exist_and_are_never_right_answers():
    known = {entry.id for entry in read_seeds()}
    noted = notes()
    assert list(noted) == [query.id for query in QUERIES]
    for query in QUERIES:
        harmful = set(noted[query.id]["harmful"])
        assert harmful <= known - set(query.grades), query.id
        assert noted[query.id]["about"], query.id


def test_left_out_deployments_have_evidence_to_hide_and_keep_their_grades():
    by_id = {query.id: query for query in QUERIES}
    left_out = read_queries("leave_one_out.jsonl")
    assert Counter(query.split for query in left_out)["heldout"] >= 15
    seen = [row.hardware for entry in read_seeds() for row in entry.evidence]
    for query in left_out:
        assert any(query.leave_out in hardware for hardware in seen), query.id
        assert query.model_copy(update={"leave_out": ""}) == by_id[query.id]
