"""Checkpoints of small policies that no run has trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import safetensors.torch

from rlhpc.checkpoint import CheckpointWriter
from rlhpc.config import config_to_yaml
from rlhpc.config.typed import typed
from rlhpc.embodied.config import PpoConfig
from rlhpc.embodied.envs.registry import check_env
from rlhpc.embodied.models import build_model
from rlhpc.jobs.paths import RunPaths
from rlhpc.runs.configuration import load_config

QUICKSTART = Path(__file__).resolve().parents[4] / "configs" / "quickstart.yaml"


def load(*overrides: str) -> Any:
    """Returns the quickstart's configuration with a small network, and evaluations of a few short episodes."""
    words = ["actor.model.hidden_sizes=[8]", "env.eval.num_envs=2", "env.eval.num_episodes=4"]
    return typed(PpoConfig, load_config(QUICKSTART, [*words, "env.eval.max_episode_steps=7", *overrides]))


def save_policy(folder: Path, *overrides: str, step: int = 3, **files: bytes) -> Path:
    """Writes a checkpoint with an untrained policy of a configuration, and returns its folder.

    Args:
        folder: Folder of the run.
        overrides: Overrides of the configuration.
        step: Step of the checkpoint.
        files: Content of files in place of the policy's, by name without suffix.
    """
    cfg = load(*overrides)
    policy = build_model(cfg.actor.model, *check_env(cfg.env.train), seed=1)
    paths = RunPaths.from_run_dir(folder.parent, folder.name)
    contents = {
        "model.safetensors": safetensors.torch.save(dict(policy.state_dict())),
        "model.json": json.dumps(policy.spec()).encode(),
        "config.yaml": config_to_yaml(cfg).encode(),
    }
    with CheckpointWriter(paths, step) as writer:
        for name, content in contents.items():
            content = files.get(name.partition(".")[0] if name != "model.json" else "spec", content)
            if content:
                writer.add_bytes(name, content)
        writer.commit()
    return paths.checkpoint(step)
