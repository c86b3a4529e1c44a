"""Trajectories between ManiSkill and rlhpc: its recorder's files read here, ours read and replayed by its tools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from rlhpc.embodied.data.trajectories import TrajectoryWriter, metadata, read_trajectories
from rlhpc.embodied.envs.maniskill import load_maniskill
from tests.extras import need_extra

need_extra("embodied")


TASK = "PushCube-v1"
KWARGS = {
    "obs_mode": "state", "control_mode": "pd_ee_delta_pos", "render_backend": "none", "sim_backend": "physx_cpu",
}  # fmt: skip


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two episodes of random actions, by ManiSkill's RecordEpisode."""
    import gymnasium as gym
    from mani_skill.utils.wrappers.record import RecordEpisode

    load_maniskill()
    folder = tmp_path_factory.mktemp("recorded")
    made: Any = gym.make(TASK, max_episode_steps=12, **KWARGS)
    env = RecordEpisode(made, str(folder), trajectory_name="theirs", save_video=False)
    env.action_space.seed(0)
    for seed in (3, 4):
        env.reset(seed=seed)
        for _ in range(12):
            env.step(env.action_space.sample())
    env.close()
    return folder / "theirs.h5"


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


def test_a_recording_of_ours_succeeds_again_in_their_simulator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`rlhpc record` plays a batched simulator; ManiSkill's own takes the first state, the actions, and gets there too."""
    from mani_skill.trajectory import replay_trajectory

    from rlhpc import cli

    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(
        "runner: {name: push}\n"
        "env:\n"
        "  train: {env_type: maniskill, env_id: PushCube-v1, kwargs: {control_mode: pd_ee_delta_pos}}\n"
        "  eval: {num_envs: 3}\n"
        "cluster: {component_placement: {actor: '0', rollout: '0', env: '0'}}\n"
    )
    words = ["--config", "run.yaml", "--episodes", "5", "--only-success", "--output", "demos.h5"]
    assert cli.main(["record", "--expert", "rlhpc.embodied.envs.experts:push_cube", *words]) == 0
    ours = list(read_trajectories("demos.h5", require=("obs", "actions", "rewards", "success", "env_states")))
    assert len(ours) == 5 and all(t["success"][-1] and not t["success"][:-1].any() for t in ours)
    for trajectory in ours:
        T = len(trajectory["actions"])
        assert trajectory["obs"].shape == (T + 1, 35)
        states = trajectory["env_states"]
        # The state says the same as the observation, at the first step and at the last.
        np.testing.assert_allclose(states["actors"]["cube"][:, :3], trajectory["obs"][:, 28:31], atol=1e-6)
        np.testing.assert_allclose(states["articulations"]["panda"][:, 13:22], trajectory["obs"][:, :9], atol=1e-6)

    replay_trajectory.main(
        replay_trajectory.Args(
            traj_path="demos.h5", obs_mode="state", save_traj=True, use_first_env_state=True, render_mode="none",
            sim_backend="physx_cpu", allow_failure=True,
        )
    )  # fmt: skip
    again = list(read_trajectories("demos.state.pd_ee_delta_pos.physx_cpu.h5"))
    for one, two in zip(ours, again, strict=True):
        assert two["success"].any()
        np.testing.assert_allclose(one["obs"][-1, 28:31], two["obs"][-1, 28:31], atol=0.01)


@pytest.mark.parametrize("task", ["pick_cube", "stack_cube"])
def test_scripted_experts(task: str, tmp_path: Path) -> None:
    from omegaconf import OmegaConf

    from rlhpc.embodied.config import EvalEnvConfig
    from rlhpc.embodied.evaluation.evaluate import load_actor
    from rlhpc.embodied.evaluation.recorder import record

    env_id = {"pick_cube": "PickCube-v1", "stack_cube": "StackCube-v1"}[task]
    cfg = OmegaConf.structured(
        EvalEnvConfig(
            env_type="maniskill", env_id=env_id, max_episode_steps=60, kwargs={"control_mode": "pd_ee_delta_pos"},
            wrappers=[], ignore_terminations=False, num_envs=4, simulator_python=None,
        )
    )  # fmt: skip
    expert = load_actor(f"rlhpc.embodied.envs.experts:{task}", "--expert")
    found = record(expert, cfg, tmp_path / "demos.h5", episodes=4, seed=1, only_success=True)
    assert found["success_once"] >= 0.75
