"""Stock is the best of the usual chains, so that a block length is never a gain."""

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specpilot.errors import InvalidInput, SpecPilotError
from specpilot.harness.controller import stock
from specpilot.harness.controller.measure import Arm
from specpilot.harness.deployments import registry
from specpilot.harness.deployments.schema import to_json
from specpilot.harness.engines.client import Generation


class Engine:
    """Serves ``speed`` seconds a token on a clock of its own."""

    def __init__(self, speed: float, short: bool = False) -> None:
        self.speed = speed
        self.short = short
        self.flushed = 0
        self.prompts: list[tuple[int, ...]] = []

    def generate(self, input_ids, params):
        self.prompts.append(tuple(input_ids))
        n = params.max_new_tokens - self.short
        ids = tuple((sum(input_ids) * 7 + i * i) % 50 for i in range(n))
        return Generation(
            prompt_ids=tuple(input_ids), output_ids=ids, sent_s=1.0,
            first_token_s=1.0 + self.speed, last_token_s=1.0 + self.speed * n,
            finish_reason="length", meta={},
        )  # fmt: skip

    def flush(self) -> None:
        self.flushed += 1


def arms(**speeds: float) -> dict[int, Arm]:
    return {int(name[1:]): Arm(name, Engine(speed)) for name, speed in speeds.items()}


def run(systems: dict[int, Arm], prompts: int = 5) -> dict[int, list[float]]:
    made = [(i, i + 1, i + 2) for i in range(prompts)]
    return stock.time_blocks(
        systems, made, tokens=8, vocab_size=50, cancelled=threading.Event()
    )  # fmt: skip


def test_the_fastest_block_is_chosen_and_every_request_is_cold() -> None:
    systems = arms(b4=0.03, b8=0.01, b16=0.02)
    seconds = run(systems)
    assert stock.choose(seconds) == 8
    for arm in systems.values():
        assert arm.engine.flushed == len(arm.engine.prompts) == 5  # type: ignore[attr-defined]
    assert {len(values) for values in seconds.values()} == {5}


def test_a_tie_goes_to_the_shorter_block() -> None:
    assert stock.choose({16: [1.0], 4: [1.0], 8: [2.0]}) == 4


def test_one_slow_request_does_not_decide() -> None:
    assert stock.choose({4: [1.0, 1.0, 1.0], 8: [0.9, 0.9, 90.0]}) == 8


def test_missing_tokens_are_a_failure() -> None:
    systems = {4: Arm("b4", Engine(0.01, short=True))}
    with pytest.raises(SpecPilotError):
        run(systems)


def test_only_the_reference_engines_chain_is_chosen() -> None:
    assert stock.blocks_to_try(registry.load("mock")) == ()
    assert stock.blocks_to_try(registry.load("pico")) == (4, 8, 16)


def test_a_round_is_opened_against_the_plain_chain_only(controller: Any) -> None:
    pico = json.loads(to_json(registry.load("pico")))
    slow = (
        {"stock": {"speculation": "none"}},
        {"stock": {}},
        {"stock": pico["stock"] | {"weights": "w12"}},
        {"launch": {"weights": "w12"}},
    )
    for number, change in enumerate(slow):
        registry.add(pico | {"id": f"slow-{number}"} | change)
        with pytest.raises(InvalidInput, match="cannot be measured against"):
            replace(controller, deployment=f"slow-{number}").open()
    stock.check_stock(registry.load("pico"))
    stock.check_stock(registry.load("mock"))


def test_a_short_drafter_bounds_the_blocks(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"block_size": 8}')
    short = replace(registry.load("pico"), drafter=str(tmp_path))
    assert stock.blocks_to_try(short) == (4, 8)


def test_a_chosen_block_replaces_the_deployments() -> None:
    pico = registry.load("pico")
    assert stock.with_block(pico, 16).stock["block"] == 16
    assert stock.with_block(pico, None) is pico
