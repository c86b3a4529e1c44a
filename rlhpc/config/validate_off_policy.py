"""Checks of off-policy runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlhpc.config.rules import Fail, check_choice


def validate(cfg: Any, fail: Fail) -> None:
    """Checks what concerns off-policy runs alone.

    Raises:
        ConfigError: The first rule that is broken.
    """
    algorithm = cfg.algorithm
    check_choice("algorithm.loss_type", str(algorithm.loss_type), ("sac", "embodied_sac"), fail)
    buffer = algorithm.replay_buffer
    if buffer.size < max(buffer.min_buffer_size, cfg.env.train.num_envs):
        raise fail(
            "algorithm.replay_buffer.size",
            f"it must hold min_buffer_size ({buffer.min_buffer_size}) and one transition of each of the "
            f"{cfg.env.train.num_envs} environments",
        )
    check_choice("algorithm.reward_type", str(algorithm.reward_type), ("chunk_level",), fail)
    if not cfg.env.train.auto_reset:
        raise fail("env.train.auto_reset", "off-policy runs go on from episode to episode: it must be true")
    if cfg.actor.micro_batch_size is not None:
        raise fail("actor.micro_batch_size", "off-policy batches are not cut; use null, or a smaller global_batch_size")
    path = algorithm.demo_buffer.load_path
    if path and not any(mark in str(path) for mark in "*?[") and not Path(str(path)).expanduser().exists():
        raise fail("algorithm.demo_buffer.load_path", "there is no such file or folder")
