"""Noise of policies: what an action depends on, where evaluations of flows begin, and how much is held."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from omegaconf import OmegaConf

from rlhpc.config.typed import typed
from rlhpc.embodied.config import EvalEnvConfig, PpoConfig
from rlhpc.embodied.evaluation.episodes import evaluate_policy
from rlhpc.embodied.models import build_model
from rlhpc.embodied.models.base import BLOCK, noise_of_episodes, noise_of_slots
from rlhpc.embodied.rollout.slot_map import SlotMap
from rlhpc.embodied.rollout.work_sharing import FullRollout
from rlhpc.embodied.standalone_policy import SCRIPT
from rlhpc.embodied.workers.rollout import MultiStepRolloutWorker

STATE, ACTION = spaces.Box(-1, 1, (4,), np.float32), spaces.Box(-1, 1, (2,), np.float32)
FLOW = {
    "model_type": "flow", "hidden_sizes": [64, 64], "activation": "silu", "ortho_init": True, "log_std_init": 0.0,
    "num_action_chunks": 1, "value_per_action": False, "kwargs": {"num_steps": 10, "noise_level": 0.4},
}  # fmt: skip


def normal(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randn((*shape, 3), generator=generator)


@pytest.mark.parametrize("bounds", [[0, 70], [0, 35, 70], [0, 16, 32, 70], [0, 1, 17, 50, 69, 70]])
def test_noise_does_not_depend_on_how_slots_are_divided(bounds: list[int]) -> None:
    shares = [range(a, b) for a, b in itertools.pairwise(bounds)]
    parts = [noise_of_slots(normal, (1, 2, 3), share) for share in shares]
    assert torch.equal(torch.cat(parts), noise_of_slots(normal, (1, 2, 3), range(70)))
    assert not torch.equal(noise_of_slots(normal, (1, 2, 4), range(70)), torch.cat(parts))
    everything = torch.cat(parts)
    assert len({tuple(row) for row in everything.tolist()}) == 70 and abs(everything.mean()) < 0.25


@pytest.mark.parametrize("decoupled", [False, True])
def test_a_rank_holds_the_noise_of_one_decision_of_its_slots(decoupled: bool) -> None:
    """Whatever the run's slots and a step's decisions are."""
    drawn: list[int] = []

    def sample(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        drawn.append(int(np.prod(shape)))
        return torch.randn((*shape, 5), generator=generator)

    share = range(40, 60)
    worker: Any = object.__new__(MultiStepRolloutWorker)
    worker.cfg, worker.slots, worker.seed, worker._turn = PpoConfig(), SlotMap(4096), 1, None
    worker.cfg.runner.enable_decoupled_mode = decoupled
    worker.shares, worker.peers = [share], [[(0, share)]]
    worker.buffers = [SimpleNamespace(made=0, write=lambda *_, **__: None)]
    worker.device, worker.policy = torch.device("cpu"), SimpleNamespace(sample_noise=sample, observation_space=STATE)
    seen: list[torch.Tensor] = []

    def choose(obs: Any, noise: torch.Tensor, asked: Any) -> Any:
        seen.append(noise)
        return torch.zeros(20, 1, 2), {}

    obs = np.zeros((20, 4), np.float32)
    worker._choose_actions, worker._send_trajectories = choose, lambda: None
    worker.links = SimpleNamespace(
        get=lambda stage: [(share, obs)],
        first=list,
        get_from=lambda *_: obs,
        put=lambda *_: None,
        put_to=lambda *_: None,
    )
    worker.generate(FullRollout(1, 3, 10, 50))
    assert len(seen) == 50 and all(noise.shape == (20, 5) for noise in seen)
    assert sum(drawn) <= 50 * (20 + 2 * BLOCK)
    assert torch.equal(seen[7], noise_of_slots(sample, (1, 3, 17), share))


@pytest.fixture(scope="module")
def ring() -> Any:
    """A flow that was cloned from actions on a ring of radius 0.8."""
    policy = build_model(OmegaConf.create(FLOW), STATE, ACTION, seed=0)
    optimizer, draw = torch.optim.Adam(policy.parameters(), 2e-3), torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    for _ in range(1500):
        angle = 6.2832 * torch.rand(256, generator=draw)
        actions = 0.8 * torch.stack([angle.cos(), angle.sin()], 1)[:, None]
        loss = policy.bc_loss({"obs": torch.zeros(256, 4), "actions": actions}).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return policy.eval()


def test_evaluations_end_where_the_demonstrations_are(ring: Any) -> None:
    with torch.no_grad():
        obs = torch.zeros(300, 4)
        seeded = ring.predict_action_batch(obs, "eval")[0].norm(dim=-1)
        zero = ring.predict_action_batch(obs, "eval", torch.zeros(300, 1, 2))[0].norm(dim=-1)
    assert ((seeded - 0.8).abs() < 0.2).float().mean() > 0.8
    assert ((zero - 0.8).abs() < 0.2).float().mean() == 0, "from the centre it ends between the demonstrations"


def side(**more: Any) -> EvalEnvConfig:
    given = {"env_type": "gymnasium", "env_id": "Pendulum-v1", "max_episode_steps": 20, "kwargs": {}, "wrappers": []}
    given |= {"num_envs": 2, "num_episodes": 4, "simulators": 0, "simulator_python": None, "ignore_terminations": False}
    return typed(EvalEnvConfig, OmegaConf.merge(OmegaConf.structured(EvalEnvConfig), given, more))


def test_an_evaluation_repeats_and_zero_is_an_option() -> None:
    pendulum = spaces.Box(-8, 8, (3,), np.float32), spaces.Box(-2, 2, (1,), np.float32)
    policy = build_model(OmegaConf.create(FLOW), *pendulum, seed=3).eval()
    first = evaluate_policy(policy, side(), seed=1)
    torch.randn(7)  # draws elsewhere change nothing
    assert evaluate_policy(policy, side(), seed=1) == first
    assert evaluate_policy(policy, side(noise="zero"), seed=1)["return_mean"] != first["return_mean"]


def test_slots_episodes_and_decisions_have_noise_of_their_own() -> None:
    rows = [noise_of_episodes(normal, 5, [e, 0], [0, t]) for e in range(3) for t in range(3)]
    assert len({tuple(row) for part in rows for row in part.tolist()}) == 3 + 3
    assert torch.equal(noise_of_episodes(normal, 5, [1, 9], [4, 2])[0], noise_of_episodes(normal, 5, [1], [4])[0])


def test_an_exports_script_draws_what_an_evaluation_draws() -> None:
    begin = SCRIPT.index("def noise(")
    names: dict[str, Any] = {"np": np, "torch": torch, "STARTS": (torch.zeros(2, 3),), "CONFIG": {}}
    exec(SCRIPT[begin : SCRIPT.index("\n\n\n", begin)], names)
    expected = noise_of_episodes(normal, 8, [0, 0, 4], [0, 0, 6])[2:]
    assert torch.equal(names["noise"](8, 2, 4, 6)[0], expected)
