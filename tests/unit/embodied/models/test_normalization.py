"""Running normalisation of observations: the statistics of what was seen, in whatever division, wherever the policy goes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from omegaconf import OmegaConf

from rlhpc.config.typed import default_section
from rlhpc.embodied.config import ModelConfig
from rlhpc.embodied.models import build_model, policy_from_spec
from rlhpc.embodied.models.normalization import AlohaJoints, ObservationNormaliser
from rlhpc.embodied.workers.ppo_actor import EmbodiedActor
from rlhpc.runtime.errors import ConfigError

STATE, ACTION = spaces.Box(-9, 9, (4,), np.float32), spaces.Box(-1, 1, (2,), np.float32)
SLOTS, STEPS = 12, 7


def model(**changes: Any) -> Any:
    cfg = OmegaConf.merge(default_section(ModelConfig), {"normalize_observations": True, "hidden_sizes": [16]}, changes)
    return build_model(cfg, STATE, ACTION, seed=1)


def observed(policies: list[Any], steps: list[tuple[np.ndarray, np.ndarray]]) -> None:
    """Has the actor ranks of a run, each with its share of the slots, take in observations `[n, T, D]` and which count."""
    size = SLOTS // len(policies)
    for obs, mask in steps:
        calls = []
        for rank, policy in enumerate(policies):
            part = slice(rank * size, (rank + 1) * size)
            actor: Any = object.__new__(EmbodiedActor)
            actor.policy, actor.share, actor.steps = policy, range(part.start, part.stop), STEPS
            actor.device, actor.world_size = torch.device("cpu"), len(policies)
            flat = SimpleNamespace(
                obs=torch.from_numpy(obs[part]).flatten(0, 1), mask=torch.from_numpy(mask[part]).float().flatten(0, 1)
            )
            calls.append((actor, flat))
            actor.slots = SimpleNamespace(num_envs=SLOTS)
        total = torch.zeros(SLOTS, 1 + 2 * obs.shape[-1], dtype=torch.float64)
        for actor, flat in calls:  # first what each says, then with the sum of all
            seen = flat.obs.reshape(len(actor.share), STEPS, -1)
            moments = actor.policy.normaliser.moments(seen, flat.mask.reshape(len(actor.share), STEPS) > 0)
            total[actor.share.start : actor.share.stop] = moments
        for actor, flat in calls:

            def all_reduce(own: torch.Tensor, share: range = actor.share) -> torch.Tensor:
                assert torch.equal(own[share.start : share.stop], total[share.start : share.stop])  # noqa: B023 (at once)
                assert own.count_nonzero() == own[share.start : share.stop].count_nonzero()
                return total.clone()  # noqa: B023

            actor.all_reduce = all_reduce
            actor._update_normaliser(flat)


def steps_of(seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(seed)
    spread = np.array([1e3, 1e-3, 5, 0.2])
    return [
        (
            (rng.normal(size=(SLOTS, STEPS, 4)) * spread + [1e4, 3, -7, 0]).astype(np.float32),
            rng.random((SLOTS, STEPS)) < 0.8,
        )
        for _ in range(5)
    ]


def test_the_statistics_are_those_of_all_observations_that_count() -> None:
    policy, steps = model(), steps_of(0)
    observed([policy], steps)
    rows = np.concatenate([obs[mask] for obs, mask in steps]).astype(np.float64)
    normaliser = policy.normaliser
    assert normaliser.count.item() == len(rows)
    np.testing.assert_allclose(normaliser.mean, rows.mean(0), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(normaliser.var, rows.var(0), rtol=1e-6)
    seen = normaliser(torch.from_numpy(rows).float())
    assert seen.mean(0).abs().max() < 0.01 and (seen.std(0) - 1).abs().max() < 0.05


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_they_do_not_depend_on_the_division_over_ranks(ranks: int) -> None:
    alone, several = model(), [model() for _ in range(ranks)]
    observed([alone], steps_of(1))
    observed(several, steps_of(1))
    for policy in several:
        for name, value in alone.normaliser.state_dict().items():
            assert torch.equal(policy.normaliser.state_dict()[name], value)


@pytest.mark.parametrize("model_type", ["mlp", "flow"])
def test_a_checkpoint_and_a_rollout_rank_see_what_training_saw(model_type: str) -> None:
    policy = model(model_type=model_type)
    obs = torch.from_numpy(steps_of(2)[0][0][:, 0])
    noise = policy.sample_noise((len(obs),), torch.Generator().manual_seed(0))
    fresh = policy.predict_action_batch(obs, "train", noise)[0]
    observed([policy], steps_of(2))
    assert {"normaliser.count", "normaliser.mean", "normaliser.var"} <= set(policy.state_dict())
    twin = policy_from_spec(policy.spec())
    twin.load_state_dict(policy.state_dict())
    for mode, *given in (("train", noise), ("eval",)):
        with torch.no_grad():
            acted, again = (each.predict_action_batch(obs, mode, *given) for each in (policy, twin))
        assert torch.equal(acted[0], again[0]) and torch.equal(acted[1]["prev_values"], again[1]["prev_values"])
    assert not torch.equal(fresh, policy.predict_action_batch(obs, "train", noise)[0])


def test_before_anything_was_seen_observations_stay() -> None:
    normaliser = ObservationNormaliser(3)
    obs = torch.tensor([[1.0, -2.0, 30.0]])
    torch.testing.assert_close(normaliser(obs), torch.tensor([[1.0, -2.0, 10.0]]))
    normaliser.update(torch.zeros(2, 7, dtype=torch.float64))
    assert normaliser.count.item() == 0 and not normaliser.mean.any()


def test_a_policy_that_has_none_says_so() -> None:
    cfg = OmegaConf.merge(default_section(ModelConfig), {"model_type": "cnn", "normalize_observations": True})
    with pytest.raises(ConfigError, match="normalize_observations is true, and a policy of model_type 'cnn'"):
        build_model(cfg, spaces.Box(0, 255, (36, 36, 3), np.uint8), spaces.Discrete(4))


def test_alohas_joints_are_converted_as_in_rlinf():
    """Against the numbers of RLinf's aloha_policy.py, recorded by `tests/rlinf/record.py`."""
    file = Path(__file__).parents[3] / "data/rlinf/aloha.json"
    recorded = {name: torch.tensor(rows) for name, rows in json.loads(file.read_text()).items() if name != "commit"}
    rows = recorded["rows"]
    before = rows.clone()
    for convert, name in (
        (AlohaJoints.state_to_pi, "states"),
        (AlohaJoints.actions_from_pi, "executed"),
        (AlohaJoints.actions_to_pi, "learned"),
    ):
        torch.testing.assert_close(convert(rows), recorded[name], rtol=1e-5, atol=1e-6)
    assert torch.equal(rows, before)
    chunks = torch.rand(2, 5, AlohaJoints.width)
    torch.testing.assert_close(AlohaJoints.actions_from_pi(AlohaJoints.actions_to_pi(chunks)), chunks)
