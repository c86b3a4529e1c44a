"""What only the ranks of the DeepSpeed tests do; importable by the workers."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import torch
from lm_ranks import Trainer, loss_of, share, train

from rlhpc.language.training.trainer import TokenTrainer


class ZeroTrainer(Trainer):
    """A rank that trains with DeepSpeed."""

    def train_all(self, configs: list[Any], **options: Any) -> list[dict[str, Any]]:
        """One after the other, in this process."""
        torch.set_num_threads(1)
        found = []
        for cfg in configs:
            # DeepSpeed keeps what it has built, and looks for garbage again and again: let it not look through that each time
            gc.collect()
            gc.freeze()
            found.append(train(self, cfg, **options))
        return found

    def accumulate_twice(self, cfg: Any) -> str:
        """What two calls of `forward_backward` before a step lead to."""
        backend = TokenTrainer(cfg, self)
        backend.forward_backward(share(self, 0), loss_of(0), compute_entropy=True)
        try:
            backend.forward_backward(share(self, 0), loss_of(0), compute_entropy=True)
        except RuntimeError as error:
            return str(error)
        return ""

    def refused(self, cfg: Any, load: Any = None) -> str:
        """What building a backend, or loading a checkpoint, says against it."""
        try:
            backend = TokenTrainer(cfg, self)
            if load is not None:
                backend.load(load)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def written(self) -> tuple[str, str]:
        """What this process has written to its two logs so far."""
        import sys

        sys.stdout.flush()
        sys.stderr.flush()
        out, err = (Path(f"/proc/self/fd/{number}").resolve().read_text() for number in (1, 2))
        return out, err
