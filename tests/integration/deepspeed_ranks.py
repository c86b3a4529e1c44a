"""What only the ranks of the DeepSpeed tests do; importable by the workers."""

from __future__ import annotations

from typing import Any

import torch
from lm_ranks import LR, TEMPERATURE, Trainer, loss_of, share, train

from rlhpc.training.lm_registry import make_backend


class ZeroTrainer(Trainer):
    """A rank that trains with DeepSpeed."""

    def train_all(self, configs: list[Any], **options: Any) -> list[dict[str, Any]]:
        """One after the other, in this process."""
        torch.set_num_threads(1)
        return [train(self, cfg, **options) for cfg in configs]

    def train_parked(self, cfg: Any, steps: int = 3) -> tuple[list[float], int, int]:
        """Gives its memory away before each step; losses, bytes given away, bytes then still held."""
        torch.set_num_threads(1)
        backend: Any = make_backend(cfg, self)
        losses, given, held = [], 0, 0
        for step in range(steps):
            given = backend.park()
            storages = [tensor.untyped_storage() for tensor in backend._tensors() if tensor.device == backend.device]
            held = sum(storage.nbytes() for storage in storages if storage.resizable())
            backend.reload()
            metrics = backend.forward_backward(share(self, step), loss_of(step), temperature=TEMPERATURE, entropy=True)
            losses.append(float(self.all_reduce(torch.stack([m["loss"] for m in metrics]).double().sum())))
            backend.optimizer_step(LR)
        return losses, given, held

    def accumulate_twice(self, cfg: Any) -> str:
        """What two calls of `forward_backward` before a step lead to."""
        backend = make_backend(cfg, self)
        backend.forward_backward(share(self, 0), loss_of(0), entropy=True)
        try:
            backend.forward_backward(share(self, 0), loss_of(0), entropy=True)
        except RuntimeError as error:
            return str(error)
        return ""

    def refused(self, cfg: Any, load: Any = None) -> str:
        """What building a backend, or loading a checkpoint, says against it."""
        try:
            backend = make_backend(cfg, self)
            if load is not None:
                backend.load(load)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def written(self) -> tuple[str, str]:
        """What this process has written to its two logs so far."""
        import sys
        from pathlib import Path

        sys.stdout.flush()
        sys.stderr.flush()
        out, err = (Path(f"/proc/self/fd/{number}").resolve().read_text() for number in (1, 2))
        return out, err
