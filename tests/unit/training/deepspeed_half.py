"""Steps of a layer in float16 by DeepSpeed, in a process of its own: `python deepspeed_half.py FOLDER` prints JSON.

DeepSpeed takes this for a device without float16 where oneDNN has none. Torch computes in float16 there all the same, so that
DeepSpeed's scaler runs once its question is answered with yes.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import torch

from rlhpc import Worker
from rlhpc.runtime.errors import ConfigError
from rlhpc.training.data_parallel import ReplicatedBackend
from rlhpc.training.deepspeed import DeepSpeedBackend
from rlhpc.training.loss_scale import MIN_SCALE
from tests.unit.training.half_module import HalfBlueprint, actor, batches, loss


def step(backend: Any, batch: torch.Tensor) -> dict[str, Any]:
    backend.forward_backward([batch, batch / 2], loss)
    norm = float(backend.optimizer_step(0.01))
    return {
        "norm": norm if math.isfinite(norm) else None, "scale": backend.loss_scale, "overflowed": backend.overflowed,
        "weights": [tensor.float().flatten().tolist() for _, tensor in backend.named_weights()],
    }  # fmt: skip


def main(folder: Path) -> None:
    from deepspeed.accelerator import get_accelerator

    results: dict[str, Any] = {"supported": bool(get_accelerator().is_fp16_supported())}
    try:
        DeepSpeedBackend(HalfBlueprint(), actor(), Worker())
    except ConfigError as error:
        results["refusal"] = str(error)
    get_accelerator().is_fp16_supported = lambda: True
    try:
        DeepSpeedBackend(HalfBlueprint(), actor(scale=48.0), Worker())
    except ConfigError as error:
        results["scale"] = str(error)
    inputs = batches(1.0, 1e4, 2.0, 3.0)
    local = ReplicatedBackend(HalfBlueprint(), actor(interval=100), Worker())
    results["local"] = [step(local, batch) for batch in inputs]
    for stage in (1, 2, 3):
        backend = DeepSpeedBackend(HalfBlueprint(), actor(interval=100, stage=stage), Worker())
        steps = [step(backend, batch) for batch in inputs[:2]]
        saved = folder / str(stage)
        saved.mkdir()
        backend.save(saved)
        steps += [step(backend, batch) for batch in inputs[2:]]
        again = DeepSpeedBackend(HalfBlueprint(), actor(interval=100, stage=stage), Worker())
        again.load(saved)
        results[str(stage)] = {"steps": steps, "resumed": [step(again, batch) for batch in inputs[2:]]}
        smallest = DeepSpeedBackend(HalfBlueprint(), actor(scale=MIN_SCALE, stage=stage), Worker())
        results[str(stage)]["smallest"] = step(smallest, torch.full((2, 4), float("inf")))
    print(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
