"""Check of a policy against demonstrations: each fault is named, also at half strength, and sound policies have none."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from rlhpc.cli import main
from rlhpc.embodied.evaluation.open_loop import PolicyCheck, check_open_loop
from rlhpc.embodied.models.base import Policy
from rlhpc.embodied.models.normalization import ObservationNormaliser, Scaling
from rlhpc.runtime.errors import ConfigError
from tests.unit.embodied.models.sections import section

SPACE = spaces.Dict({
    "front": spaces.Box(0, 255, (6, 6, 3), np.uint8),
    "wrist": spaces.Box(0, 255, (6, 6, 3), np.uint8),
    "instruction": spaces.Box(0, 255, (8,), np.uint8),
    "state": spaces.Box(-np.inf, np.inf, (3,), np.float32),
})  # fmt: skip
ACTIONS = spaces.Box(-2, 2, (3,), np.float32)
LENGTH, EPISODES = 60, 5
ROOT = Path(__file__).resolve().parents[4]


class Seeing(Policy):
    """A random policy that reads both images and the state; its chunk is a wave on top, whose phase is the state's last
    number."""

    has_head = False

    def __init__(self, seed: int, chunk: int = 6) -> None:
        super().__init__(section(num_action_chunks=chunk), SPACE, ACTIONS)
        generator = torch.Generator().manual_seed(seed)
        self.weights = {
            name: torch.randn(int(np.prod(SPACE[name].shape or ())), 3, generator=generator)
            for name in ("front", "wrist", "state")
        }
        self.weights["state"][-1] = 0
        self.gain, self.offset = torch.ones(3), torch.zeros(3)
        self.shift, self.rate, self.seeing = 0.0, 1.0, 0.3

    def features(self, obs: Any, policy: bool, value: bool) -> tuple[Tensor | None, Tensor | None]:
        raise NotImplementedError

    def predict_action_batch(
        self, obs: Any, mode: str = "train", noise: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Any]]:
        seen = sum((obs[name].float().flatten(1) / 255 - 0.5) @ self.weights[name] for name in ("front", "wrist"))
        seen = torch.tanh(seen + obs["state"].float() @ self.weights["state"])
        steps = torch.arange(self.chunk) * self.rate + self.shift
        phases = obs["state"][:, -1, None, None] + 0.35 * steps[:, None] + torch.arange(3)
        actions = torch.sin(phases) + self.seeing * seen[:, None]
        return actions * self.gain + self.offset, {}


def demonstrations(policy: Seeing, seed: int, noise: float = 0.1) -> list[dict[str, Any]]:
    """Episodes whose actions are the first ones of the policy's chunks; its images are of smooth random scenes."""
    rng, episodes = np.random.default_rng(seed), []
    for number in range(EPISODES):
        obs: dict[str, Any] = {}
        for name in ("front", "wrist"):
            scene = rng.normal(size=(LENGTH + 1, 6, 6, 3)).cumsum(0)
            scene = (scene - scene.mean()) / scene.std()
            obs[name] = (128 + 60 * scene).clip(0, 255).astype(np.uint8)
        state = rng.normal(size=(LENGTH + 1, 3)).cumsum(0) / 5
        state[:, -1] = 0.35 * np.arange(LENGTH + 1) + rng.uniform(0, 6)
        obs |= {"state": state.astype(np.float32), "instruction": np.full((LENGTH + 1, 8), 97, np.uint8)}
        rows = {name: torch.from_numpy(values[:-1]) for name, values in obs.items()}
        actions = policy.predict_action_batch(rows)[0][:, 0].numpy()
        actions = (actions + noise * rng.normal(size=actions.shape)).astype(np.float32)
        episodes.append({"obs": obs, "actions": actions, "source": f"episode {number}"})
    return episodes


def faults(check: PolicyCheck) -> dict[str, str]:
    return {verdict.subject: verdict.fault for verdict in check.faults}


@pytest.mark.parametrize("seed", range(10))
def test_sound_policies_have_no_fault(seed: int) -> None:
    policy = Seeing(seed)
    check = check_open_loop(policy, demonstrations(policy, seed, noise=0.3), seed=seed, fps=20, control_hz=20)
    assert faults(check) == {}
    assert {verdict.subject for verdict in check.verdicts} == {
        "open-loop error", "cameras", "instruction", "state", "normalisation of actions", "chunk alignment", "frame rate",
    }  # fmt: skip
    assert check.num_episodes == EPISODES and check.num_frames == 256 and len(check.errors_by_step) == 6
    floors = [np.mean(check.errors[name]) for name in ("mean action", "another frame's action")]
    assert np.mean(check.errors["policy"]) < 0.5 * min(floors)


IMAGE_FAULTS = {
    "mirrored images": lambda obs: obs | {name: obs[name][:, :, ::-1] for name in ("front", "wrist")},
    "images rotated by 180 degrees": lambda obs: obs | {name: obs[name][:, ::-1, ::-1] for name in ("front", "wrist")},
    "images upside down of wrist": lambda obs: obs | {"wrist": obs["wrist"][:, ::-1]},
    "front and wrist exchanged": lambda obs: obs | {"front": obs["wrist"], "wrist": obs["front"]},
    "red and blue of front exchanged": lambda obs: obs | {"front": obs["front"][..., ::-1]},
}


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("name", IMAGE_FAULTS)
def test_images_that_the_policy_was_not_trained_on_are_named(name: str, half: bool) -> None:
    """At half strength, two of five episodes have the fault."""
    policy = Seeing(3)
    policy.seeing = 1.0
    episodes = demonstrations(policy, 3)
    for episode in episodes[1::2] if half else episodes:
        episode["obs"] = {
            key: np.ascontiguousarray(values) for key, values in IMAGE_FAULTS[name](episode["obs"]).items()
        }
    named = faults(check_open_loop(policy, episodes))["cameras"]
    assert f"with {name}," in named and ("of 5 episodes" in named) == half


@pytest.mark.parametrize(("gain", "offset"), [(2.0, 0.0), (1.5, 0.0), (1.0, 0.6), (1.0, 0.3), (-1.0, 0.0)])
def test_other_statistics_of_actions_are_named(gain: float, offset: float) -> None:
    policy = Seeing(4)
    episodes = demonstrations(policy, 4)
    policy.gain[1], policy.offset[1] = gain, offset
    named = faults(check_open_loop(policy, episodes))
    assert (
        named["normalisation of actions"].startswith("dimension 1: demonstrated = ")
        and ";" not in named["normalisation of actions"]
    )


@pytest.mark.parametrize("shift", [1.0, 2.0, -1.0])
def test_a_shifted_chunk_is_named(shift: float) -> None:
    policy = Seeing(5)
    episodes = demonstrations(policy, 5)
    policy.shift = shift
    named = faults(check_open_loop(policy, episodes))
    assert f"fits the actions {shift:+.0f} step(s)" in named["chunk alignment"] and "frame rate" not in named


@pytest.mark.parametrize("rate", [0.5, 0.8, 1.25, 2.0])
def test_another_frame_rate_is_named(rate: float) -> None:
    policy = Seeing(6)
    episodes = demonstrations(policy, 6)
    policy.rate = rate
    named = faults(check_open_loop(policy, episodes))
    assert (
        f"one predicted step is {rate:g} demonstrated steps" in named["frame rate"] and "chunk alignment" not in named
    )
    policy.rate = 1.0
    assert "30 frames/s" in faults(check_open_loop(policy, episodes, fps=30, control_hz=20))["frame rate"]


@pytest.mark.parametrize("factor", [2.0, 1.5, 1.0])
def test_other_statistics_of_observations_are_named(factor: float) -> None:
    policy = Seeing(7)
    episodes = demonstrations(policy, 7)
    states = torch.from_numpy(np.concatenate([episode["obs"]["state"] for episode in episodes]))
    normaliser = ObservationNormaliser(3)
    normaliser.count += len(states)
    normaliser.mean += states.double().mean(0)
    normaliser.var *= states.double().var(0)
    normaliser.var[1] *= factor**2
    policy.normaliser = normaliser
    named = faults(check_open_loop(policy, episodes)).get("normalisation of observations", "")
    assert named.startswith("dimension 1: ") == (factor > 1) and "dimension 0" not in named
    policy.normaliser = None
    low, high = states.quantile(0.01, 0), states.quantile(0.99, 0)
    policy.states = Scaling(low / factor, high / factor)
    named = faults(check_open_loop(policy, episodes)).get("normalisation of observations", "")
    assert ("dimension 1: " in named) == (factor > 1), named


def test_another_policy_is_not_taken_for_one_that_knows_the_demonstrations() -> None:
    """As with a wrong adapter: half of the weights are others."""
    policy, other = Seeing(8), Seeing(9)
    policy.seeing = other.seeing = 3.0
    episodes = demonstrations(policy, 8)
    assert faults(check_open_loop(policy, episodes)) == {}
    assert "does not know these demonstrations" in faults(check_open_loop(other, episodes))["open-loop error"]


def test_demonstrations_of_other_spaces_are_refused() -> None:
    policy = Seeing(1)
    [episode, *_] = demonstrations(policy, 1)
    with pytest.raises(ConfigError, match="front"):
        check_open_loop(policy, [{**episode, "obs": {**episode["obs"], "front": episode["obs"]["front"][:, :3]}}])
    with pytest.raises(ConfigError, match="no episode"):
        check_open_loop(policy, [])
    with pytest.raises(
        ConfigError, match=r"15 frames .* too few .*take at least 16"
    ):  # no comparison could find a fault
        check_open_loop(policy, [episode], num_frames=15)


def test_the_command_checks_a_run_and_a_configuration(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with tarfile.open(ROOT / "tests" / "data" / "baseline" / "runs" / "bc_flow.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    demos = ["--demos", str(tmp_path / "data" / "demos.h5")]
    for path in (tmp_path / "runs" / "run", tmp_path / "run.yaml"):  # neither has learned anything
        assert main(["check-policy", str(path), *demos]) == 1
        output = capfd.readouterr().out
        assert "48 frames of 4 episodes" in output and "FAULT  open-loop error" in output and "ok  frame rate" in output
    for rate in ("0", "-1", "nan", "inf"):
        assert main(["check-policy", str(tmp_path / "run.yaml"), *demos, "--control-hz", rate]) == 2
        assert "must be a number above 0" in capfd.readouterr().err
    assert main(["check-policy", str(tmp_path / "run.yaml"), *demos, "--control-hz", "0.5"]) == 1
    assert "open-loop error" in capfd.readouterr().out
    assert main(["check-policy", "missing", *demos]) == 2
    error = capfd.readouterr().err
    assert "PATH is 'missing', which is no folder" in error and "explain command-line" in error
    assert main(["check-policy", str(tmp_path / "run.yaml"), "--demos", "nothing.h5"]) == 2
    assert "no such file" in capfd.readouterr().err
    assert main(["check-policy", str(tmp_path / "runs" / "run"), "a.b=1", *demos]) == 2
    assert "overrides (a.b=1) belong to a configuration" in capfd.readouterr().err
    assert main(["check-policy", str(ROOT / "configs" / "reasoning" / "demo_sft.yaml"), *demos]) == 2
    assert "has no environment (section env)" in capfd.readouterr().err
