"""Rollout workers: what actors get of a full rollout, checkpoints, lost env ranks, and rows of a value pass."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlhpc.embodied.rollout.slot_map import SlotMap
from rlhpc.embodied.rollout.work_sharing import FullRollout
from rlhpc.embodied.training import PolicyBlueprint
from rlhpc.embodied.workers.rollout import MultiStepRolloutWorker, StageBuffer
from rlhpc.runs.configuration import load_config
from tests.unit.embodied.workers.in_process import RankPair, in_a_run


@pytest.mark.parametrize("named", [False, True])
def test_a_value_pass_has_no_more_rows_than_a_stage_has_slots(named: bool) -> None:
    """However many episodes a rollout has ended. The last pass is filled up, so that all have one size."""
    passes: list[int] = []

    def value(obs: Any) -> torch.Tensor:
        rows = obs["state"] if named else obs
        passes.append(len(rows))
        return 2 * rows[:, 0]

    worker: Any = object.__new__(MultiStepRolloutWorker)
    worker.shares, worker.device = [range(4), range(8, 15)], torch.device("cpu")
    worker.policy = SimpleNamespace(value=value)
    obs = np.arange(61, dtype=np.float32)[:, None]
    values = worker._compute_values({"state": obs} if named else obs)
    np.testing.assert_array_equal(values, 2 * obs[:, 0])
    assert passes == [7] * 9


@pytest.mark.parametrize("level", ["token_level", "action_level", "chunk_level"])
@pytest.mark.parametrize("model", ["mlp", "conditioned"])
def test_a_rollout_rank_and_the_trainer_use_one_level_of_logprobs(model: str, level: str) -> None:
    """Of a policy within another, too: it is the inner one that acts."""
    kwargs = {"of": "mlp"} if model == "conditioned" else {}
    words = [f"actor.model.model_type={model}", f"actor.model.kwargs={kwargs}", f"algorithm.logprob_type={level}"]
    cfg = load_config("configs/quickstart.yaml", words, check=False)
    space, actions = spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(2)
    worker: Any = object.__new__(MultiStepRolloutWorker)
    worker.cfg, worker.device = cfg, torch.device("cpu")
    policy: Any = worker.build_policy(space, actions)
    blueprint = PolicyBlueprint(cfg.actor, (space, actions), worker.device, seed=1, reads_norm=False, levels=level)  # type: ignore[attr-defined]
    trained: Any = blueprint.build()
    for each in (policy, trained, *(getattr(p, "inner", p) for p in (policy, trained))):
        assert each.logprob_type == level


@pytest.fixture
def run(tmp_path: Path) -> Iterator[None]:
    with in_a_run(tmp_path):
        yield


SLOTS = SlotMap(4, num_actor_ranks=2, env_name="left", rollout_name="right")
STEPS = 6


def sent_by(pair: RankPair) -> list[dict[str, Any]]:
    return [items.get_nowait() for _, items in sorted(pair.sent.items.items())]


def test_each_actor_gets_the_transitions_of_its_slots(run: None) -> None:
    pair = RankPair(SLOTS, f"algorithm.rollout_steps={STEPS}")
    _, report = pair.play(FullRollout(5, 1, 0, STEPS))
    messages = sent_by(pair)
    assert len(messages) == 2 and report["busy_s"] >= 0
    for message in messages:
        assert message["rollout"] == 5 and message["version"] == 0
        assert message["rewards"].shape == message["values"].shape == message["next_values"].shape == (2, STEPS)
        assert message["obs"].shape == (2, STEPS, 4)
        goes_on = ~(message["terminations"] | message["truncations"])[:, :-1]
        np.testing.assert_allclose(
            message["next_values"][:, :-1][goes_on], message["values"][:, 1:][goes_on], rtol=1e-5
        )
    policy = pair.rollout.policy
    values = policy.value(torch.from_numpy(messages[0]["obs"].reshape(-1, 4))).reshape(2, STEPS)
    np.testing.assert_allclose(messages[0]["values"], values, rtol=1e-5)


def test_a_shorter_turn_ends_its_episodes_as_truncated(run: None) -> None:
    pair = RankPair(SLOTS, f"algorithm.rollout_steps={STEPS}")
    pair.play(FullRollout(1, 1, 0, STEPS - 2))
    for message in sent_by(pair):
        assert message["rewards"].shape == (2, STEPS - 2)
        assert (message["terminations"] | message["truncations"])[:, -1].all()


@pytest.mark.parametrize("decoupled", [False, True])
def test_actions_depend_on_seed_step_and_slot_alone(run: None, decoupled: bool) -> None:
    words = [f"algorithm.rollout_steps={STEPS}", f"runner.enable_decoupled_mode={decoupled}"]
    played = []
    for step in (1, 1, 2):
        pair = RankPair(SLOTS, *words)
        torch.manual_seed(0)
        for parameter in pair.rollout.policy.parameters():
            torch.nn.init.constant_(parameter, 0.05)
        pair.play(FullRollout(1, step, 0, STEPS))
        played.append(np.concatenate([message["actions"] for message in sent_by(pair)]))
    assert np.array_equal(played[0], played[1]) and not np.array_equal(played[0], played[2])


def test_slots_of_a_lost_env_rank_are_marked_as_missing(run: None) -> None:
    pair = RankPair(SLOTS, f"algorithm.rollout_steps={STEPS}")
    pair.rollout.links.lose(0, 0)
    assert pair.rollout.links.get(0) == [(range(4), None)]
    report = pair.rollout.generate(FullRollout(1, 1, 0, STEPS))
    assert report["busy_s"] >= 0
    for message in sent_by(pair):
        assert message["lost"].all()


def test_a_checkpoint_has_the_version_and_the_random_state(run: None, tmp_path: Path) -> None:
    first, second = RankPair(SLOTS).rollout, RankPair(SLOTS).rollout
    first.version = 7
    first.save(str(tmp_path))
    expected = torch.rand(3)
    second.load(str(tmp_path / "none"))
    assert second.version == 0
    second.load(str(tmp_path))
    assert second.version == 7 and torch.equal(torch.rand(3), expected)
    second.release_observations()
    second.offload()
    assert second.free_beside_update() == float("inf")
    second.reload()
    second.allow_exit()


def test_a_buffer_keeps_each_decision_of_each_slot() -> None:
    buffer = StageBuffer(range(4, 7), 3)
    for t in range(2):
        buffer.write(t, slice(None), values=np.arange(3) + 10 * t, obs=torch.full((3, 2), float(t)))
    buffer.write(1, slice(0, 1), values=np.array([-1, 0, 0]))
    buffer.num_decisions = 2
    columns = buffer.columns()
    assert columns["values"].tolist() == [[0, -1], [1, 11], [2, 12]] and columns["obs"].shape == (3, 2, 2)
