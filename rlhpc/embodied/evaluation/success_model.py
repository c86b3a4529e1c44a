"""Evaluation of a success model by `rlhpc eval`: its predictions for recorded episodes, compared with the simulator's
labels.
"""

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
from rlhpc.runs.device import device_of, evaluation_device, settle, to_tensors
from rlhpc.runtime.trust import Trust


def evaluate_judge(cfg: BcConfig, checkpoint: Path, suite: str, episodes: int | None, output: Path | None) -> str:
    """Evaluates a success model on every step of the held-out episodes (`demos.holdout`), or of all episodes if no episode is
    held out.

    Args:
        cfg: Configuration.
        checkpoint: Checkpoint of the model.
        suite: Name of the evaluation.
        episodes: Maximum number of episodes.
        output: Path of the JSON file, which is written atomically.

    Returns:
        A line of text with the model's accuracy.

    Raises:
        CheckpointError: The checkpoint has faults.
        ConfigError: The episodes cannot be read, or the file cannot be written.
    """
    require_valid(checkpoint, hint="or evaluate another checkpoint")
    model, trajectories = settle(load_policy(checkpoint, Trust()), evaluation_device(cfg)), list(read_demos(cfg))
    held_out = held_out_of(len(trajectories), cfg)
    episodes_to_judge = [
        trajectory for index, trajectory in enumerate(trajectories) if index in held_out or not held_out
    ][:episodes]
    judgement = score_predictions(model, episodes_to_judge) | {
        "suite": suite, "episodes": len(episodes_to_judge), "held_out": bool(held_out), "checkpoint": str(checkpoint),
        "global_step": int(read_manifest(checkpoint)["global_step"]),
    }  # fmt: skip
    if output is not None:
        write_result(output, judgement)
    split_name = "held-out" if held_out else "trained-on"
    return (
        f"{judgement['accuracy']:.1%} of {judgement['steps']} steps of {len(episodes_to_judge)} {split_name} episodes judged "
        f"rightly; of {judgement['successes']} steps with success {judgement['recall']:.1%}, of the others "
        f"{judgement['specificity']:.1%}"
    )


@torch.no_grad()
def score_predictions(model: Policy, trajectories: list[Trajectory]) -> dict[str, Any]:
    """Compares predictions (probability above one half) with the simulator's success label of each step.

    Returns:
        steps, successes (steps with success), accuracy, recall (accuracy on steps with success) and specificity (accuracy on
        the other steps); a rate over no steps is 1.
    """
    device = device_of(model)
    is_correct, labels = np.zeros(0, bool), np.zeros(0, bool)
    for trajectory in trajectories:
        predicted_success = model.value(to_tensors(take(trajectory["obs"], slice(1, None)), device)).cpu().numpy() > 0.5
        is_correct, labels = (
            np.append(is_correct, predicted_success == trajectory["success"]),
            np.append(labels, trajectory["success"]),
        )

    def rate(mask: np.ndarray) -> float:
        return float(is_correct[mask].mean()) if mask.any() else 1.0

    return {
        "steps": len(labels), "successes": int(labels.sum()), "accuracy": rate(np.ones(len(labels), bool)),
        "recall": rate(labels), "specificity": rate(~labels),
    }  # fmt: skip
