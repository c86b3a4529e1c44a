"""Registry of environments by name: built in, registered, an entry point of group `rlhpc.envs`, or `module:Class`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from omegaconf import OmegaConf

from rlhpc.config.typed import plain, typed, with_value
from rlhpc.embodied.config import BcConfig, EnvSideConfig
from rlhpc.embodied.envs.base import VectorEnv
from rlhpc.runtime.plugins import Registry

#: Classes or functions `(cfg, num_envs, slot_offset, seed) -> VectorEnv`, by name.
ENVS: Registry[Callable[..., VectorEnv]] = Registry(
    "environment type", "env.env_type", "rlhpc.envs",
    {
        "distant_robot": "rlhpc.embodied.robots.remote_env:RemoteRobotVectorEnv",
        "gymnasium": "rlhpc.embodied.envs.gymnasium_env:GymnasiumVectorEnv",
        "libero": "rlhpc.embodied.envs.libero:LiberoVectorEnv",
        "maniskill": "rlhpc.embodied.envs.maniskill:ManiSkillVectorEnv",
        "rlinf": "rlhpc.embodied.envs.rlinf_env:RlinfVectorEnv",
        "robot": "rlhpc.embodied.robots.robot_env:RobotVectorEnv",
        "metaworld": "rlhpc.embodied.envs.metaworld:MetaWorldVectorEnv",
        "tensors": "rlhpc.embodied.envs.tensor_env:TensorVectorEnv",
    },
)  # fmt: skip
register_env = ENVS.register
#: Dataclasses of the options in `env.train.kwargs`, by environment type. Other types check their options when they are built.
ENV_OPTIONS = {
    "libero": "rlhpc.embodied.envs.libero:LiberoOptions",
    "metaworld": "rlhpc.embodied.envs.metaworld:MetaWorldOptions",
    "rlinf": "rlhpc.embodied.envs.rlinf_env:RlinfOptions",
}


def make_env(cfg: EnvSideConfig, num_envs: int, slot_offset: int = 0, seed: int = 0, stage: str = "train") -> VectorEnv:
    """Builds the vector environment of a section `env.train` or `env.eval`.

    Args:
        cfg: Section `env.train` or `env.eval`.
        num_envs: Number of slots to build (a rank's share of `cfg.num_envs`).
        slot_offset: Global number of the first slot: slot i is seeded by (seed, i), on any rank.
        seed: Seed of the run.
        stage: "train" or "eval".

    Raises:
        ConfigError: The environment cannot be built.
    """
    from rlhpc.embodied.envs.subprocess_env import ProcessVectorEnv, process_count

    factory = ENVS.find(cfg.env_type)
    env_arguments: dict[str, Any] = {"num_envs": num_envs, "slot_offset": slot_offset, "seed": seed}
    if getattr(factory, "takes_stage", False):
        env_arguments["stage"] = stage
    if processes := process_count(cfg, factory, num_envs):
        return ProcessVectorEnv(factory, cfg, **env_arguments, num_processes=processes)
    return factory(cfg, **env_arguments)


def environment_of(cfg: BcConfig) -> EnvSideConfig:
    """Returns the configuration of the environment that a cloning run's demonstrations are of, from `env.train`."""
    task = cfg.env.train
    env_cfg = EnvSideConfig(
        env_type=task.env_type, env_id=task.env_id, max_episode_steps=task.max_episode_steps, kwargs=plain(task.kwargs),
        wrappers=plain(task.wrappers), ignore_terminations=task.ignore_terminations, simulator_python=task.simulator_python,
    )  # fmt: skip
    return typed(EnvSideConfig, OmegaConf.structured(env_cfg))


def check_env(cfg: EnvSideConfig, python: str | None = None) -> tuple[Any, Any]:
    """Builds an environment and closes it again, so that an unknown id or wrong arguments are reported before a run
    starts.

    A separate process builds an environment on an accelerator, because its memory would stay allocated in this process.

    Args:
        cfg: Section `env.train` or `env.eval`.
        python: Python interpreter of the env group, which may have packages that this interpreter lacks.

    Returns:
        Observation and action space of a slot.

    Raises:
        ConfigError: The environment cannot be built.
    """
    if python is not None and cfg.simulator_python is None:
        cfg = with_value(cfg, "simulator_python", python)
    factory = ENVS.find(cfg.env_type)
    if isinstance(factory, type) and issubclass(factory, VectorEnv) and factory.uses_accelerator(cfg):
        cfg = with_value(cfg, "simulators", 1)
    env = make_env(cfg, cfg.group_size, slot_offset=0, seed=0, stage="train")
    try:
        return env.observation_space, env.action_space
    finally:
        env.close()
