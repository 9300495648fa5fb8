"""The page about token forcing quotes the committed table and the constants of the code."""

import re
from pathlib import Path

from specpilot.harness.token_forcing import Policy, calibration
from specpilot.harness.token_forcing.coverage import REQUESTS, TOKENS, coverage_at
from specpilot.harness.token_forcing.rules import excess_p
from specpilot.harness.token_forcing.sampling import tokens_for_bias

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "forcing.md").read_text(encoding="utf-8")


def test_the_coverage_table_is_the_committed_one() -> None:
    for requests in REQUESTS:
        quoted = re.search(rf"^\| {requests} \|(.*)\|$", PAGE, re.MULTILINE)
        assert quoted is not None
        for cell, tokens in zip(quoted.group(1).split("|"), TOKENS, strict=True):
            assert cell.strip() == f"{100 * (coverage_at(requests, tokens) or 0):.1f} %"


def test_the_page_states_the_codes_constants() -> None:
    policy = Policy()
    assert (policy.rate_limit, policy.rate_level, policy.affected_rate) == (0.005, 0.975, 0.05)
    assert (policy.event_level, policy.audit_limit, policy.minimum_requests) == (0.005, 200, 30)
    assert (calibration.FLOOR, calibration.LARGE_FACTOR, calibration.LARGE_FLOOR) == (1e-3, 4, 0.5)
    assert calibration.CEILING == 1.0 and calibration.QUANTILE == 0.999
    assert excess_p(8, 1, 0, 1) < policy.event_level <= excess_p(7, 1, 0, 1)
    assert [tokens_for_bias(b) for b in (2.0, 0.5, 0.1)] == [13, 341, 10_155]
