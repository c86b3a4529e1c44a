"""What a kind of run is: one object that the command line, the workflow, the report and the checks ask.

`runner.task_type` names it. The two wings have those that come with rlhpc; others are entry points of group
`rlhpc.kinds`, or `module:NAME`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
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
from rlhpc.runtime.text import shown


@dataclass(frozen=True)
class Preparation:
    """What the workflow does before training.

    Attributes:
        sft: Configuration of a run that comes first, relative to this run's; and what is changed in it.
        demos: The file for an expert's episodes, the expert, and how many episodes to record.
        evaluates_start: Whether the model is also evaluated before training, as step 0.
    """

    sft: tuple[str, list[str]] | None = None
    demos: tuple[str, str, int] | None = None
    evaluates_start: bool = False


@dataclass(frozen=True)
class Exporting:
    """What `rlhpc convert` was asked for.

    Attributes:
        licence: SPDX identifier for the model card.
        adapter_only: With LoRA: the adapter alone.
        base: With LoRA: where the adapted model is now, if it has moved.
        dtype: Of the written weights; None keeps that of training.
        critic: The critic rather than the policy.
        released: As the model's family is released, for its own code.
        trust_code: Import what the checkpoint names as `module:Class`.
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
    """A number by which runs of a kind are judged: a column of tables, and of `rlhpc status`.

    Attributes:
        metric: Name in metrics.jsonl; `eval/…` for a result of evaluations, `eval/pass_at_k` for that of the largest k.
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
        film: Where the film goes if there is no display.
        episodes: How many episodes are played.
        seed: Of the environment, or of sampling.
        system: First message of a conversation.
        max_tokens: Most tokens of a reply.
        trust_code: Import what the checkpoint names as `module:Class`.
    """

    film: Path
    episodes: int | None = None
    seed: int | None = None
    system: str | None = None
    max_tokens: int | None = None
    trust_code: bool = False


@dataclass(frozen=True)
class Parts:
    """The parts of a report that depend on the kind of run, as HTML and SVG.

    Attributes:
        subject: What is trained on what, for the subtitle.
        cards: The key figures.
        curves: Learning curves, the most important first.
        evaluation: Plot and table of the evaluations.
        times: Curves of time.
        evaluated: Step → what its first evaluation says, for the table of checkpoints.
        trained: The metric that the table of checkpoints shows, and its title.
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
#: The configuration of a kind of run.
Cfg = TypeVar("Cfg", bound=RunConfig)


@dataclass(frozen=True)
class Kind(Generic[Cfg]):
    """A kind of run. Nothing here is heavy: methods import what they need.

    Attributes:
        name: Its name in `runner.task_type`.
        config: Its configuration's dataclass.
        roles: Group → its worker class, as `module:Class`.
        runner: Class of the loop that drives them, as `module:Class`; called with the configuration and the groups by name.
        preload: Modules that the fork server imports.
        curves: Curves that its report always has, file name → title.
        compared: Metrics by which runs are compared: name, title, axis; those of evaluations begin with `eval/`.
        headlines: Numbers by which its runs are judged, the most important first; empty for those of `compared`.
        ranges: Key → the range of its number.
        choices: Key → the words it may have.
        conditions: Keys that a run reads under a condition alone; it always reads the others.
        evaluation: Keys, or sections (with a dot at the end), that change what evaluations do, and nothing else.
        free: Those of the machine and of how the work is cut into pieces: a run goes on with others.
        expendable: Groups that may be lost and restarted in a submitted run.
        independent: Those of them whose ranks have no collectives among themselves: one that dies is restarted alone.
        workload: What a step consists of, for `rlhpc tune`: a function of the configuration and of the steps by which those
            who sample may be ahead at most, as `module:function`, that gives a `Workload`; "" if nobody knows.
        account: What its ranks hold in memory, for `rlhpc plan`: a `rlhpc.runs.memory.plan.Accounting`, as `module:function`;
            "" if nobody knows.
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
    def schema(self) -> Schema:
        """The keys of its configuration."""
        return Schema(self.config, self.name)

    def whose(self, key: str) -> str:
        """The complaint about a key that another kind of run has; empty if none has it."""
        owners = [kind.name for kind in all_kinds() if kind.name != self.name and key in kind.schema]
        if not owners:
            return ""
        noun = "a kind of run" if len(owners) == 1 else "kinds of run"
        return f"is for {noun} that this one ({self.name}) is not: {', '.join(owners)}; leave it out"

    # -- groups ---------------------------------------------------------------------------------------------------

    def roles_of(self, cfg: Cfg) -> Mapping[str, str]:
        """The groups of a run with this configuration, and their worker classes: `roles`, and whatever it asks for besides."""
        del cfg
        return self.roles

    def components(self, cfg: Cfg) -> Sequence[str]:
        """The names that `cluster.component_placement` may have, for messages."""
        return list(self.roles_of(cfg))

    def expendable_of(self, cfg: Cfg) -> frozenset[str]:
        """`expendable`, of those groups."""
        del cfg
        return self.expendable

    def independent_of(self, cfg: Cfg) -> frozenset[str]:
        """`independent`, of those groups."""
        del cfg
        return self.independent

    def elastic_of(self, cfg: Cfg) -> dict[str, int]:
        """Groups that go on without ranks that have ended, and how many they need at least."""
        del cfg
        return {}

    def patience_of(self, cfg: Cfg) -> dict[str, float]:
        """Of the groups of `elastic_of`, those whose ranks are taken for lost sooner than others: the seconds of silence."""
        del cfg
        return {}

    def why_fixed(self, cfg: Cfg) -> str:
        """Why no group of `elastic_of` is in this run, and what would have to change, for messages; "" if nothing would do."""
        del cfg
        return ""

    def most_useful(self, cfg: Cfg, started: Mapping[str, int]) -> dict[str, int]:
        """Of the groups of `elastic_of`: ranks beyond which there is nothing more to do at a time.

        Args:
            cfg: The configuration.
            started: Ranks of each group that the run starts with.
        """
        del cfg, started
        return {}

    # -- configuration --------------------------------------------------------------------------------------------

    def missing(self, cfg: Cfg) -> list[str]:
        """Required keys that are not set."""
        del cfg
        return []

    def check(self, cfg: Cfg, fail: Fail, *, training: bool) -> None:
        """Refuses names and combinations that cannot work; imports no torch, and writes nothing.

        Args:
            cfg: The configuration.
            fail: Makes the error for a key and the rule that it breaks.
            training: Also check what only training needs.

        Raises:
            ConfigError: The first rule that is broken.
        """

    def check_placement(self, cfg: Cfg, processes: Mapping[str, int], accelerators: Mapping[str, int]) -> None:
        """Refuses counts of processes that do not fit.

        Args:
            cfg: The configuration.
            processes: Number of processes of each group.
            accelerators: Number of accelerators of each process of a group.

        Raises:
            ConfigError, PlacementError: Names the component and the numbers.
        """

    def checks(self, cfg: Cfg, ranks: Mapping[str, int]) -> Iterator[Check]:
        """Yields what has to hold before a run starts and its configuration alone does not tell, in the order of a start.

        `rlhpc train` makes all of these checks; `rlhpc plan` and `submit` make those that need files alone.

        Args:
            cfg: The configuration, as `prepare` or `trial` gave it.
            ranks: Number of processes of each group.
        """
        del cfg, ranks
        return iter(())

    def together_of(self, cfg: Cfg) -> dict[str, int]:
        """Groups of which so many neighbouring ranks are one replica: they come, go and end together."""
        del cfg
        return {}

    def placed(self, cfg: Cfg, replicas: Mapping[str, int]) -> Cfg:
        """The configuration, with what follows from the placement written down.

        Args:
            cfg: The configuration.
            replicas: How many neighbouring ranks of each group are one engine.
        """
        del replicas
        return cfg

    def prepare(self, cfg: Cfg, *, resumes: bool) -> Cfg:
        """The configuration as its ranks get it; the caller's stays as it is.

        Args:
            cfg: The configuration.
            resumes: The run goes on from a checkpoint.
        """
        del resumes
        return cfg

    @contextlib.contextmanager
    def trial(self, cfg: Cfg) -> Iterator[Cfg]:
        """Yields the configuration for `checks`, as `prepare` gives it; nothing that this makes remains.

        Args:
            cfg: The configuration.
        """
        yield self.prepare(cfg, resumes=False)

    def differences(self, cfg: Cfg, checkpoint: Path) -> list[str]:
        """How a checkpoint of this kind differs from this run: keys with its value there and here."""
        del cfg, checkpoint
        return []

    #: The end of a message: what can be done with a checkpoint from which this run cannot resume.
    other_start = ""

    # -- workflow -------------------------------------------------------------------------------------------------

    def preparation(self, cfg: Cfg) -> Preparation:
        """What the workflow does before training."""
        del cfg
        return Preparation()

    def recording(self, cfg: Cfg) -> tuple[int, bool]:
        """How many episodes of the last policy are recorded, and whether only those that succeeded."""
        del cfg
        return 0, False

    def goal(self, cfg: Cfg) -> Any:
        """What can end a segment before its planned step; None if nothing can."""
        return early_end(cfg)

    def evaluation_metrics(self, cfg: Cfg) -> Sequence[str]:
        """The metrics of held-out data that a run with this configuration measures while it trains, and that have a better and
        a worse: what `runner.keep_best` may name; none where it does not evaluate."""
        del cfg
        return ()

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def evaluate(
        self, cfg: Cfg, checkpoint: Path, *, suite: str, episodes: int | None, output: Path | None, trust_code: bool
    ) -> str:
        """Evaluates a checkpoint.

        Args:
            cfg: The configuration.
            checkpoint: Its folder.
            suite: Name of the evaluation.
            episodes: How many; None for what the configuration says.
            output: Where the result is written; None writes nothing.
            trust_code: Import what the checkpoint names as `module:Class`.

        Returns:
            The result in a line.
        """
        raise ConfigError(f"runs of kind {self.name} are not evaluated")

    def evaluate_model(self, cfg: Cfg, *, suite: str, output: Path | None) -> str:
        """Evaluates the model that the configuration names, without a checkpoint; the result in a line."""
        raise ConfigError(f"--model is for language models; {self.name} runs have none. Give a checkpoint")

    def play(self, cfg: Cfg, checkpoint: Path, options: PlayOptions) -> str:
        """Shows a checkpoint's policy at work, or talks with it.

        Args:
            cfg: The configuration.
            checkpoint: Its folder.
            options: Options.

        Returns:
            The result in a line; "" where there is nothing to say.
        """
        raise ConfigError(f"runs of kind {self.name} have nothing to play; rlhpc eval evaluates their checkpoints")

    def export(self, checkpoint: Path, output: Path | None, wanted: Exporting) -> Path:
        """Writes a checkpoint as a folder for others.

        Args:
            checkpoint: Its folder.
            output: Target; by default in the run that the checkpoint lies in.
            wanted: Options.

        Returns:
            The folder.
        """
        raise ConfigError(f"runs of kind {self.name} have no export")

    # -- report ---------------------------------------------------------------------------------------------------

    def charts(self, paths: RunPaths, rows: Rows) -> dict[str, str]:
        """Every chart of a run as SVG, by file name."""
        del paths, rows
        return {}

    def parts(self, paths: RunPaths, rows: Rows, *, linked: bool) -> Parts:
        """The parts of the report that are this kind's own.

        Args:
            paths: The run.
            rows: Its metrics.
            linked: The page may refer to other files of the run.
        """
        del paths, rows, linked
        return Parts("", "", [], "", [], {}, ("", ""))


def early_end(cfg: RunConfig) -> list[Any] | None:
    """Returns what ends a run that gets no better, as far as its configuration says; None if nothing does."""
    return [cfg.runner.keep_best, cfg.runner.patience] if cfg.runner.patience > 0 else None


def kind_names() -> list[str]:
    """All names that `runner.task_type` may have, apart from `module:NAME`."""
    return [*KINDS.built_in, *sorted(offered(KINDS.group))]


def all_kinds() -> list[Kind]:
    """All kinds of run that have a name: built-in and from entry points."""
    return [find_kind(name) for name in kind_names()]


def find_kind(name: str | None = None, source: str = "configuration") -> Kind[Any]:
    """The kind of run that `runner.task_type` names.

    Args:
        name: In any case; None for the default.
        source: Where the name is from, for messages.

    Raises:
        ConfigError: There is no such kind of run; says which there are.
    """
    wanted = DEFAULT if name is None else name
    if path := KINDS.path(wanted):
        return _checked(import_attribute(path, f"{source}: {KINDS.key}"), wanted, source)
    raise ConfigError(
        f"{source}: {KINDS.key} is {shown(wanted)}{nearest(wanted, kind_names())} allowed: {', '.join(kind_names())}, "
        f"or {KINDS.form}"
    )


def _checked(found: Any, name: str, source: str) -> Kind[Any]:
    if not isinstance(found, Kind):
        raise ConfigError(f"{source}: runner.task_type is {shown(name)}, which is a {type(found).__name__} and no Kind")
    return found


def kind_of(cfg: Cfg) -> Kind[Cfg]:
    """The kind of run that a configuration is for."""
    return find_kind(cfg.runner.task_type)


def kind_of_run(paths: RunPaths) -> Kind[Any]:
    """The kind of a run, from its config.yaml; the default kind if that cannot be read."""
    return _kind_of_file(paths.config) or find_kind()


def kind_of_checkpoint(checkpoint: Path) -> Kind[Any]:
    """The kind of the run that made a checkpoint, from its config.yaml; the default kind if that cannot be read."""
    return _kind_of_file(checkpoint / CONFIG) or find_kind()


def _kind_of_file(config: Path) -> Kind[Any] | None:
    try:
        name = str(read_yaml(read_file(config))["runner"]["task_type"])
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError):
        return None
    known = name.lower() in kind_names()
    return find_kind(name) if known else None  # a file from elsewhere imports nothing
