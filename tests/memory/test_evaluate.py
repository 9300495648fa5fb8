import math

import pytest

from specpilot.errors import InvalidInput
from specpilot.memory.evaluate import (
    Query,
    _dcg,
    _without,
    as_results,
    evaluate,
    read_queries,
)
from specpilot.memory.schema import parse


def query(**changes):
    raw = {
        "id": "trees-one-request", "split": "tune",
        "query": "verify more of the drafter's candidates in one pass",
        "facts": {"requests": 1, "gpu_arch": "sm_90"},
        "grades": {"best-first-tree": 3, "eagle2-dynamic-tree": 1},
    }  # fmt: skip
    return parse(Query, raw | changes, "query")


def test_a_gain_of_rank_is_a_gain_of_ndcg():
    assert _dcg([3, 0]) > _dcg([0, 3]) > _dcg([0, 2])
    assert _dcg([3]) == 7.0
    assert math.isclose(_dcg([0, 1]), 1 / math.log2(3))


def test_every_ranker_is_scored_and_compared_in_pairs(seeded):
    queries = [
        query(),
        query(id="snapshots", query="tree states of GDN layers without snapshots",
              facts={}, grades={"gdn-tree-wy-verify": 3, "gdn-state-snapshots": 2}),
        query(id="forcing", query="find a faulty system that accuracy cannot see", facts={},
              grades={"token-forcing": 3, "accuracy-cannot-see-bias": 3}),
    ]  # fmt: skip
    report = evaluate(seeded, queries, "tune")
    assert set(report.scores) == {"fused", "random", "bm25", "regime"}
    assert set(report.gains) == {"random", "bm25", "regime"}
    assert report.scores["fused"].ndcg > report.scores["random"].ndcg
    assert all(0 <= score.ndcg <= 1 for score in report.scores.values())
    mean, low, high = report.gains["random"]
    assert low <= mean <= high
    assert mean == pytest.approx(report.scores["fused"].ndcg - report.scores["random"].ndcg)
    assert {row["id"] for row in as_results(report)} >= {"memory.tune.ndcg8", "memory.tune.mrr"}


def test_hits_that_cannot_apply_always_carry_a_flag(seeded):
    facts = {"requests": 24, "gpu_arch": "cpu", "weight_dtype": "fp32", "drafter": "none"}
    cannot = query(query="", facts=facts, grades={"fixed-trees-when-batching": 1})
    assert evaluate(seeded, [cannot], "tune").scores["fused"].harmful == 0.0


def test_hiding_a_device_changes_only_what_was_seen_there(seeded):
    hidden, shown = _without(seeded, "RTX PRO 6000"), seeded.columns()
    changed = {
        before.id
        for before, after in zip(shown.cards, hidden.cards, strict=True) if before != after
    }  # fmt: skip
    assert {"split-kv-verify-attention", "sm120-port-tree-w12"} <= changed
    assert not {"best-first-tree", "fixed-trees-when-batching"} & changed
    at = hidden.by_id["split-kv-verify-attention"]
    assert (hidden.cards[at].gain, hidden.effect[at]) == ("", 0.0)
    assert evaluate(seeded, [query(leave_out="RTX PRO 6000")], "tune").queries == 1


def test_a_label_on_an_unknown_entry_is_refused(seeded):
    with pytest.raises(InvalidInput, match="unknown entries"):
        evaluate(seeded, [query(grades={"nothing-here": 3})], "tune")
    with pytest.raises(InvalidInput, match="No labelled query"):
        evaluate(seeded, [query()], "heldout")


@pytest.mark.parametrize(
    "changes",
    [
        {"grades": {}}, {"grades": {"best-first-tree": 4}}, {"grades": {"best-first-tree": 0}},
        {"query": " ", "facts": {}}, {"facts": {"speed": 1}}, {"split": "all"}, {"extra": 1},
    ],
)  # fmt: skip
def test_a_malformed_query_is_refused(changes):
    with pytest.raises(InvalidInput):
        query(**changes)


def test_shipped_queries_are_valid_and_grade_shipped_entries(seeded):
    known = set(seeded.ids())
    for labelled in read_queries():
        assert set(labelled.grades) <= known
