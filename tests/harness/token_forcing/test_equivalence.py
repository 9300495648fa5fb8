"""Distribution equivalence: exact laws, Monte Carlo with power, and sequences over servers."""

from dataclasses import replace

import numpy as np
import pytest

from specpilot.harness.deployments import registry
from specpilot.harness.token_forcing import equivalence
from specpilot.harness.token_forcing.exact_law import (
    RULES,
    ToyModel,
    emit,
    law_of,
    total_variation,
)
from specpilot.mechanisms.trees.acceptance import keyed_noise


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("seed", [1, 2])
def test_each_rule_has_the_law_of_plain_decoding(rule: str, seed: int) -> None:
    model = ToyModel(3, 3, seed)
    law = law_of(lambda coin: emit(model, RULES[rule], coin))
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-12)
    assert total_variation(law, model.plain()) < 1e-12


@pytest.mark.parametrize("rule", equivalence.WRONG)
def test_known_errors_have_another_law(rule: str) -> None:
    model = ToyModel(3, 3, 1)
    law = law_of(lambda coin: emit(model, equivalence.WRONG[rule], coin))
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-12)
    assert total_variation(law, model.plain()) > 0.005


def test_the_enumeration_adds_up_known_chances() -> None:
    def two_coins(coin) -> tuple[int, ...]:
        return (int(coin.accept(0.25)), coin.draw(np.array([1.0, 0.0, 3.0])))

    law = law_of(two_coins)
    assert law == pytest.approx({(1, 0): 1 / 16, (1, 2): 3 / 16, (0, 0): 3 / 16, (0, 2): 9 / 16})


@pytest.fixture(scope="module")
def monte_carlo():
    return equivalence.monte_carlo_level(draws=3000)


def test_monte_carlo_accepts_right_rules_and_rejects_wrong_ones(monte_carlo) -> None:
    right, wrong, detectable = monte_carlo
    assert min(t.adjusted_p for t in right) > 0.01
    assert max(t.p for t in wrong) < 0.01
    assert 0.05 < detectable < 0.2


def test_all_levels_pass_on_the_mock(monte_carlo, monkeypatch) -> None:
    monkeypatch.setattr(equivalence, "monte_carlo_level", lambda draws: monte_carlo)
    deployment = registry.load("mock")
    deployment = replace(deployment, launch={**deployment.launch, "delay_ms": 0.0, "row_ms": 0.0})
    found = equivalence.run(deployment, requests=24, tokens=48)
    assert found.passed
    assert found.sequences is not None
    assert found.sequences.greedy_identical == found.sequences.keyed_identical == 24
    assert found.to_dict()["sequences"]["law"]["rejected"] is False


class TableServer:
    """Generates with a table model, as a client would over HTTP."""

    def __init__(self, model, bias: float = 0.0) -> None:
        self.model, self.bias = model, bias

    def generate(self, prompt, params):
        if params.temperature == 0:
            return self.model.generate(prompt, params.max_new_tokens, self.bias)
        seed = params.sampling_seed
        return self.model.sample(
            prompt, params.max_new_tokens, seed, keyed_noise, params.temperature, bias=self.bias
        )


@pytest.mark.parametrize(
    ("bias", "exact", "passed"),
    [(0.0, True, True), (1.0, True, False), (1.0, False, False), (0.02, True, False)],
)
def test_sequences_pass_only_with_the_law_and_equal_tokens(
    bias, exact, passed, new_model, scorer, prompts
) -> None:
    plain, system = TableServer(new_model()), TableServer(new_model(), bias)
    found = equivalence.sequence_level(plain, system, scorer, prompts, tokens=48, exact=exact)
    assert found.passed is passed
    assert (found.greedy_identical == len(prompts)) is (bias == 0)


def test_roundings_pass_where_equal_tokens_are_not_asked_for(new_model, scorer, prompts) -> None:
    plain, system = TableServer(new_model()), TableServer(new_model(noise=0.02, key=1))
    found = equivalence.sequence_level(plain, system, scorer, prompts, tokens=48, exact=False)
    assert found.greedy_identical < len(prompts)
    assert found.passed
