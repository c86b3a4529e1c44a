"""Typed access to a run folder from Python, finished or live: metrics, samples, episodes, evaluations, checkpoints, policy."""

from __future__ import annotations

import fnmatch
import html
import importlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml

from rlhpc.jobs.paths import CONFIG, RunPaths, step_of
from rlhpc.jobs.state import Facts, find_runs, holds_run, number_of, states
from rlhpc.language.reporting.sample_pages import read_samples, samples_path
from rlhpc.live.metric_table import Floats, MetricTable
from rlhpc.metrics.provenance import read_all_results, read_provenance
from rlhpc.runtime.errors import CheckpointError, ConfigError
from rlhpc.runtime.files import expand_home, is_number, read_file, read_yaml
from rlhpc.runtime.text import first_line, format_names, printable

#: Number of rows, and of columns, of a table in a notebook.
_MAX_ROWS, _MAX_COLUMNS = 10, 8
#: Longest text of a cell in a notebook.
_MAX_TEXT = 80


class MetricColumns(Mapping[str, Floats]):
    """Metrics of a run as columns of equal length: name → a number for each row, NaN where a row has none.

    Attributes:
        step: Global step of each row.
    """

    def __init__(self, step: npt.NDArray[np.int64], columns: Mapping[str, Floats]) -> None:
        self.step = step
        self._columns = dict(columns)

    def __getitem__(self, name: str) -> Floats:
        if name in self._columns:
            return self._columns[name]
        raise KeyError(f"no metric {name!r}; the table has: {', '.join(self._columns) or 'none'}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def curve(self, name: str, against: str = "step") -> tuple[Floats, Floats]:
        """Returns the finite points (x, y) of a metric over the step or over another metric."""
        x = self.step.astype(np.float64) if against == "step" else self[against]
        y = self[name]
        has_both = np.isfinite(x) & np.isfinite(y)
        return x[has_both], y[has_both]

    def to_pandas(self) -> Any:
        """Returns a `pandas.DataFrame` with the step as its index.

        Raises:
            ConfigError: pandas is not installed.
        """
        try:
            pandas = importlib.import_module("pandas")
        except ImportError:
            raise ConfigError(
                "to_pandas() needs pandas: pip install pandas; or use the columns, which are NumPy arrays"
            ) from None
        return pandas.DataFrame(self._columns, index=pandas.Index(self.step, name="step"))

    def __repr__(self) -> str:
        last_step_text = f", last step {self.step[-1]}" if len(self.step) else ""
        return f"MetricColumns({len(self.step)} rows of {len(self)} metrics{last_step_text})"

    def _repr_html_(self) -> str:
        names = list(self)[:_MAX_COLUMNS]
        rows = [
            [str(self.step[row]), *(f"{self[name][row]:.5g}" for name in names)]
            for row in range(max(0, len(self.step) - _MAX_ROWS), len(self.step))
        ]
        caption = repr(self) + (f"; the first {len(names)} of them" if len(names) < len(self) else "")
        return _html_table(["step", *names], rows, caption)


@dataclass(frozen=True)
class SamplePart:
    """Part of a sample: text that the model read, or tokens that it sampled.

    Attributes:
        role: Role of the policy in the episode; "" where there is one role.
        turn: Number of the turn.
        text: Text of the part.
        tokens: Text of each sampled token; empty for text that was read.
        logprobs: Log-prob of each sampled token.
        reward: Reward of the turn; 0 if the turn has no reward.
    """

    role: str
    turn: int
    text: str
    tokens: tuple[str, ...] = ()
    logprobs: tuple[float, ...] = ()
    reward: float = 0.0


@dataclass(frozen=True)
class SampleRecord:
    """Response of a language model to a problem of an evaluation.

    Attributes:
        step, suite: Step of the checkpoint, and the evaluation suite.
        id: Identifier of the problem.
        index: Number of the response among those to the problem.
        prompt, response: Texts.
        answer: Reference answer, as in the data; None if there is no reference.
        is_right: Whether the first reward term is 1.
        reward: Total reward; None if it was not recorded.
        terms: Reward term → its value.
        num_tokens: Number of tokens of the response; None if it was not recorded.
        level: Level of the problem; None without levels.
        parts: Turns of an agent's episode, or the response of one turn, with each sampled token and its log-prob; empty if
            they were not recorded.
    """

    step: int
    suite: str
    id: str | int
    index: int
    prompt: str
    response: str
    answer: Any
    is_right: bool
    reward: float | None = None
    terms: Mapping[str, float] = field(default_factory=dict)
    num_tokens: int | None = None
    level: Any = None
    parts: tuple[SamplePart, ...] = ()


@dataclass(frozen=True)
class EpisodeRecord:
    """Recorded episode of a policy in a simulator.

    Attributes:
        step: Step of the checkpoint that acted.
        index: Number of the episode in its file.
        observations: Array `[T+1, …]`, or a dict of them; None if the file has none.
        actions: Array `[T, dim]`.
        rewards: Array `[T]`; None if the file has none.
        terminated, truncated: Arrays `[T]`.
        success: Array `[T]`; None if the simulator does not report success.
        seed: Seed of the episode's reset, if it is known.
    """

    step: int
    index: int
    observations: Any
    actions: npt.NDArray[Any]
    rewards: npt.NDArray[Any] | None
    terminated: npt.NDArray[Any]
    truncated: npt.NDArray[Any]
    success: npt.NDArray[Any] | None
    seed: int | None

    @property
    def episode_return(self) -> float:
        """Sum of the rewards; NaN without rewards."""
        return float("nan") if self.rewards is None else float(self.rewards.sum())

    def __len__(self) -> int:
        return len(self.actions)


@dataclass(frozen=True)
class EvaluationRecord:
    """Result of an evaluation of a checkpoint.

    Attributes:
        step, suite: Step of the checkpoint, and the suite.
        numbers: Name of a metric → its value.
        result: Complete content of the JSON file.
    """

    step: int
    suite: str
    numbers: Mapping[str, float]
    result: Mapping[str, Any] = field(repr=False)


@dataclass(frozen=True)
class CheckpointRecord:
    """Complete checkpoint.

    Attributes:
        step: Global step.
        path: Folder.
        is_best: Whether the run keeps it as its best checkpoint (`runner.keep_best`).
    """

    step: int
    path: Path
    is_best: bool


@dataclass(frozen=True)
class RunStatus:
    """State of a run at one moment, as `rlhpc status` shows it.

    Attributes:
        state: running, finished, failed, …
        reason: Consequence or cause of the state.
        step, max_steps: Completed and planned steps; None while they are unknown.
        eta_s: Estimated seconds to the end; None if unknown.
    """

    state: str
    reason: str
    step: int | None
    max_steps: int | None
    eta_s: float | None


class LoadedRun:
    """Run folder of a finished or a live run. Each access reads the current content of the files.

    Args:
        paths: Files of the run.
    """

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self._table = MetricTable(paths.metrics)

    @property
    def folder(self) -> Path:
        """Run folder."""
        return self._paths.root

    @property
    def name(self) -> str:
        """Name of the run."""
        return self._paths.root.name

    @property
    def status(self) -> RunStatus:
        """State of the run. For a run in a Slurm job, this may ask Slurm once."""
        [(facts, run_record)] = states([self._paths])
        step, max_steps = (number_of(facts.status, key) for key in ("step", "max_steps"))
        return RunStatus(
            run_record.state, run_record.reason, None if step is None else int(step),
            None if max_steps is None else int(max_steps),
            number_of(facts.status, "eta_s") if run_record.is_current else None,
        )  # fmt: skip

    @property
    def config(self) -> dict[str, Any]:
        """Resolved configuration with which the run was started; {} before the run has written it.

        Raises:
            ConfigError: The file cannot be read.
        """
        path = self._paths.config
        try:
            content = read_yaml(read_file(path))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, yaml.YAMLError) as error:
            reason = getattr(error, "strerror", None) or first_line(error)
            raise ConfigError(f"{path} cannot be read: {reason}") from None
        return content if isinstance(content, dict) else {}

    @property
    def provenance(self) -> dict[str, Any]:
        """Versions, git state, Slurm job, host and command of the run; {} if there is no readable record."""
        return read_provenance(self._paths)

    @property
    def checkpoints(self) -> list[CheckpointRecord]:
        """Complete checkpoints, oldest first."""
        best_step = self._paths.best_step()
        return [CheckpointRecord(step, path, step == best_step) for step, path in self._paths.complete_steps()]

    @property
    def evaluations(self) -> list[EvaluationRecord]:
        """Evaluations of the run's checkpoints, sorted by step and suite. Unreadable results are left out."""
        return sorted(
            (
                EvaluationRecord(
                    int(result["global_step"]), str(result["suite"]),
                    {name: float(value) for name, value in result.items() if is_number(value)}, result,
                )
                for result in read_all_results(self._paths)
            ),
            key=lambda record: (record.step, record.suite),
        )  # fmt: skip

    def metrics(self, *patterns: str) -> MetricColumns:
        """Returns the metrics so far. Incomplete and invalid lines of metrics.jsonl are left out.

        Args:
            patterns: Shell patterns of names, such as `train/*`; without patterns, all metrics.

        Raises:
            ConfigError: metrics.jsonl cannot be read, or no metric fits a pattern.
        """
        path = self._paths.metrics
        if path.exists() and not (path.is_file() and os.access(path, os.R_OK)):
            raise ConfigError(f"{path} cannot be read; load_run needs read access to the run's files")
        self._table.update()
        names = self._table.names()
        for pattern in patterns:
            if names and not fnmatch.filter(names, pattern):
                raise ConfigError(f"no metric fits {pattern!r}; the run has: {', '.join(names)}")
        metric_names = [name for name in names if not patterns or any(fnmatch.fnmatchcase(name, p) for p in patterns)]
        # Copies, because the table goes on reading.
        columns = {name: self._table.column(name).copy() for name in metric_names}
        return MetricColumns(self._table.column("step").astype(np.int64), columns)

    def samples(self, step: int | None = None, suite: str | None = None) -> Iterator[SampleRecord]:
        """Yields the responses of a language model's evaluations, one at a time. Invalid lines are left out.

        Args:
            step: Step of the checkpoint; None for all.
            suite: Evaluation suite; None for all.

        Raises:
            ConfigError: The run has no samples of this step and suite.
        """
        files = [
            (step_of(path.parent.name) or 0, path.stem, samples_path(path))
            for path in self._paths.eval_results()
            if samples_path(path).is_file()
        ]
        selected_files = sorted(file for file in files if step in (None, file[0]) and suite in (None, file[1]))
        if not selected_files:
            available_text = ", ".join(f"step {file_step} {name}" for file_step, name, _ in sorted(files)) or (
                "none; rlhpc eval writes them for language models"
            )
            raise ConfigError(
                f"{self.folder} has no samples{_describe_selection(step, suite)}; it has: {available_text}"
            )
        return (
            _sample_record(row, file_step, name)
            for file_step, name, path in selected_files
            for row in read_samples(path)
        )

    def episodes(self, step: int | None = None) -> Iterator[EpisodeRecord]:
        """Yields the episodes that were recorded with the run's policies in a simulator, one at a time.

        Args:
            step: Step of the checkpoint that acted; None for all.

        Raises:
            ConfigError: The run has no recorded episodes of this step, or a file is damaged.
        """
        steps = [s for s, _ in self._paths.checkpoint_steps() if self._paths.recording(s).is_file()]
        selected_steps = [s for s in steps if step in (None, s)]
        if not selected_steps:
            available_text = ", ".join(f"step {s}" for s in steps) or (
                f"none; record some: rlhpc record --run {self.folder} --output {self._paths.recording('N')}"
            )
            raise ConfigError(
                f"{self.folder} has no recorded episodes{_describe_selection(step, None)}; it has: {available_text}"
            )
        return (episode for s in selected_steps for episode in _read_episodes(s, self._paths.recording(s)))

    def policy(self, step: int | None = None, *, trust_code: bool = False) -> Any:
        """Returns the trained policy, ready for use: `policy.act(observation)` in a simulator's run, `policy.generate(prompt)`
        in a language model's. Close it after use, or use it as a context manager.

        Args:
            step: Step of the checkpoint; None for the best one, or the newest if the run keeps no best.
            trust_code: Import code that the checkpoint names. Checkpoints of your own runs need no permission.

        Raises:
            CheckpointError: The run has no such checkpoint, or it is damaged.
            ConfigError: Runs of this task type have no such policy.
        """
        from rlhpc.checkpoint.manifest import is_trusted
        from rlhpc.checkpoint.store import require_valid
        from rlhpc.runs.configuration import load_config
        from rlhpc.runs.task_type import task_type_of
        from rlhpc.runtime.trust import Trust

        chosen_step = self._paths.chosen_step() if step is None else step
        steps = [record.step for record in self.checkpoints]
        if chosen_step is None or chosen_step not in steps:
            raise CheckpointError(
                f"{self.folder} has no complete checkpoint{'' if step is None else f' of step {step}'}; it has: "
                f"{', '.join(map(str, steps)) or 'none yet'}"
            )
        checkpoint = self._paths.checkpoint(chosen_step)
        require_valid(checkpoint, hint="or load another step")
        is_trusted_checkpoint = trust_code or is_trusted(checkpoint)
        cfg = load_config(checkpoint / CONFIG, training=False, trust=Trust(is_trusted_checkpoint))
        return task_type_of(cfg).offline.load_policy(cfg, checkpoint, trust_code=is_trusted_checkpoint)

    def report(self) -> Path:
        """Writes the run's report page; returns its path.

        Raises:
            RlhpcError: The page cannot be written.
        """
        from rlhpc.runs.report import write_report

        return write_report(self._paths)

    def __repr__(self) -> str:
        return f"LoadedRun({str(self.folder)!r})"

    def _repr_html_(self) -> str:
        facts_of_run = Facts.read(self._paths)
        run_record, status = facts_of_run.state(), facts_of_run.status  # without asking Slurm
        try:
            metrics = self.metrics()
            metrics_text = f"{len(metrics)}, in {len(metrics.step)} rows"
        except ConfigError:  # a notebook would show a traceback in place of the rest
            metrics_text = "cannot be read"
        facts = {
            "folder": str(self.folder),
            "state": run_record.state + (f": {run_record.reason}" if run_record.reason else ""),
            "step": f"{status.get('step', '–')} of {status.get('max_steps', '–')}",
            "metrics": metrics_text,
            "checkpoints": ", ".join(str(record.step) for record in self.checkpoints) or "none",
            "evaluations": ", ".join(f"{r.suite} at step {r.step}" for r in self.evaluations[-4:]) or "none",
        }
        return _html_table(["run", self.name], [[key, value] for key, value in facts.items()], "")


def load_run(folder: str | os.PathLike[str]) -> LoadedRun:
    """Opens the folder of a run, finished or live, of this version or an earlier one.

    Raises:
        ConfigError: The folder is not the folder of a run; the message names the runs below it.
    """
    paths = RunPaths(expand_home(os.fspath(folder)).absolute())
    if paths.root.is_dir() and (holds_run(paths) or paths.metrics.is_file()):
        return LoadedRun(paths)
    if not paths.root.exists():
        sibling_names = [run_paths.root.name for run_paths in find_runs(paths.root.parent, 1)]
        raise ConfigError(
            f"there is no folder {paths.root}; "
            + (
                f"runs in {paths.root.parent}: {format_names(sibling_names, limit=_MAX_ROWS)}"
                if sibling_names
                else "give the folder of a run, such as runs/quickstart"
            )
        )
    nested_names = (
        [str(run_paths.root.relative_to(paths.root)) for run_paths in find_runs(paths.root)]
        if paths.root.is_dir()
        else []
    )
    hint = (
        f"runs below it: {format_names(nested_names, limit=_MAX_ROWS)}"
        if nested_names
        else "give the folder of a run: it has a config.yaml and a metrics.jsonl"
    )
    raise ConfigError(f"{paths.root} is no run folder; {hint}")


def _describe_selection(step: int | None, suite: str | None) -> str:
    return ("" if step is None else f" of step {step}") + ("" if suite is None else f" of suite {suite!r}")


def _sample_record(row: Mapping[str, Any], step: int, suite: str) -> SampleRecord:
    terms = row.get("terms", {})
    return SampleRecord(
        step, suite, row["id"], row["sample"], row["prompt"], row["response"], row.get("answer"),
        row["right"], row.get("reward"), {name: float(v) for name, v in terms.items() if is_number(v)},
        row.get("tokens"), row.get("level"), tuple(_parts(row.get("episode") or _one_turn(row))),
    )  # fmt: skip


def _one_turn(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the tokens of a response of one turn in the form of a transcript; [] if they were not recorded."""
    return [{"parts": [{"turn": 0, "drawn": row["drawn"]}]}] if row.get("drawn") else []


def _parts(episode: Any) -> Iterator[SamplePart]:
    """Yields the parts of a transcript; omits entries that do not have the form of `transcript`."""
    for sample in episode if isinstance(episode, list) else ():
        parts = sample.get("parts") if isinstance(sample, dict) else None
        for part in parts if isinstance(parts, list) else ():
            if not isinstance(part, dict) or not is_number(part.get("turn")):
                continue
            sampled_tokens = part.get("drawn")
            pairs = [
                (str(pair[0]), float(pair[1]))
                for pair in (sampled_tokens if isinstance(sampled_tokens, list) else ())
                if isinstance(pair, list) and len(pair) == 2 and is_number(pair[1])
            ]
            tokens = tuple(text for text, _ in pairs)
            reward: Any = part.get("reward")
            yield SamplePart(
                str(sample.get("role") or ""), int(part["turn"]), "".join(tokens) or str(part.get("read") or ""), tokens,
                tuple(logprob for _, logprob in pairs), float(reward) if is_number(reward) else 0.0,
            )  # fmt: skip


def _read_episodes(step: int, path: Path) -> Iterator[EpisodeRecord]:
    from rlhpc.embodied.data.trajectories import read_maniskill  # imports h5py

    for index, trajectory in enumerate(read_maniskill(path)):
        yield EpisodeRecord(
            step, index, trajectory["obs"], trajectory["actions"], trajectory["rewards"], trajectory["terminations"],
            trajectory["truncations"], trajectory["success"], trajectory["seed"],
        )  # fmt: skip


def _html_table(head: list[str], rows: list[list[str]], caption: str) -> str:
    """Returns an HTML table of texts; all texts are escaped."""

    def cells(tag: str, texts: list[str]) -> str:
        short_texts = (
            text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 1]}…" for text in map(printable, texts)
        )
        return "<tr>" + "".join(f"<{tag}>{html.escape(text)}</{tag}>" for text in short_texts) + "</tr>"

    body = "".join(cells("td", row) for row in rows)
    title = f"<caption>{html.escape(caption)}</caption>" if caption else ""
    return f"<table>{title}<thead>{cells('th', head)}</thead><tbody>{body}</tbody></table>"
