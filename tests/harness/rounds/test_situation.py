"""What is known of a deployment before a trial, and what nobody can predict."""

import pytest

from specpilot.errors import InvalidInput, NotFound
from specpilot.harness.rounds.situation import Situation


def test_an_unprofiled_deployment_has_facts_but_no_predictions() -> None:
    situation = Situation.of("pico")
    assert situation.facts["target_arch"] == "hybrid-gdn"
    assert situation.predict_mechanism("best_first_tree", {"rows": 8}) is None
    with pytest.raises(NotFound, match="cost_profile"):
        situation.ceiling()


def test_packed_weights_on_a_cpu_are_not_predicted() -> None:
    with pytest.raises(InvalidInput, match="not modelled"):
        Situation.of("pico").predict({"weights": "w12"})


def test_a_rounds_stock_goes_over_the_deployments() -> None:
    assert Situation.of("pico", stock={"block": 4}).deployment.stock["block"] == 4
