"""What the ranks of the tests on an accelerator do; importable by the workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lm_ranks import LR, TEMPERATURE, loss_of, share, train

from rlhpc import Worker
from rlhpc.language.training.trainer import TokenTrainer
from rlhpc.runs.device import worker_device


def _allocated() -> int:
    return torch.accelerator.memory_allocated() if torch.accelerator.is_available() else 0


class Sharing(Worker):
    """A rank that trains, and gives its accelerator away in between."""

    def rest_and_resume(self, cfg: Any, folder: Path) -> dict[str, Any]:
        """Saves and loads while its memory is given away, as the runner asks it to.

        Returns:
            The device; bytes allocated in training, after `offload`, and after a checkpoint was read; and the weights after
            the second step, taken before that and after it.
        """
        torch.set_num_threads(1)
        trainer = TokenTrainer(cfg, self)

        def step(number: int) -> dict[str, torch.Tensor]:
            micro = share(self, number)
            trainer.forward_backward(micro, loss_of(number), temperature=TEMPERATURE, compute_entropy=True)
            trainer.optimizer_step(LR)
            return {name: tensor.detach().cpu().clone() for name, tensor in trainer.named_weights()}

        step(0)
        allocated = [_allocated()]
        trainer.offload()
        allocated.append(_allocated())
        trainer.save(folder)
        trainer.reload()
        first = step(1)
        trainer.offload()
        trainer.load(folder)
        allocated.append(_allocated())
        trainer.reload()
        return {"device": trainer.backend.device.type, "allocated": allocated, "first": first, "again": step(1)}

    def give(self, to: str) -> str:
        """Sends a tensor from where it computes; returns that device."""
        device = worker_device(self)
        self.send(torch.arange(6.0, device=device).reshape(2, 3), to, 0)
        return device.type


class Without(Worker):
    """A rank that was granted no accelerator."""

    def take(self, sender: str) -> tuple[str, list[list[float]]]:
        found = self.recv(sender, 0)
        return found.device.type, found.tolist()


class Linked(Worker):
    """One of two ranks, each with an accelerator of its own."""

    def exchange(self, channel: str) -> dict[str, Any]:
        """A sum over both ranks, and one tensor sent to and fro, once as a message and once through a channel; with the
        devices that they were on."""
        device = worker_device(self)
        other = 1 - self.rank
        mine = torch.arange(6.0, device=device) + 10 * self.rank
        total = self.all_reduce(mine.clone())
        through = Worker.connect_channel(channel)
        if self.rank == 0:
            self.send(mine, self.group_name, other)
            through.put(mine, key="0")
            back = self.recv(self.group_name, other)
            got = through.get(key="1")
        else:
            back = self.recv(self.group_name, other)
            got = through.get(key="0")
            self.send(back + 1, self.group_name, other)
            through.put(got + 1, key="1")
        found = {"sum": total, "message": back, "channel": got}
        return {"own": device.type, **{name: (tensor.device.type, tensor.tolist()) for name, tensor in found.items()}}

    def seen(self) -> tuple[int, str]:
        """How many accelerators torch sees here, and which the first is."""
        module: Any = torch.get_device_module(worker_device(self))
        return torch.accelerator.device_count(), str(module.get_device_properties(0).uuid)

    def train(self, cfg: Any) -> dict[str, Any]:
        """Five steps: losses, norms, and on the host the weights and log-probs after them."""
        torch.set_num_threads(1)
        found = train(self, cfg)
        weights = {name: tensor.cpu() for name, tensor in found["weights"].items()}
        return {"losses": found["losses"], "norms": found["norms"], "weights": weights, "after": found["after"].cpu()}
