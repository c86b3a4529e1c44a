"""What only the ranks of the DeepSpeed tests do; importable by the workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lm_ranks import LR, TEMPERATURE, Trainer, loss_of, share, train
from safetensors.torch import load_file

from rlhpc.language.tokens.trainer import TokenTrainer


class ZeroTrainer(Trainer):
    """A rank that trains with DeepSpeed."""

    def train_all(self, configs: list[Any], **options: Any) -> list[dict[str, Any]]:
        """One after the other, in this process."""
        torch.set_num_threads(1)
        return [train(self, cfg, **options) for cfg in configs]

    def train_parked(self, cfg: Any, steps: int = 3) -> tuple[list[float], int, int]:
        """Gives its memory away before each step; losses, bytes given away, bytes then still held."""
        torch.set_num_threads(1)
        trainer = TokenTrainer(cfg, self)
        backend: Any = trainer.backend
        losses, given, held = [], 0, 0
        for step in range(steps):
            given = backend.park()
            storages = [tensor.untyped_storage() for tensor in backend._tensors() if tensor.device == backend.device]
            held = sum(storage.nbytes() for storage in storages if storage.resizable())
            backend.reload()
            metrics = trainer.forward_backward(share(self, step), loss_of(step), temperature=TEMPERATURE, entropy=True)
            losses.append(float(self.all_reduce(torch.stack([m["loss"] for m in metrics]).double().sum())))
            trainer.optimizer_step(LR)
        return losses, given, held

    def save_and_load_parked(self, cfg: Any, folder: str) -> dict[str, bool]:
        """Writes, reads, sends and exports while its memory is given away, as the runner asks it to; what is then right."""
        torch.set_num_threads(1)
        trainer = TokenTrainer(cfg, self)
        backend: Any = trainer.backend
        backend.offload = lambda: None if backend.away else backend.park()  # on a CPU it would give nothing away

        def step(number: int) -> None:
            micro = share(self, number)
            trainer.forward_backward(micro, loss_of(number), temperature=TEMPERATURE, entropy=True)
            trainer.optimizer_step(LR)

        def weights() -> dict[str, torch.Tensor]:
            return {name: tensor.clone() for name, tensor in backend.named_weights()}

        step(0)
        before = weights()
        backend.offload()
        backend.save(Path(folder) / "parked")
        sent = weights()
        trainer.export(Path(folder) / "exported")
        exported = load_file(Path(folder) / "exported" / "model.safetensors")
        found = {"away again": backend.away, "sent": all(torch.equal(sent[name], before[name]) for name in before)}
        found["exported"] = all(torch.equal(exported[name], before[name]) for name in before)
        backend.reload()
        step(1)
        expected = weights()
        backend.offload()
        backend.load(Path(folder) / "parked")
        found |= {
            "away after load": backend.away,
            "loaded": all(torch.equal(t, before[n]) for n, t in weights().items()),
        }
        backend.reload()
        step(1)
        found["moments"] = all(torch.equal(tensor, expected[name]) for name, tensor in weights().items())
        return found

    def accumulate_twice(self, cfg: Any) -> str:
        """What two calls of `forward_backward` before a step lead to."""
        backend = TokenTrainer(cfg, self)
        backend.forward_backward(share(self, 0), loss_of(0), entropy=True)
        try:
            backend.forward_backward(share(self, 0), loss_of(0), entropy=True)
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
