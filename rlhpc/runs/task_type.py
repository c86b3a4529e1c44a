"""Task type of a run: the object that the command line, the workflow, the report and the checks use.

`runner.task_type` names it. The language and embodied packages have the built-in ones; others are entry points of group
`rlhpc.kinds`, or `module:NAME`.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import yaml

from rlhpc.config.conditional_keys import Condition
from rlhpc.config.constraints import Fail, Range
from rlhpc.config.schema import Schema
from rlhpc.config.sections import RunConfig
from rlhpc.jobs.paths import CONFIG, RunPaths
from rlhpc.runs.preflight import Check
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.files import read_file, read_yaml
from rlhpc.runtime.plugins import Registry, import_attribute, nearest, offered
from rlhpc.runtime.policies import GroupPolicy, SessionPolicies
from rlhpc.runtime.text import shown


@dataclass(frozen=True)
class Preparation:
    """Steps of the workflow before training.

    Attributes:
        sft: Configuration of a run that comes first, relative to this run's; and its overrides.
        demos: The file for an expert's episodes, the expert, and how many episodes to record.
        evaluates_start: Whether the model is also evaluated before training, as step 0.
    """

    sft: tuple[str, list[str]] | None = None
    demos: tuple[str, str, int] | None = None
    evaluates_start: bool = False


@dataclass(frozen=True)
class Exporting:
    """Options of `rlhpc convert`.

    Attributes:
        licence: SPDX identifier for the model card.
        adapter_only: With LoRA: write only the adapter.
        base: With LoRA: present path of the adapted model, if it has moved.
        dtype: Dtype of the written weights; None keeps that of training.
        critic: Write the critic rather than the policy.
        released: Write the format in which the model's family is released, for its own code.
        trust_code: Import names of the form `module:Class` in the checkpoint.
    """

    licence: str | None = None
    adapter_only: bool = False
    base: str | None = None
    dtype: str | None = None
    critic: bool = False
    released: bool = False
    trust_code: bool = False


@dataclass(frozen=True)
class Headline:
    """Number by which runs of a task type are judged: a column of tables, and of `rlhpc status`.

    Attributes:
        metric: Name in metrics.jsonl; `eval/…` for a result of evaluations, `eval/pass_at_k` for the largest k.
        title: Title of the column.
        form: `share` (a percentage with its interval), `count`, or `number`.
    """

    metric: str
    title: str
    form: str = "number"


@dataclass(frozen=True)
class PlayOptions:
    """Options of `rlhpc play`; None stands for the default.

    Attributes:
        film: File of the film if no display is available.
        episodes: Number of episodes to play.
        seed: Seed of the environment, or of sampling.
        system: First message of a conversation.
        max_tokens: Maximum number of tokens of a reply.
        trust_code: Import names of the form `module:Class` in the checkpoint.
    """

    film: Path
    episodes: int | None = None
    seed: int | None = None
    system: str | None = None
    max_tokens: int | None = None
    trust_code: bool = False


@dataclass(frozen=True)
class Parts:
    """Parts of a report that depend on the task type, as HTML and SVG.

    Attributes:
        subject: Model and task, for the subtitle.
        cards: The key figures.
        curves: Learning curves, the most important first.
        evaluation: Plot and table of the evaluations.
        times: Curves of time.
        evaluated: Step → result of its first evaluation, for the table of checkpoints.
        trained: Metric in the table of checkpoints, and its title.
    """

    subject: str
    cards: str
    curves: list[str]
    evaluation: str
    times: list[str]
    evaluated: Mapping[int, str]
    trained: tuple[str, str]


DEFAULT = "embodied"
KINDS: Registry[Any] = Registry(
    "kind of run",
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

Rows = Sequence[Mapping[str, Any]]
#: Configuration of a task type.
Cfg = TypeVar("Cfg", bound=RunConfig)


class GroupSpec(Generic[Cfg]):
    """Worker groups of a task type, and how they are placed and kept alive.

    Args:
        roles: Group → its worker class, as `module:Class`.
        preload: Modules that the fork server imports; by default those of the class.
    """

    preload: tuple[str, ...] = ()

    def __init__(self, roles: Mapping[str, str], preload: Sequence[str] = ()) -> None:
        self.roles = roles
        self.preload = tuple(preload) or self.preload

    def roles_of(self, cfg: Cfg) -> Mapping[str, str]:
        """Returns the groups of a run with this configuration and their worker classes: `roles`, and groups that the
        configuration adds.
        """
        del cfg
        return self.roles

    def components(self, cfg: Cfg) -> Sequence[str]:
        """Returns the names that `cluster.component_placement` may have, for messages."""
        return list(self.roles_of(cfg))

    def policies(self, cfg: Cfg, *, max_recoveries: int = 0) -> SessionPolicies:
        """Returns the failure handling of each group of a run with this configuration; by default any failure ends the run.

        Args:
            cfg: The configuration.
            max_recoveries: Maximum number of restarts of restartable groups without a new checkpoint in between.
        """
        del cfg
        return SessionPolicies({}, max_recoveries)

    def most_useful(self, cfg: Cfg, started: Mapping[str, int]) -> dict[str, int]:
        """Returns the maximum number of ranks that each elastic group can use at a time.

        Args:
            cfg: The configuration.
            started: Ranks of each group that the run starts with.
        """
        del cfg, started
        return {}

    def placed(self, cfg: Cfg, replicas: Mapping[str, int]) -> Cfg:
        """Returns the configuration with the values that follow from the placement.

        Args:
            cfg: The configuration.
            replicas: Number of neighbouring ranks that form one engine, by group.
        """
        del replicas
        return cfg

    def check_placement(self, cfg: Cfg, processes: Mapping[str, int], accelerators: Mapping[str, int]) -> None:
        """Raises an error for numbers of processes that do not fit.

        Args:
            cfg: The configuration.
            processes: Number of processes of each group.
            accelerators: Number of accelerators of each process of a group.

        Raises:
            ConfigError, PlacementError: Names the component and the numbers.
        """


class ConfigChecks(Generic[Cfg]):
    """Rules of a task type's configuration, and the checks before a start.

    Attributes:
        ranges: Key → the range of its number.
        choices: Key → its allowed words.
        conditions: Keys that a run reads only under a condition; it always reads the others.
        evaluation: Keys, or sections (with a dot at the end), that change evaluations and nothing else.
        free: Keys changeable on resume: those of the machine and of the division of the work.
        other_start: End of a message: the other use of a checkpoint from which a run cannot resume.
    """

    ranges: Mapping[str, Range] = MappingProxyType({})
    choices: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    conditions: tuple[Condition, ...] = ()
    evaluation: tuple[str, ...] = ()
    free: tuple[str, ...] = ()
    other_start = ""

    def missing(self, cfg: Cfg) -> list[str]:
        """Returns the required keys that are not set."""
        del cfg
        return []

    def check(self, cfg: Cfg, fail: Fail, *, training: bool) -> None:
        """Raises an error for names and combinations that cannot work; imports no torch, and writes nothing.

        Args:
            cfg: The configuration.
            fail: Makes the error for a key and the rule that it breaks.
            training: Also check values that only training needs.

        Raises:
            ConfigError: The first broken rule.
        """

    def preflight(self, cfg: Cfg, ranks: Mapping[str, int]) -> Iterator[Check]:
        """Yields the checks before a start that need more than the configuration, in the order of a start.

        `rlhpc train` runs all of these checks; `rlhpc plan` and `submit` run those that need only files.

        Args:
            cfg: The configuration from `prepare` or `trial`.
            ranks: Number of processes of each group.
        """
        del cfg, ranks
        return iter(())

    def prepare(self, cfg: Cfg, *, resumes: bool) -> Cfg:
        """Returns the configuration for the ranks; the caller's stays unchanged.

        Args:
            cfg: The configuration.
            resumes: The run continues from a checkpoint.
        """
        del resumes
        return cfg

    @contextlib.contextmanager
    def trial(self, cfg: Cfg) -> Iterator[Cfg]:
        """Yields the configuration for `preflight`, as from `prepare`, and removes everything that this creates.

        Args:
            cfg: The configuration.
        """
        yield self.prepare(cfg, resumes=False)

    def differences(self, cfg: Cfg, checkpoint: Path) -> list[str]:
        """Returns the keys in which a checkpoint of this task type differs from this run, with both values."""
        del cfg, checkpoint
        return []

    def goal(self, cfg: Cfg) -> Any:
        """Returns the goal that can end a segment before its planned step; None without one."""
        return early_end(cfg)

    def evaluation_metrics(self, cfg: Cfg) -> Sequence[str]:
        """Returns the metrics of held-out data that a run with this configuration measures during training and that have a
        better direction, for `runner.keep_best`; empty if it does not evaluate.
        """
        del cfg
        return ()


class Offline(Generic[Cfg]):
    """Work of a task type before and after training: data to prepare, evaluation, playing, export.

    Args:
        name: Name of the task type, for messages.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def preparation(self, cfg: Cfg) -> Preparation:
        """Returns the steps of the workflow before training."""
        del cfg
        return Preparation()

    def recording(self, cfg: Cfg) -> tuple[int, bool]:
        """Returns the number of recorded episodes of the last policy, and whether only successful ones are recorded."""
        del cfg
        return 0, False

    def evaluate(
        self, cfg: Cfg, checkpoint: Path, *, suite: str, episodes: int | None, output: Path | None, trust_code: bool
    ) -> str:
        """Evaluates a checkpoint.

        Args:
            cfg: The configuration.
            checkpoint: Its folder.
            suite: Name of the evaluation.
            episodes: Number of episodes; None for that of the configuration.
            output: File for the result; None writes nothing.
            trust_code: Import names of the form `module:Class` in the checkpoint.

        Returns:
            The result in a line.
        """
        raise ConfigError(f"runs of kind {self.name} are not evaluated")

    def evaluate_model(self, cfg: Cfg, *, suite: str, output: Path | None) -> str:
        """Evaluates the model that the configuration names, without a checkpoint; returns the result in a line."""
        raise ConfigError(f"--model is for language models; {self.name} runs have none. Give a checkpoint")

    def play(self, cfg: Cfg, checkpoint: Path, options: PlayOptions) -> str:
        """Plays episodes with a checkpoint's policy, or chats with its model.

        Args:
            cfg: The configuration.
            checkpoint: Its folder.
            options: Options.

        Returns:
            The result in a line; "" without a result.
        """
        raise ConfigError(f"runs of kind {self.name} have nothing to play; rlhpc eval evaluates their checkpoints")

    def export(self, checkpoint: Path, output: Path | None, options: Exporting) -> Path:
        """Exports a checkpoint as a folder for other tools.

        Args:
            checkpoint: Its folder.
            output: Target; by default in the run of the checkpoint.
            options: Options.

        Returns:
            The folder.
        """
        raise ConfigError(f"runs of kind {self.name} have no export")


class Reporting:
    """Pages and tables of a task type's runs.

    Args:
        curves: Curves that its report always has: file name → title.
        compared: Metrics by which runs are compared: name, title, axis; those of evaluations begin with `eval/`.
        headlines: Numbers by which its runs are judged, the most important first; empty for those of `compared`.
    """

    def __init__(
        self,
        curves: Mapping[str, str] | None = None,
        compared: Sequence[tuple[str, str, str]] = (),
        headlines: Sequence[Headline] = (),
    ) -> None:
        self.curves: Mapping[str, str] = curves or {}
        self.compared, self.headlines = tuple(compared), tuple(headlines)

    def charts(self, paths: RunPaths, rows: Rows) -> dict[str, str]:
        """Returns every chart of a run as SVG, by file name."""
        del paths, rows
        return {}

    def parts(self, paths: RunPaths, rows: Rows, *, linked: bool) -> Parts:
        """Returns the parts of the report that depend on the task type.

        Args:
            paths: The run.
            rows: Its metrics.
            linked: The page may refer to other files of the run.
        """
        del paths, rows, linked
        return Parts("", "", [], "", [], {}, ("", ""))


@dataclass(frozen=True)
class Planning:
    """Models of a task type's runs, which `rlhpc tune` and `rlhpc plan` read.

    Attributes:
        workload: Workload of a step: a function as `module:function` that takes the configuration and the maximum staleness in
            steps, and returns a `Workload`; "" if unknown.
        account: Memory account of its ranks: a `rlhpc.runs.memory.plan.Accounting`, as `module:function`; "" if unknown.
    """

    workload: str = ""
    account: str = ""


class ConfigKeys:
    """Keys of a task type's configuration, as reading and checking one needs them.

    Args:
        task_type: Name of the task type.
        config: Dataclass of its configuration.
        checks: Its rules.
    """

    def __init__(self, task_type: str, config: type[RunConfig], checks: ConfigChecks[Any]) -> None:
        self._task_type, self._config, self._checks = task_type, config, checks

    @functools.cached_property
    def schema(self) -> Schema:
        """Schema of the configuration."""
        return Schema(self._config, self._task_type)

    @property
    def ranges(self) -> Mapping[str, Range]:
        """Range of each number, by key."""
        return self._checks.ranges

    def missing(self, cfg: Any) -> list[str]:
        """Returns the required keys that are not set."""
        return self._checks.missing(cfg)

    def whose(self, key: str) -> str:
        """Returns the complaint about a key that another task type has; empty if none has it."""
        owners = [kind.name for kind in all_kinds() if kind.name != self._task_type and key in kind.schema]
        if not owners:
            return ""
        noun = "a kind of run" if len(owners) == 1 else "kinds of run"
        return f"is for {noun} that this one ({self._task_type}) is not: {', '.join(owners)}; leave it out"


class TaskType(Generic[Cfg]):
    """Task type of runs, in parts. Construction is cheap: the parts import what they need when they are asked.

    Args:
        name: Its name in `runner.task_type`.
        config: Its configuration's dataclass.
        groups: Its worker groups.
        runner: Class of the loop that drives them, as `module:Class`; called with the configuration and the groups by name.
        checks: Rules of its configuration; by default there are none.
        offline: Evaluation, export and the other work without training; by default they are refused.
        reporting: Its pages and tables; by default they are empty.
        planning: Its workload and memory models; by default they are unknown.
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
        """Schema of its configuration."""
        return self.keys.schema


@dataclass(frozen=True)
class Kind(GroupSpec[Cfg], ConfigChecks[Cfg], Offline[Cfg], Reporting):
    """Former form of a task type: one object that is all parts of a `TaskType`. It works for two releases, with a warning.

    The fields are those of `TaskType` and its parts, besides:

    Attributes:
        expendable: Groups that may be lost and restarted in a submitted run.
        independent: Expendable groups whose ranks have no collectives among themselves: a dead rank is restarted alone.
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
        """The task type of which this object is every part."""
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
        """Schema of its configuration."""
        return ConfigKeys(self.name, self.config, self).schema

    # -- former methods ------------------------------------------------------------------------------------------

    def checks(self, cfg: Cfg, ranks: Mapping[str, int]) -> Iterator[Check]:
        """Yields the checks before a start (`ConfigChecks.preflight`)."""
        return super().preflight(cfg, ranks)

    def expendable_of(self, cfg: Cfg) -> frozenset[str]:
        """Returns the restartable groups."""
        del cfg
        return self.expendable

    def independent_of(self, cfg: Cfg) -> frozenset[str]:
        """Returns the restartable groups of independent ranks."""
        del cfg
        return self.independent

    def elastic_of(self, cfg: Cfg) -> dict[str, int]:
        """Returns the elastic groups and the minimum number of ranks of each."""
        del cfg
        return {}

    def together_of(self, cfg: Cfg) -> dict[str, int]:
        """Returns the number of ranks of a replica, by group."""
        del cfg
        return {}

    def patience_of(self, cfg: Cfg) -> dict[str, float]:
        """Returns the seconds of silence after which a rank is lost, for groups with a lease of their own."""
        del cfg
        return {}

    def why_fixed(self, cfg: Cfg) -> str:
        """Returns the reason why no group accepts ranks."""
        del cfg
        return ""

    # -- parts that were named otherwise -------------------------------------------------------------------------

    def preflight(self, cfg: Cfg, ranks: Mapping[str, int]) -> Iterator[Check]:
        """Yields the checks of `checks`."""
        return self.checks(cfg, ranks)

    def policies(self, cfg: Cfg, *, max_recoveries: int = 0) -> SessionPolicies:
        """Returns the policies that the former methods describe."""
        restartable, independent = self.expendable_of(cfg), self.independent_of(cfg)
        min_ranks, sizes, leases = self.elastic_of(cfg), self.together_of(cfg), self.patience_of(cfg)
        groups = {
            name: GroupPolicy(
                restartable=name in restartable,
                independent_ranks=name in independent,
                min_ranks=min_ranks.get(name),
                replica_size=sizes.get(name, 1),
                lease_s=leases.get(name),
            )
            for name in {*restartable, *min_ranks, *sizes, *leases}
        }
        return SessionPolicies(groups, max_recoveries, self.why_fixed(cfg))


def early_end(cfg: RunConfig) -> list[Any] | None:
    """Returns the settings that end a run without improvement; None if the configuration has no early end."""
    return [cfg.runner.keep_best, cfg.runner.patience] if cfg.runner.patience > 0 else None


def kind_names() -> list[str]:
    """Returns all names that `runner.task_type` may have, except `module:NAME`."""
    return [*KINDS.built_in, *sorted(offered(KINDS.group))]


def all_kinds() -> list[TaskType[Any]]:
    """Returns all task types with a name: built-in ones and entry points."""
    return [find_kind(name) for name in kind_names()]


def find_kind(name: str | None = None, source: str = "configuration") -> TaskType[Any]:
    """Returns the task type that `runner.task_type` names.

    Args:
        name: Name in upper or lower case; None for the default.
        source: Source of the name, for messages.

    Raises:
        ConfigError: The task type does not exist; the message lists the existing ones.
    """
    type_name = DEFAULT if name is None else name
    if path := KINDS.path(type_name):
        return _checked(import_attribute(path, f"{source}: {KINDS.key}"), type_name, source)
    raise ConfigError(
        f"{source}: {KINDS.key} is {shown(type_name)}{nearest(type_name, kind_names())} allowed: {', '.join(kind_names())}, "
        f"or {KINDS.form}"
    )


def keys_of(name: str | None = None, source: str = "configuration") -> ConfigKeys:
    """Returns the keys of the task type that `runner.task_type` names (`find_kind`)."""
    return find_kind(name, source).keys


def _checked(item: Any, name: str, source: str) -> TaskType[Any]:
    if isinstance(item, TaskType):
        return item
    if isinstance(item, Kind):
        return item.task_type
    raise ConfigError(f"{source}: runner.task_type is {shown(name)}, which is a {type(item).__name__} and no TaskType")


def kind_of(cfg: Cfg) -> TaskType[Cfg]:
    """Returns the task type that a configuration is for."""
    return find_kind(cfg.runner.task_type)


def kind_of_run(paths: RunPaths) -> TaskType[Any]:
    """Returns the task type of a run, from its config.yaml; the default if the file cannot be read."""
    return _kind_of_file(paths.config) or find_kind()


def kind_of_checkpoint(checkpoint: Path) -> TaskType[Any]:
    """Returns the task type of a checkpoint's run, from its config.yaml; the default if the file cannot be read."""
    return _kind_of_file(checkpoint / CONFIG) or find_kind()


def _kind_of_file(config: Path) -> TaskType[Any] | None:
    try:
        name = str(read_yaml(read_file(config))["runner"]["task_type"])
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError):
        return None
    is_registered = name.lower() in kind_names()
    return find_kind(name) if is_registered else None  # a foreign file must not import code
