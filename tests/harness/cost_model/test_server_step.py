"""The step of a live server is its time between tokens over its passes."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from specpilot.errors import EngineFailure, InvalidInput
from specpilot.harness.cost_model.server_step import measure_server_step


@dataclass
class Client:
    """Answers as a server would that takes 10 ms a pass and emits ``tau`` tokens in each."""

    tau: int = 1
    counted: bool = True
    seen: list[int] = field(default_factory=list)

    def generate(self, prompt, params):
        self.seen.append(params.max_new_tokens)
        tokens = params.max_new_tokens
        passes = (tokens - 1) / self.tau
        meta = {"spec_verify_ct": passes} if self.counted else {}
        start = 5.0 + 0.1  # prefill
        return SimpleNamespace(
            output_ids=tuple(range(tokens)),
            meta=meta,
            first_token_s=start,
            last_token_s=start + 0.010 * passes,
        )


def test_speculative_and_plain_steps_are_told_apart() -> None:
    found = measure_server_step(Client(tau=4), [[1], [2]], output_tokens=41, requests=2)
    assert (found.requests, found.tokens_per_pass) == (2, 4.0)
    assert found.step_ms == pytest.approx(10)
    plain = measure_server_step(Client(counted=False), [[1]], output_tokens=41)
    assert plain.step_ms == pytest.approx(10) and plain.tokens_per_pass == 1.0


def test_replies_and_arguments_without_a_step_are_refused() -> None:
    with pytest.raises(InvalidInput, match="output_tokens"):
        measure_server_step(Client(), [[1]], output_tokens=1)
    with pytest.raises(InvalidInput, match="prompts"):
        measure_server_step(Client(), [], output_tokens=9)
    still = Client(tau=4)
    still.generate = lambda prompt, params: SimpleNamespace(
        output_ids=(1,), meta={}, first_token_s=1.0, last_token_s=1.0
    )
    with pytest.raises(EngineFailure, match="1 tokens"):
        measure_server_step(still, [[1]], output_tokens=9)
