"""Command-line arguments that name a run or a checkpoint."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rlhpc.jobs.paths import BEST, CONFIG, RunPaths
from rlhpc.runtime.errors import CheckpointError, ConfigError
from rlhpc.runtime.files import expand_home, unwritable

#: The word for a run's newest checkpoint.
LATEST = "latest"


def is_run(paths: RunPaths) -> bool:
    """Returns whether the folder contains a run that has begun; False for a folder that this user may not open."""
    return any(os.path.exists(marker) for marker in (paths.config, paths.submit, paths.checkpoints, paths.registry))  # noqa: PTH110


def run_paths(run_text: str, overrides: Sequence[str] = ()) -> RunPaths:
    """Returns the run that the user names by its folder, or by its configuration file and overrides.

    Raises:
        ConfigError: The run does not exist; the message lists the runs in the same folder.
    """
    location = expand_home(run_text).absolute()
    root = location
    if location.is_file() or overrides:
        from rlhpc.runs.configuration import load_config

        is_folder = location.is_dir()
        cfg = load_config(RunPaths(location).config if is_folder else location, overrides, check=False)
        overridden_keys = {override.partition("=")[0].strip() for override in overrides}
        run_dir = location.parent if is_folder and "runner.run_dir" not in overridden_keys else cfg.runner.run_dir
        name = location.name if is_folder and "runner.name" not in overridden_keys else cfg.runner.name
        root = RunPaths.from_run_dir(run_dir, name).root
    paths = RunPaths(root)
    if is_run(paths):
        return paths
    if os.path.isdir(root) and not os.access(root, os.R_OK | os.X_OK):  # noqa: PTH112
        from rlhpc.jobs.state import owner

        raise ConfigError(f"{root} cannot be opened: Permission denied; the folder belongs to {owner(paths)}")
    nearby_runs = (
        sorted(config_file.parent.name for config_file in root.parent.glob(f"*/{CONFIG}"))
        if root.parent.is_dir()
        else []
    )
    hint = f"; runs there: {', '.join(nearby_runs)}" if nearby_runs else ""
    raise ConfigError(f"{root} {'is no run folder' if root.is_dir() else 'does not exist: no such run folder'}{hint}")


def checkpoint_of(args: argparse.Namespace, overrides: Sequence[str] = ()) -> Path:
    """Returns the checkpoint that the command line names: by --checkpoint, or by --run (with overrides) and --step.

    With --run, `--checkpoint best` means `--step best`.

    Raises:
        ConfigError: The options name no checkpoint, or more than one.
        CheckpointError: The run does not have the checkpoint.
    """
    step = args.step
    if args.checkpoint == BEST and args.run:
        step = BEST
    elif args.checkpoint and args.run:
        raise ConfigError("--checkpoint names the checkpoint already; leave out --run")
    elif args.checkpoint:
        checkpoint = expand_home(args.checkpoint).absolute()
        if checkpoint.name == BEST and (run := RunPaths.from_checkpoint(checkpoint)) is not None:
            return _find_best_checkpoint(run)
        if args.checkpoint == BEST and not checkpoint.exists():
            raise ConfigError("--checkpoint best is the best checkpoint of a run: name the run with --run FOLDER")
        if overrides and (checkpoint / CONFIG).is_file():
            from rlhpc.runs.configuration import load_config

            load_config(checkpoint / CONFIG, overrides, check=False)
            print("rlhpc: --checkpoint names the checkpoint; the overrides change nothing here", file=sys.stderr)
        return checkpoint
    if not args.run:
        raise ConfigError(
            "say which checkpoint: --checkpoint FOLDER, or --run FOLDER with --step N, latest or best; --help lists options"
        )
    from rlhpc.checkpoint import newest_valid

    paths = run_paths(args.run, overrides)
    if step == BEST or (step is None and paths.best_step() is not None):
        return _find_best_checkpoint(paths)
    if step in (None, LATEST):
        newest_checkpoint = newest_valid(paths)
        for path, reason in newest_checkpoint.skipped:
            print(f"rlhpc: skipped {path.name}: {reason}", file=sys.stderr)
        if newest_checkpoint.path is None:
            raise CheckpointError(f"{paths.root} has no complete checkpoint yet; see rlhpc status {paths.root}")
        return newest_checkpoint.path
    if not step.isdecimal():
        raise ConfigError(f"--step is {step!r}; give a number, {LATEST} or {BEST}")
    checkpoint = paths.checkpoint(int(step))
    if not checkpoint.is_dir():
        saved_text = ", ".join(str(step) for step, _ in paths.checkpoint_steps()) or "none"
        raise CheckpointError(f"{paths.root} has no checkpoint of step {step}; there are: {saved_text}")
    return checkpoint


def _find_best_checkpoint(paths: RunPaths) -> Path:
    """Returns the folder of a run's best checkpoint, `global_step_<N>`.

    Raises:
        CheckpointError: The run has no best checkpoint.
    """
    if (step := paths.best_step()) is None:
        raise CheckpointError(
            f"{paths.root} has no best checkpoint: a run keeps one where runner.keep_best names a metric of its evaluations; "
            "--step latest takes the newest"
        )
    return paths.checkpoint(step)


def require_positive(args: argparse.Namespace, *option_names: str) -> None:
    """Refuses options with a number below 1.

    Raises:
        ConfigError: Names the first such option.
    """
    for name in option_names:
        option_value = getattr(args, name)
        if option_value is not None and option_value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is {option_value}; it must be at least 1")


def describe_saved(paths: RunPaths, num_steps: int, folder: object) -> str:
    """Formats the last saved step of a run, out of `num_steps` steps, and the folder of its checkpoints."""
    steps = [step for step, _ in paths.complete_steps()]
    return f"saved up to step {steps[-1]} of {num_steps} in {folder}" if steps else "nothing is saved yet"


def require_driver(paths: RunPaths) -> Path:
    """Returns the registry folder of a run's driver, which must be running to receive requests.

    Raises:
        ConfigError: The run has no running driver.
    """
    from rlhpc.jobs.state import states
    from rlhpc.runtime.joining import DriverConnection

    connection = DriverConnection(paths.registry)
    try:
        # If all ranks are on the driver's host, the driver listens only there; other hosts see its state in files and Slurm.
        if not (connection.lives() if connection.is_reachable else states([paths])[0][1].state == "running"):
            raise ConfigError(
                f"{paths.root.name}: its driver does not answer; `rlhpc status {paths.root}` says where it is"
            )
        return connection.registry.root
    finally:
        connection.close()


def check_file(option_name: str, path: Path) -> Path:
    """Returns the path of a file that a command will write.

    Raises:
        ConfigError: The path is a folder, or no file could be created there.
    """
    if path.is_dir():
        raise ConfigError(f"{option_name} is {path}, a folder; name a file in it")
    return _require_writable(option_name, path, path.parent)


def check_folder(option_name: str, path: Path) -> Path:
    """Returns the path of a folder that a command will create or fill.

    Raises:
        ConfigError: The path is a file, or the folder could not be created.
    """
    if path.exists() and not path.is_dir():
        raise ConfigError(f"{option_name} is {path}, a file; name a folder")
    return _require_writable(option_name, path, path)


def _require_writable(option_name: str, path: Path, folder: Path) -> Path:
    if reason := unwritable(folder):
        raise ConfigError(f"{option_name} is {path}; {reason}; choose another place")
    return path
