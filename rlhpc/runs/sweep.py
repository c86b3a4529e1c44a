"""Sweep of runs: every run has a checked configuration, and runs share equal preparations."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhpc.config import total_steps
from rlhpc.config.files import find_config, read_files
from rlhpc.config.load import read_task_type
from rlhpc.config.sections import RunConfig
from rlhpc.config.sweep import SWEEP, Point, SweepConfig, digest, is_about_sweep, override, points, read_section
from rlhpc.config.typed import leaves, plain, select
from rlhpc.jobs.paths import RunPaths, SweepPaths
from rlhpc.jobs.shared_files import read_json_file
from rlhpc.runs.configuration import load_config
from rlhpc.runs.run_identity import check_same_run
from rlhpc.runs.task_type import find_task_type, task_type_of
from rlhpc.runtime.disk_errors import unwritten_page_error
from rlhpc.runtime.errors import ConfigError, RlhpcError
from rlhpc.runtime.files import expand_home, replace_durably, unwritable

#: Configuration sections that determine an expert's episodes.
_RECORDING_SECTIONS = ("env",)


@dataclass(frozen=True)
class SweepRun:
    """Run of a sweep.

    Attributes:
        point: Name and values of the run.
        overrides: Overrides of the sweep's file that result in the run's configuration, for `load_config` and commands.
        cfg: Configuration of the run.
        prepares: Preparations (`sft`, `demos`) that this run makes for all runs with the same preparation.
    """

    point: Point
    overrides: tuple[str, ...]
    cfg: RunConfig
    prepares: frozenset[str] = frozenset()

    @property
    def paths(self) -> RunPaths:
        return RunPaths.from_run_dir(self.cfg.runner.run_dir, self.cfg.runner.name)


@dataclass(frozen=True)
class Sweep:
    """Sweep with its runs.

    Attributes:
        name: Name of the sweep's folder.
        paths: Files of the sweep.
        source: File that describes the sweep.
        section: Content of section `sweep`.
        runs: Runs of the sweep.
    """

    name: str
    paths: SweepPaths
    source: str
    section: SweepConfig
    runs: tuple[SweepRun, ...]

    def facts(self) -> dict[str, Any]:
        """Returns the content of `sweep.json` without the time of writing."""
        return {
            "name": self.name,
            "config": str(Path(self.source).absolute()),
            "metric": self.section.metric,
            "goal": self.section.goal,
            "suite": next(iter(self.runs[0].cfg.workflow.eval_suites), "default"),
            "max_queued": self.section.max_queued,
            "runs": [
                {"name": run.point.name, "label": run.point.label or self.name, "seed": run.point.seed,
                 "values": dict(run.point.values)}
                for run in self.runs
            ],
        }  # fmt: skip

    def begin(self) -> None:
        """Writes `sweep.json` at the start of the sweep, and revokes an earlier cancellation.

        Raises:
            RlhpcError: The file cannot be written.
        """
        record_text = json.dumps({**self.facts(), "written": time.time()}, indent=2, default=str)
        try:
            self.paths.root.mkdir(parents=True, exist_ok=True)
            replace_durably(self.paths.record, record_text.encode())
            self.paths.cancel_mark.unlink(missing_ok=True)
        except OSError as error:
            raise unwritten_page_error(error, self.paths.record) from error


def load_sweep(path: str | Path, overrides: Sequence[str] = (), *, site: str | None = None) -> Sweep | None:
    """Reads a sweep and checks the configuration of each run; writes nothing.

    Args:
        path: YAML file.
        overrides: `key=value` for all runs; `sweep=…` and `sweep.seeds=…` change the sweep.
        site: Name or file of the site file, as for `load_config`.

    Returns:
        The sweep; None if the file is the configuration of a single run.

    Raises:
        ConfigError: The sweep or a run is invalid; the message names the run and its values.
    """
    config_source = str(find_config(path))
    files = read_files(Path(config_source))
    if read_section(files, overrides) is None:
        return None
    sweep_section = read_section(files, overrides, find_task_type(*read_task_type(files, overrides)).schema)
    assert sweep_section is not None
    section, sweep_source = sweep_section
    common_overrides = [
        *(override_text for override_text in overrides if not is_about_sweep(override_text)),
        f"{SWEEP}=null",
    ]
    named_points = points(section, sweep_source, common_overrides)
    first_cfg = _load(
        config_source,
        [*common_overrides, *named_points[0].overrides],
        named_points[0],
        sweep_source,
        common_overrides,
        site,
        check=False,
    )
    name, folder = first_cfg.runner.name, first_cfg.runner.run_dir
    paths = SweepPaths(RunPaths.from_run_dir(folder, name).root)
    if os.path.isfile(RunPaths(paths.root).config):
        raise ConfigError(
            f"{sweep_source}: {paths.root} is the folder of a run; give the sweep a name of its own with runner.name=…"
        )
    if reason := unwritable(paths.root):
        raise ConfigError(
            f"{sweep_source}: the sweep's folder {paths.root}: {reason}; choose another with runner.run_dir=…"
        )
    run_dir_overrides = [*common_overrides, override("runner.run_dir", os.path.normpath(f"{folder}/{name}"))]
    runs = []
    for sweep_point in named_points:
        run_overrides = [*run_dir_overrides, override("runner.name", sweep_point.name), *sweep_point.overrides]
        cfg = _load(config_source, run_overrides, sweep_point, sweep_source, common_overrides, site)
        runs.append(
            _move_preparations(
                SweepRun(sweep_point, tuple(run_overrides), cfg),
                config_source,
                paths,
                sweep_source,
                common_overrides,
                site,
            )
        )
    return Sweep(
        name, paths, config_source, section, tuple(_share_preparations(runs, config_source, sweep_source, site))
    )


def check_begun(sweep: Sweep, *, resume_with: bool = False) -> None:
    """Checks before the start of runs that no run of the sweep has already started with another configuration.

    Raises:
        ConfigError: A run has started with another configuration; the message names the keys that differ.
    """
    for run in sweep.runs:
        check_same_run(run.paths, run.cfg, resume_with=resume_with)


def _load(
    config_source: str, run_overrides: Sequence[str], sweep_point: Point, sweep_source: str, common_overrides: Sequence[str],
    site: str | None, *, check: bool = True,
) -> RunConfig:  # fmt: skip
    try:
        return load_config(config_source, run_overrides, check=check, site=site)
    except ConfigError as error:
        try:
            load_config(config_source, common_overrides, check=check, site=site)
        except ConfigError as common_error:
            if str(common_error) == str(error):
                raise error from None  # the sweep's values are not the cause
        raise ConfigError(
            f"{sweep_source}: {SWEEP}: run {sweep_point.name} ({' '.join(sweep_point.overrides)}): {error}"
        ) from None


# -- preparations -----------------------------------------------------------------------------------------------------


def sft_of(config_source: str, cfg: RunConfig, site: str | None) -> tuple[str, RunConfig] | None:
    """Returns the file and the configuration of the SFT run that precedes a run; None if there is no SFT run."""
    sft = task_type_of(cfg).offline.preparation(cfg).sft
    if sft is None:
        return None
    path = os.path.normpath(Path(config_source).parent / sft[0])
    return path, load_config(path, sft[1], site=site)


def sft_export(config_source: str, cfg: RunConfig, sft_source: tuple[str, RunConfig]) -> Path:
    """Returns the folder into which the workflow exports the policy of the SFT run: `export/chosen`, unless the RL run's
    `actor.model.model_path` names the export of the SFT run's last step.

    Args:
        config_source: File of the RL run.
        cfg: Configuration of the RL run.
        sft_source: Result of `sft_of`.

    Raises:
        ConfigError: The RL run names the export of one step, but the SFT run may choose another step; or the SFT run has
            several segments.
    """
    path, sft = sft_source
    if sft.runner.segments > 1:
        raise ConfigError(f"{path}: runner.segments must be 1 for a run that another one starts from")
    run = RunPaths.from_run_dir(sft.runner.run_dir, sft.runner.name)
    last_export, chosen_export = run.export(total_steps(sft)), run.chosen_export
    model_path = select(cfg, "actor.model.model_path")
    model = expand_home(str(model_path)).absolute()
    if model.parent.absolute() != chosen_export.parent.absolute() or model.name == chosen_export.name:
        return chosen_export
    reasons = {"runner.keep_best": sft.runner.keep_best, "runner.patience": sft.runner.patience}
    set_keys = [key for key, is_set in reasons.items() if is_set]
    if set_keys or model.name != last_export.name:
        reason = (
            f"its {' and '.join(set_keys)} may choose another step"
            if set_keys
            else f"its last step is {last_export.name}"
        )
        raise ConfigError(
            f"{config_source}: actor.model.model_path is {model_path!r}, of the run of workflow.sft ({path}), and "
            f"{reason}; name "
            f"{chosen_export}, where the policy of the chosen step is exported"
        )
    return last_export


def _move_preparations(
    run: SweepRun,
    config_source: str,
    paths: SweepPaths,
    sweep_source: str,
    common_overrides: Sequence[str],
    site: str | None,
) -> SweepRun:
    """Returns the run with overrides that rename preparations with the run's name in their path.

    The new names contain a digest of the content, so that runs with equal preparations share them. The overrides also change
    all keys that refer to the old paths.
    """
    task_type, name = task_type_of(run.cfg), run.point.name
    moved_overrides: list[str] = []
    sft_source = sft_of(config_source, run.cfg, site)
    if sft_source is not None and name in sft_source[1].runner.name:
        sft_folder = RunPaths.from_run_dir(sft_source[1].runner.run_dir, sft_source[1].runner.name).root
        sft_content = plain(sft_source[1])
        sft_content["runner"] = {k: v for k, v in sft_content["runner"].items() if k not in ("name", "run_dir")}
        folder = paths.root / f"sft-{digest(sft_content)}"
        sft = task_type.offline.preparation(run.cfg).sft
        sft_overrides = [
            *(sft[1] if sft else ()),
            override("runner.run_dir", os.path.normpath(f"{run.cfg.runner.run_dir}")),
            override("runner.name", folder.name),
        ]
        moved_overrides += [
            override("workflow.sft_overrides", sft_overrides),
            *_iter_moved_overrides(run.cfg, sft_folder, folder),
        ]
    demos = task_type.offline.preparation(run.cfg).demos
    if demos is not None and name in demos[0]:
        demo_facts = [_select_recording_values(run.cfg), run.cfg.runner.seed]
        moved_overrides += _iter_moved_overrides(
            run.cfg, Path(demos[0]), paths.root / f"demos-{digest(demo_facts)}{Path(demos[0]).suffix}"
        )
    if not moved_overrides:
        return run
    overrides = (*run.overrides, *moved_overrides)
    return SweepRun(
        run.point, overrides, _load(config_source, overrides, run.point, sweep_source, common_overrides, site)
    )


def _iter_moved_overrides(cfg: RunConfig, old_location: Path, new_location: Path) -> Iterator[str]:
    """Yields overrides that move the values of all keys at or below `old_location` to `new_location`."""
    old_path = os.path.abspath(old_location)
    new_path = os.path.relpath(new_location) if new_location.is_relative_to(Path.cwd()) else str(new_location)
    for key, value in leaves(plain(cfg)):
        if value and isinstance(value, str) and not key.startswith(("runner.", "workflow.")):
            path = os.path.abspath(os.path.expanduser(value))
            if path == old_path or path.startswith(f"{old_path}{os.sep}"):
                yield override(key, f"{new_path}{path.removeprefix(old_path)}")


def _select_recording_values(cfg: RunConfig) -> Any:
    """Returns all values except the seed that determine an expert's recorded episodes."""
    plain_config = plain(cfg)
    demos = task_type_of(cfg).offline.preparation(cfg).demos
    return [
        {key: plain_config.get(key) for key in _RECORDING_SECTIONS},
        *(demos[1:] if demos else ()),
        task_type_of(cfg).offline.recording(cfg)[1],
    ]


def recording_key(cfg: RunConfig) -> str:
    """Returns the fingerprint of an expert's recorded demonstrations, without the seed. Runs of a sweep with the same
    fingerprint share the demonstrations.
    """
    return digest(_select_recording_values(cfg))


def _share_preparations(
    runs: Sequence[SweepRun], config_source: str, sweep_source: str, site: str | None
) -> Iterator[SweepRun]:
    """Yields the runs; assigns each shared preparation to the first run that needs it.

    Raises:
        ConfigError: Two runs name the same folder or file for different preparations.
    """
    makers_by_path: dict[str, tuple[SweepRun, Any]] = {}
    for run in runs:
        assigned_preparations = set()
        sft_source, demos = (
            sft_of(config_source, run.cfg, site),
            task_type_of(run.cfg).offline.preparation(run.cfg).demos,
        )
        preparations = []
        if sft_source is not None:
            sft_folder = RunPaths.from_run_dir(sft_source[1].runner.run_dir, sft_source[1].runner.name).root
            preparations.append(("sft", str(sft_folder), digest(plain(sft_source[1]))))
        if demos is not None:
            preparations.append(("demos", os.path.abspath(demos[0]), recording_key(run.cfg)))
        for preparation, path, sft_content in preparations:
            maker, maker_content = makers_by_path.setdefault(path, (run, sft_content))
            if maker_content != sft_content:
                raise ConfigError(
                    f"{sweep_source}: {SWEEP}: runs {maker.point.name} and {run.point.name} both prepare {path}, and "
                    "differently; put ${runner.name} into its name"
                )
            if maker is run:
                assigned_preparations.add(preparation)
        yield SweepRun(run.point, run.overrides, run.cfg, frozenset(assigned_preparations))


def rule_prefixes(rule_names: Sequence[str]) -> dict[str, str]:
    """Returns the unique prefix of each run's rules in the workflow, with only the characters of a rule's name."""
    prefixes: dict[str, str] = {}
    for name in rule_names:
        prefix = "run_" + re.sub(r"\W", "_", name) + "_"
        prefixes[name] = prefix if prefix not in prefixes.values() else f"{prefix}{len(prefixes)}_"
    return prefixes


# -- on disk ----------------------------------------------------------------------------------------------------------


def read_sweep(paths: SweepPaths) -> dict[str, Any]:
    """Returns the content of `sweep.json`.

    Raises:
        RlhpcError: The file is missing or is not the record of a sweep.
    """
    record = read_json_file(paths.record)
    runs = (record or {}).get("runs")
    if not isinstance(runs, list) or not all(
        isinstance(run, dict) and "/" not in str(run.get("name", "/")) for run in runs
    ):
        raise RlhpcError(f"{paths.record}: it cannot be read as a sweep's; start the sweep again, which writes it anew")
    return dict(record or {})


def runs_of(paths: SweepPaths) -> list[RunPaths]:
    """Returns the paths of all runs in the sweep's record, started or not, and of their shared SFT runs."""
    run_paths = [paths.run(str(run["name"])) for run in read_sweep(paths)["runs"]]
    return [*run_paths, *(RunPaths(folder) for folder in sorted(paths.root.glob("sft-*")) if folder.is_dir())]
