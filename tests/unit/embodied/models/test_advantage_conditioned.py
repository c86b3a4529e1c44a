"""Which steps of recorded episodes count as improvements."""

from __future__ import annotations

import numpy as np
import pytest

from rlhpc.embodied.models.advantage_conditioned import advantages, improvements


@pytest.mark.parametrize("steps", [1, 2, 5, 9])
def test_an_advantage_is_the_formula_term_by_term(steps: int) -> None:
    """Beyond the episode's end nothing is paid, and nothing expected."""
    rng, gamma, T = np.random.default_rng(0), 0.9, 5
    rewards, values = rng.normal(size=T), rng.normal(size=T)

    def by_hand(t: int) -> float:
        paid = sum(gamma**k * rewards[t + k] for k in range(steps) if t + k < T)
        return paid + (gamma**steps * values[t + steps] if t + steps < T else 0.0) - values[t]

    np.testing.assert_allclose(advantages(rewards, values, gamma, steps), [by_hand(t) for t in range(T)])


def test_the_best_part_of_all_steps_improves() -> None:
    """Over all episodes together, whatever an episode has of it."""
    found = improvements([np.array([5.0, 0.0, 4.0, 1.0]), np.array([-1.0, -2.0, 3.0, -3.0, -4.0, 2.0])], 0.3)
    assert [each[:, 0].tolist() for each in found] == [[1, -1, 1, -1], [-1, -1, 1, -1, -1, -1]]


def test_what_is_all_alike_improves_nothing() -> None:
    assert (improvements([np.zeros(7)], 0.3)[0] == -1).all()
