"""Task type of a run: the object that defines its worker groups, checks, training loop, reports and cost models.

`runner.task_type` names the task type. The language and embodied packages contain the built-in task types. Other task types
are entry points of group `rlhpc.kinds`, or are named as `module:NAME`.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic

import yaml

from rlhpc.config.conditional_keys import Condition
from rlhpc.config.constraints import Range
from rlhpc.config.schema import ConfigKey, Schema, fields_of, is_section, tree_of
from rlhpc.config.sections import RunConfig
from rlhpc.jobs.paths import CONFIG, RunPaths
from rlhpc.runs.preflight import Check
from rlhpc.runs.task_parts import (
    Cfg,
    ConfigChecks,
    Exporting,
    GroupSpec,
    Headline,
    Offline,
    Parts,
    Planning,
    PlayOptions,
    Preparation,
    Reporting,
    Rows,
)
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.files import read_file, read_yaml
from rlhpc.runtime.former_names import former_attributes
from rlhpc.runtime.key_metadata import OnResume
from rlhpc.runtime.plugins import Registry, import_attribute, list_entry_points, nearest
from rlhpc.runtime.policies import GroupPolicy, SessionPolicies
from rlhpc.runtime.text import short_repr

__all__ = [
    "DEFAULT",
    "TASK_TYPES",
    "Cfg",
    "ConfigChecks",
    "ConfigKeys",
    "Exporting",
    "GroupSpec",
    "Headline",
    "Kind",
    "Offline",
    "Parts",
    "Planning",
    "PlayOptions",
    "Preparation",
    "Reporting",
    "Rows",
    "TaskType",
    "all_task_types",
    "find_task_type",
    "task_type_keys",
    "task_type_names",
    "task_type_of",
    "task_type_of_checkpoint",
    "task_type_of_run",
]

if not TYPE_CHECKING:
    __getattr__ = former_attributes(__name__)

DEFAULT = "embodied"
TASK_TYPES: Registry[Any] = Registry(
    "task type",
    "runner.task_type",
    "rlhpc.kinds",
    {
        "embodied": "rlhpc.embodied.task_types:PPO",
        "off_policy": "rlhpc.embodied.task_types:SAC",
        "bc": "rlhpc.embodied.task_types:BC",
        "reasoning": "rlhpc.language.task_types:GRPO",
        "sft": "rlhpc.language.task_types:SFT",
        "reward_model": "rlhpc.language.task_types:REWARD_MODEL",
        "dpo": "rlhpc.language.task_types:DPO",
    },
    form="module:NAME",
)


class ConfigKeys:
    """Configuration keys of a task type, for reading and checking configurations.

    Args:
        task_type: Name of the task type.
        config: Dataclass of the configuration.
        checks: Rules of the configuration.
    """

    def __init__(self, task_type: str, config: type[RunConfig], checks: ConfigChecks[Any]) -> None:
        self._task_type, self._config, self._checks = task_type, config, checks

    @functools.cached_property
    def schema(self) -> Schema:
        """Schema of the configuration."""
        return Schema(self._config, self._task_type)

    @functools.cached_property
    def tree(self) -> Mapping[str, ConfigKey]:
        """Keys and sections by dotted path; each section comes before its keys."""
        config: type = self._config
        checks = self._checks
        return {
            path: dataclasses.replace(
                key,
                range=checks.ranges.get(path, key.range),
                choices=checks.choices.get(path, key.choices),
                is_free=key.is_free or _is_in(path, checks.free),
                is_evaluations=key.is_evaluations or _is_in(path, checks.evaluation),
            )
            for path, key in tree_of(config).items()
        }

    @functools.cached_property
    def by_path(self) -> Mapping[str, ConfigKey]:
        """Keys by dotted path, without sections."""
        return {path: key for path, key in self.tree.items() if not key.is_section}

    def on_resume(self, key: str) -> OnResume:
        """Returns whether a key may change when a run resumes. For a key that is not in the schema, such as a key of an open
        mapping or of an earlier version, returns the rule of the nearest section that contains the key.
        """
        while key and key not in self.tree:
            key = key.rpartition(".")[0]
        return self.tree[key].on_resume if key else OnResume.FIXED

    def find_missing_keys(self, cfg: Any) -> list[str]:
        """Returns the required keys that are not set."""
        return self._checks.find_missing_keys(cfg)

    def explain_foreign_key(self, key: str) -> str:
        """Returns the end of the error message for a key of other task types; "" if no task type has the key."""
        owners = [
            task_type.name
            for task_type in all_task_types()
            if task_type.name != self._task_type and key in task_type.schema
        ]
        if not owners:
            return ""
        noun = "a task type" if len(owners) == 1 else "task types"
        return f"is for {noun} that this one ({self._task_type}) is not: {', '.join(owners)}; leave it out"

    def foreign_names(self, section: str) -> Collection[str]:
        """Returns the names that only other task types allow in a section; "" is the top."""
        names: set[str] = set()
        for task_type in all_task_types():
            names.update(_names_in(section, task_type.config, task_type.schema))
        return names - set(_names_in(section, self._config, self.schema))


def _names_in(section: str, config: type, schema: Schema) -> Collection[str]:
    """Returns the names in a section of a configuration; "" is the top."""
    section_type = schema.type_of(section) if section else config
    return fields_of(section_type) if is_section(section_type) else ()


class TaskType(Generic[Cfg]):
    """Task type of runs. Construction is cheap, because the components import their dependencies on first use.

    Args:
        name: Name in `runner.task_type`.
        config: Dataclass of the configuration.
        groups: Worker groups.
        runner: Class of the training loop, as `module:Class`; called with the configuration and the groups by name.
        checks: Rules of the configuration; by default no rules.
        offline: Evaluation, export and other work outside training; by default each such command raises an error.
        reporting: Pages and tables; by default empty.
        planning: Workload and memory models; by default unknown.
    """

    def __init__(
        self,
        name: str,
        config: type[Cfg],
        groups: GroupSpec[Cfg],
        runner: str,
        *,
        checks: ConfigChecks[Cfg] | None = None,
        offline: Offline[Cfg] | None = None,
        reporting: Reporting | None = None,
        planning: Planning | None = None,
    ) -> None:
        self.name, self.config, self.groups, self.runner = name, config, groups, runner
        self.checks: ConfigChecks[Cfg] = checks or ConfigChecks()
        self.offline: Offline[Cfg] = offline or Offline(name)
        self.reporting = reporting or Reporting()
        self.planning = planning or Planning()
        self.keys = ConfigKeys(name, config, self.checks)

    @property
    def schema(self) -> Schema:
        """Schema of the configuration."""
        return self.keys.schema


@dataclass(frozen=True)
class Kind(GroupSpec[Cfg], ConfigChecks[Cfg], Offline[Cfg], Reporting):
    """Deprecated task type: one object that implements all components of a `TaskType`. Works for two releases, with a warning.

    All fields except the following have the meaning of the same fields in `TaskType` and its components.

    Attributes:
        expendable: Groups that may be lost and restarted in a submitted run.
        independent: Expendable groups without collectives among their ranks: a dead rank is restarted alone.
    """

    name: str
    config: type[Cfg]
    roles: Mapping[str, str]
    runner: str
    preload: tuple[str, ...] = ()
    curves: Mapping[str, str] = field(default_factory=dict)
    compared: tuple[tuple[str, str, str], ...] = ()
    headlines: tuple[Headline, ...] = ()
    ranges: Mapping[str, Range] = field(default_factory=dict)
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    conditions: tuple[Condition, ...] = ()
    evaluation: tuple[str, ...] = ()
    free: tuple[str, ...] = ()
    expendable: frozenset[str] = frozenset()
    independent: frozenset[str] = frozenset()
    workload: str = ""
    account: str = ""

    @functools.cached_property
    def task_type(self) -> TaskType[Cfg]:
        """`TaskType` that uses this object for all components except planning."""
        warnings.warn(
            f"the task type {self.name!r} is a Kind, which works for two releases: make it a "
            "rlhpc.runs.task_type.TaskType of parts (docs/how-to/add-kind.md)",
            FutureWarning,
            stacklevel=3,
        )
        return TaskType(
            self.name,
            self.config,
            groups=self,
            runner=self.runner,
            checks=self,
            offline=self,
            reporting=self,
            planning=Planning(self.workload, self.account),
        )

    @property
    def schema(self) -> Any:
        """Schema of the configuration."""
        return ConfigKeys(self.name, self.config, self).schema

    # -- former methods ------------------------------------------------------------------------------------------

    def roles_of(self, cfg: Cfg) -> Mapping[str, str]:
        """Returns the worker class of each group of a run."""
        return self.roles

    def checks(self, cfg: Cfg, ranks: Mapping[str, int]) -> Iterator[Check]:
        """Yields the checks before a start (`ConfigChecks.preflight`)."""
        return super().preflight(cfg, ranks)

    def expendable_of(self, cfg: Cfg) -> frozenset[str]:
        """Returns the restartable groups."""
        return self.expendable

    def independent_of(self, cfg: Cfg) -> frozenset[str]:
        """Returns the restartable groups with independent ranks."""
        return self.independent

    def elastic_of(self, cfg: Cfg) -> dict[str, int]:
        """Returns the minimum number of ranks of each elastic group."""
        return {}

    def together_of(self, cfg: Cfg) -> dict[str, int]:
        """Returns the number of ranks per replica of each group."""
        return {}

    def patience_of(self, cfg: Cfg) -> dict[str, float]:
        """Returns a dict from group to seconds of silence after which a rank counts as lost, for groups that set this time."""
        return {}

    def why_fixed(self, cfg: Cfg) -> str:
        """Returns the reason why no group admits ranks during the run."""
        return ""

    # -- methods with former names -------------------------------------------------------------------------

    def worker_classes_of(self, cfg: Cfg) -> Mapping[str, str]:
        """Returns the worker classes of the former method `roles_of`."""
        return self.roles_of(cfg)

    def preflight(self, cfg: Cfg, ranks: Mapping[str, int]) -> Iterator[Check]:
        """Yields the checks of the former method `checks`."""
        return self.checks(cfg, ranks)

    def policies(self, cfg: Cfg, *, max_recoveries: int = 0) -> SessionPolicies:
        """Returns the failure policies that the former methods describe."""
        restartable, independent = self.expendable_of(cfg), self.independent_of(cfg)
        min_ranks, group_sizes, leases = self.elastic_of(cfg), self.together_of(cfg), self.patience_of(cfg)
        groups = {
            name: GroupPolicy(
                restartable=name in restartable,
                independent_ranks=name in independent,
                min_ranks=min_ranks.get(name),
                replica_size=group_sizes.get(name, 1),
                lease_s=leases.get(name),
            )
            for name in {*restartable, *min_ranks, *group_sizes, *leases}
        }
        return SessionPolicies(groups, max_recoveries, self.why_fixed(cfg))


def _is_in(key: str, parent_names: Sequence[str]) -> bool:
    """Returns whether `parent_names` contains the key or a section of the key."""
    return any(key == name.rstrip(".") or key.startswith(f"{name.rstrip('.')}.") for name in parent_names)


def task_type_names() -> list[str]:
    """Returns all allowed values of `runner.task_type` except `module:NAME`."""
    return [*TASK_TYPES.built_in, *sorted(list_entry_points(TASK_TYPES.group))]


def all_task_types() -> list[TaskType[Any]]:
    """Returns all named task types: built-in task types and entry points."""
    return [find_task_type(name) for name in task_type_names()]


def find_task_type(name: str | None = None, source_name: str = "configuration") -> TaskType[Any]:
    """Returns the task type that `runner.task_type` names.

    Args:
        name: Name in upper or lower case; None for the default.
        source_name: Source of the name, for messages.

    Raises:
        ConfigError: The task type does not exist; the message lists the existing ones.
    """
    type_name = DEFAULT if name is None else name
    if path := TASK_TYPES.path(type_name):
        return _require_task_type(import_attribute(path, f"{source_name}: {TASK_TYPES.key}"), type_name, source_name)
    raise ConfigError(
        f"{source_name}: {TASK_TYPES.key} is {short_repr(type_name)}{nearest(type_name, task_type_names())} "
        f"allowed: {', '.join(task_type_names())}, or {TASK_TYPES.form}"
    )


def task_type_keys(name: str | None = None, source_name: str = "configuration") -> ConfigKeys:
    """Returns the keys of the task type that `runner.task_type` names (`find_task_type`)."""
    return find_task_type(name, source_name).keys


def _require_task_type(found_item: Any, name: str, source_name: str) -> TaskType[Any]:
    if isinstance(found_item, TaskType):
        return found_item
    if isinstance(found_item, Kind):
        return found_item.task_type
    raise ConfigError(
        f"{source_name}: runner.task_type is {short_repr(name)}, which is a {type(found_item).__name__} and no TaskType"
    )


def task_type_of(cfg: Cfg) -> TaskType[Cfg]:
    """Returns the task type of a configuration."""
    return find_task_type(cfg.runner.task_type)


def task_type_of_run(paths: RunPaths) -> TaskType[Any]:
    """Returns the task type of a run, from its config.yaml; the default if the file cannot be read."""
    return _find_task_type_of_file(paths.config) or find_task_type()


def task_type_of_checkpoint(checkpoint: Path) -> TaskType[Any]:
    """Returns the task type of a checkpoint's run, from its config.yaml; the default if the file cannot be read."""
    return _find_task_type_of_file(checkpoint / CONFIG) or find_task_type()


def _find_task_type_of_file(config: Path) -> TaskType[Any] | None:
    try:
        name = str(read_yaml(read_file(config))["runner"]["task_type"])
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError):
        return None
    is_registered = name.lower() in task_type_names()
    return find_task_type(name) if is_registered else None  # a foreign file must not import code
