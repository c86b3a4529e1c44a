"""Environments in checkpoints, and the seeds from which they begin, for all workers that simulate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlhpc.checkpoint.state import load_state, rng_state, save_state
from rlhpc.embodied.config import PlayingConfig
from rlhpc.embodied.envs.base import VectorEnv
from rlhpc.embodied.envs.observations import Obs, as_arrays, join, take
from rlhpc.runtime.errors import CheckpointError

FILE = "env-{rank}.pt"


def env_seed(cfg: PlayingConfig) -> int:
    """Returns the seed of the run's environments: `env.train.seed`, or `runner.seed`."""
    return cfg.runner.seed if cfg.env.train.seed is None else cfg.env.train.seed


def episode_seed(cfg: PlayingConfig, seed: int, step: int, first_decision: int = 0) -> int:
    """Returns the seed of the episodes that begin in all slots at a step, if each rollout is one episode per slot.

    Args:
        cfg: The configuration.
        seed: Seed of the environments.
        step: Global step.
        first_decision: Number of the step's decisions before the episodes.
    """
    if cfg.env.train.use_fixed_reset_state_ids:
        return seed
    entropy = [seed, step, first_decision] if first_decision else [seed, step]
    return int(np.random.SeedSequence(entropy).generate_state(1)[0])


def save_envs(folder: Path, rank: int, envs: Sequence[tuple[range, Obs, VectorEnv]]) -> None:
    """Writes `env-<rank>.pt`: slots, current observation and simulator state of each vector environment of a rank."""
    unit_states = [
        {
            "start": slots.start,
            "stop": slots.stop,
            "obs": as_arrays(obs),
            "state": env.state_dict() if env.supports_state else None,
        }
        for slots, obs, env in envs
    ]
    save_state(folder / FILE.format(rank=rank), {"rng": rng_state(), "units": unit_states})


def read_saved_units(folder: Path) -> list[dict[str, Any]]:
    """Reads the vector environments that all ranks wrote to a checkpoint (`save_envs`)."""
    return [
        unit_state for file in sorted(folder.glob(FILE.format(rank="*"))) for unit_state in load_state(file)["units"]
    ]


def restore_env(env: VectorEnv, slots: range, unit_states: Sequence[dict[str, Any]], folder: Path) -> Obs | None:
    """Restores a vector environment from a checkpoint, whose slots may be distributed over other ranks.

    Args:
        env: Vector environment of `slots`.
        slots: Global slots.
        unit_states: Result of `read_saved_units`.
        folder: The checkpoint, for messages.

    Returns:
        The current observation of the slots; None if the simulators cannot be restored.

    Raises:
        CheckpointError: The state does not fit the environment.
    """
    saved_slots = {
        slot: (unit_state, slot - unit_state["start"])
        for unit_state in unit_states
        if unit_state["state"] is not None
        for slot in range(unit_state["start"], unit_state["stop"])
    }
    if not {*slots} <= saved_slots.keys():
        return None
    slot_sources = [saved_slots[slot] for slot in slots]
    first_unit = slot_sources[0][0]
    try:
        if range(first_unit["start"], first_unit["stop"]) == slots:
            env.load_state_dict(first_unit["state"])
        else:
            env.load_state_dict(
                env.merge_states([env.slot_state(unit_state["state"], i) for unit_state, i in slot_sources])
            )
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder}: the environments' state does not fit this run: {error!r}") from error
    return join([take(unit_state["obs"], slice(i, i + 1)) for unit_state, i in slot_sources])
