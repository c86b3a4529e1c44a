"""What the user names: a run, a checkpoint."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rlhpc.jobs.paths import CONFIG, RunPaths
from rlhpc.runtime.errors import CheckpointError, ConfigError


def is_run(paths: RunPaths) -> bool:
    """Whether a run has begun in that folder."""
    return any(mark.exists() for mark in (paths.config, paths.submit, paths.checkpoints, paths.registry))


def run_paths(text: str, overrides: Sequence[str] = ()) -> RunPaths:
    """The run that the user names by its folder, or by its configuration file and overrides.

    Raises:
        ConfigError: There is no such run; names those that lie beside it.
    """
    given = Path(text).expanduser().absolute()
    root = given
    if given.is_file() or overrides:
        from rlhpc.runs.configuration import load_config

        folder = given.is_dir()
        cfg = load_config(RunPaths(given).config if folder else given, overrides, check=False)
        changed = {override.partition("=")[0].strip() for override in overrides}
        run_dir = given.parent if folder and "runner.run_dir" not in changed else cfg.runner.run_dir
        name = given.name if folder and "runner.name" not in changed else cfg.runner.name
        root = RunPaths.of(run_dir, name).root
    paths = RunPaths(root)
    if is_run(paths):
        return paths
    near = sorted(found.parent.name for found in root.parent.glob(f"*/{CONFIG}")) if root.parent.is_dir() else []
    hint = f"; runs there: {', '.join(near)}" if near else ""
    raise ConfigError(f"{root} {'is no run folder' if root.is_dir() else 'does not exist: no such run folder'}{hint}")


def checkpoint_of(args: argparse.Namespace, overrides: Sequence[str] = ()) -> Path:
    """The checkpoint named by --checkpoint, or by --run (and overrides) and --step."""
    if args.checkpoint and args.run:
        raise ConfigError("--checkpoint names the checkpoint already; leave out --run")
    if args.checkpoint:
        checkpoint = Path(args.checkpoint).expanduser().absolute()
        if overrides and (checkpoint / CONFIG).is_file():
            from rlhpc.runs.configuration import load_config

            load_config(checkpoint / CONFIG, overrides, check=False)
            print("rlhpc: --checkpoint names the checkpoint; the overrides change nothing here", file=sys.stderr)
        return checkpoint
    if not args.run:
        raise ConfigError("say which checkpoint: --checkpoint FOLDER, or --run FOLDER with --step N or --step latest")
    from rlhpc.checkpoint import newest_valid

    paths = run_paths(args.run, overrides)
    if args.step == "latest":
        found = newest_valid(paths)
        for path, reason in found.skipped:
            print(f"rlhpc: skipped {path.name}: {reason}", file=sys.stderr)
        if found.path is None:
            raise CheckpointError(f"{paths.root} has no complete checkpoint yet; see rlhpc status {paths.root}")
        return found.path
    if not args.step.isdecimal():
        raise ConfigError(f"--step is {args.step!r}; give a number or latest")
    checkpoint = paths.checkpoint(int(args.step))
    if not checkpoint.is_dir():
        there = ", ".join(str(step) for step, _ in paths.checkpoint_steps()) or "none"
        raise CheckpointError(f"{paths.root} has no checkpoint of step {args.step}; there are: {there}")
    return checkpoint


def require_driver(paths: RunPaths) -> Path:
    """The registry folder of a run's driver, which is at work to hear what the run is asked.

    Raises:
        ConfigError: There is none, or it does not answer.
    """
    from rlhpc.runtime.joining import Door

    door = Door(paths.registry)
    try:
        if not door.lives():
            raise ConfigError(
                f"{paths.root.name}: its driver does not answer; `rlhpc status {paths.root}` says where it is"
            )
        return door.registry.root
    finally:
        door.close()
