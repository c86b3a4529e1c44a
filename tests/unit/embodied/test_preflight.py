"""Preflight of runs with simulators: each check by its name, the resource that it needs, and what it refuses."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhpc.config.typed import typed
from rlhpc.embodied.config import BcConfig, EnvSideConfig, PpoConfig, SacConfig
from rlhpc.embodied.data.trajectories import TrajectoryWriter
from rlhpc.embodied.preflight import (
    bc_checks,
    check_against_demonstrations,
    environment_resource,
    off_policy_checks,
    ppo_checks,
)
from rlhpc.runs.configuration import load_config
from rlhpc.runs.preflight import FILES, FILES_ALONE, Check, Need, run_checks
from rlhpc.runtime.errors import ConfigError
from tests.unit.embodied.evaluation.saved_policies import save_policy

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
RANKS = {"actor": 1, "rollout": 1, "env": 1}
PYTHONS: dict[str, str | None] = dict.fromkeys(RANKS)
PENDULUM = ("env.train.env_id=Pendulum-v1", "runner.name=x")


def checks_of(kind: str, *overrides: str, ranks: dict[str, int] = RANKS) -> Iterator[Check]:
    """Returns the checks of an on-policy, off-policy or cloning run."""
    config, schema = {
        "ppo": ("quickstart.yaml", PpoConfig), "sac": ("embodied/pendulum_sac.yaml", SacConfig),
        "bc": ("base/bc.yaml", BcConfig),
    }[kind]  # fmt: skip
    words = [*(PENDULUM if kind == "bc" else ()), *overrides]
    cfg: Any = typed(schema, load_config(CONFIGS / config, words, check=False))  # type: ignore[type-var]
    if kind == "ppo":
        return ppo_checks(cfg, ranks, PYTHONS)
    return off_policy_checks(cfg, ranks, None) if kind == "sac" else bc_checks(cfg, None)


@pytest.fixture(scope="module")
def demos(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Demonstrations of Pendulum-v1, and of a task with other observations."""
    folder = tmp_path_factory.mktemp("demos")
    paths = {"fitting": folder / "fitting.h5", "other": folder / "other.h5"}
    for path, width in zip(paths.values(), (3, 5), strict=True):
        _demonstrations(path, width)
    return paths


def _demonstrations(path: Path, width: int, fps: float | None = None) -> Path:
    """Writes demonstrations with a state of this width, and returns the path."""
    with TrajectoryWriter(path, env_id="Pendulum-v1", facts={"fps": fps}) as writer:
        writer.add({
            "obs": np.zeros((4, width), np.float32), "actions": np.zeros((3, 1), np.float32),
            "rewards": np.zeros(3, np.float32), "terminations": np.array([False, False, True]),
            "truncations": np.zeros(3, bool),
        })  # fmt: skip
    return path


def test_runs_that_are_right_pass_all_checks(demos: dict[str, Path]) -> None:
    evaluated = ("runner.val_check_interval=1", "env.eval.max_episode_steps=5")
    assert run_checks(checks_of("ppo", *evaluated)) == []
    assert run_checks(checks_of("sac", f"algorithm.demo_buffer.load_path={demos['fitting']}")) == []
    assert run_checks(checks_of("bc", f"demos.path={demos['fitting']}")) == []


@pytest.mark.parametrize(
    ("kind", "override", "name", "message"),
    [
        ("ppo", "env.train.env_id=NoSuch-v0", "env.train", "NoSuch"),
        ("ppo", "env.train.simulator_python=/nowhere", "env.train.simulator_python", "No such file"),
        ("ppo", "env.train.reward_model=/nowhere", "env.train.reward_model", "env.train.reward_model"),
        ("ppo", "runner.init_from=/nowhere", "runner.init_from", "runner.init_from"),
        ("ppo", "env.eval.real_time_chunking.inference_delay=1", "env.eval.real_time_chunking", "real_time_chunking"),
        ("sac", "env.train.env_id=NoSuch-v0", "env.train", "NoSuch"),
        ("sac", "env.train.env_id=CartPole-v1", "actor.model and env.train", "Discrete"),
        ("sac", "algorithm.demo_buffer.load_path=/nowhere.h5", "algorithm.demo_buffer.load_path", "nowhere.h5"),
        (
            "sac",
            "algorithm.demo_buffer.load_path={other}",
            "algorithm.demo_buffer.load_path and env.train",
            "next_obs float32[5]",
        ),
        ("bc", "demos.path=/nowhere.h5", "demos.path", "nowhere.h5"),
        ("bc", "demos.path={other}", "demos.path and env.train", "other.h5"),
        ("bc", "algorithm.value_model=/nowhere", "algorithm.value_model", "algorithm.value_model"),
    ],
)
def test_the_check_of_a_wrong_value_refuses_it(
    kind: str, override: str, name: str, message: str, demos: dict[str, Path]
) -> None:
    words = [override.replace("{other}", str(demos["other"]))]
    if kind == "bc" and "demos.path" not in override:
        words.append(f"demos.path={demos['fitting']}")
    for check in checks_of(kind, *words):
        try:
            run_checks([check])
        except ConfigError as error:
            assert check.name == name and message in str(error)
            return
    raise AssertionError("nothing was refused")


def test_slots_and_evaluations_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"actor ranks"):
        run_checks(checks_of("ppo", "env.train.num_envs=8", ranks={**RANKS, "actor": 3}))
    with pytest.raises(ConfigError, match=r"NoSuch"):
        run_checks(checks_of("ppo", "runner.val_check_interval=1", "env.eval.env_id=NoSuch-v0"))
    run_checks(checks_of("ppo", "env.eval.env_id=NoSuch-v0"))
    with pytest.raises(ConfigError, match=r"algorithm.bc_loss is 'mse'"):
        run_checks(checks_of("bc", "algorithm.bc_loss=mse", "env.train.env_id=CartPole-v1"))


def test_an_environment_needs_a_process_where_this_one_cannot_build_it() -> None:
    assert environment_resource(EnvSideConfig(env_id="CartPole-v1", simulators=4)) == FILES
    own_python = EnvSideConfig(env_id="CartPole-v1", simulator_python=sys.executable)
    for resource in (environment_resource(own_python), environment_resource(EnvSideConfig(), sys.executable)):
        assert resource.need is Need.PROCESS and sys.executable in str(resource)
    left_out = run_checks(checks_of("ppo", f"env.train.simulator_python={sys.executable}"), FILES_ALONE)
    assert {check.name for check in left_out} >= {"env.train", "actor.model and env.train"}


@pytest.mark.parametrize("kind", ["robot", "distant_robot"])
@pytest.mark.parametrize("python", [None, sys.executable])
def test_no_plan_starts_a_robot(kind: str, python: str | None) -> None:
    """Not with --processes either, and not in a Python of its own."""
    assert environment_resource(EnvSideConfig(env_type=kind), python).need not in {*FILES_ALONE, Need.PROCESS}


def test_data_that_an_expert_will_record_are_left_out(tmp_path: Path) -> None:
    expert = "rlhpc.embodied.envs.experts:push_cube"
    words = [f"demos.path={tmp_path / 'later.h5'}", f"workflow.demos_expert={expert}"]
    left_out = run_checks(checks_of("bc", *words), FILES_ALONE)
    assert {check.name for check in left_out} == {"demos.path", "demos.path and env.train"}
    assert "the expert of workflow.demos_expert" in str(left_out[0])


def test_demonstrations_of_several_frame_rates_are_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They may be trained on together, as mixtures of robots are."""
    paths = [_demonstrations(tmp_path / f"{fps}.h5", 3, fps) for fps in (10, 20, 20)]
    assert run_checks(checks_of("bc", f"demos.path=[{','.join(map(str, paths[1:]))}]")) == []
    assert capsys.readouterr().err == ""
    assert run_checks(checks_of("bc", f"demos.path=[{','.join(map(str, paths))}]")) == []
    assert f"different frame rates: 10 ({paths[0]}), 20 ({paths[1]});" in capsys.readouterr().err


def test_messages_of_check_policy_name_its_own_options(tmp_path: Path) -> None:
    policy = save_policy(tmp_path / "run", "env.train.env_id=Pendulum-v1")
    paths = [_demonstrations(tmp_path / f"{fps}.h5", width, fps) for width, fps in ((3, 10), (5, 20), (3, 30))]

    def check(*demos: object) -> str:
        with pytest.raises(ConfigError) as caught:
            check_against_demonstrations(policy, [*map(str, demos)], num_episodes=1, num_frames=4)
        return str(caught.value)

    assert check("nowhere.h5").startswith("--demos is 'nowhere.h5'; there is no such file")
    assert f"--demos: {paths[1]}, traj_0 has observations [5]" in check(paths[1])
    assert "the policy has observations [3]" in check(paths[1])
    assert check(paths[0], paths[2]).endswith("has 10; check the policy with each of them")
