import json
import math

import pytest

from specpilot.errors import InvalidInput
from specpilot.memory.schema import canonical, read_entry


def figure(**changes):
    return {"metric": "speedup_over_stock", "value": 1.2, "unit": "x"} | changes


def with_figure(raw, **changes):
    entry = raw()
    entry["evidence"][0]["figures"] = [figure(**changes)]
    return entry


def test_an_entry_survives_its_canonical_text(raw):
    entry = read_entry(raw())
    assert read_entry(canonical(entry)) == entry
    assert canonical(read_entry(canonical(entry))) == canonical(entry)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"value": math.nan}, "finite"),
        ({"value": math.inf}, "finite"),
        ({"unit": "%"}, "speedup_over_stock is given in x"),
        ({"low": 1.3, "high": 1.4, "confidence": 0.95}, "excludes its mean"),
        ({"low": 1.1}, "both low and high"),
        ({"value": -1.0}, "ratio between 0 and 1000"),
        ({"value": "1.2"}, "valid number"),
        ({"value": True}, "valid number"),
    ],
)
def test_a_figure_with_a_wrong_number_unit_or_interval_is_refused(raw, changes, says):
    with pytest.raises(InvalidInput, match=says):
        read_entry(with_figure(raw, **changes))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"surprise": 1}, "surprise: Extra inputs are not permitted"),
        ({"body": "x" * 2001}, "body: String should have at most 2000"),
        ({"id": "../../etc/passwd"}, "id"),
        ({"id": "x'; DROP TABLE revisions; --"}, "id"),
        ({"kind": "rumour"}, "kind"),
        ({"revision": 1.5}, "revision"),
        ({"title": "lone \ud800 surrogate in a title"}, "lone surrogate U\\+D800"),
        ({"title": "a bell \x07 in the title"}, "control character U\\+0007"),
        ({"evidence": []}, "needs evidence"),
        ({"kind": "negative_result"}, "retry_when"),
        ({"kind": "untested_regime"}, "refines"),
        ({"status": "validated"}, "receipt and a forcing pass"),
        ({"applies_when": {"requests": [8, 2]}}, "runs from 8 down to 2"),
        ({"applies_when": {"serving": "single", "requests": [2, 8]}}, "contradicts"),
        ({"interactions": [{"other": "narrow-tree", "relation": "refines"}]}, "itself"),
        (
            {"preconditions": [{"field": "smem", "op": ">=", "value": 1.0, "why": "w"}]},
            "unknown fact 'smem'",
        ),
        (
            {"preconditions": [{"field": "requests", "op": ">=", "value": "two", "why": "w"}]},
            "requests is a int",
        ),
        (
            {"preconditions": [{"field": "engine", "op": "<", "value": "sglang", "why": "w"}]},
            "no order",
        ),
    ],
)
def test_a_malformed_entry_is_refused_with_the_field_that_is_wrong(raw, changes, says):
    with pytest.raises(InvalidInput, match=says):
        read_entry(raw(**changes))


def test_a_megabyte_is_refused_before_it_is_parsed(raw):
    with pytest.raises(InvalidInput, match="bytes; at most"):
        read_entry(json.dumps(raw(body="x" * 1_000_000)))


@pytest.mark.parametrize("text", ["", "[]", "{", "null", "[" * 100_000, '"entry"'])
def test_text_that_is_no_json_object_is_refused(text):
    with pytest.raises(InvalidInput):
        read_entry(text)


def test_a_source_must_be_followable(raw):
    entry = raw()
    entry["evidence"][0]["source"] = {"kind": "arxiv", "ref": "somewhere"}
    with pytest.raises(InvalidInput, match="no reference of kind arxiv"):
        read_entry(entry)
    entry["evidence"][0]["source"] = {"kind": "paper", "ref": "SpecPilot paper"}
    with pytest.raises(InvalidInput, match="needs where"):
        read_entry(entry)


def test_a_forcing_verdict_without_its_receipt_is_refused(raw):
    entry = raw()
    entry["evidence"][0]["forcing"] = "pass"
    with pytest.raises(InvalidInput, match="bound to"):
        read_entry(entry)
