"""`rlhpc eval` of a model of success: what it says of recorded episodes, beside what the simulator said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlhpc.checkpoint import read_manifest, require_valid
from rlhpc.embodied.config import BcConfig
from rlhpc.embodied.data.demonstrations import held_out_of, read_demos
from rlhpc.embodied.data.trajectory import Trajectory
from rlhpc.embodied.envs.observations import take
from rlhpc.embodied.evaluation.evaluate import write_result
from rlhpc.embodied.models.base import Policy
from rlhpc.embodied.models.registry import load_policy
from rlhpc.runs.device import to_tensors
from rlhpc.runtime.trust import Trust


def evaluate_judge(cfg: BcConfig, checkpoint: Path, suite: str, episodes: int | None, output: Path | None) -> str:
    """Judges every step of the episodes that `demos.holdout` held out, or of all where none were.

    Args:
        cfg: Configuration.
        checkpoint: Of the model.
        suite: Name of the evaluation.
        episodes: At most so many.
        output: JSON file to write, atomically.

    Returns:
        A line that says how often it was right.

    Raises:
        CheckpointError: The checkpoint has faults.
        ConfigError: The episodes cannot be read, or the file cannot be written.
    """
    require_valid(checkpoint, hint="or evaluate another checkpoint")
    model, trajectories = load_policy(checkpoint, Trust()), list(read_demos(cfg))
    aside = held_out_of(len(trajectories), cfg)
    chosen = [each for number, each in enumerate(trajectories) if number in aside or not aside][:episodes]
    found = judged(model, chosen) | {
        "suite": suite, "episodes": len(chosen), "held_out": bool(aside), "checkpoint": str(checkpoint),
        "global_step": int(read_manifest(checkpoint)["global_step"]),
    }  # fmt: skip
    if output is not None:
        write_result(output, found)
    which = "held-out" if aside else "trained-on"
    return (
        f"{found['accuracy']:.1%} of {found['steps']} steps of {len(chosen)} {which} episodes judged rightly; of "
        f"{found['successes']} steps with success {found['recall']:.1%}, of the others {found['specificity']:.1%}"
    )


@torch.no_grad()
def judged(model: Policy, trajectories: list[Trajectory]) -> dict[str, Any]:
    """How often a probability above one half agrees with the simulator's word on what a step led to.

    Returns:
        steps, successes (steps with success), accuracy, recall (of those), specificity (of the others; each 1 where there are
        none).
    """
    device = torch.device("cpu")
    right, true = np.zeros(0, bool), np.zeros(0, bool)
    for each in trajectories:
        said = model.value(to_tensors(take(each["obs"], slice(1, None)), device)).numpy() > 0.5
        right, true = np.append(right, said == each["success"]), np.append(true, each["success"])

    def part(mask: np.ndarray) -> float:
        return float(right[mask].mean()) if mask.any() else 1.0

    return {
        "steps": len(true), "successes": int(true.sum()), "accuracy": part(np.ones(len(true), bool)),
        "recall": part(true), "specificity": part(~true),
    }  # fmt: skip
