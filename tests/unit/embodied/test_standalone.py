"""An export's program gives the policy's own actions, in a process that cannot import rlhpc."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from gymnasium import spaces
from omegaconf import OmegaConf

from rlhpc.config.typed import untouched
from rlhpc.embodied.card import policy_card
from rlhpc.embodied.config import ModelConfig
from rlhpc.embodied.envs.spaces import space_from_json, space_to_json
from rlhpc.embodied.models import build_model
from rlhpc.embodied.standalone import SCRIPT, program_of

INF = float("inf")
STATE = spaces.Box(-INF, INF, (4,), np.float32)
CASES = {
    "discrete": ({}, STATE, spaces.Discrete(3, start=-1)),
    "box": ({}, STATE, spaces.Box(np.float32([-1, -INF]), np.float32([0.5, INF]))),
    "chunks of a dict": (
        {"num_action_chunks": 2},
        spaces.Dict({"a": STATE, "b": spaces.Box(0, 1, (2,), np.float64)}),
        spaces.MultiDiscrete([2, 3]),
    ),
    "images": ({"model_type": "cnn"}, spaces.Box(0, 255, (36, 36, 3), np.uint8), spaces.Discrete(4)),
}
_ASK = """
import json, sys
sys.modules["rlhpc"] = None  # importing it would fail
sys.path.insert(0, {folder!r})
import numpy, policy
obs = numpy.load({folder!r} + "/obs.npz")
many = [dict(zip(obs, rows)) if "obs" not in obs else rows[0] for rows in zip(*obs.values())]
print(json.dumps([numpy.asarray(policy.act(one)).tolist() for one in many]))
"""


def model(changes: dict[str, Any], observation: Any, action: Any) -> Any:
    cfg = OmegaConf.merge(untouched(ModelConfig), changes)
    policy = build_model(cfg, observation, action, seed=1)
    with torch.no_grad():
        for parameter in policy.parameters():  # the last layers begin at nearly nothing
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(7)))
    return policy.eval()


@pytest.mark.parametrize("name", CASES)
def test_the_program_acts_as_the_policy(name: str) -> None:
    policy = model(*CASES[name])
    program = program_of(policy)
    assert program is not None
    rows = sample(policy.observation_space, 5)
    from io import BytesIO

    acts = torch.export.load(BytesIO(program)).module()
    with torch.no_grad():
        expected = policy.predict_action_batch(rows, mode="eval")[0]
        torch.testing.assert_close(acts(rows), expected)
        one = {key: part[:1] for key, part in rows.items()} if isinstance(rows, dict) else rows[:1]
        torch.testing.assert_close(acts(one), expected[:1])


@pytest.mark.parametrize("name", ["discrete", "box"])
def test_the_script_acts_without_rlhpc(name: str, tmp_path: Path) -> None:
    policy = model(*CASES[name])
    config = {"env_id": "CartPole-v1", "policy": policy.spec()}
    (tmp_path / "config.json").write_text(json.dumps(config, allow_nan=False))  # JSON has no Infinity
    (tmp_path / "policy.pt2").write_bytes(program_of(policy) or b"")
    (tmp_path / "policy.py").write_text(SCRIPT)
    rows = sample(policy.observation_space, 6)
    np.savez(tmp_path / "obs.npz", obs=rows.numpy())
    ask = [sys.executable, "-P", "-c", _ASK.format(folder=str(tmp_path))]
    done = subprocess.run(ask, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    raw = policy.predict_action_batch(rows, mode="eval")[0][:, 0].detach().numpy()
    space = policy.action_space
    wanted = raw[:, 0] + space.start if name == "discrete" else np.clip(raw, space.low, space.high)
    np.testing.assert_allclose(json.loads(done.stdout), wanted, rtol=1e-5, atol=1e-6)
    assert all(space.contains(np.asarray(a, space.dtype)) for a in json.loads(done.stdout))


def test_a_policy_that_cannot_be_followed() -> None:
    """Flow matching draws its start itself."""
    assert program_of(model({"model_type": "flow"}, STATE, spaces.Box(-1, 1, (2,), np.float32))) is None


def test_spaces_are_json() -> None:
    for _, observation, action in CASES.values():
        for space in (observation, action):
            assert space_from_json(json.loads(json.dumps(space_to_json(space), allow_nan=False))) == space
    old = {"type": "Box", "shape": [1], "dtype": "float32", "low": -INF, "high": [INF]}  # as earlier versions wrote it
    assert space_from_json(old) == spaces.Box(-INF, INF, (1,), np.float32)


def test_the_card() -> None:
    policy = model(*CASES["discrete"])
    config = {"env_id": "CartPole-v1", "run": "mine", "rlhpc_version": "0", "global_step": 4, "policy": policy.spec()}
    result = {"env_id": "CartPole-v1", "suite": "default", "episodes": 9, "return_mean": 41.5, "return_std": 2.0,
              "return_ci95": [40.0, 43.0]}  # fmt: skip
    card = policy_card(config, "global_step_4", [result], licence="apache-2.0", standalone=True)
    facts = yaml.safe_load(card.split("---\n")[1])
    assert (facts["license"], facts["pipeline_tag"]) == ("apache-2.0", "reinforcement-learning")
    [entry] = facts["model-index"][0]["results"]
    assert entry["metrics"][0] == {"type": "mean_reward", "name": "mean return", "value": "41.50 +/- 2.00"}
    assert (
        "| default | 9 | 41.50 | 40.00 to 43.00 |" in card and "Linear(64) → tanh → Linear(64) → tanh → Linear" in card
    )
    assert (
        yaml.safe_load(policy_card(config, "x", [], licence=None, standalone=False).split("---\n")[1])["license"]
        == "other"
    )


def sample(space: Any, count: int) -> Any:
    """Observations of a space, as tensors."""
    if isinstance(space, spaces.Dict):
        return {key: sample(part, count) for key, part in space.spaces.items()}
    rng = np.random.default_rng(3)
    if space.dtype == np.uint8:
        return torch.from_numpy(rng.integers(0, 256, (count, *space.shape), np.uint8))
    return torch.from_numpy(rng.standard_normal((count, *space.shape)).astype(space.dtype))
