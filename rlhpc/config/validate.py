"""Checks that no type can express: ranges, divisibility, names that must exist. Nothing here writes."""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf

from rlhpc.config import validate_language as language
from rlhpc.config import validate_off_policy as off_policy
from rlhpc.config import validate_policy as policy
from rlhpc.config.ranges import LARGEST, check_ranges
from rlhpc.config.rules import Fail, check_choice, check_name
from rlhpc.runtime.errors import ConfigError, PlacementError
from rlhpc.runtime.shown import shown
from rlhpc.runtime.writable import unwritable

#: Components of each kind of run.
COMPONENTS = {
    "embodied": ("actor", "rollout", "env"),
    "off_policy": ("actor", "rollout", "env"),
    "bc": ("actor",),
    "reasoning": ("actor", "rollout"),
    "sft": ("actor",),
}
TASKS = tuple(COMPONENTS)
#: Kinds of run with simulators and a policy network of their own.
EMBODIED = ("embodied", "off_policy", "bc")
_CHOICES: dict[str, tuple[str, ...]] = {
    "runner.task_type": TASKS,
    "runner.on_nonfinite": ("stop", "skip"),
    "algorithm.logprob_type": ("token_level", "action_level", "chunk_level"),
    "algorithm.reward_type": ("action_level", "chunk_level"),
    "algorithm.bc_loss": ("nll", "mse"),
    "algorithm.normalize_advantages": ("auto", "minibatch", "batch", "none"),
    "algorithm.loss_agg": (
        "token-mean",
        "token-sum",
        "seq-mean-token-mean",
        "seq-mean-token-sum",
        "seq-mean-token-sum-norm",
    ),
    "rollout.weight_sync": ("auto", "broadcast"),
    "rollout.weight_delta": ("off", "frozen", "elements"),
    "actor.optim.lr_scheduler": ("constant", "linear", "cosine"),
    "actor.optim.name": ("adam", "adamw"),
    "actor.model.activation": ("tanh", "relu", "elu", "silu", "gelu"),
}
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
_NAME_RULE = "use letters, digits, '.', '_' and '-' (at most 100), starting with a letter or digit"
_WORD = (r"[^\s'\"\\`$;]+", "it goes into a job's directives: use one word without quotes")
_DIRECTIVES = {
    **dict.fromkeys(("partition", "account", "qos", "constraint", "gres"), _WORD),
    "mem": (r"\d+[KMGT]?B?", "write it as Slurm does: 64G, 512M or 0 for all"),
    "time": (r"\d+|\d+:\d+|\d+:\d+:\d+|\d+-\d+(:\d+){0,2}", "write it as Slurm does: 02:00:00, 1-12:00:00, or minutes"),
}
#: Names that come with the package; others are looked up where torch may be imported, before a run starts.
_ESTIMATORS = ("gae", "grpo", "dr_grpo", "rloo", "reinforce++", "reinforce++_baseline", "raw")
_LOSSES = ("ppo", "actor", "actor_critic", "gspo", "cispo", "decoupled_ppo")


def validate(
    cfg: Any, source: str = "configuration", sources: Mapping[str, str] | None = None, *, training: bool = True
) -> None:
    """Checks a loaded configuration.

    Args:
        cfg: The configuration.
        source: Where it comes from, for messages.
        sources: Key → the file or override that set it, where that is known.
        training: Also what only training needs: batches, placement, run folder.

    Raises:
        ConfigError: The first rule that is broken: key, value, what is allowed.
    """

    def fail(key: str, rule: str) -> ConfigError:
        return ConfigError(f"{(sources or {}).get(key, source)}: {key} is {shown(OmegaConf.select(cfg, key))}; {rule}")

    _numbers(cfg, fail)
    for key, allowed in _CHOICES.items():
        check_choice(key, str(OmegaConf.select(cfg, key)), allowed, fail)
    if training:
        _loggers(cfg)
    for suite in cfg.workflow.eval_suites:
        if not re.fullmatch(_NAME, str(suite)):
            raise fail("workflow.eval_suites", f"a suite's name becomes a file's: {_NAME_RULE}")
    _node_groups(cfg, fail)
    for key in ("cluster", "workflow.eval_job", "workflow.convert_job"):
        _directives(OmegaConf.select(cfg, key), key, fail)
    _lookup(cfg, fail)
    if str(cfg.actor.model.model_type).lower() not in policy.MODELS:
        from rlhpc.embodied.models.registry import find_model

        find_model(str(cfg.actor.model.model_type))
    task = str(cfg.runner.task_type).lower()
    if task in EMBODIED:
        _embodied(cfg, fail)
        policy.validate(cfg, fail)
    else:
        language.validate(cfg, fail, training=training)
    if task == "off_policy":
        off_policy.validate(cfg, fail)
    if training:
        if task == "embodied":
            _divisibility(cfg, fail)
        elif task == "off_policy":
            _slots(cfg, fail)
        _runner(cfg, fail)
        _placement(cfg)


def _loggers(cfg: Any) -> None:
    """Their names, packages and arguments."""
    from rlhpc.metrics.loggers import check_loggers

    kwargs = OmegaConf.to_container(cfg.runner.logger.kwargs, resolve=True)
    check_loggers([str(name) for name in cfg.runner.logger.logger_backends], cast(dict[str, Any], kwargs))


def _numbers(cfg: Any, fail: Fail) -> None:
    for key, found in _leaves(OmegaConf.to_container(cfg, resolve=True)):
        if isinstance(found, float) and not math.isfinite(found):
            raise fail(key, "it must be a finite number")
        if isinstance(found, int) and abs(found) > LARGEST:
            raise fail(key, f"it must not be greater than {LARGEST}")
    check_ranges(cfg, fail)


def _leaves(tree: Any, prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Scalars by dotted key; the elements of a list under the list's key."""
    if isinstance(tree, dict):
        for key, below in tree.items():
            yield from _leaves(below, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(tree, list):
        for below in tree:
            yield from _leaves(below, prefix)
    else:
        yield prefix, tree


def _lookup(cfg: Any, fail: Fail) -> None:
    """Registered names: known ones pass without an import; for others the registries are asked."""
    if str(cfg.runner.task_type).lower() in ("off_policy", "bc"):  # they use neither
        return
    if str(cfg.algorithm.adv_type).lower() not in _ESTIMATORS or str(cfg.algorithm.loss_type).lower() not in _LOSSES:
        from rlhpc import algorithms  # noqa: F401  (fills the registries)
        from rlhpc.algorithms.registry import ADVANTAGES, POLICY_LOSSES

        ADVANTAGES.get(str(cfg.algorithm.adv_type))
        POLICY_LOSSES.get(str(cfg.algorithm.loss_type))


def _embodied(cfg: Any, fail: Fail) -> None:
    if cfg.workflow.demos_expert is not None:
        off_policy = str(cfg.runner.task_type).lower() == "off_policy"
        key = "algorithm.demo_buffer.load_path" if off_policy else "demos.path"
        path = OmegaConf.select(cfg, key)
        if not isinstance(path, str) or not path.endswith(".h5") or "*" in path:
            raise fail(key, "workflow.demos_expert records the demonstrations there: name one .h5 file")
    if str(cfg.runner.task_type).lower() == "bc" and not cfg.demos.path:
        raise fail(
            "demos.path", "name trajectories: a .h5 file, a pattern, a folder of them, or a LeRobot dataset's folder"
        )
    check_choice("actor.training_backend", str(cfg.actor.training_backend), ("local",), fail)
    if str(cfg.actor.model.model_type).lower() in policy.MODELS:
        policy.check_options(cfg.actor.model, fail)
    for suite in cfg.workflow.eval_suites:
        check_name("workflow.eval_suites", str(suite), ("default", *map(str, cfg.workflow.suites)), fail)
    for name, side in (("train", cfg.env.train), ("eval", cfg.env.eval)):
        if side.kwargs.get("render_mode") == "human":
            raise fail(
                f"env.{name}.kwargs.render_mode",
                "it opens a window for each slot and waits for it at every step; leave it out: films are made by "
                "env.eval.video_episodes",
            )
        if str(side.env_type).lower() == "gymnasium":
            _gymnasium_id(f"env.{name}.env_id", str(side.env_id), fail)
        else:
            from rlhpc.embodied.envs.registry import find_env

            find_env(str(side.env_type))


def _gymnasium_id(key: str, env_id: str, fail: Fail) -> None:
    """A bare id that gymnasium does not know is refused here; `module:Id` is imported when the environment is built."""
    if ":" in env_id:
        return
    import gymnasium

    if env_id not in gymnasium.registry:
        near = difflib.get_close_matches(env_id, list(gymnasium.registry), 3, 0.5)
        hint = f"did you mean {', '.join(near)}?" if near else "see gymnasium.registry for all ids, or write module:Id"
        raise fail(key, f"gymnasium does not know it; {hint}")


def _slots(cfg: Any, fail: Fail) -> None:
    envs, stages = cfg.env.train.num_envs, cfg.rollout.pipeline_stage_num
    if envs % stages:
        raise fail("env.train.num_envs", f"it must divide by rollout.pipeline_stage_num ({stages})")
    for side in ("train", "eval"):
        section = cfg.env[side]
        if section.num_envs % section.group_size:
            raise fail(f"env.{side}.num_envs", f"it must divide by env.{side}.group_size ({section.group_size})")


def _divisibility(cfg: Any, fail: Fail) -> None:
    _slots(cfg, fail)
    envs = cfg.env.train.num_envs
    batch, total = cfg.actor.global_batch_size, envs * cfg.algorithm.rollout_steps
    if total % batch:
        raise fail(
            "actor.global_batch_size",
            f"a rollout has env.train.num_envs({envs}) * algorithm.rollout_steps({cfg.algorithm.rollout_steps}) = "
            f"{total} transitions, which must divide by it",
        )
    micro = cfg.actor.micro_batch_size
    if micro is not None and (micro > batch or batch % micro):
        raise fail("actor.micro_batch_size", f"it must divide actor.global_batch_size ({batch})")


def _runner(cfg: Any, fail: Fail) -> None:
    name = str(cfg.runner.name)
    if not re.fullmatch(_NAME, name):
        raise fail("runner.name", _NAME_RULE)
    steps = cfg.runner.max_steps if cfg.runner.max_steps != -1 else cfg.runner.max_epochs
    if steps == -1:
        raise fail("runner.max_steps", "one of runner.max_steps and runner.max_epochs must be at least 1")
    if cfg.runner.segments > steps:
        raise fail("runner.segments", f"there cannot be more segments than training steps ({steps})")
    resume = cfg.runner.resume_dir
    if resume not in (None, "auto") and not Path(str(resume)).expanduser().exists():
        own = Path(str(cfg.runner.run_dir)) / name / "checkpoints" / str(resume)
        if not own.exists():
            raise fail(
                "runner.resume_dir", "there is no such checkpoint; allowed: null, auto, or a global_step_<N> folder"
            )
    _writable(Path(str(cfg.runner.run_dir)).expanduser().absolute() / name, fail)


def _writable(folder: Path, fail: Fail) -> None:
    """Whether the run folder could be made and holds a little more; looks only."""
    if reason := unwritable(folder):
        raise fail("runner.run_dir", f"{reason}; choose another with runner.run_dir=…")


def _node_groups(cfg: Any, fail: Fail) -> None:
    """What goes into a job's directives: walltimes, and words that stay on their line."""
    for index, group in enumerate(cfg.cluster.node_groups):
        at = f"cluster.node_groups[{index}]"
        _directives(group, at, fail)


def _directives(section: Any, at: str, fail: Fail) -> None:
    for name, rule in _DIRECTIVES.items():
        if section[name] is not None and not re.fullmatch(rule[0], str(section[name])):
            raise fail(f"{at}.{name}", rule[1])


def _placement(cfg: Any) -> None:
    """The placement on the machines that the configuration asks for: all rules, before anything starts."""
    from rlhpc.runtime.allocation import in_slurm_job
    from rlhpc.runtime.cluster import Cluster
    from rlhpc.runtime.placement import HybridComponentPlacement

    cluster = Cluster.planned(cfg.cluster)
    try:
        placement = HybridComponentPlacement(cfg, cluster)
    except PlacementError as error:
        if not in_slurm_job(os.environ):
            raise
        try:  # accelerators that the configuration leaves open are those of the job
            cluster = Cluster(cfg.cluster)
            placement = HybridComponentPlacement(cfg, cluster)
        except (ConfigError, PlacementError):
            raise error from None
    task = str(cfg.runner.task_type).lower()
    wanted = list(COMPONENTS[task])
    for component in placement.components:
        if component not in wanted:
            near = difflib.get_close_matches(component, wanted, 1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ConfigError(
                f"cluster.component_placement.{component}: no such component; {hint}components: {', '.join(wanted)}"
            )
    sizes = {name: placement.get_world_size(name) for name in wanted}
    if task not in EMBODIED:
        language.check_sizes(cfg, sizes)
        placed = {name: placement.get_strategy(name).place(cluster) for name in wanted}
        language.check_accelerators(cfg, {name: len(ranks[0].accelerators) for name, ranks in placed.items()})
    if "env" not in wanted:
        return
    slots = cfg.env.train.num_envs // cfg.rollout.pipeline_stage_num
    for name, size in sizes.items():
        if slots % size:
            raise ConfigError(
                f"cluster.component_placement.{name} gives {size} processes; they must divide the "
                f"env.train.num_envs({cfg.env.train.num_envs}) / rollout.pipeline_stage_num"
                f"({cfg.rollout.pipeline_stage_num}) = {slots} slots of a stage"
            )
