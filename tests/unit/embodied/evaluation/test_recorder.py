"""Recorder of episodes: those that failed are left out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from rlhpc.embodied.data.trajectories import TrajectoryWriter
from rlhpc.embodied.evaluation.episodes import play
from rlhpc.embodied.evaluation.recorder import EpisodeRecorder
from tests.unit.embodied.workers.failing import Failing, Still, recorded


def test_recordings_leave_out_episodes_that_failed(tmp_path: Path) -> None:
    env = Failing({3})
    with TrajectoryWriter(tmp_path / "a.h5", env_id="x", env_kwargs={}, max_episode_steps=4) as writer:
        recorder = EpisodeRecorder(writer, env, only_success=False, num_episodes=3)
        play(Still(), env, np.array([2, 1]), torch.device("cpu"), watch=recorder)
        assert len(writer) == recorder.played == 3
    assert [len(rewards) for rewards in recorded(tmp_path / "a.h5")] == [4, 4, 4]
