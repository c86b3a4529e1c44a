"""EnvWorker: the simulators of a run that learns from rollouts; and whether simulators can be built."""

from __future__ import annotations

from typing import Any

from rlhpc.config.typed import changed
from rlhpc.embodied.config import EnvSideConfig, PpoConfig
from rlhpc.embodied.envs.base import VectorEnv
from rlhpc.embodied.envs.registry import ENVS, make_env
from rlhpc.embodied.roles.outcomes import Shape, ppo_shape
from rlhpc.embodied.roles.replica import JoiningWorker


class EnvWorker(JoiningWorker[PpoConfig]):
    """Owns one vector environment per pipeline stage, with the slots that the `SlotMap` gives it."""

    acts = "rlhpc.embodied.roles.rollout:MultiStepRolloutWorker"

    def shape(self) -> Shape:
        """Of the outcomes."""
        return ppo_shape(self.cfg)


def check_env(cfg: EnvSideConfig, python: str | None = None) -> tuple[Any, Any]:
    """Builds one environment and closes it again, so that an unknown id or bad arguments show before a run starts.

    One on an accelerator is built by a process that ends: in this one, what it holds there would stay for the whole run.

    Args:
        cfg: Section `env.train` or `env.eval`.
        python: The env group's own Python, which can build what this one cannot.

    Returns:
        Observation and action space of a slot.

    Raises:
        ConfigError: It cannot be built.
    """
    if python is not None and cfg.simulator_python is None:
        cfg = changed(cfg, "simulator_python", python)
    factory = ENVS.find(cfg.env_type)
    if isinstance(factory, type) and issubclass(factory, VectorEnv) and factory.uses_accelerator(cfg):
        cfg = changed(cfg, "simulators", 1)
    env = make_env(cfg, cfg.group_size, slot_offset=0, seed=0, stage="train")
    try:
        return env.observation_space, env.action_space
    finally:
        env.close()
