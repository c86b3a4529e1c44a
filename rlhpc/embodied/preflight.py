"""Preflight of runs with simulators: checks of environments, policies and demonstrations (`ConfigChecks.preflight`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhpc.checkpoint.start import check_start, find_weights
from rlhpc.config.typed import mapping, select, with_value
from rlhpc.embodied.config import BcConfig, EmbodiedConfig, EnvSideConfig, PpoConfig, SacConfig
from rlhpc.embodied.envs.base import VectorEnv
from rlhpc.embodied.envs.registry import ENVS, check_env, environment_of
from rlhpc.embodied.envs.subprocess_env import require_python
from rlhpc.embodied.evaluation.episodes import real_time
from rlhpc.embodied.models import build_model, check_policy
from rlhpc.embodied.models.registry import check_folder, policy_section
from rlhpc.embodied.training import check_backend, without_weights
from rlhpc.runs.preflight import FILES, Check, Need, Resource, merge_resources, model_resource, path_resource
from rlhpc.runs.run_folder import note
from rlhpc.runtime.trust import Trust

if TYPE_CHECKING:
    from rlhpc.embodied.evaluation.open_loop import PolicyCheck

#: Environment types of local and remote robots.
_ROBOT_ENV_TYPES = ("robot", "distant_robot")
Spaces = tuple[Any, Any]


def environment_resource(section: EnvSideConfig, python: str | None = None) -> Resource:
    """Returns the resource that is needed to build an environment.

    Args:
        section: `env.train` or `env.eval`.
        python: Python of the env group, if it has a separate one.
    """
    if section.env_type in _ROBOT_ENV_TYPES:
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
        section = with_value(section, "simulators", 0)  # this process can build it
    return check_env(section, python)


def environment_checks(
    cfg: PpoConfig | SacConfig,
    python: str | None,
    spaces: Callable[[], Spaces],
    classifier_key: str = "env.train.reward_model",
) -> Iterator[Check]:
    """Yields the checks of the training and evaluation environments.

    Args:
        cfg: The configuration.
        python: Python of the env group, if it has a separate one.
        spaces: Builds an environment of `env.train` and returns its spaces.
        classifier_key: Key that names a success classifier, if its value is not null.
    """
    train_env, resource = cfg.env.train, environment_resource(cfg.env.train, python)
    yield from _check_interpreter(train_env.simulator_python, "env.train")
    key, path = classifier_key, select(cfg, classifier_key)
    if path is not None:
        yield Check(key, lambda: find_weights(path, key), path_resource(cfg, path))
    yield Check("env.train", spaces, resource)
    if path is not None:
        from rlhpc.embodied.rewards import reward_model

        yield Check(
            f"{key} and env.train",
            lambda: reward_model(path, spaces()[0], key),
            merge_resources(resource, path_resource(cfg, path)),
        )
    if cfg.runner.val_check_interval > 0:
        if cfg.env.eval.simulator_python != train_env.simulator_python:
            yield from _check_interpreter(cfg.env.eval.simulator_python, "env.eval")
        yield Check("env.eval", lambda: _check_environment(cfg.env.eval, None), environment_resource(cfg.env.eval))


def _check_interpreter(python: str | None, section: str) -> Iterator[Check]:
    if python is not None:
        yield Check(f"{section}.simulator_python", lambda: require_python(python))


def policy_checks(
    cfg: EmbodiedConfig, spaces: Callable[[], Spaces], resource: Resource, build_policy: Callable[[Spaces], Any]
) -> Iterator[Check]:
    """Yields the checks of the policy and of its initial weights.

    Args:
        cfg: The configuration.
        spaces: Returns observation and action space.
        resource: Resource that `spaces` needs.
        build_policy: Builds the policy for these spaces without pretrained weights; returns None if only another Python
            can build it.
    """
    init_from = cfg.runner.init_from
    resource = merge_resources(resource, model_resource(cfg, getattr(cfg.actor.model, "model_path", None)))

    @cache
    def make_policy() -> Any:
        with without_weights():
            return build_policy(spaces())

    def check_real_time() -> None:
        if make_policy() is not None:
            real_time(make_policy(), cfg.env.eval)

    yield Check("actor.model", lambda: check_folder(cfg.actor.model))
    yield from _check_adapter_folder(cfg)
    if init_from is not None:
        yield Check("runner.init_from", lambda: find_weights(init_from), path_resource(cfg, init_from))
    yield Check("actor.model and env.train", make_policy, resource)
    if init_from is not None:
        check_resource = merge_resources(resource, path_resource(cfg, init_from))
        yield Check("runner.init_from and actor.model", lambda: check_start(cfg, make_policy()), check_resource)
    yield Check("env.eval.real_time_chunking", check_real_time, resource)


def _check_adapter_folder(cfg: EmbodiedConfig) -> Iterator[Check]:
    lora = getattr(cfg.actor, "lora", None)  # off-policy runs train all weights
    if lora is None or lora.path is None:
        return

    def check_adapter() -> None:
        from rlhpc.training.lora import read_adapter

        read_adapter(lora)

    yield Check("actor.lora.path", check_adapter, path_resource(cfg, str(lora.path)))


def ppo_checks(cfg: PpoConfig, ranks: Mapping[str, int], pythons: Mapping[str, str | None]) -> Iterator[Check]:
    """Yields the checks of an on-policy run.

    Args:
        cfg: The configuration.
        ranks: Number of ranks by group.
        pythons: Python interpreter by group; None for the current one.
    """
    yield from _check_slots(cfg, ranks)
    yield Check("actor.training_backend", lambda: check_backend(cfg.actor))
    spaces = cache(lambda: _check_environment(cfg.env.train, pythons["env"]))
    yield from environment_checks(cfg, pythons["env"], spaces)
    builders = [pythons["actor"], pythons["rollout"]]
    resource = environment_resource(cfg.env.train, pythons["env"])
    yield from policy_checks(cfg, spaces, resource, lambda pair: check_policy(cfg.actor, pair, builders))


def _check_slots(cfg: PpoConfig | SacConfig, ranks: Mapping[str, int]) -> Iterator[Check]:
    from rlhpc.embodied.rollout.slot_map import SlotMap

    actor = ranks["actor"]
    env, rollout = ranks.get("env", actor), ranks.get("rollout", actor)  # actor ranks may simulate and act themselves
    yield Check(
        "cluster.component_placement",
        lambda: SlotMap.from_config(cfg, num_env_ranks=env, num_rollout_ranks=rollout, num_actor_ranks=actor),
    )


def off_policy_checks(cfg: SacConfig, ranks: Mapping[str, int], python: str | None) -> Iterator[Check]:
    """Yields the checks of an off-policy run; `python` is the env group's separate Python, if any."""
    from rlhpc.embodied.algorithms.registry import algorithm_for
    from rlhpc.embodied.data.frame_store import image_layouts
    from rlhpc.embodied.data.mixture import fit
    from rlhpc.embodied.workers.off_policy import read_demo_buffer

    yield from _check_slots(cfg, ranks)
    spaces = cache(lambda: _check_environment(cfg.env.train, python))
    keys = ["algorithm.success_classifier.init_from"] if cfg.algorithm.success_classifier.train else []
    yield from environment_checks(cfg, python, spaces, *keys)
    resource = environment_resource(cfg.env.train, python)

    def build(pair: Spaces) -> Any:
        policy = build_model(cfg.actor.model, *pair)
        algorithm_for(cfg.algorithm.name, policy, cfg.actor.model.model_type)
        return policy

    yield from policy_checks(cfg, spaces, resource, build)
    yield Check(
        "algorithm.replay_buffer.frame_stack",
        lambda: image_layouts(spaces()[0], cfg.algorithm.replay_buffer.frame_stack),
        resource,
    )
    path = cfg.algorithm.demo_buffer.load_path
    if not path:
        return
    check_resource = path_resource(cfg, path, _describe_recorder(cfg))
    demos = cache(lambda: read_demo_buffer(cfg))
    yield Check("algorithm.demo_buffer.load_path", demos, check_resource)
    yield Check(
        "algorithm.demo_buffer.load_path and env.train",
        lambda: fit(demos(), *spaces(), cfg.actor.model.num_action_chunks, has_positions=cfg.algorithm.n_step > 1),
        merge_resources(check_resource, resource),
    )


def _describe_recorder(cfg: SacConfig | BcConfig) -> str:
    """Returns a text about the expert that records demonstrations before training; "" if no expert is configured."""
    return "the expert of workflow.demos_expert" if cfg.workflow.demos_expert is not None else ""


def bc_checks(cfg: BcConfig, python: str | None) -> Iterator[Check]:
    """Yields the checks of behaviour cloning; `python` is the actor group's separate Python, if any."""
    from rlhpc.embodied.data.datasets import frame_rates
    from rlhpc.embodied.data.demonstrations import check_fit, first_demo
    from rlhpc.embodied.models.advantage_conditioned import KEY, load_value_model
    from rlhpc.embodied.workers.bc_actor import check_actions, skips, spaces_of

    train_env = environment_of(cfg)
    resource = environment_resource(train_env)
    spaces = cache(lambda: spaces_of(cfg))
    yield from _check_interpreter(train_env.simulator_python, "env.train")
    yield Check("env.train", spaces, resource)
    yield Check("actor.training_backend", lambda: check_backend(cfg.actor))
    yield from policy_checks(cfg, spaces, resource, lambda pair: check_policy(cfg.actor, pair, [python]))
    yield Check("algorithm.bc_loss", lambda: check_actions(cfg, spaces()[1]), resource)
    if path := cfg.algorithm.value_model:
        check_resource = path_resource(cfg, path)
        yield Check(KEY, lambda: find_weights(path, KEY), check_resource)
        yield Check(
            f"{KEY} and env.train",
            lambda: load_value_model(cfg, spaces()[0]),
            merge_resources(check_resource, resource),
        )
    paths: Sequence[str] = [cfg.demos.path] if isinstance(cfg.demos.path, str) else list(cfg.demos.path or ())
    check_resource = merge_resources(*(path_resource(cfg, demo_path, _describe_recorder(cfg)) for demo_path in paths))

    @cache
    def first_trajectory() -> Any:
        trajectory = first_demo(cfg, [] if skips(cfg) else None)
        if len(rates := frame_rates(paths, "demos.path")) > 1:
            rates_text = ", ".join(f"{fps:g} ({source})" for fps, source in rates.items())
            note(
                f"demos.path: the datasets have different frame rates: {rates_text}; a step is not as long in all of them"
            )
        return trajectory

    yield Check("demos.path", first_trajectory, check_resource)
    yield Check(
        "demos.path and env.train",
        lambda: check_fit(first_trajectory(), *spaces()),
        merge_resources(check_resource, resource),
    )


def check_against_demonstrations(
    source_folder: Path,
    demos: Sequence[str],
    *,
    num_episodes: int,
    num_frames: int,
    control_hz: float | None = None,
    cfg: EmbodiedConfig | None = None,
    trust: Trust | None = None,
) -> PolicyCheck:
    """Checks the policy of a folder, or of a configuration with its pretrained weights, against files of demonstrations.

    Args:
        source_folder: Checkpoint, export or run folder; with `cfg` the configuration's file, for messages.
        demos: Files or folders of demonstrations.
        num_episodes: Maximum number of episodes to read.
        num_frames, control_hz: See `rlhpc.embodied.evaluation.open_loop.check_open_loop`.
        cfg: Configuration whose `actor.model` is checked as training would start from it.
        trust: Code that the folder may import.

    Raises:
        ConfigError, CheckpointError: The policy or the demonstrations cannot be read, or do not fit each other.
    """
    from rlhpc.embodied.data.datasets import merge_facts, source_facts
    from rlhpc.embodied.data.trajectories import read_trajectories
    from rlhpc.embodied.evaluation.evaluate import load_actor
    from rlhpc.embodied.evaluation.open_loop import check_open_loop
    from rlhpc.embodied.workers.bc_actor import spaces_of
    from rlhpc.runs.device import evaluation_device, place_policy

    fps = merge_facts(source_facts(demos, "--demos"), fps_hint="check the policy with each of them").fps
    trajectories = read_trajectories(list(demos), limit=num_episodes, key="--demos")
    device = evaluation_device(cfg)
    if cfg is None:
        policy = load_actor(str(source_folder), "PATH", trust)
    else:
        # runs of cloning describe their environment in another way, and off-policy runs have no adapters
        sections: Any = cfg
        spaces = spaces_of(sections) if "demos" in mapping(cfg) else check_env(sections.env.train)
        has_adapters = "lora" in mapping(sections.actor)
        model = policy_section(sections.actor, device) if has_adapters else sections.actor.model
        policy = build_model(model, *spaces, seed=cfg.runner.seed)
    policy = place_policy(policy, device).eval()
    return check_open_loop(policy, trajectories, num_frames=num_frames, fps=fps, control_hz=control_hz)
