"""Action chunks and whole episodes: outcomes of single actions, and what trains, against plain loops."""

from __future__ import annotations

import numpy as np
import pytest

from rlhpc.embodied.rollout.step_outcomes import Outcomes
from rlhpc.runtime.errors import ConfigError


def test_what_comes_after_an_episode_does_not_count():
    outcomes = Outcomes(range(2), 4, is_single_episode=True)
    ends = [[False, False], [True, False], [False, True], [True, True]]
    reported = []
    for t, done in enumerate(np.array(ends)):
        infos = {"final_obs": np.full((2, 1), t, np.float32)}
        reported.append(outcomes.add(t, np.ones(2, np.float32), done, np.zeros(2, bool), infos))
    message = outcomes.part(slice(0, 2), np.zeros((2, 1), np.float32))
    assert message.valid.tolist() == [[True, True, False, False], [True, True, True, False]]
    assert message.rewards.sum(1).tolist() == [2, 3] and message.terminations.sum(1).tolist() == [1, 1]
    assert message.final_obs.ravel().tolist() == [1, 2]
    assert [None if done is None else done.tolist() for done in reported] == [None, [0], [1], None]


def test_an_environment_that_says_nothing_of_single_actions_is_refused():
    with pytest.raises(ConfigError, match="chunk_level"):
        Outcomes(range(1), 1, chunk=2).add(0, np.zeros(1), np.zeros(1, bool), np.zeros(1, bool), {})
