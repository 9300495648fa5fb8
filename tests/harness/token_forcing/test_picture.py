"""The picture of an audit, from the verdict as the ledger keeps it."""

import json
from pathlib import Path

import pytest

from specpilot.errors import InvalidInput
from specpilot.harness.token_forcing import audit, picture


@pytest.fixture(scope="module")
def verdicts(prompts, stock, new_model, scorer, calibration):
    faulty = [new_model().generate(p, 64, bias=2.0, after=32) for p in prompts]
    systems = {"lossless": stock, "faulty": faulty}
    found = {n: audit(stock, s, scorer, calibration) for n, s in systems.items()}
    return {name: json.loads(verdict.canonical()) for name, verdict in found.items()}


def test_bars_hold_rates_limits_and_captions(verdicts) -> None:
    stock, lossless, faulty = picture.bars(verdicts)
    assert (stock.label, stock.limit, stock.rate) == ("stock", None, 0.0)
    assert lossless.limit == faulty.limit == pytest.approx(0.005)
    assert lossless.caption == "pass, 0 events, 0 of 0 unexplained"
    assert faulty.caption.startswith("fail, ")
    assert faulty.low < faulty.rate < faulty.high


def test_the_text_shows_the_faulty_bar_beyond_its_limit(verdicts) -> None:
    lines = picture.text(picture.bars(verdicts)).splitlines()
    assert len(lines) == 4
    faulty = lines[2]
    assert faulty.startswith("faulty")
    assert faulty.rindex("=") > faulty.index("|")
    assert "200 of 200 unexplained" in faulty


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_the_picture_is_written(verdicts, tmp_path: Path, suffix: str) -> None:
    file = picture.draw(picture.bars(verdicts), tmp_path / f"audit{suffix}")
    assert file.stat().st_size > 2000


def test_an_audit_that_was_not_carried_out_has_no_picture(stock, scorer, calibration) -> None:
    verdict = audit(stock, [], scorer, calibration).to_dict()
    with pytest.raises(InvalidInput, match="0 system outputs"):
        picture.bars({"broken": verdict})
    with pytest.raises(InvalidInput, match="no verdict"):
        picture.bars({})
