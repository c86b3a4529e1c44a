"""Which kinds of run may have their weights sharded."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhpc.runs.configuration import load_config
from rlhpc.runtime.errors import ConfigError

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
PPO, SAC, BC = (
    CONFIGS / name for name in ("quickstart.yaml", "embodied/pendulum_sac.yaml", "embodied/push_cube_vla_bc.yaml")
)


@pytest.mark.parametrize("config", [PPO, BC])
@pytest.mark.parametrize("backend", ["local", "fsdp", "deepspeed", "mine:Backend"])
def test_ppo_and_cloning_may(config: Path, backend: str) -> None:
    load_config(config, [f"actor.training_backend={backend}"])


@pytest.mark.parametrize(
    ("config", "overrides", "said"),
    [
        (
            SAC,
            ["actor.training_backend=fsdp"],
            "actor.training_backend is for task types that this one .off_policy. is not",
        ),
        (PPO, ["actor.training_backend=deepspeed", "algorithm.target_kl=0.1"], "algorithm.target_kl"),
        (BC, ["actor.training_backend=locl"], "did you mean 'local'"),
        (
            PPO,
            ["actor.offload_in_rollout=true"],
            "actor.offload_in_rollout is for a task type that this one",
        ),
    ],
)
def test_what_cannot_be_is_refused(config: Path, overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config(config, overrides)
