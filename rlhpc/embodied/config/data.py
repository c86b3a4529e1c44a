"""Configuration sections of demonstrations and buffers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from rlhpc.config.constraints import COUNT, FRACTION, PART


@dataclass
class DemosConfig:
    """Demonstrations for embodied policies: training data of behaviour cloning."""

    path: Any = None
    """Trajectories: a `.h5` file in ManiSkill's format, a pattern, a folder of such files, the folder of a LeRobot or
    Minari dataset, or a list of those."""
    only_success: bool = False
    """Leaves out episodes that never succeeded."""
    limit: Annotated[int | None, COUNT] = None
    """At most this many episodes; null takes all."""
    holdout: Annotated[float, PART] = 0.0
    """Fraction of the episodes that is not trained on; `train/holdout_loss` is their loss."""


@dataclass
class ReplayBufferConfig:
    """Off-policy learning: the transitions of the environments that batches are drawn from."""

    size: Annotated[int, COUNT] = 1_000_000
    """Transitions kept, over all actor ranks; the oldest go first."""
    min_buffer_size: Annotated[int, COUNT] = 5000
    """Transitions before the first update."""


@dataclass
class DemoBufferConfig:
    """Off-policy learning: a fixed second buffer (RLPD)."""

    load_path: str | None = None
    """HDF5 trajectories in ManiSkill's format (file, folder or pattern), a Minari or LeRobot dataset's folder, or a replay
    buffer (a checkpoint of an off-policy run, or what `rlhpc replay` wrote); null is none."""
    ratio: Annotated[float, FRACTION] = 0.5
    """Fraction of each batch that comes from this buffer."""
