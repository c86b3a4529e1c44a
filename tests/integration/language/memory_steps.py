"""What ranks of the tests of memory do: a few steps of training, watched by the kernel."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from rlhpc.config.typed import default_section
from rlhpc.language.config.run import GrpoConfig
from rlhpc.language.models.logprobs import TokenScores
from rlhpc.language.models.token_batch import TokenBatch
from rlhpc.language.training.trainer import TokenTrainer
from tests.forked import Rank

#: glibc's M_MMAP_THRESHOLD and M_TRIM_THRESHOLD: with fixed ones, whatever is freed leaves the process at once.
_MMAP, _TRIM, _LARGE = -3, -1, 64 << 10


class Watch:
    """The most anonymous memory of this process since it was made, over what it was then."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None)
        libc.mallopt(_MMAP, _LARGE)
        libc.mallopt(_TRIM, _LARGE)
        libc.malloc_trim(0)
        self._start = _status()["RssAnon"]
        self.reset()

    def reset(self) -> None:
        """Begins anew."""
        Path("/proc/self/clear_refs").write_text("5")

    def peak(self) -> int:
        """Bytes."""
        found = _status()
        return found["VmHWM"] - found["RssFile"] - found["RssShmem"] - self._start


def _status() -> dict[str, int]:
    lines = Path("/proc/self/status").read_text().splitlines()
    return {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines if line.startswith(("Vm", "Rss"))}


def make_cfg(changes: dict[str, Any]) -> Any:
    """A configuration; `changes` are keys below `actor`."""
    cfg = default_section(GrpoConfig)
    base = {"model.dtype": "float32", "optim.name": "adamw", "optim.clip_grad": 1.0, "optim.lr": 3e-4}
    for key, value in {**base, **changes}.items():
        OmegaConf.update(cfg.actor, key, value)
    return cfg


def steps(rank: Rank, changes: dict[str, Any], tokens: int, samples: int) -> dict[str, int]:
    """Two steps; what the rank held at most in the second, and what it trains. By then the optimizer has its state, and the
    micro-batch of so many tokens finds the gradients of one before it: what makes state and gradients may be small."""
    watch = Watch()
    trainer = TokenTrainer(make_cfg(changes), rank)

    def batch_of(length: int) -> TokenBatch:
        ids = [torch.randint(3, 1000, (length,)) for _ in range(samples)]
        return TokenBatch.from_sequences(ids, [torch.ones(length, dtype=torch.bool) for _ in ids], {})

    def loss(scores: TokenScores, batch: TokenBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return -scores.logprobs.sum() / batch.tokens, {}

    small, whole = batch_of(16), batch_of(tokens // samples)
    for batches in ([small], [small, whole]):
        watch.reset()
        trainer.forward_backward(batches, loss)
        trainer.optimizer_step(1e-4)
    return {"peak": watch.peak(), "trained": trainer.num_trained_parameters}
