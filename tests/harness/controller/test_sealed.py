"""Sealed sets are committed before use, differ, and can be drawn again by whoever has the key."""

import random
from collections.abc import Sequence

import pytest

from specpilot.errors import CheckFailed
from specpilot.harness.controller.sealed import PromptBook, prompts_digest


def draw(split: str, n: int, key: bytes) -> list[tuple[int, ...]]:
    rng = random.Random(f"{split} {key.hex()}")
    return [tuple(rng.randrange(500) for _ in range(8)) for _ in range(n)]


def book(secret: bytes = b"secret", round_id: str = "r1") -> PromptBook:
    return PromptBook(draw, secret, round_id)


def test_a_committed_set_is_drawn_again() -> None:
    sets = book().commit(3, 10)
    for number, sealed in enumerate(sets):
        prompts = book().unseal(sets, number)
        assert prompts_digest(prompts) == sealed.sha256
        assert len(prompts) == 10


def test_no_prompt_is_in_two_sets() -> None:
    sets = book().commit(3, 10)
    prompts = [prompt for number in range(3) for prompt in book().unseal(sets, number)]
    assert len(set(prompts)) == 30


def test_sets_depend_on_secret_and_round() -> None:
    first = book().commit(1, 10)[0].sha256
    assert first != book(secret=b"other").commit(1, 10)[0].sha256
    assert first != book(round_id="r2").commit(1, 10)[0].sha256


def test_a_set_that_is_not_the_committed_one_is_refused() -> None:
    sets = book().commit(2, 10)
    with pytest.raises(CheckFailed, match="not those that were committed"):
        book(secret=b"other").unseal(sets, 0)


def test_a_split_that_is_too_small_is_refused() -> None:
    def tiny(split: str, n: int, key: bytes) -> Sequence[tuple[int, ...]]:
        return [(number % 4, 1) for number in range(n)]

    with pytest.raises(CheckFailed, match="too small"):
        PromptBook(tiny, b"s", "r1").commit(3, 10)


def test_a_workload_that_gives_too_few_prompts_is_refused() -> None:
    with pytest.raises(CheckFailed, match="gave 2 of 10"):
        PromptBook(lambda split, n, key: [(1,), (2,)], b"s", "r1").fresh("trial", 10)


def test_each_measurement_gets_prompts_of_its_own() -> None:
    first, second = list(book().fresh("a", 10)), list(book().fresh("b", 10))
    assert not set(first) & set(second)
    assert first == list(book().fresh("a", 10))
