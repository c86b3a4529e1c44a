"""Simulators that fail at random: what is trained, counted and recorded is the data without their transitions."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from rlhpc.algorithms import calculate_adv_and_returns
from rlhpc.embodied.config import PpoConfig
from rlhpc.embodied.data.trajectories import TrajectoryWriter, read_trajectories
from rlhpc.embodied.envs.base import Step, VectorEnv
from rlhpc.embodied.evaluation.episodes import play
from rlhpc.embodied.evaluation.intervention import Gated, Intervention
from rlhpc.embodied.evaluation.recorder import EpisodeRecorder, TakenRecorder
from rlhpc.embodied.rollout.slot_map import SlotMap
from rlhpc.embodied.rollout.step_outcomes import EpisodeLog, Outcomes, next_values
from rlhpc.embodied.rollout.trajectory_receiver import TrajectoryReceiver
from rlhpc.embodied.workers.off_policy import Incomplete, OffPolicyActor, OffPolicyRolloutWorker
from rlhpc.embodied.workers.ppo_actor import EmbodiedActor
from rlhpc.runtime.errors import RlhpcError

SIZE, STEPS, GAMMA, LAMBDA = 12, 9, 0.9, 0.8


def rollout(rng: np.random.Generator, *, whole: bool, chunk: int, per_action: bool) -> dict[str, np.ndarray]:
    """Columns `[n, T, ...]` of slots whose episodes end and whose simulators fail at random; the outcome of a failed step is
    noise, as far as the interface allows it."""
    outcomes = Outcomes(
        range(SIZE), STEPS, chunk=chunk, reward_per_action=per_action, single_episode=whole, spoiled=lambda *_: None
    )
    obs = rng.normal(size=(STEPS + 1, SIZE, 1)).astype(np.float32)
    for t in range(STEPS):
        failed = rng.random(SIZE) < 0.08
        terminated = (rng.random(SIZE) < 0.1) & ~failed
        truncated = ((rng.random(SIZE) < 0.1) & ~terminated) | failed
        infos: dict[str, Any] = {"final_obs": np.where(failed[:, None], obs[t], obs[t] + 10)}
        if failed.any():
            infos["lost"] = failed
        rewards = rng.normal(size=SIZE).astype(np.float32)
        if chunk > 1:
            last = np.where(terminated | truncated, rng.integers(0, chunk, SIZE), chunk - 1)
            mask = (np.arange(chunk) <= last[:, None]) & ~failed[:, None]
            infos["chunk"] = {"mask": mask, "rewards": rng.normal(size=(SIZE, chunk)).astype(np.float32) * mask}
        outcomes.add(t, rewards, terminated, truncated, infos)
    message = outcomes.part(slice(0, SIZE), obs[-1])
    of = (
        (lambda seen: np.repeat(seen, chunk, -1) * np.arange(1, chunk + 1, dtype=np.float32))
        if per_action
        else lambda seen: seen[..., 0]
    )
    columns = {"obs": obs[:-1].swapaxes(0, 1), "values": of(obs[:-1].swapaxes(0, 1))}
    columns["logprobs"] = rng.normal(size=(SIZE, STEPS, chunk) if chunk > 1 else (SIZE, STEPS)).astype(np.float32)
    columns["next_values"] = next_values(
        columns["values"], of(message["last_obs"]), message["final_slot"], message["final_step"],
        of(message["final_obs"]), message.get("action_mask"),
    )  # fmt: skip
    names = ("rewards", "terminations", "truncations", "action_mask", "loss_mask", "nonfinite", "env_failed")
    return columns | {name: message[name].copy() for name in names if name in message}


def trained(columns: dict[str, np.ndarray], adv_type: str, group_size: int) -> tuple[dict[str, Any], dict[str, float]]:
    """What an actor trains on of them, and what it says of it."""
    actor: Any = object.__new__(EmbodiedActor)
    actor.cfg = PpoConfig()
    actor.cfg.algorithm.adv_type, actor.cfg.algorithm.gamma, actor.cfg.algorithm.gae_lambda = adv_type, GAMMA, LAMBDA
    actor.share, actor.device, actor.world_size = range(SIZE), torch.device("cpu"), 1
    actor.slots = SlotMap(SIZE, group_size=group_size)
    actor.intake = TrajectoryReceiver(actor.cfg, actor.slots, 0)
    actor.intake.columns = lambda step, source: ({name: column.copy() for name, column in columns.items()}, 0)
    return actor._take(1, None)


def gae_of(columns: dict[str, np.ndarray], slot: int) -> dict[tuple[int, int], float]:
    """Advantages of a slot's executed actions by a plain loop: of its rollout without the transitions that failed, before
    each of which its episode is cut."""
    rows = []  # decision, action, reward, value, value at the end, terminated, done
    shape = columns["rewards"].shape
    reward, value, ahead = (
        columns[name].reshape(*shape[:2], -1)[slot] for name in ("rewards", "values", "next_values")
    )
    for t in range(STEPS):
        if columns["env_failed"][slot, t]:
            if rows:
                rows[-1][-1] = True
            continue
        count = int(columns["action_mask"][slot, t].sum()) if len(shape) == 3 else 1
        for c in range(count):
            last = c == count - 1
            ends = [bool(columns[name][slot, t]) and last for name in ("terminations", "truncations")]
            rows.append([(t, c), reward[t, c], value[t, c], ahead[t, c], ends[0], any(ends)])
    found, carried = {}, 0.0
    for at, r, v, following, terminated, done in reversed(rows):
        carried = r + GAMMA * following * (not terminated) - v + GAMMA * LAMBDA * (not done) * carried
        found[at] = carried
    return found


@pytest.mark.parametrize("per_action", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_gae_is_that_of_the_rollout_without_what_failed(per_action: bool, seed: int) -> None:
    chunk = 3 if per_action else 1
    columns = rollout(np.random.default_rng(seed), whole=False, chunk=chunk, per_action=per_action)
    assert columns["env_failed"].any()
    batch, facts = trained(columns, "gae", 1)
    assert facts["failed"] == columns["env_failed"].sum() and facts["left_out"] == 0
    mask, advantages = (batch[name].reshape(SIZE, STEPS, -1) for name in ("mask", "advantages"))
    for slot in range(SIZE):
        expected = gae_of(columns, slot)
        assert {tuple(at) for at in mask[slot].nonzero().tolist()} == set(expected)
        for (t, c), value in expected.items():
            assert advantages[slot, t, c] == pytest.approx(value, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("adv_type", ["grpo", "dr_grpo", "rloo", "reinforce++", "reinforce++_baseline", "raw"])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("per_action", [False, True])
def test_others_advantages_are_those_of_the_batch_without_the_slots_that_failed(
    adv_type: str, whole: bool, per_action: bool
) -> None:
    """Bit for bit, also of those in the same group."""
    chunk, group = (3 if per_action else 1), 4
    for seed in range(4):
        columns = rollout(np.random.default_rng(seed), whole=whole, chunk=chunk, per_action=per_action)
        counted = columns["env_failed"].any(1)
        assert counted.any() and not counted.all()
        batch, facts = trained(columns, adv_type, group)
        assert facts["failed"] == counted.sum() * STEPS and not batch["mask"][counted].any()
        mask = torch.from_numpy(columns.get("loss_mask", np.ones((SIZE, STEPS), bool)))
        if per_action:
            mask = torch.from_numpy(columns["action_mask"]) & mask[..., None]
        rest = torch.from_numpy(~counted)
        advantages, returns = calculate_adv_and_returns(
            adv_type, rewards=torch.from_numpy(columns["rewards"]).flatten(1)[rest], loss_mask=mask.flatten(1)[rest],
            group_ids=torch.arange(SIZE)[rest] // group, gamma=GAMMA,
        )  # fmt: skip
        assert torch.equal(batch["advantages"].flatten(1)[rest], advantages)
        assert torch.equal(batch["returns"].flatten(1)[rest], returns)


def test_off_policy_buffers_get_the_transitions_that_did_not_fail() -> None:
    rng, kept, expected = np.random.default_rng(3), list[float](), list[float]()
    actor: Any = object.__new__(OffPolicyActor)
    actor.slots, actor.world_size, actor.transitions = SlotMap(SIZE), 1, 0
    actor.incomplete = Incomplete(SIZE, range(SIZE))
    for step in range(1, 6):
        columns = rollout(rng, whole=False, chunk=1, per_action=False)
        columns["obs"] = np.arange(SIZE * STEPS).reshape(SIZE, STEPS, 1) + 1000.0 * step
        expected += columns["obs"][~columns["env_failed"]].ravel().tolist()
        intake = SimpleNamespace(share=range(SIZE), columns=lambda *_, c=columns: (c, 0))
        intake.pop_lost = lambda c: np.zeros((SIZE, STEPS), bool)
        intake.pop_failed = lambda c: c.pop("env_failed")
        intake.pop_nonfinite = lambda step, c: c.pop("nonfinite")
        actor.intake, actor.replay = intake, SimpleNamespace(add=lambda c: kept.extend(c["obs"].ravel().tolist()))
        facts = actor.receive(step, None)
        assert facts["failed"] + facts["left_out"] > 0 and facts["left_out"] == 0
    assert len({*kept}) == len(kept) == actor.transitions and {*kept} <= {*expected}
    assert len(expected) - len(kept) < SIZE, "less than a row waits"


def test_rollout_ranks_hand_over_what_failed() -> None:
    worker: Any = object.__new__(OffPolicyRolloutWorker)
    worker.buffers = [SimpleNamespace(names=["obs"], batch_first=lambda name: np.zeros((2, 1, 1), np.float32))]
    outcomes = Outcomes(range(2), 1, spoiled=lambda *_: None)
    final = np.ones((2, 1), np.float32)
    outcomes.add(
        0, np.ones(2), np.array([True, False]), np.zeros(2, bool), {"lost": np.array([True, False]), "final_obs": final}
    )
    (columns,) = worker.columns([outcomes.part(slice(0, 2), final)])
    assert columns["env_failed"].tolist() == [[True], [False]]
    assert columns["rewards"].tolist() == [[0], [1]] and not columns["terminations"].any()


class Failing(VectorEnv):
    """Two slots that count their steps; slot 0 fails in the steps of `fails`, its episodes have four steps."""

    observation_space = gymnasium.spaces.Box(-99, 99, (1,), np.float32)
    action_space = gymnasium.spaces.Box(-9, 9, (1,), np.float32)

    def __init__(self, fails: Any) -> None:
        self.num_envs, self.max_episode_steps = 2, 4
        self._fails, self._t = fails, 0
        self._at = np.zeros(2, np.int64)

    def _obs(self) -> np.ndarray:
        return self._at[:, None].astype(np.float32)

    def reset(self, seed: int | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        self._at[:] = 0
        return self._obs(), {}

    def step(self, actions: np.ndarray) -> Step:
        self._t += 1
        failed = np.array([self._t in self._fails, False])
        self._at += 1
        done = failed | (self._at >= 4)
        infos: dict[str, Any] = {}
        if done.any():
            # Of one that failed a careless adapter says that it counts.
            infos = {"final_obs": self._obs(), "lost": failed}
            infos["episode"] = {"return": self._at.astype(float), "length": self._at.copy(), "mask": done}
            infos["episode"]["success"] = np.ones(2, bool)
        self._at[done] = 0
        return self._obs(), np.ones(2, np.float32), np.zeros(2, bool), done, infos


class Still:
    def predict_action_batch(self, obs: Any, mode: str = "eval", noise: Any = None) -> Any:
        return torch.zeros(len(obs), 1, 1), {}


def test_an_evaluation_plays_an_episode_that_was_lost_again() -> None:
    rows = play(Still(), Failing({2, 3, 9}), np.array([2, 1]), torch.device("cpu"))
    assert [row["length"] for row in rows] == [4, 4, 4]


def test_an_evaluation_whose_simulators_fail_without_end_ends() -> None:
    with pytest.raises(RlhpcError, match="simulators failed"):
        play(Still(), Failing(range(0, 10**9, 2)), np.array([1, 1]), torch.device("cpu"))


def test_episodes_that_failed_count_in_no_statistic() -> None:
    log, env = EpisodeLog(), Failing({2})
    env.reset()
    for t in range(4):
        _, _, terminations, truncations, infos = env.step(np.zeros((2, 1)))
        log.add(t, 0, infos, np.flatnonzero(terminations | truncations))
    assert log.arrays()["slot"].tolist() == [1]


def recorded(path: Path) -> list[Any]:
    return [list(each["rewards"]) for each in read_trajectories(str(path))]


class Person(Intervention):
    """Acts in slot 0."""

    def act(self, obs: Any, actions: np.ndarray, picture: Any) -> tuple[np.ndarray, np.ndarray]:
        return actions, np.array([True, False])


def test_recordings_leave_out_episodes_that_failed(tmp_path: Path) -> None:
    env = Failing({3})
    with TrajectoryWriter(tmp_path / "a.h5", env_id="x", env_kwargs={}, max_episode_steps=4) as writer:
        recorder = EpisodeRecorder(writer, env, only_success=False, num_episodes=3)
        play(Still(), env, np.array([2, 1]), torch.device("cpu"), watch=recorder)
        assert len(writer) == recorder.played == 3
    assert [len(rewards) for rewards in recorded(tmp_path / "a.h5")] == [4, 4, 4]


def test_of_an_intervention_the_steps_before_a_failure_are_recorded(tmp_path: Path) -> None:
    env = Failing({3})
    with TrajectoryWriter(tmp_path / "a.h5", env_id="x", env_kwargs={}, max_episode_steps=4) as writer:
        gated = Gated(Still(), Person(), env)
        recorder = TakenRecorder(writer, env, num_episodes=2, gated=gated)
        play(gated, env, np.array([1, 1]), torch.device("cpu"), watch=recorder)
        assert recorder.played == 2 and recorder.taken_steps == 6
    assert [len(rewards) for rewards in recorded(tmp_path / "a.h5")] == [2, 4]
