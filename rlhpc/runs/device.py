"""Device, number of threads and seeds of a rank."""

from __future__ import annotations

import random
import zlib
from typing import Any

import numpy as np
import torch
from torch import nn

from rlhpc.config.sections import RunConfig, RunnerConfig
from rlhpc.runtime.devices import accelerator, set_process_device, torch_device
from rlhpc.runtime.worker import Worker

#: Number of parameters below which a second thread costs more time for synchronisation than it saves. On a machine with
#: shared cores, waiting threads spin and slow the working threads: a small MLP became 10 times slower.
_MIN_PARAMETERS_FOR_THREADS = 250_000


def worker_device(worker: Worker) -> torch.device:
    """Returns the rank's first accelerator, or the CPU if the rank has none.

    Raises:
        ConfigError: The rank has an accelerator that torch cannot use.
    """
    device_type = torch_device(worker.accelerators)
    if worker.device_index:  # the process also sees accelerators of others
        set_process_device(worker.device_index)
    return torch.device(device_type)


def evaluation_device(cfg: RunConfig | None) -> torch.device:
    """Returns the device of a command that evaluates, records or answers outside a run: the first accelerator. Sets the
    precision of float32 products as in the run (`set_tf32`).

    It is the CPU on a machine without one, and for runs that compute on CPUs (`cluster.accelerators_per_node` is 0).

    Args:
        cfg: Configuration of the run; None for a policy that comes without one.
    """
    if cfg is not None:
        set_tf32(cfg.runner.tf32)
        if cfg.cluster.accelerators_per_node == 0:
            return torch.device("cpu")
    return torch.device(accelerator() or "cpu")


def device_of(policy: Any) -> torch.device:
    """Returns the device of a policy's parameters; the CPU for a policy without any, such as an expert's function."""
    parameters = policy.parameters() if isinstance(policy, nn.Module) else iter(())
    return next((parameter.device for parameter in parameters), torch.device("cpu"))


def set_up_process(runner: RunnerConfig, role: str, rank: int, *, seed: int | None = None) -> None:
    """Seeds the global random generators of the process, which external environments and models use, and sets the precision
    of its float32 products (`set_tf32`). `seed` replaces that of the run.
    """
    set_tf32(runner.tf32)
    entropy = [runner.seed if seed is None else seed, zlib.crc32(role.encode()), rank]
    seed_words = np.random.SeedSequence(entropy).generate_state(3)
    random.seed(int(seed_words[0]))
    np.random.seed(int(seed_words[1]))
    torch.manual_seed(int(seed_words[2]))


def set_tf32(tf32: bool | None) -> None:
    """Sets whether NVIDIA GPUs round the inputs of float32 matrix products and convolutions to TF32 (`runner.tf32`)."""
    if tf32 is not None:
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        torch.backends.cudnn.set_flags(_allow_tf32=tf32, _fp32_precision=None)  # the latter would reset the line above


def place_policy(module: nn.Module, device: torch.device) -> Any:
    """Moves a policy to the device, and limits the threads of the process (`limit_threads`); returns the policy."""
    limit_threads(module, device)
    return module.to(device)


def limit_threads(module: nn.Module, device: torch.device) -> None:
    """Limits the process to one thread if a small module runs on the CPU."""
    if device.type == "cpu" and sum(p.numel() for p in module.parameters()) < _MIN_PARAMETERS_FOR_THREADS:
        torch.set_num_threads(1)


def to_tensors(obs: Any, device: torch.device) -> Any:
    """Converts an array or tensor, or a (nested) dict of arrays or tensors, to tensors on the device; shares memory if
    possible.
    """
    if isinstance(obs, dict):
        return {key: to_tensors(array, device) for key, array in obs.items()}
    if isinstance(obs, torch.Tensor):
        return obs.to(device)
    return torch.from_numpy(np.ascontiguousarray(obs)).to(device)
