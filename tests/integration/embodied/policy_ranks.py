"""What the ranks of the tests of sharded policies do; importable by the workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from omegaconf import OmegaConf

from rlhpc.embodied.algorithms.ppo import PolicyUpdate
from rlhpc.embodied.config import BcConfig, PpoConfig
from rlhpc.embodied.data.batches import TrainBatch
from rlhpc.embodied.workers.actor import PolicyTrainer
from rlhpc.embodied.workers.bc_actor import BcActor

ROWS, BATCH, LR = 24, 12, 3e-3
SPACES = {
    "mlp": (spaces.Box(-1, 1, (3,), np.float32), spaces.Box(-1, 1, (2,), np.float32)),
    "openvla": (spaces.Box(0, 255, (32, 32, 3), np.uint8), spaces.Box(-1, 1, (2,), np.float32)),
    "vla": (spaces.Box(0, 255, (32, 32, 3), np.uint8), spaces.Box(-1, 1, (2,), np.float32)),
    "resnet10": (spaces.Box(0, 255, (32, 32, 3), np.uint8), spaces.Box(-1, 1, (2,), np.float32)),
    "flow": (spaces.Box(0, 255, (32, 32, 3), np.uint8), spaces.Box(-1, 1, (2,), np.float32)),
}
#: Denoising steps of the flow policies.
STEPS = 2


def make_config(changes: dict[str, Any]) -> Any:
    """A configuration; keys are dotted."""
    cfg = OmegaConf.structured(BcConfig if "demos.path" in changes else PpoConfig)
    base: dict[str, Any] = {
        "algorithm.update_epochs": 2, "actor.model.hidden_sizes": [8],
        "actor.optim.name": "adamw", "actor.optim.weight_decay": 0.1, "actor.optim.lr": LR,
    }  # fmt: skip
    if "demos.path" not in changes:
        base["algorithm.entropy_coef"] = 0.01
    for key, value in {**base, **changes}.items():
        OmegaConf.update(cfg, key, value)
    return cfg


def rollout(kind: str, number: int) -> TrainBatch:
    """Transitions that are made up; a few of them do not train."""
    generator = torch.Generator().manual_seed(number)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    mask = torch.ones(ROWS)
    mask[::7] = 0
    pictures = torch.randint(0, 256, (ROWS, 32, 32, 3), generator=generator, dtype=torch.uint8)
    return TrainBatch(
        obs=draw(ROWS, 3) if kind == "mlp" else pictures,
        actions=draw(ROWS, 1, 2).clamp(-0.9, 0.9),
        logprobs=-draw(ROWS).abs() - 1,
        values=draw(ROWS),
        advantages=draw(ROWS) * 2 + 1,
        returns=draw(ROWS),
        mask=mask,
        inputs={"inputs.chain": 0.3 * draw(ROWS, STEPS + 1, 1, 2)} if kind == "flow" else {},
    )


def spoil_what_fills_up(module: torch.nn.Module) -> None:
    """The last part of a partitioned parameter is as large as the others; what is beyond the parameter's end is whatever the
    memory held before."""
    for parameter in module.parameters():
        if hasattr(parameter, "ds_tensor"):
            part = parameter.ds_tensor
            left = parameter.ds_numel - part.numel() * parameter.ds_zero_partition_rank
            part.data[max(left, 0) :] = torch.nan


class PolicyTrainer(PolicyTrainer[Any]):
    """Trains by PPO on rollouts that are made up."""

    def __init__(self) -> None:
        super().__init__(make_config({}))

    def ppo(self, changes: dict[str, Any], updates: range = range(3), save: str = "", load: str = "") -> dict[str, Any]:
        """Metrics of each update, the full weights after them, and how many of them this rank holds."""
        torch.set_num_threads(1)
        self.cfg = make_config(changes)
        self.set_up_device()
        kind = str(self.cfg.actor.model.model_type)
        backend = self.build_backend(self.cfg.actor, SPACES[kind], reads_norm=True)
        if load:
            self.load(load)
        update = PolicyUpdate(
            self.cfg.algorithm, backend, batch_size=BATCH, micro_batch=5, seed=1, reduce=self.all_reduce,
            gather=self.all_gather_object, rank=self.rank, num_ranks=self.world_size,
        )  # fmt: skip
        held = range(ROWS * self.rank // self.world_size, ROWS * (self.rank + 1) // self.world_size)
        metrics = []
        for number in updates:
            rows = torch.arange(ROWS)[held.start : held.stop]
            metrics.append(update.run(rollout(kind, number).select(rows), held, ROWS, number, LR))
        if save:
            Path(save).mkdir(exist_ok=True)
            self.barrier()
            spoil_what_fills_up(backend.module)
            self.save(save)
        weights = {name: tensor.clone() for name, tensor in backend.named_weights()}
        here = sum(tensor.numel() for name, tensor in backend.local_tensors() if "optimizer" not in name)
        return {"metrics": metrics, "weights": weights, "held": here}

    def bc(self, changes: dict[str, Any], steps: range = range(1, 4), save: str = "", load: str = "") -> dict[str, Any]:
        """As `ppo`, on demonstrations."""
        torch.set_num_threads(1)
        actor = BcActor(make_config(changes))
        actor._collectives = self._collectives  # torch has one default group a process
        actor.init_worker()
        if load:
            actor.load(load)
        metrics = [actor.imitate(step, 0.0) for step in steps]
        if save:
            Path(save).mkdir(exist_ok=True)
            self.barrier()
            actor.save(save)
        return {"metrics": metrics, "weights": actor._gather_weights(), "evaluation": actor.evaluate()}
