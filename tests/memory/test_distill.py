import datetime as dt
import shutil
from dataclasses import replace

import pytest

from specpilot.errors import CheckFailed, InvalidInput
from specpilot.memory.distill import Outcome, distill
from specpilot.memory.store import MemoryStore
from specpilot.memory.transfer import plan_port
from specpilot.types import ReceiptRef

FACTS = {"deployment": "pico", "engine": "reference", "drafter": "block", "gpu_arch": "cpu",
         "requests": 1, "weight_dtype": "fp32", "drafter_top_k": 16}  # fmt: skip
DAY = dt.date(2026, 11, 29)


def outcome(**changes):
    base = Outcome(
        mechanisms=(("best_first_tree", {"rows": 16}),), facts=FACTS, gain=1.3, low=1.25,
        high=1.35, confidence=0.95, baseline="stock", receipt=ReceiptRef(4, "c" * 64, "final"),
        forcing="pass", promoted=True, reason="Siblings were nearly free.", workload="code",
        hardware="2 CPU cores",
    )  # fmt: skip
    return replace(base, **changes)


@pytest.fixture
def ledgered(seeded_file, tmp_path):
    """A seeded store whose ledger knows the receipts c… and d…."""
    known = {"c" * 64, "d" * 64}
    path = shutil.copy(seeded_file, tmp_path / "m.sqlite")
    with MemoryStore(path, verifier=lambda row: row.receipt.hash in known) as store:
        yield store


def test_a_promoted_gain_validates_the_mechanism_and_is_planned_as_measured_here(ledgered):
    before = ledgered.get("best-first-tree")
    report = distill(ledgered, [outcome()], run="round-1", day=DAY)
    entry = ledgered.get("best-first-tree")
    assert report.revised == ("best-first-tree",) and report.proposed == ()
    assert entry.status == "validated"
    assert entry.evidence[:-1] == before.evidence and entry.body == before.body
    assert entry.evidence[-1].figures[0].value == 1.3
    assert entry.transfers[-1].outcome == "works"
    assert entry.provenance.run == "round-1"
    step = next(s for s in plan_port(ledgered, FACTS).steps if s.entry == "best-first-tree")
    assert (step.predicted, step.basis) == (1.3, "measured here")


def test_a_loss_becomes_a_negative_result_with_reason_and_retry(ledgered):
    lost = outcome(gain=0.9, low=0.88, high=0.92, promoted=False, reason="Rows cost time here.",
                   retry_when="The machine has more cores.",
                   receipt=ReceiptRef(5, "d" * 64, "trial"))  # fmt: skip
    (id,) = distill(ledgered, [lost], run="round-1", day=DAY).proposed
    entry = ledgered.get(id)
    assert entry.kind == "negative_result"
    assert entry.retry_when == "The machine has more cores."
    assert "Rows cost time here." in entry.body
    assert entry.applies_when.gpu_arch == ("cpu",)
    assert ledgered.get("best-first-tree").transfers[-1].outcome == "no_gain"
    assert ledgered.get("best-first-tree").status == "proposed"
    found = ledgered.search("tree rows", facts=FACTS, kinds=("mechanism",))
    assert id in {hit.id for hit in found.negatives}


def test_the_same_outcome_twice_changes_nothing(ledgered):
    lost = outcome(gain=0.9, low=0.88, high=0.92, promoted=False,
                   receipt=ReceiptRef(5, "d" * 64, "trial"))  # fmt: skip
    distill(ledgered, [outcome(), lost], run="round-1", day=DAY)
    before = {entry.id: entry for entry in ledgered.entries()}
    again = distill(ledgered, [outcome(), lost], run="round-1", day=DAY)
    assert again.revised == again.proposed == ()
    assert {entry.id: entry for entry in ledgered.entries()} == before


def test_a_mechanism_without_an_entry_gets_one(ledgered):
    new = outcome(mechanisms=(("faster_head", {"tile": 64}),))
    assert distill(ledgered, [new], run="round-1", day=DAY).proposed == ("faster-head",)
    entry = ledgered.get("faster-head")
    assert entry.status == "validated"
    assert entry.implementation.mechanism == "faster_head"
    assert distill(ledgered, [new], run="round-1", day=DAY).proposed == ()


def test_a_failed_audit_never_validates(ledgered):
    faulty = outcome(promoted=False, forcing="fail", reason="The audit rejected its tokens.")
    (id,) = distill(ledgered, [faulty], run="round-1", day=DAY).proposed
    assert ledgered.get(id).bottleneck == "correctness"
    assert ledgered.get("best-first-tree").status == "proposed"
    assert ledgered.get("best-first-tree").transfers[-1].outcome == "fails"


def test_an_outcome_with_a_forged_receipt_writes_nothing(ledgered):
    before = {entry.id: entry for entry in ledgered.entries()}
    for forged in (outcome(receipt=ReceiptRef(4, "e" * 64, "final")),
                   outcome(receipt=ReceiptRef(4, "e" * 64, "trial"), promoted=False)):  # fmt: skip
        with pytest.raises(CheckFailed):
            distill(ledgered, [forged], run="round-1", day=DAY)
    assert {entry.id: entry for entry in ledgered.entries()} == before


def test_an_outcome_must_name_its_deployment(ledgered):
    with pytest.raises(InvalidInput):
        distill(ledgered, [outcome(facts={"requests": 1})], run="round-1", day=DAY)
