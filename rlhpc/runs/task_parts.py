"""Components of a task type: worker groups, configuration checks, offline work, reporting and planning; and their options."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from rlhpc.config.conditional_keys import Condition
from rlhpc.config.constraints import Fail, Range
from rlhpc.config.sections import RunConfig
from rlhpc.jobs.paths import RunPaths
from rlhpc.runs.preflight import Check
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.former_names import former_members
from rlhpc.runtime.policies import SessionPolicies


@dataclass(frozen=True)
class Preparation:
    """Preparation steps of the workflow before training.

    Attributes:
        sft: Configuration file of the SFT run before this run, relative to this run's file, and overrides for the SFT run.
        demos: File for the expert's episodes, the expert, and the number of episodes to record.
        evaluates_start: True if the workflow also evaluates the model before training, as step 0.
    """

    sft: tuple[str, list[str]] | None = None
    demos: tuple[str, str, int] | None = None
    evaluates_start: bool = False


@dataclass(frozen=True)
class Exporting:
    """Options of `rlhpc convert`.

    Attributes:
        licence: SPDX identifier for the model card.
        adapter_only: With LoRA, True to write only the adapter.
        base: With LoRA, the current path of a base model that has moved.
        dtype: Dtype of the written weights; None keeps the dtype of training.
        critic: True to write the critic rather than the policy.
        released: True to write the format in which the model's family is released, which the family's code reads.
        trust_code: True to allow imports of `module:Class` names in the checkpoint.
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
    """Key metric of a task type: a column of tables and of `rlhpc status`.

    Attributes:
        metric: Name in metrics.jsonl; `eval/…` for an evaluation metric, `eval/pass_at_k` for the largest k.
        title: Title of the column.
        form: `share` (a percentage with its interval), `count`, or `number`.
    """

    metric: str
    title: str
    form: str = "number"


@dataclass(frozen=True)
class PlayOptions:
    """Options of `rlhpc play`; None selects the default.

    Attributes:
        video: Video file to write if no display is available.
        episodes: Number of episodes to play.
        seed: Seed of the environment, or of sampling.
        system: First message of a conversation.
        max_tokens: Maximum number of tokens of a reply.
        trust_code: True to allow imports of `module:Class` names in the checkpoint.
    """

    video: Path
    episodes: int | None = None
    seed: int | None = None
    system: str | None = None
    max_tokens: int | None = None
    trust_code: bool = False


@dataclass(frozen=True)
class Parts:
    """Sections of a report that depend on the task type, as HTML and SVG.

    Attributes:
        subject: Model and task, for the subtitle.
        cards: Key figures of the run.
        curves: Learning curves, the most important first.
        evaluation: Plot and table of the evaluations.
        times: Curves of times per step.
        evaluated: Step → result of the first evaluation of this step, for the table of checkpoints.
        trained: Training metric in the table of checkpoints, and its title.
    """

    subject: str
    cards: str
    curves: list[str]
    evaluation: str
    times: list[str]
    evaluated: Mapping[int, str]
    trained: tuple[str, str]


Rows = Sequence[Mapping[str, Any]]
#: Configuration of a task type.
Cfg = TypeVar("Cfg", bound=RunConfig)


@former_members(most_useful="max_useful_ranks")
class GroupSpec(Generic[Cfg]):
    """Worker groups of a task type, with their placement and failure handling.

    Args:
        worker_classes: Group → worker class of the group, as `module:Class`.
        preload: Modules that the fork server imports; by default the class attribute `preload`.
    """

    preload: tuple[str, ...] = ()

    def __init__(self, worker_classes: Mapping[str, str], preload: Sequence[str] = ()) -> None:
        self.worker_classes = worker_classes
        self.preload = tuple(preload) or self.preload

    def worker_classes_of(self, cfg: Cfg) -> Mapping[str, str]:
        """Returns the worker class of each group of a run: `worker_classes`, and the groups that the configuration adds."""
        return self.worker_classes

    def components(self, cfg: Cfg) -> Sequence[str]:
        """Returns the names allowed in `cluster.component_placement`, for messages."""
        return list(self.worker_classes_of(cfg))

    def policies(self, cfg: Cfg, *, max_recoveries: int = 0) -> SessionPolicies:
        """Returns the failure policies of the groups of a run with this configuration; by default any failure ends the run.

        Args:
            cfg: The configuration.
            max_recoveries: Maximum number of restarts of restartable groups without a new checkpoint in between.
        """
        return SessionPolicies({}, max_recoveries)

    def max_useful_ranks(self, cfg: Cfg, num_started: Mapping[str, int]) -> dict[str, int]:
        """Returns the maximum number of ranks that each elastic group can use at a time.

        Args:
            cfg: The configuration.
            num_started: Group → number of ranks at the start.
        """
        return {}

    def placed(self, cfg: Cfg, replicas: Mapping[str, int]) -> Cfg:
        """Returns the configuration with the values that the placement determines.

        Args:
            cfg: The configuration.
            replicas: Group → number of neighbouring ranks that form one engine.
        """
        return cfg

    def check_placement(self, cfg: Cfg, processes: Mapping[str, int], accelerators: Mapping[str, int]) -> None:
        """Checks that the numbers of processes fit the configuration.

        Args:
            cfg: The configuration.
            processes: Group → number of processes.
            accelerators: Group → number of accelerators of each process.

        Raises:
            ConfigError, PlacementError: The numbers do not fit; the message names the component and the numbers.
        """


@former_members(missing="find_missing_keys")
class ConfigChecks(Generic[Cfg]):
    """Checks of a task type: of its configuration, and before a start.

    Attributes:
        ranges, choices: Key → range of its number, or allowed words, for fields without such an annotation.
        conditions: Conditions of the keys that a run does not always read.
        evaluation, free: Keys, or sections (with a dot at the end), that affect only evaluations, and keys that are
            changeable on resume, for fields without such an annotation.
        other_start: End of the message about a checkpoint that a run cannot resume from: another way to use the checkpoint.
    """

    ranges: Mapping[str, Range] = MappingProxyType({})
    choices: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    conditions: tuple[Condition, ...] = ()
    evaluation: tuple[str, ...] = ()
    free: tuple[str, ...] = ()
    other_start = ""

    def find_missing_keys(self, cfg: Cfg) -> list[str]:
        """Returns the required keys that are not set."""
        return []

    def check(self, cfg: Cfg, fail: Fail, *, training: bool) -> None:
        """Checks names and combinations of values; does not import torch and writes nothing.

        Args:
            cfg: The configuration.
            fail: Function that builds the error from a key and the broken rule.
            training: True to check also values that only training needs.

        Raises:
            ConfigError: A rule is broken; the message states the first broken rule.
        """

    def preflight(self, cfg: Cfg, ranks: Mapping[str, int]) -> Iterator[Check]:
        """Yields the checks before a start that need more than the configuration, in the order of a start.

        `rlhpc train` runs all of these checks; `rlhpc plan` and `rlhpc submit` run the checks that need only files.

        Args:
            cfg: The configuration from `prepare` or `trial`.
            ranks: Group → number of processes.
        """
        return iter(())

    def prepare(self, cfg: Cfg, *, resumes: bool) -> Cfg:
        """Returns the configuration for the ranks; does not modify `cfg`.

        Args:
            cfg: The configuration.
            resumes: True if the run continues from a checkpoint.
        """
        return cfg

    @contextlib.contextmanager
    def trial(self, cfg: Cfg) -> Iterator[Cfg]:
        """Yields the configuration for `preflight`, as `prepare` returns it; removes created files afterwards.

        Args:
            cfg: The configuration.
        """
        yield self.prepare(cfg, resumes=False)

    def differences(self, cfg: Cfg, checkpoint: Path) -> list[str]:
        """Returns a sentence for each key that differs between a checkpoint of this task type and the configuration."""
        return []

    def goal(self, cfg: Cfg) -> Any:
        """Returns the settings that can end a segment before its planned step; None if there are no such settings."""
        return [cfg.runner.keep_best, cfg.runner.patience] if cfg.runner.patience > 0 else None

    def evaluation_metrics(self, cfg: Cfg) -> Sequence[str]:
        """Returns the allowed values of `runner.keep_best`: metrics on held-out data of which a higher or a lower value is
        better. Empty for a run that does not evaluate during training.
        """
        return ()


class Offline(Generic[Cfg]):
    """Work of a task type before and after training: preparation, evaluation, playing, export.

    Args:
        name: Name of the task type, for messages.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def preparation(self, cfg: Cfg) -> Preparation:
        """Returns the steps of the workflow before training."""
        return Preparation()

    def recording(self, cfg: Cfg) -> tuple[int, bool]:
        """Returns (number of episodes to record with the trained policy, whether to record only successful episodes)."""
        return 0, False

    def evaluate(
        self, cfg: Cfg, checkpoint: Path, *, suite: str, episodes: int | None, output: Path | None, trust_code: bool
    ) -> str:
        """Evaluates a checkpoint.

        Args:
            cfg: The configuration.
            checkpoint: Folder of the checkpoint.
            suite: Name of the evaluation.
            episodes: Number of episodes; None for the number in the configuration.
            output: File for the result; None writes no file.
            trust_code: True to allow imports of `module:Class` names in the checkpoint.

        Returns:
            A one-line summary of the result.

        Raises:
            ConfigError: Always, unless the task type implements it.
        """
        raise ConfigError(f"runs of kind {self.name} are not evaluated")

    def evaluate_model(self, cfg: Cfg, *, suite: str, output: Path | None) -> str:
        """Evaluates the model that the configuration names, without a checkpoint; returns a one-line summary of the result.

        Raises:
            ConfigError: Always, unless the task type implements it.
        """
        raise ConfigError(f"--model is for language models; {self.name} runs have none. Give a checkpoint")

    def play(self, cfg: Cfg, checkpoint: Path, options: PlayOptions) -> str:
        """Plays episodes with a checkpoint's policy, or chats with its model.

        Args:
            cfg: The configuration.
            checkpoint: Folder of the checkpoint.
            options: Options of `rlhpc play`.

        Returns:
            A one-line summary of the result; "" if there is no result.

        Raises:
            ConfigError: Always, unless the task type implements it.
        """
        raise ConfigError(f"runs of kind {self.name} have nothing to play; rlhpc eval evaluates their checkpoints")

    def load_policy(self, cfg: Cfg, checkpoint: Path, *, trust_code: bool) -> Any:
        """Loads a checkpoint's policy for scripts and notebooks: an object with `act` or `generate`, and with `close`.

        Args:
            cfg: The configuration.
            checkpoint: Folder of the checkpoint, which is valid.
            trust_code: True to allow imports of `module:Class` names in the checkpoint.

        Raises:
            ConfigError: Always, unless the task type implements it.
        """
        raise ConfigError(
            f"runs of kind {self.name} have no policy that acts or answers; rlhpc eval evaluates their checkpoints"
        )

    def export(self, checkpoint: Path, output: Path | None, options: Exporting) -> Path:
        """Exports a checkpoint as a folder for other tools.

        Args:
            checkpoint: Folder of the checkpoint.
            output: Target folder; by default a folder in the run of the checkpoint.
            options: Options of `rlhpc convert`.

        Returns:
            The written folder.

        Raises:
            ConfigError: Always, unless the task type implements it.
        """
        raise ConfigError(f"runs of kind {self.name} have no export")


class Reporting:
    """Pages and tables of a task type's runs.

    Args:
        curves: File name → title of the curves that every report has.
        compared: Comparison metrics: (name, title, axis label); names of evaluation metrics begin with `eval/`.
        headlines: Key metrics, the most important first; if empty, the metrics of `compared`.
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
        return {}

    def parts(self, paths: RunPaths, rows: Rows, *, linked: bool) -> Parts:
        """Returns the sections of the report that depend on the task type.

        Args:
            paths: Files of the run.
            rows: Metrics of the run, one row per step.
            linked: True if the page may link to other files of the run folder.
        """
        return Parts("", "", [], "", [], {}, ("", ""))


@dataclass(frozen=True)
class Planning:
    """Cost models of a task type's runs for `rlhpc tune` and `rlhpc plan`.

    Attributes:
        workload: Name (`module:function`) of a function that takes the configuration and the maximum staleness in steps, and
            returns the `Workload` of a step; "" if unknown.
        account: Name (`module:function`) of a function that returns the memory accounts of the ranks
            (`rlhpc.runs.memory.plan.Accounting`); "" if unknown.
    """

    workload: str = ""
    account: str = ""
