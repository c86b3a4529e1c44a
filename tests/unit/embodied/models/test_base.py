"""Policies: guidance of a flow, noise of actions and of evaluations, and how much of it is held."""

from __future__ import annotations

import itertools
import math
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
from rlhpc.embodied.models.base import BLOCK, Guide, noise_of_episodes, noise_of_slots, overlap_weights
from rlhpc.embodied.models.flow import Flow
from rlhpc.embodied.rollout.slot_map import SlotMap
from rlhpc.embodied.rollout.work_sharing import FullRollout
from rlhpc.embodied.standalone_policy import SCRIPT
from rlhpc.embodied.workers.rollout import MultiStepRolloutWorker
from rlhpc.weights.receiver import TransferTotals


@pytest.mark.parametrize(("horizon", "executed", "delay"), [(8, 3, 2), (8, 4, 4), (50, 10, 4), (5, 5, 0), (6, 2, 0)])
def test_weights_are_those_of_the_paper(horizon: int, executed: int, delay: int) -> None:
    """And of LeRobot's and Kinetix's code, which take them from a line between 1 and 0."""
    end = horizon - executed
    line = torch.linspace(1, 0, end - delay + 2)[1:-1]
    between = line * torch.expm1(line) / (math.e - 1)
    theirs = torch.cat([torch.ones(delay), between, torch.zeros(executed)])
    torch.testing.assert_close(overlap_weights(horizon, executed, delay), theirs)


@pytest.mark.parametrize(("t", "weight"), [(1.0, 5.0), (0.5, 2.0), (0.75, (1 / 16 + 9 / 16) / (3 / 16)), (0.05, 5.0)])
def test_the_correction_in_closed_form(t: float, weight: float) -> None:
    """Of v = a·x, whose x̂ = (1 − t·a)·x has the derivative 1 − t·a."""
    a, x, wanted = 0.3, torch.tensor([[[1.0], [-2.0], [0.5]]]), torch.tensor([[[0.7], [0.1], [0.9]]])
    weights = torch.tensor([1.0, 0.25, 0.0])[None, :, None]
    found = Guide(wanted, weights, 5.0)(lambda x, t: a * x)(x, torch.tensor([t]))
    pull = weights * (wanted - (1 - t * a) * x) * (1 - t * a)
    torch.testing.assert_close(found, a * x - weight * pull)


def test_a_chunk_agrees_with_what_is_decided_and_goes_on_from_there() -> None:
    """Actions N(2, 0.5²), the later ones like the first: the velocity that flow matching would learn is known."""
    var, mean, alike = 0.25, 2.0, 0.9
    covariance = var * (alike * torch.ones(4, 4) + (1 - alike) * torch.eye(4))

    def velocity(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        now = t[0].item()
        total = (1 - now) ** 2 * covariance + now**2 * torch.eye(4)
        gap = torch.linalg.solve(total, x.squeeze(-1).T - (1 - now) * mean).T
        return (now * gap - (mean + (1 - now) * gap @ covariance))[..., None]

    wanted = torch.tensor([3.0, 3.0, 0.0, 0.0])[None, :, None]
    guide = Guide(wanted, overlap_weights(4, 2, 2)[None, :, None], 50.0)
    start = torch.zeros(1, 4, 1)
    free = Flow(100, 0.5).act(velocity, None, start)[0][0, -1, :, 0]
    guided = Flow(100, 0.5).act(guide(velocity), None, start)[0][0, -1, :, 0]
    assert free.tolist() == pytest.approx([2.0] * 4, abs=0.03)
    assert guided[:2].tolist() == pytest.approx([3.0, 3.0], abs=0.1)
    likely = mean + (covariance[2, :2] @ torch.linalg.solve(covariance[:2, :2], torch.ones(2))).item()
    assert all(2.6 < each < likely for each in guided[2:].tolist())  # drawn to what the first two make probable


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
    worker.cfg, worker.slots, worker.seed, worker._full_rollout = PpoConfig(), SlotMap(4096), 1, None
    worker._transfers = TransferTotals()
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
