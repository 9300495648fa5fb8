"""Temperature, top-k and top-p on one row of logits."""

import numpy as np
import pytest

from specpilot.harness.engines.reference.sampling import filtered

LOGITS = np.log(np.array([0.1, 0.4, 0.25, 0.05, 0.2]))


def probabilities(**given) -> list[float]:
    scores = filtered(LOGITS, **{"temperature": 1.0, "top_k": -1, "top_p": 1.0, **given})
    p = np.exp(scores)
    return (p / p.sum()).tolist()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, [0.1, 0.4, 0.25, 0.05, 0.2]),
        (
            {"temperature": 0.5},
            [0.01 / 0.275, 0.16 / 0.275, 0.0625 / 0.275, 0.0025 / 0.275, 0.04 / 0.275],
        ),
        ({"top_k": 2}, [0, 0.4 / 0.65, 0.25 / 0.65, 0, 0]),
        ({"top_k": 9}, [0.1, 0.4, 0.25, 0.05, 0.2]),
        ({"top_p": 0.39}, [0, 1, 0, 0, 0]),
        ({"top_p": 0.5}, [0, 0.4 / 0.65, 0.25 / 0.65, 0, 0]),
        ({"top_p": 0.8}, [0, 0.4 / 0.85, 0.25 / 0.85, 0, 0.2 / 0.85]),
        ({"top_p": 0.8, "top_k": 2}, [0, 0.4 / 0.65, 0.25 / 0.65, 0, 0]),
    ],
)
def test_filters_keep_the_likeliest_and_their_proportions(given, expected):
    assert probabilities(**given) == pytest.approx(expected)


def test_ties_at_the_cut_go_to_the_lower_id():
    scores = filtered(np.zeros(6), 1.0, 2, 1.0)
    assert np.isfinite(scores).tolist() == [True, True, False, False, False, False]
