"""Trajectories between ManiSkill and rlhpc: its recorder's files read here, ours read and replayed by its tools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from rlhpc.data.trajectories import TrajectoryWriter, metadata, read_trajectories

sapien = pytest.importorskip("sapien")
pytest.importorskip("mani_skill")


class NoMaterial:
    """Without Vulkan a material cannot be made; a task without rendering only hands it on."""

    def __init__(self, **_: Any) -> None:
        pass


TASK = "PushCube-v1"
KWARGS = {
    "obs_mode": "state", "control_mode": "pd_ee_delta_pos", "render_backend": "none", "sim_backend": "physx_cpu",
}  # fmt: skip


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two episodes of random actions, by ManiSkill's RecordEpisode."""
    import gymnasium as gym
    import mani_skill.envs  # noqa: F401 (registers the tasks)
    from mani_skill.utils.wrappers.record import RecordEpisode

    with pytest.MonkeyPatch.context() as patch:
        for module in (sapien.render, sapien.pysapien.render):
            patch.setattr(module, "RenderMaterial", NoMaterial)
        folder = tmp_path_factory.mktemp("recorded")
        made: Any = gym.make(TASK, max_episode_steps=12, **KWARGS)
        env = RecordEpisode(made, str(folder), trajectory_name="theirs", save_video=False)
        env.action_space.seed(0)
        for seed in (3, 4):
            env.reset(seed=seed)
            for _ in range(12):
                env.step(env.action_space.sample())
        env.close()
        yield folder / "theirs.h5"


def test_their_recording_is_read(recorded: Path) -> None:
    read = list(read_trajectories(recorded, require=("obs", "actions", "rewards", "success", "env_states")))
    assert [t["seed"] for t in read] == [3, 4]
    with h5py.File(recorded) as file:
        for number, trajectory in enumerate(read):
            group = file[f"traj_{number}"]
            assert trajectory["obs"].shape == (13, 35) and trajectory["actions"].shape == (12, 4)
            for name, theirs in (
                ("obs", "obs"),
                ("actions", "actions"),
                ("rewards", "rewards"),
                ("truncations", "truncated"),
            ):
                np.testing.assert_array_equal(trajectory[name], group[theirs])
            np.testing.assert_array_equal(
                trajectory["env_states"]["actors"]["cube"], group["env_states/actors/cube"]
            )  # fmt: skip
    assert metadata(recorded)["env_info"]["env_id"] == TASK


def test_their_tools_read_and_replay_ours(recorded: Path, tmp_path: Path) -> None:
    """Replayed by states, the observations that ManiSkill computes anew are those that we wrote."""
    from mani_skill.trajectory import replay_trajectory
    from mani_skill.trajectory.dataset import ManiSkillTrajectoryDataset
    from mani_skill.trajectory.merge_trajectory import merge_trajectories

    trajectories = list(read_trajectories(recorded))
    ours = tmp_path / "ours.h5"
    with TrajectoryWriter(ours, env_id=TASK, env_kwargs=KWARGS, max_episode_steps=12, source_desc="a test") as writer:
        for trajectory in trajectories:
            writer.add(trajectory)

    dataset = ManiSkillTrajectoryDataset(str(ours))
    assert len(dataset) == 24
    np.testing.assert_array_equal(dataset[13]["obs"], trajectories[1]["obs"][1])
    np.testing.assert_array_equal(dataset[13]["action"], trajectories[1]["actions"][1])

    merge_trajectories(str(tmp_path / "merged.h5"), [ours, recorded])
    assert len(list(read_trajectories(tmp_path / "merged.h5"))) == 4

    replay_trajectory.main(
        replay_trajectory.Args(
            traj_path=str(ours), obs_mode="state", save_traj=True, use_env_states=True, allow_failure=True,
            record_rewards=True, reward_mode="normalized_dense", render_mode="none", sim_backend="physx_cpu",
        )
    )  # fmt: skip
    again = list(read_trajectories(tmp_path / "ours.state.pd_ee_delta_pos.physx_cpu.h5"))
    for one, two in zip(trajectories, again, strict=True):
        np.testing.assert_array_equal(one["actions"], two["actions"])
        np.testing.assert_allclose(one["rewards"], two["rewards"], atol=1e-2)
