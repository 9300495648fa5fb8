"""Workloads: cuts that a key decides, the same everywhere, never twice in a call."""

import pytest

from specpilot.errors import InvalidInput, NotFound
from specpilot.harness.deployments.workload import Workload, load_workload


def counting(split: str) -> range:
    return range(1000) if split == "open" else range(10_000, 11_000)


WORKLOAD = Workload("counting", 8, counting)


def test_prompts_are_cuts_of_their_own_split() -> None:
    for split, low in (("open", 0), ("sealed", 10_000)):
        for prompt in WORKLOAD.prompts(split, 20, b"key"):  # type: ignore[arg-type]
            assert len(prompt) == 8
            assert list(prompt) == list(range(prompt[0], prompt[0] + 8))
            assert low <= prompt[0] < low + 1000


def test_the_key_decides_and_nothing_else() -> None:
    first = WORKLOAD.prompts("sealed", 20, b"key")
    assert first == WORKLOAD.prompts("sealed", 20, b"key")
    assert first[:5] == WORKLOAD.prompts("sealed", 5, b"key")
    assert first[:5] != WORKLOAD.prompts("sealed", 5, b"other")


def test_known_prompts_stay_as_they_are() -> None:
    """Receipts name prompts by key: the same key must mean the same prompts in every version."""
    assert [p[0] for p in WORKLOAD.prompts("sealed", 4, b"key")] == [10586, 10226, 10089, 10601]


def test_no_place_is_cut_twice_and_all_places_can_be() -> None:
    every = WORKLOAD.prompts("open", 993, b"key")
    assert len(set(every)) == 993


@pytest.mark.parametrize(("n", "length"), [(994, 8), (0, 8), (1, 1001), (1, 0)])
def test_a_shard_that_is_too_short_is_refused(n: int, length: int) -> None:
    with pytest.raises(InvalidInput, match="Cannot cut"):
        Workload("counting", length, counting).prompts("open", n, b"key")


def test_a_split_that_does_not_exist_is_refused() -> None:
    with pytest.raises(InvalidInput, match="'secret'"):
        WORKLOAD.prompts("secret", 1, b"key")  # type: ignore[arg-type]


def test_the_mock_workload_stays_inside_the_mocks_vocabulary() -> None:
    prompts = load_workload("mock", 32).prompts("open", 50, b"key")
    assert all(1 <= token < 512 for prompt in prompts for token in prompt)


@pytest.mark.parametrize("name", ["nothing", "../mock", "mock.target", ""])
def test_an_unknown_workload_is_not_found(name: str) -> None:
    with pytest.raises(NotFound, match="no workload"):
        load_workload(name)
