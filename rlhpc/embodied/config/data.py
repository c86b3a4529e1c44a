"""Configuration sections of demonstrations and buffers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from rlhpc.config.constraints import COUNT, FRACTION, FREE, PART, RATE


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
    memory_mb: Annotated[int, COUNT, FREE] = 768
    """Host memory of each rank for demonstrations, in MiB: decoded images, numbers, and batches that are read ahead. Images
    that do not fit are read from the files again in each pass."""


@dataclass
class ReplayBufferConfig:
    """Replay buffer of off-policy learning: transitions of the environments."""

    size: Annotated[int, COUNT] = 1_000_000
    """Capacity in transitions, over all actor ranks; the oldest are dropped first."""
    min_buffer_size: Annotated[int, COUNT] = 5000
    """Number of transitions before the first update."""
    frame_stack: Annotated[int, COUNT] = 1
    """Number of images that an observation's image stacks in its channels, oldest first. The buffer stores each image once."""


@dataclass
class DemoBufferConfig:
    """Demonstration buffer of off-policy learning (RLPD): recorded transitions, and interventions of the run."""

    load_path: str | None = None
    """HDF5 trajectories in ManiSkill's format (file, folder or pattern), a Minari or LeRobot dataset's folder, or a replay
    buffer (a checkpoint of an off-policy run, or the output of `rlhpc replay`); null is none."""
    ratio: Annotated[float, FRACTION] = 0.5
    """Fraction of each batch that comes from this buffer."""
    size: Annotated[int, COUNT] = 20_000
    """Capacity in transitions of interventions (`env.train.intervene`), which are added to those of `load_path`; the oldest
    are dropped first."""


@dataclass
class SuccessClassifierConfig:
    """Success classifier of a run with `env.train.intervene`, trained on the frames that a person marks."""

    train: bool = False
    """Trains a success classifier during the run. A mark ends an episode, and labels its last frame; frames after which an
    episode went on count as failures, too. Once the classifier is good enough (`min_marks`, `min_accuracy`), its probability
    that the task is done after a step, times `env.train.reward_scale`, replaces the reward of new steps without a mark."""
    init_from: str | None = None
    """Success classifier to start from (a run, a checkpoint or an export folder of `model_type: success`, or the folder
    `success_classifier` of a checkpoint); null starts with random weights. Its network is then that of the folder; otherwise
    it has the encoder and the `hidden_sizes` of `actor.model`."""
    min_marks: Annotated[int, COUNT] = 10
    """Number of newest marks of each kind (success, failure) on which accuracy is measured; with fewer, the environment's
    rewards are used."""
    min_accuracy: Annotated[float, FRACTION] = 0.9
    """Smallest fraction of these marks, of each kind, that the classifier must have predicted before it learned them. Below it
    the environment's rewards are used again."""
    updates: Annotated[int, COUNT] = 20
    """Optimizer steps of the classifier per step of the run, once there are marks of both kinds."""
    batch_size: Annotated[int, COUNT] = 128
    """Frames per optimizer step: half of them successes, half failures."""
    lr: Annotated[float, RATE] = 3.0e-4
    """Learning rate of the classifier (Adam)."""
    size: Annotated[int, COUNT] = 1000
    """Number of marked frames of each kind that are kept; the oldest are dropped first."""
