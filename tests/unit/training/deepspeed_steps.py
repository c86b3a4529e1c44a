"""Training steps of a small policy by DeepSpeed, in a process of its own: `python deepspeed_steps.py FOLDER` prints JSON.

DeepSpeed changes the environment and the process group of its process.
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import torch

from rlhpc.config.typed import default_section
from rlhpc.embodied.config import PpoConfig
from rlhpc.embodied.workers.actor import PolicyTrainer
from rlhpc.runtime.errors import RlhpcError
from rlhpc.training.backend import OffloadingBackend, TrainingBackend

STAGES = ("local", "1", "2", "3")
BATCHES = [torch.linspace(-1, 1, 4 * rows).reshape(rows, 4) for rows in (3, 5)]


def backend_of(stage: str) -> TrainingBackend:
    cfg = default_section(PpoConfig)
    cfg.actor.model.hidden_sizes = [7]  # odd, so that partitions are padded
    cfg.actor.training_backend = "local" if stage == "local" else "deepspeed"
    if stage != "local":
        cfg.actor.deepspeed.zero_stage = int(stage)
    trainer = PolicyTrainer(cfg)
    trainer.set_up_device()
    with gym.make("CartPole-v1") as env:
        return trainer.build_backend(cfg.actor, (env.observation_space, env.action_space), reads_norm=False)


def loss(module: Any, batch: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    inputs = {"obs": batch, "actions": torch.zeros(len(batch), 1, 1, dtype=torch.long)}
    outputs = module(lambda policy: policy.default_forward(inputs, compute_entropy=True, compute_values=True))
    return (outputs["values"].pow(2).sum() - outputs["logprobs"].sum() - 0.1 * outputs["entropy"].sum()) / 8, {}


def step(backend: TrainingBackend) -> float:
    backend.forward_backward(BATCHES, loss)
    return float(backend.optimizer_step(1e-2))


def weights(backend: TrainingBackend) -> dict[str, list[float]]:
    return {name: tensor.flatten().tolist() for name, tensor in backend.named_weights()}


def refusal(action: Any) -> str:
    try:
        action()
    except (RlhpcError, RuntimeError) as error:
        return str(error)
    return ""


def main(folder: Path) -> None:
    results: dict[str, Any] = {}
    for stage in STAGES:
        backend = backend_of(stage)
        facts: dict[str, Any] = {
            "first": weights(backend),
            "norms": [step(backend)],
            "trained": backend.num_trained_parameters,
        }
        saved = folder / stage
        saved.mkdir()
        backend.save(saved)
        facts["norms"].append(step(backend))
        facts["second"] = weights(backend)
        if stage != "local":  # whose weights are in a file of the trainer's
            backend.load(saved)
            facts["norms"].append(step(backend))
            facts["resumed"] = weights(backend)
            assert isinstance(backend, OffloadingBackend)
            backend.move_to_host()  # what `offload` does where there is an accelerator
            facts["is_away"] = backend.is_offloaded
            backend.reload()
            facts["returned"] = weights(backend)
            facts["local"] = {name: tensor.flatten().tolist() for name, tensor in backend.local_tensors()}
            with backend.perturbed():
                facts["perturbed"] = weights(backend)
            facts["restored"] = weights(backend)
            first = {
                name: torch.tensor(values).reshape(tensor.shape)
                for (name, tensor), values in zip(backend.named_weights(), facts["first"].values(), strict=True)
            }
            backend.forward_backward(BATCHES, loss)
            facts["twice"] = refusal(functools.partial(backend.forward_backward, BATCHES, loss))
            backend.optimizer_step(0.0)
            backend.replace_weights(first)
            facts["replaced"] = weights(backend)
            facts["other"] = refusal(functools.partial(backend.load, folder / ("3" if stage != "3" else "1")))
            (saved / "deepspeed.json").write_text("no JSON")
            facts["broken"] = refusal(functools.partial(backend.load, saved))
            if stage == "1":
                (folder / "1").rename(folder / "was-1")
                (folder / "1").mkdir()
                backend.save(folder / "1")
        results[stage] = facts
    print(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
