"""Configuration sections of demonstrations and buffers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from rlhpc.config.constraints import COUNT, FRACTION, PART


@dataclass
class DemosConfig:
    """Demonstrations: training data of behaviour cloning."""

    path: Any = None
    """Trajectories: a `.h5` file in ManiSkill's format, a pattern, a folder of such files, the folder of a LeRobot or
    Minari dataset, or a list of these."""
    only_success: bool = False
    """Drops episodes that never succeeded."""
    limit: Annotated[int | None, COUNT] = None
    """Maximum number of episodes; null takes all."""
    holdout: Annotated[float, PART] = 0.0
    """Fraction of the episodes that are held out of training; `train/holdout_loss` is their loss."""


@dataclass
class ReplayBufferConfig:
    """Replay buffer of off-policy learning: transitions of the environments."""

    size: Annotated[int, COUNT] = 1_000_000
    """Capacity in transitions, over all actor ranks; the oldest are dropped first."""
    min_buffer_size: Annotated[int, COUNT] = 5000
    """Number of transitions before the first update."""


@dataclass
class DemoBufferConfig:
    """Demonstration buffer of off-policy learning, with fixed content (RLPD)."""

    load_path: str | None = None
    """HDF5 trajectories in ManiSkill's format (file, folder or pattern), a Minari or LeRobot dataset's folder, or a replay
    buffer (a checkpoint of an off-policy run, or the output of `rlhpc replay`); null is none."""
    ratio: Annotated[float, FRACTION] = 0.5
    """Fraction of each batch that comes from this buffer."""
