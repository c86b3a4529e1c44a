"""DAgger (Ross et al. 2011): the clone plays, the expert says what it would have done there, and all of it is cloned again.

Every round is an ordinary run of behaviour cloning, `<name>-round<k>`, that starts from the weights of the one before and
trains on all data so far; the data of a round are a file of trajectories. Data and runs that exist already are not made
again.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhpc.checkpoint import newest_valid
from rlhpc.config.typed import typed
from rlhpc.embodied.config import BcConfig
from rlhpc.embodied.elsewhere import where_it_can
from rlhpc.embodied.evaluate import record_episodes
from rlhpc.embodied.kinds import BC
from rlhpc.jobs.paths import RunPaths
from rlhpc.runs.configuration import load_config
from rlhpc.runs.folder import note, total_steps
from rlhpc.runs.kinds import kind_of
from rlhpc.runs.train import train
from rlhpc.runtime.errors import ConfigError, RlhpcError


def dagger(
    config: str | Path, overrides: Sequence[str], *, expert: str, rounds: int, episodes: int, trust_code: bool = False
) -> list[dict[str, Any]]:
    """Trains a policy by DAgger.

    Args:
        config: Run of behaviour cloning. Its `demos.path` is the data of the first round; null lets the expert play.
        overrides: Of the configuration.
        expert: Labels, as `module:function` or a checkpoint.
        rounds: How often the clone plays.
        episodes: Episodes of each round.
        trust_code: Import what a checkpoint that is the expert names as `module:Class`, also where the configuration does not.

    Returns:
        One entry per run: name, checkpoint, data.

    Raises:
        ConfigError: The configuration is not one of behaviour cloning.
    """
    # The workflow's expert records what a run trains on; here that is the data of the rounds.
    given_overrides, overrides = overrides, [*overrides, "workflow.demos_expert=null"]
    if kind_of(plain := load_config(config, given_overrides, check=False)) is not BC:
        raise ConfigError(f"runner.task_type is {plain.runner.task_type!r}; dagger takes runs of {BC.name}")
    first = _load(config, [*overrides, "demos.path=expert.h5"] if not _path(config, overrides) else overrides)
    name = first.runner.name
    folder = RunPaths.of(first.runner.run_dir, f"{name}-dagger").root
    given = _path(config, overrides)
    data = [given] if isinstance(given, str) else [str(one) for one in given or ()]
    if not data:
        data = [_labelled(folder / "round_0.h5", expert, first, episodes, None, trust_code)]
    made: list[dict[str, Any]] = []
    start: list[str] = []
    for k in range(rounds + 1):
        words = [*overrides, f"runner.name={name}-round{k}", f"demos.path=[{','.join(map(_quoted, data))}]", *start]
        cfg = _load(config, words)
        paths = RunPaths.of(cfg.runner.run_dir, cfg.runner.name)
        found = newest_valid(paths)
        if found.path is None or found.step < total_steps(cfg):
            if found.path is not None:
                cfg = _load(config, [*words, "runner.resume_dir=auto"])
            if train(cfg)["exit_code"]:
                raise RlhpcError(f"{paths.root} was stopped; the same command goes on from there")
            found = newest_valid(paths)
        made.append({"name": paths.root.name, "checkpoint": str(found.path), "data": list(data)})
        start = [f"runner.init_from={_quoted(str(found.path))}"]
        if k < rounds:
            data.append(_labelled(folder / f"round_{k + 1}.h5", expert, cfg, episodes, str(found.path), trust_code))
    return made


def _load(config: str | Path, overrides: Sequence[str], *, check: bool = True) -> BcConfig:
    return typed(BcConfig, load_config(config, overrides, check=check))


def _path(config: str | Path, overrides: Sequence[str]) -> Any:
    return _load(config, overrides, check=False).demos.path


def _quoted(path: str) -> str:
    return "'" + path.replace("'", "''") + "'"


def _labelled(output: Path, expert: str, cfg: BcConfig, episodes: int, student: str | None, trust_code: bool) -> str:
    """The file of a round: episodes of the student (of the expert itself, without one) with the expert's actions."""
    if not output.is_file():
        # Not the episodes of evaluations, and different ones in every round.
        number = int(output.stem.rpartition("_")[2])
        seed = cfg.runner.seed + 7919 * (number + 1)
        found = where_it_can(
            student or expert,
            record_episodes,
            student or expert,
            cfg,
            output,
            episodes=episodes,
            seed=seed,
            teacher=expert if student else None,
            trust_code=trust_code,
        )
        note(f"{found['episodes']} episodes, mean return {found['return_mean']:.2f}, labelled by {expert} → {output}")
    return str(output)
