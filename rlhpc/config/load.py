"""Configuration loading: from files and overrides to one read-only, typed configuration. Every mistake is reported in one
message.
"""

from __future__ import annotations

import copy
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlhpc.config.constraints import null_numbers
from rlhpc.config.files import ConfigSource, read_files, source_name
from rlhpc.config.merge import ConfigLayers, parse_override, reason
from rlhpc.config.schema import ConfigKey, Schema, SchemaKeys, typed_value
from rlhpc.config.sections import RunConfig
from rlhpc.config.sites import apply_site, find_site
from rlhpc.config.sweep import SWEEP, is_about_sweep, read_section
from rlhpc.config.yaml_files import dump_yaml
from rlhpc.runtime import env_references
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.text import short_repr
from rlhpc.runtime.trust import Trust

#: Sections of a file in which an earlier version saved a run's configuration, with the keys of all task types.
_ONCE_SAVED = frozenset(
    ("cluster", "runner", "algorithm", "env", "rollout", "actor", "data", "demos", "reward", "workflow")
)
#: Keys of section `runner` that every saved configuration has, and hardly one that was written by hand.
ALWAYS_SAVED = frozenset(
    ("run_dir", "max_epochs", "resume_dir", "save_reserve_s", "rendezvous_timeout_s", "step_timeout_s")
)
#: Keys that had no effect in some task types and were removed there: saved configurations may still have them.
_REMOVED_KEYS = (
    "algorithm.loss_type", "env.train.num_envs", "env.train.seed", "env.train.group_size", "env.train.auto_reset",
    "env.train.use_fixed_reset_state_ids", "env.train.use_rel_reward", "env.train.simulators",
    "env.train.simulator_timeout_s", "env.eval.auto_reset", "actor.lora.dropout", "data.train.name",
    "reward.max_failed_steps",
)  # fmt: skip
TASK = "runner.task_type"


class TaskTypeInfo(SchemaKeys, Protocol):
    """Facts about a task type that reading a configuration needs."""

    @property
    def by_path(self) -> Mapping[str, ConfigKey]:
        """Each key by path, with its range."""

    def explain_foreign_key(self, key: str) -> str:
        """Returns the complaint about a key that another task type has; empty if none has it."""

    def missing(self, cfg: Any) -> list[str]:
        """Returns the required keys that are not set."""


#: Finds the task type for a name and the file or override that set it; the name is None if it was not set.
TaskTypeFinder = Callable[[str | None, str], TaskTypeInfo]


def read_layers(
    config: ConfigSource,
    overrides: Sequence[str],
    find: TaskTypeFinder,
    *,
    site: str | None = None,
    trust: Trust | None = None,
) -> ConfigLayers:
    """Reads a configuration; see `load_config`.

    Raises:
        ConfigError: Names the file or override, the key, its value, and the allowed values.
    """
    name = source_name(config)
    env_references.watch()
    files, overrides = _drop_sweep(read_files(config, trust), overrides, name)
    task, origin = read_task_type(files, overrides)
    if trust is not None:
        trust.check({"runner": {"task_type": task}}, origin)  # before anything that it names is imported
    task_type = find(task, origin)
    layers = ConfigLayers(task_type.schema, task_type.explain_foreign_key, null_numbers(task_type.by_path))
    for source, content in files:
        layers.add(
            _drop_removed_keys(content, task_type.schema),
            source,
            lenient=set(content) >= _ONCE_SAVED,
            variables=trust is None or trust.everything,
        )
    for override_text in overrides:
        layers.override(override_text)
    site = os.environ.get("RLHPC_SITE") if site is None else site
    if site:
        apply_site(layers, find_site(site))
    check_complete(layers, task_type, name)
    if trust is not None:
        trust.check(OmegaConf.to_container(layers.cfg, resolve=True), name)
    return layers


def _drop_sweep(
    files: Sequence[tuple[str, Any]], overrides: Sequence[str], source: str
) -> tuple[list[tuple[str, Any]], list[str]]:
    """Returns files and overrides without their sweep sections, for a configuration whose sweep is removed (`sweep=null`)."""
    if read_section(files, overrides) is not None:
        raise ConfigError(
            f"{source}: it is a sweep of several runs (section {SWEEP}), which rlhpc run and the workflow take, and rlhpc "
            f"plan, status, cancel and compare; {SWEEP}=null makes the single run of the rest of it"
        )
    run_files = [
        (name, {key: value for key, value in content.items() if key != SWEEP} if SWEEP in content else content)
        for name, content in files
    ]
    return run_files, [override_text for override_text in overrides if not is_about_sweep(override_text)]


def _drop_removed_keys(content: Any, schema: Schema) -> Any:
    """Returns a saved configuration without the keys that this task type no longer has; any other configuration unchanged."""
    runner = content.get("runner") if isinstance(content, dict) else None
    if not isinstance(runner, dict) or not set(runner) >= ALWAYS_SAVED:
        return content
    remaining = copy.deepcopy(content)
    for key in _REMOVED_KEYS:
        *path, leaf_name = key.split(".")
        section: Any = remaining
        for section_name in path:
            section = section.get(section_name) if isinstance(section, dict) else None
        if isinstance(section, dict) and key not in schema:
            section.pop(leaf_name, None)
    return remaining


def read_task_type(files: Sequence[tuple[str, Any]], overrides: Sequence[str]) -> tuple[str | None, str]:
    """Returns `runner.task_type`, which decides which keys exist, and the source that set it.

    Raises:
        ConfigError: It is not a text.
    """
    task, origin = None, files[-1][0] if files else ""
    for source, content in files:
        runner = content.get("runner") if isinstance(content, dict) else None
        if isinstance(runner, dict) and "task_type" in runner:
            task, origin = runner["task_type"], source
    for override_text in overrides:
        if override_text.partition("=")[0].strip() == TASK:
            task, origin = parse_override(override_text)[1], f"override {short_repr(override_text)}"
    task = typed_value(task, str)
    if task is not None and not isinstance(task, str):
        raise ConfigError(f"{origin}: {TASK} is {short_repr(task)}; it must be the name of a task type")
    return task, origin


def check_complete(layers: ConfigLayers, task_type: TaskTypeInfo, source: str) -> None:
    """Raises an error for missing required values and for `${...}` references that cannot be resolved.

    Raises:
        ConfigError: Names the first of them.
    """
    cfg = layers.cfg
    try:
        missing_keys = [*sorted(OmegaConf.missing_keys(cfg)), *task_type.missing(cfg)]
        if missing_keys:
            raise ConfigError(f"{source}: {missing_keys[0]} is missing; set it in the file or with {missing_keys[0]}=…")
        OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        key = error.full_key or ""
        message = reason(error)
        if match := re.search(r"Environment variable '(\w+)' not found", message):
            message = f"the environment variable {match[1]} is not set; set it, or write ${{oc.env:{match[1]},DEFAULT}}"
        elif match := re.search(r"Interpolation key '(\w+)' not found", message):
            message += f"; an environment variable is written ${{oc.env:{match[1]}}}"
        raise ConfigError(f"{layers.sources.get(key, source)}: {f'{key}: ' if key else ''}{message}") from None


def config_to_yaml(cfg: object) -> str:
    """Formats the resolved configuration as YAML; `load_config` reads it back to the same configuration.

    Values from the environment (`${oc.env:…}`) stay as they were written: they may be secrets, and a restarted run reads them
    from its own environment.
    """
    content = OmegaConf.to_container(OmegaConf.create(env_references.to_plain(cfg)))
    return dump_yaml(content, sort_keys=False)


def total_steps(cfg: RunConfig) -> int:
    """Returns the steps of the complete run: `runner.max_steps`, or `runner.max_epochs` if that is -1."""
    steps = cfg.runner.max_steps
    return steps if steps >= 0 else cfg.runner.max_epochs


def segment_end(total: int, segment: int, segments: int) -> int:
    """Returns the step at which a segment ends."""
    return math.ceil(total * (segment + 1) / segments)


def segment_ends(cfg: RunConfig) -> list[int]:
    """Returns the planned last step of each segment of the run."""
    count = cfg.runner.segments
    return [segment_end(total_steps(cfg), k, count) for k in range(count)]
