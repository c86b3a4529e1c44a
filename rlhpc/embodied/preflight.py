"""Preflight of runs with simulators: checks of environments, policies and demonstrations (`ConfigChecks.preflight`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from rlhpc.checkpoint.start import check_start, find_weights
from rlhpc.config.typed import changed
from rlhpc.embodied.config import BcConfig, EmbodiedConfig, EnvSideConfig, PpoConfig, SacConfig
from rlhpc.embodied.envs.base import VectorEnv
from rlhpc.embodied.envs.registry import ENVS, check_env
from rlhpc.embodied.envs.subprocess_env import require_python
from rlhpc.embodied.evaluation.episodes import real_time
from rlhpc.embodied.models import build_model, check_policy
from rlhpc.embodied.models.registry import check_folder
from rlhpc.embodied.training.blueprint import check_backend, without_weights
from rlhpc.runs.model_names import model_resource
from rlhpc.runs.preflight import FILES, Check, Need, Resource, path_resource, strongest

#: Environment types of local and remote robots.
_ROBOT_ENV_TYPES = ("robot", "distant_robot")
Spaces = tuple[Any, Any]


def environment_resource(section: EnvSideConfig, python: str | None = None) -> Resource:
    """Returns the resource that is needed to build an environment.

    Args:
        section: `env.train` or `env.eval`.
        python: Python of the env group, if it has a separate one.
    """
    if section.env_type.lower() in _ROBOT_ENV_TYPES:
        return Resource(Need.ROBOT, "no plan moves one")
    if interpreter := section.simulator_python or python:
        return Resource(Need.PROCESS, f"a simulator in {interpreter}")
    factory = ENVS.find(section.env_type)
    if isinstance(factory, type) and issubclass(factory, VectorEnv):
        if factory.holds_hardware:
            return Resource(Need.ROBOT, "no plan moves one")
        if factory.uses_accelerator(section):
            return Resource(Need.PROCESS, "a simulator on an accelerator")
    return FILES


def _check_environment(section: EnvSideConfig, python: str | None) -> Spaces:
    if section.simulators and environment_resource(section, python) is FILES:
        section = changed(section, "simulators", 0)  # this process can build it
    return check_env(section, python)


def environment_checks(cfg: PpoConfig | SacConfig, python: str | None, spaces: Callable[[], Spaces]) -> Iterator[Check]:
    """Yields the checks of the training and evaluation environments.

    Args:
        cfg: The configuration.
        python: Python of the env group, if it has a separate one.
        spaces: Builds an environment of `env.train` and returns its spaces.
    """
    train, resource = cfg.env.train, environment_resource(cfg.env.train, python)
    yield from _interpreter_check(train.simulator_python, "env.train")
    if (path := train.reward_model) is not None:
        from rlhpc.embodied.rewards.success_reward import KEY, reward_model

        yield Check(KEY, lambda: find_weights(path, KEY), path_resource(cfg, path))
    yield Check("env.train", spaces, resource)
    if path is not None:
        yield Check(
            f"{KEY} and env.train",
            lambda: reward_model(path, spaces()[0]),
            strongest(resource, path_resource(cfg, path)),
        )
    if cfg.runner.val_check_interval > 0:
        if cfg.env.eval.simulator_python != train.simulator_python:
            yield from _interpreter_check(cfg.env.eval.simulator_python, "env.eval")
        yield Check("env.eval", lambda: _check_environment(cfg.env.eval, None), environment_resource(cfg.env.eval))


def _interpreter_check(python: str | None, section: str) -> Iterator[Check]:
    if python is not None:
        yield Check(f"{section}.simulator_python", lambda: require_python(python))


def policy_checks(
    cfg: EmbodiedConfig, spaces: Callable[[], Spaces], resource: Resource, build: Callable[[Spaces], Any]
) -> Iterator[Check]:
    """Yields the checks of the policy and of its initial weights.

    Args:
        cfg: The configuration.
        spaces: Returns observation and action space.
        resource: Resource that `spaces` needs.
        build: Builds the policy for these spaces without pretrained weights; returns None if only another Python can build
            it.
    """
    init_from = cfg.runner.init_from
    resource = strongest(resource, model_resource(cfg, getattr(cfg.actor.model, "model_path", None)))

    @cache
    def policy() -> Any:
        with without_weights():
            return build(spaces())

    def check_real_time() -> None:
        if policy() is not None:
            real_time(policy(), cfg.env.eval)

    yield Check("actor.model", lambda: check_folder(cfg.actor.model))
    if init_from is not None:
        yield Check("runner.init_from", lambda: find_weights(init_from), path_resource(cfg, init_from))
    yield Check("actor.model and env.train", policy, resource)
    if init_from is not None:
        check_resource = strongest(resource, path_resource(cfg, init_from))
        yield Check("runner.init_from and actor.model", lambda: check_start(cfg, policy()), check_resource)
    yield Check("env.eval.real_time_chunking", check_real_time, resource)


def ppo_checks(cfg: PpoConfig, ranks: Mapping[str, int], pythons: Mapping[str, str | None]) -> Iterator[Check]:
    """Yields the checks of an on-policy run.

    Args:
        cfg: The configuration.
        ranks: Number of ranks by group.
        pythons: Python interpreter by group; None for the current one.
    """
    yield from _slot_checks(cfg, ranks)
    yield Check("actor.training_backend", lambda: check_backend(cfg.actor))
    spaces = cache(lambda: _check_environment(cfg.env.train, pythons["env"]))
    yield from environment_checks(cfg, pythons["env"], spaces)
    builders = [pythons["actor"], pythons["rollout"]]
    resource = environment_resource(cfg.env.train, pythons["env"])
    yield from policy_checks(cfg, spaces, resource, lambda pair: check_policy(cfg.actor, pair, builders))


def _slot_checks(cfg: PpoConfig | SacConfig, ranks: Mapping[str, int]) -> Iterator[Check]:
    from rlhpc.embodied.rollout.slot_map import SlotMap

    yield Check(
        "cluster.component_placement",
        lambda: SlotMap.from_config(cfg, env=ranks["env"], rollout=ranks["rollout"], actor=ranks["actor"]),
    )


def off_policy_checks(cfg: SacConfig, ranks: Mapping[str, int], python: str | None) -> Iterator[Check]:
    """Yields the checks of an off-policy run; `python` is the env group's separate Python, if any."""
    from rlhpc.embodied.algorithms.registry import algorithm_for
    from rlhpc.embodied.data.mixture import fit
    from rlhpc.embodied.workers.off_policy import read_demo_buffer

    yield from _slot_checks(cfg, ranks)
    spaces = cache(lambda: _check_environment(cfg.env.train, python))
    yield from environment_checks(cfg, python, spaces)
    resource = environment_resource(cfg.env.train, python)

    def build(pair: Spaces) -> Any:
        policy = build_model(cfg.actor.model, *pair)
        algorithm_for(cfg.algorithm.name, policy, cfg.actor.model.model_type)
        return policy

    yield from policy_checks(cfg, spaces, resource, build)
    path = cfg.algorithm.demo_buffer.load_path
    if not path:
        return
    check_resource = path_resource(cfg, path, _recorder(cfg))
    demos = cache(lambda: read_demo_buffer(cfg))
    yield Check("algorithm.demo_buffer.load_path", demos, check_resource)
    yield Check(
        "algorithm.demo_buffer.load_path and env.train",
        lambda: fit(demos(), *spaces(), cfg.actor.model.num_action_chunks),
        strongest(check_resource, resource),
    )


def _recorder(cfg: SacConfig | BcConfig) -> str:
    """Returns a text about the expert that records demonstrations before training; "" if no expert is configured."""
    return "the expert of workflow.demos_expert" if cfg.workflow.demos_expert is not None else ""


def bc_checks(cfg: BcConfig, python: str | None) -> Iterator[Check]:
    """Yields the checks of behaviour cloning; `python` is the actor group's separate Python, if any."""
    from rlhpc.embodied.data.demonstrations import check_fit, read_demos
    from rlhpc.embodied.models.advantage_conditioned import KEY, load_value_model
    from rlhpc.embodied.workers.bc_actor import check_actions, environment_of, skips, spaces_of

    train = environment_of(cfg)
    resource = environment_resource(train)
    spaces = cache(lambda: spaces_of(cfg))
    yield from _interpreter_check(train.simulator_python, "env.train")
    yield Check("env.train", spaces, resource)
    yield Check("actor.training_backend", lambda: check_backend(cfg.actor))
    yield from policy_checks(cfg, spaces, resource, lambda pair: check_policy(cfg.actor, pair, [python]))
    yield Check("algorithm.bc_loss", lambda: check_actions(cfg, spaces()[1]), resource)
    if path := cfg.algorithm.value_model:
        check_resource = path_resource(cfg, path)
        yield Check(KEY, lambda: find_weights(path, KEY), check_resource)
        yield Check(
            f"{KEY} and env.train", lambda: load_value_model(cfg, spaces()[0]), strongest(check_resource, resource)
        )
    paths: Sequence[str] = [cfg.demos.path] if isinstance(cfg.demos.path, str) else list(cfg.demos.path or ())
    check_resource = strongest(*(path_resource(cfg, demo_path, _recorder(cfg)) for demo_path in paths))
    first_trajectory = cache(lambda: next(iter(read_demos(cfg, [] if skips(cfg) else None))))
    yield Check("demos.path", first_trajectory, check_resource)
    yield Check(
        "demos.path and env.train",
        lambda: check_fit(first_trajectory(), *spaces()),
        strongest(check_resource, resource),
    )
