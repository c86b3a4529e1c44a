"""Tasks of MJX in the Python that has it: `python -m tests.unit.embodied.envs.mjx_program` prints its findings as JSON."""

from __future__ import annotations

import json
from typing import Any

import gymnasium
import numpy as np
import torch

from rlhpc.embodied.config import EnvSideConfig
from rlhpc.embodied.envs.mjx_tasks import MjxEnv, MjxHalfCheetah, MjxInvertedPendulum
from rlhpc.embodied.envs.tensor_env import TensorVectorEnv

CPU = torch.device("cpu")
#: Each number of slots is compiled anew, which takes longer than all else.
SLOTS = 4
TASKS = {
    "mjx_half_cheetah": (MjxHalfCheetah, "HalfCheetah-v5"),
    "mjx_inverted_pendulum": (MjxInvertedPendulum, "InvertedPendulum-v5"),
}


def errors_against_gymnasium(env: MjxEnv, env_id: str) -> dict[str, Any]:
    """Largest errors of single steps from equal states: a contact's first instant makes whole episodes chaotic."""
    theirs: Any = gymnasium.make(env_id).unwrapped
    theirs.reset(seed=0)
    rng, ends = np.random.default_rng(0), 0
    errors = {"observation": 0.0, "reward": 0.0}
    everyone = torch.ones(env.num_envs, dtype=torch.bool)
    env.reset(everyone, torch.arange(env.num_envs))
    for step in range(60):
        state, slot = env.state, step % env.num_envs
        theirs.set_state(state.positions[slot].double().numpy(), state.velocities[slot].double().numpy())
        theirs.data.qacc_warmstart[:] = state.warmstart[slot].numpy()
        actions = rng.uniform(-1, 1, (env.num_envs, env.model.nu)).astype(np.float32)
        obs, rewards, terminations, *_ = env.step(torch.from_numpy(actions))
        expected, reward, terminated, *_ = theirs.step(actions[slot])
        errors["observation"] = max(errors["observation"], float(np.abs(obs[slot].numpy() - expected).max()))
        errors["reward"] = max(errors["reward"], abs(float(rewards[slot]) - float(reward)))
        assert bool(terminations[slot]) == terminated, step
        ends += terminated
        if terminated:
            env.reset(terminations, torch.full((env.num_envs,), 100 + step))
    limit = gymnasium.spec(env_id).max_episode_steps
    boxes_equal = (
        env.action_space == theirs.action_space and env.observation_space.shape == theirs.observation_space.shape
    )
    return {**errors, "ends": ends, "same_limit": env.max_episode_steps == limit, "same_spaces": bool(boxes_equal)}


def build(env_id: str, count: int, offset: int = 0, limit: int = 7) -> TensorVectorEnv:
    cfg = EnvSideConfig(env_type="tensors", env_id=env_id, num_envs=count, max_episode_steps=limit)
    return TensorVectorEnv(cfg, count, offset, 3, CPU)


def play(env: TensorVectorEnv, steps: int, offset: int = 0) -> list[dict[str, np.ndarray]]:
    """Plays actions that follow from step and slot; returns observations, rewards, ends and final observations."""
    rows, low, high = [], env.action_space.low, env.action_space.high
    for t in range(steps):
        share = [np.random.default_rng((t, offset + slot)).uniform(low, high) for slot in range(env.num_envs)]
        obs, rewards, terminations, truncations, infos = env.step(np.array(share, np.float32))
        final = infos.get("final_obs", np.zeros_like(obs))
        rows.append({"obs": obs, "rewards": rewards, "done": terminations | truncations, "final": final})
    return rows


def equal(first: list[dict[str, np.ndarray]], second: list[dict[str, np.ndarray]]) -> bool:
    return all(np.array_equal(mine[key], row[key]) for mine, row in zip(first, second, strict=True) for key in mine)


def episodes(env_id: str) -> dict[str, Any]:
    """Resets on the device, final observations, seeds and states."""
    env, again = build(env_id, SLOTS), build(env_id, SLOTS)
    starts = env.reset()[0]
    again.reset()
    rows = play(env, 20)
    repeated = equal(rows, play(again, 20))
    ended = [(row, t) for t, row in enumerate(rows) if row["done"].any()]
    # The final observation follows from the one before, and is not the first of the next episode.
    final_differs = all(not np.array_equal(row["final"][row["done"]], row["obs"][row["done"]]) for row, _ in ended)
    restored = build(env_id, SLOTS)
    restored.reset(seed=9)
    restored.load_state_dict(again.state_dict())
    continued = equal(play(again, 10), play(restored, 10))
    parts = [build(env_id, 2), build(env_id, 2, offset=2)]
    part_starts = np.concatenate([part.reset()[0] for part in parts])
    part_rows = [play(part, 20, offset) for part, offset in zip(parts, (0, 2), strict=True)]
    part_error = max(
        float(np.abs(row["obs"] - np.concatenate([first["obs"], second["obs"]])).max())
        for row, first, second in zip(rows[:5], *part_rows, strict=False)
    )
    return {
        "ends": len(ended), "repeated": repeated, "final_differs": final_differs, "continued": continued,
        "same_starts": np.array_equal(part_starts, starts), "distinct_starts": len(np.unique(starts[:, 0])),
        "part_error": part_error,
    }  # fmt: skip


def forgets(env: MjxEnv) -> bool:
    """Tells whether an episode is the same whatever its slot has simulated before."""
    everyone, seeds = torch.ones(env.num_envs, dtype=torch.bool), torch.full((env.num_envs,), 4)
    fresh = env.reset(everyone, seeds)
    action = torch.full((env.num_envs, env.model.nu), 0.3)
    first = env.step(action)[0]
    for _ in range(30):
        env.step(-action)
    return torch.equal(env.reset(everyone, seeds), fresh) and torch.equal(env.step(action)[0], first)


def reads_in_place() -> bool:
    """Tells whether torch reads an array of JAX where it is."""
    import jax

    array = jax.numpy.arange(64.0)
    return bool(torch.from_dlpack(array).data_ptr() == array.unsafe_buffer_pointer())


def main() -> None:
    torch.set_num_threads(1)
    report: dict[str, Any] = {}
    for name, (task, env_id) in TASKS.items():
        env = task(SLOTS, CPU)
        report[name] = {
            "gymnasium": errors_against_gymnasium(env, env_id), "forgets": forgets(env), **episodes(name)
        }  # fmt: skip
    report["reads_in_place"] = reads_in_place()
    print(json.dumps(report))


if __name__ == "__main__":
    main()
