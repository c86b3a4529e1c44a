"""DAgger (Ross et al. 2011): the cloned policy acts, an expert labels the visited states with actions, and the policy
is trained again on all data.

Every round is a run of behaviour cloning, `<name>-round<k>`, that starts from the weights of the preceding round and
trains on the data of all rounds so far. The data of a round is one file of trajectories. Existing data and runs are
reused.

In human-gated DAgger (Kelly et al. 2019), a person watches the policy act and takes over when needed. The person's
actions are the data of the round.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhpc.checkpoint import newest_valid
from rlhpc.config.typed import typed
from rlhpc.embodied.config import BcConfig
from rlhpc.embodied.data.datasets import WriteOptions
from rlhpc.embodied.data.lerobot_writer import NothingToWrite
from rlhpc.embodied.data.recording import incomplete_datasets
from rlhpc.embodied.evaluation.evaluate import record_episodes
from rlhpc.embodied.interventions.sources import named_intervention
from rlhpc.embodied.python_env import call_where_importable
from rlhpc.embodied.task_types import BC
from rlhpc.jobs.paths import RunPaths
from rlhpc.runs.configuration import load_config
from rlhpc.runs.run_folder import note, total_steps
from rlhpc.runs.task_type import task_type_of
from rlhpc.runs.train import train
from rlhpc.runtime.errors import ConfigError, RlhpcError
from rlhpc.runtime.files import read_json


def dagger(
    config: str | Path, overrides: Sequence[str], *, expert: str | None, num_rounds: int, num_episodes: int,
    intervene: str | None = None, trust_code: bool = False, options: WriteOptions | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Trains a policy by DAgger.

    Args:
        config: Configuration of a behaviour-cloning run. Its `demos.path` is the data of the first round; if it is
            null, the expert records the data.
        overrides: Overrides of the configuration.
        expert: Expert that labels states, as `module:function` or a checkpoint; None for interventions.
        intervene: Source of interventions (`find_intervention`); only the steps of interventions are cloned. The rounds
            end early after a round without interventions.
        num_rounds: Number of rounds in which the policy acts.
        num_episodes: Number of episodes per round.
        options: Format of the rounds' data; ManiSkill's HDF5 by default.
        trust_code: True imports code that the expert's checkpoint names as `module:Class`, even if the configuration
            does not name the code.

    Returns:
        One dict per run, with `name`, `checkpoint` and `data`.

    Raises:
        ConfigError: The configuration does not describe a run of behaviour cloning.
        RlhpcError: A round was stopped before its end.
    """
    if intervene is not None:
        named_intervention(intervene)  # checks the source before the first round, which may take long
    # The rounds record the data, so `workflow.demos_expert` must not record demonstrations.
    user_overrides, overrides = overrides, [*overrides, "workflow.demos_expert=null"]
    if task_type_of(unchecked_cfg := load_config(config, user_overrides, check=False)) is not BC:
        raise ConfigError(f"runner.task_type is {unchecked_cfg.runner.task_type!r}; dagger takes runs of {BC.name}")
    base_cfg = _load(
        config, [*overrides, "demos.path=expert.h5"] if not _load_demos_path(config, overrides) else overrides
    )
    if intervene is not None and (chunk := base_cfg.actor.model.num_action_chunks) != 1:
        raise ConfigError(
            f"the policy acts in chunks of {chunk} (actor.model.num_action_chunks); interventions are recorded by single "
            "actions: allowed is 1"
        )
    name = base_cfg.runner.name
    folder = RunPaths.from_run_dir(base_cfg.runner.run_dir, f"{name}-dagger").root
    demos_path = _load_demos_path(config, overrides)
    dataset_paths = [demos_path] if isinstance(demos_path, str) else [str(demo_path) for demo_path in demos_path or ()]
    if not dataset_paths:
        if expert is None:
            raise ConfigError(
                "demos.path is null; --intervene goes on from a first clone: record demonstrations, and name them"
            )
        dataset_paths = _record_round(folder, 0, expert, base_cfg, num_episodes, None, None, trust_code, options)
    runs: list[dict[str, Any]] = []
    init_overrides: list[str] = []
    for k in range(num_rounds + 1):
        round_overrides = [
            *overrides,
            f"runner.name={name}-round{k}",
            f"demos.path=[{','.join(map(_quote_path, dataset_paths))}]",
            *init_overrides,
        ]
        cfg = _load(config, round_overrides)
        paths = RunPaths.from_run_dir(cfg.runner.run_dir, cfg.runner.name)
        checkpoint = newest_valid(paths)
        if checkpoint.path is None or checkpoint.step < total_steps(cfg):
            if checkpoint.path is not None:
                cfg = _load(config, [*round_overrides, "runner.resume_dir=auto"])
            if train(cfg)["exit_code"]:
                raise RlhpcError(f"{paths.root} was stopped; the same command goes on from there")
            checkpoint = newest_valid(paths)
        runs.append({"name": paths.root.name, "checkpoint": str(checkpoint.path), "data": list(dataset_paths)})
        init_overrides = [f"runner.init_from={_quote_path(str(checkpoint.path))}"]
        if k < num_rounds:
            round_data = _record_round(
                folder, k + 1, expert, cfg, num_episodes, str(checkpoint.path), intervene, trust_code, options
            )
            dataset_paths += round_data
            if not round_data:
                note(f"nobody took over in {num_episodes} episodes; {runs[-1]['checkpoint']} is the last policy")
                return runs
    return runs


def _load(config: str | Path, overrides: Sequence[str], *, checks_config: bool = True) -> BcConfig:
    return typed(BcConfig, load_config(config, overrides, check=checks_config))


def _load_demos_path(config: str | Path, overrides: Sequence[str]) -> Any:
    return _load(config, overrides, checks_config=False).demos.path


def _quote_path(path: str) -> str:
    return "'" + path.replace("'", "''") + "'"


def _record_round(
    folder: Path,
    round_number: int,
    expert: str | None,
    cfg: BcConfig,
    num_episodes: int,
    student: str | None,
    intervene: str | None,
    trust_code: bool, options: WriteOptions | None,
) -> list[str]:  # fmt: skip
    """Records the data of a round unless the data exists. Returns the paths of the data; none without interventions.

    The data consists of the student's episodes, labelled with the expert's actions. Without a student, it consists of
    the expert's episodes; with `intervene`, it consists of the steps of interventions, also of those that were recorded before
    a recording of the round ended early.
    """
    file, dataset = folder / f"round_{round_number}.h5", folder / f"round_{round_number}"
    output = dataset if options is not None and options.to == "lerobot" else file
    output = next((path for path in (file, dataset) if path.exists()), output)  # keeps the format of existing data
    if not output.exists():
        # The seed makes episodes differ from evaluation episodes, and between rounds.
        seed = cfg.runner.seed + 7919 * (round_number + 1)
        actor = str(student or expert)
        try:
            summary = call_where_importable(
                actor,
                record_episodes,
                actor,
                cfg,
                output,
                episodes=num_episodes,
                seed=seed,
                teacher=expert if student and not intervene else None,
                intervene=intervene,
                only_taken=intervene is not None,
                counts_whole=True,
                trust_code=trust_code,
                options=options,
            )
        except NothingToWrite:
            return _list_early_data(output)
        description = f"labelled by {expert}"
        if intervene is not None:
            description = f"{summary['taken_steps']} of {summary['steps']} steps by whoever took over"
        note(f"{summary['played']} episodes, mean return {summary['return_mean']:.2f}, {description} → {output}")
    if output == file and intervene is not None and not read_json(output.with_suffix(".json").read_bytes())["episodes"]:
        return _list_early_data(output)
    return [*_list_early_data(output), str(output)]


def _list_early_data(output: Path) -> list[str]:
    """Returns the paths of the data that a round recorded before it ended early."""
    return [str(dataset) for dataset in incomplete_datasets(output)]
