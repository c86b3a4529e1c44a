"""Configuration loading: reads files and overrides into one typed configuration. An error message names the mistake's source,
key, value and allowed values.
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

from rlhpc.config.constraints import normalize_words, null_numbers
from rlhpc.config.files import ConfigSource, read_files, source_name
from rlhpc.config.merge import ConfigLayers, ForeignKeys, parse_override, reason
from rlhpc.config.schema import ConfigKey, Schema, SchemaKeys, typed_value
from rlhpc.config.sections import RunConfig
from rlhpc.config.sites import apply_site, find_site
from rlhpc.config.sweep import SWEEP, is_about_sweep, read_section
from rlhpc.config.yaml_files import dump_yaml
from rlhpc.runtime import env_references
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.text import short_repr
from rlhpc.runtime.trust import Trust

#: Sections of a run's configuration as an earlier version saved it, with the keys of all task types.
_FORMER_SECTIONS = frozenset(
    ("cluster", "runner", "algorithm", "env", "rollout", "actor", "data", "demos", "reward", "workflow")
)
#: Keys of section `runner` that every saved configuration has; a hand-written file rarely has all of them.
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


class TaskTypeInfo(SchemaKeys, ForeignKeys, Protocol):
    """Facts about a task type that are needed to read its configurations."""

    @property
    def by_path(self) -> Mapping[str, ConfigKey]:
        """Path → key, with the key's range."""

    def find_missing_keys(self, cfg: Any) -> list[str]:
        """Returns the required keys that are not set."""


#: Function that returns the task type for a name, and for the file or override that set the name; None if nothing set it.
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
    task_type_name, task_source = read_task_type(files, overrides)
    if trust is not None:
        trust.check({"runner": {"task_type": task_type_name}}, task_source)  # before its modules are imported
    task_type = find(task_type_name, task_source)
    layers = ConfigLayers(task_type.schema, task_type, null_numbers(task_type.by_path))
    for source, content in files:
        layers.add(
            _drop_removed_keys(content, task_type.schema),
            source,
            lenient=set(content) >= _FORMER_SECTIONS,
            variables=trust is None or trust.everything,
        )
    for override_text in overrides:
        layers.override(override_text)
    site = os.environ.get("RLHPC_SITE") if site is None else site
    if site:
        apply_site(layers, find_site(site))
    complete(layers, task_type, name)
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
        (
            name,
            {key: key_value for key, key_value in file_content.items() if key != SWEEP}
            if SWEEP in file_content
            else file_content,
        )
        for name, file_content in files
    ]
    return run_files, [override_text for override_text in overrides if not is_about_sweep(override_text)]


def _drop_removed_keys(file_content: Any, schema: Schema) -> Any:
    """Returns a saved configuration without the keys that this task type no longer has; any other configuration unchanged."""
    runner = file_content.get("runner") if isinstance(file_content, dict) else None
    if not isinstance(runner, dict) or not set(runner) >= ALWAYS_SAVED:
        return file_content
    remaining_content = copy.deepcopy(file_content)
    for key in _REMOVED_KEYS:
        *path, leaf_name = key.split(".")
        section: Any = remaining_content
        for section_name in path:
            section = section.get(section_name) if isinstance(section, dict) else None
        if isinstance(section, dict) and key not in schema:
            section.pop(leaf_name, None)
    return remaining_content


def read_task_type(files: Sequence[tuple[str, Any]], overrides: Sequence[str]) -> tuple[str | None, str]:
    """Returns `runner.task_type`, which determines the valid keys, and the source that set it.

    Raises:
        ConfigError: The value is not a text.
    """
    task_type_name, task_source = None, files[-1][0] if files else ""
    for source, content in files:
        runner = content.get("runner") if isinstance(content, dict) else None
        if isinstance(runner, dict) and "task_type" in runner:
            task_type_name, task_source = runner["task_type"], source
    for override_text in overrides:
        if override_text.partition("=")[0].strip() == TASK:
            task_type_name, task_source = parse_override(override_text)[1], f"override {short_repr(override_text)}"
    task_type_name = typed_value(task_type_name, str)
    if task_type_name is not None and not isinstance(task_type_name, str):
        raise ConfigError(f"{task_source}: {TASK} is {short_repr(task_type_name)}; it must be the name of a task type")
    return task_type_name, task_source


def complete(layers: ConfigLayers, task_type: TaskTypeInfo, source: str) -> None:
    """Completes a configuration after its last layer: puts words whose case does not matter into lower case.

    Refuses missing required values and `${...}` references that cannot be resolved.

    Raises:
        ConfigError: Names the first of them.
    """
    cfg = layers.cfg
    try:
        missing_keys = [*sorted(OmegaConf.missing_keys(cfg)), *task_type.find_missing_keys(cfg)]
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
    normalize_words(cfg, task_type.by_path)


def config_to_yaml(cfg: object) -> str:
    """Formats the resolved configuration as YAML; `load_config` reads it back to the same configuration.

    References to environment variables (`${oc.env:…}`) are not resolved: the values may be secrets, and a restarted run
    reads its own environment.
    """
    content = OmegaConf.to_container(OmegaConf.create(env_references.to_plain(cfg)))
    return dump_yaml(content, sort_keys=False)


def total_steps(cfg: RunConfig) -> int:
    """Returns the steps of the complete run: `runner.max_steps`, or `runner.max_epochs` if that is -1."""
    steps = cfg.runner.max_steps
    return steps if steps >= 0 else cfg.runner.max_epochs


def segment_end(total: int, segment: int, num_segments: int) -> int:
    """Returns the step at which a segment ends."""
    return math.ceil(total * (segment + 1) / num_segments)


def segment_ends(cfg: RunConfig) -> list[int]:
    """Returns the planned last step of each segment of the run."""
    num_segments = cfg.runner.segments
    return [segment_end(total_steps(cfg), k, num_segments) for k in range(num_segments)]
