"""What the ranks of the tests of memory do."""

from __future__ import annotations

import ctypes
import threading
import time
from pathlib import Path
from typing import Any

import torch
from mesh_ranks import LR, TEMPERATURE, loss, make_config, samples
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from rlhpc.language.training.trainer import TokenTrainer
from tests.forked import Rank

_MIB = 1 << 20


def _anonymous() -> int:
    """Bytes of memory that belong to no file."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) << 10


class Peak:
    """The largest amount of such memory in a block, above that at its start."""

    def __enter__(self) -> Peak:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        self._start = self._most = _anonymous()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._over.is_set():
            self._most = max(self._most, _anonymous())
            time.sleep(0.001)

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._most = max(self._most, _anonymous())

    @property
    def mib(self) -> float:
        return (self._most - self._start) / _MIB


def peaks(rank: Rank, model: str, warm: str, folder: str, changes: dict[str, Any]) -> dict[str, float]:
    """MiB at the peak of loading, of a training step, of saving and of exporting; and what is there to compare them with."""
    # What is freed goes back at once, so that what is seen is what is held; and what is imported is there.
    ctypes.CDLL("libc.so.6").mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD
    warmed = TokenTrainer(make_config(warm, **changes), rank)
    warmed.forward_backward([samples(0)], loss, temperature=TEMPERATURE, compute_entropy=True)
    warmed.optimizer_step(LR)
    warmed.save(Path(folder) / "warm")
    del warmed
    with Peak() as loading:
        trainer = TokenTrainer(make_config(model, **changes), rank)
    module = trainer.backend.module
    own = sum((p.to_local() if isinstance(p, DTensor) else p).nbytes for p in module.parameters())
    units = [part for part in module.modules() if isinstance(part, FSDPModule)]
    inner = {part: {id(p) for child in units if child is not part and child in part.modules() for p in child.parameters()}
             for part in units}  # fmt: skip
    tensor = trainer.backend.sizes.tensor
    unit = max(sum(p.nbytes for p in part.parameters() if id(p) not in inner[part]) for part in units) / tensor
    one = max(p.nbytes for p in module.parameters())
    with Peak() as stepping:
        trainer.forward_backward([samples(0)], loss, temperature=TEMPERATURE, compute_entropy=True)
        trainer.optimizer_step(LR)
    with Peak() as saving:
        trainer.save(Path(folder) / "saved")
    with Peak() as exporting:
        trainer.export(Path(folder) / "exported")
    return {
        "load": loading.mib, "step": stepping.mib, "save": saving.mib, "export": exporting.mib, "own": own / _MIB,
        "unit": unit / _MIB, "tensor": one / _MIB, "model": sum(p.nbytes for p in module.parameters()) / _MIB,
    }  # fmt: skip


def converted(rank: Rank, model: str, saved: str, folder: str) -> tuple[float, float]:
    """MiB at the peak of a conversion of a checkpoint to a Hugging Face folder, and of that folder to another in bfloat16."""
    from rlhpc.language.config.models import PretrainedConfig
    from rlhpc.language.export import stream_folder, stream_shards
    from rlhpc.language.models.loading import load_causal_lm

    ctypes.CDLL("libc.so.6").mallopt(-3, 1 << 16)
    config = PretrainedConfig(model_path=model)
    load_causal_lm(config, empty=True)
    with Peak() as first:
        stream_shards(Path(folder) / "first", Path(saved) / "shards", config, torch.float32, load_causal_lm, model)
    with Peak() as second:
        source = PretrainedConfig(model_path=str(Path(folder) / "first"))
        done, _ = stream_folder(Path(folder) / "second", source, torch.bfloat16, load_causal_lm)
    assert done
    return first.mib, second.mib
