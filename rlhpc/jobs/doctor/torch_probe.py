"""Torch probe of the doctor for a node with GPUs. The source runs in the node's Python, so it does not import rlhpc.

The probe prints a line of JSON after each stage. If it hangs or dies, the last line shows the last completed stage.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import json
import time
import warnings
from typing import Any

#: Module of vLLM's kernels: vLLM 0.32 has the first, earlier versions have the second.
VLLM_KERNELS = ("vllm._C_stable_libtorch", "vllm._C")


def print_values(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def newest_cuda() -> str:
    """Returns the newest CUDA version that the node's driver supports; empty if there is no driver."""
    cuda_version = ctypes.c_int()
    try:
        status_code = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(cuda_version))
    except (OSError, AttributeError):
        return ""
    return "" if status_code else f"{cuda_version.value // 1000}.{cuda_version.value % 1000 // 10}"


def import_vllm_kernels() -> bool:
    """Imports vLLM's compiled kernels, which need the CUDA version that vLLM was built for; returns False without vLLM.

    vLLM itself only warns if they cannot be loaded, and fails later.

    Raises:
        ImportError: The kernels are missing, or a library that they need.
    """
    if importlib.util.find_spec("vllm") is None:
        return False
    name = next(name for name in VLLM_KERNELS if importlib.util.find_spec(name) or name == VLLM_KERNELS[-1])
    importlib.import_module(name)
    return True


def probe_torch() -> None:
    import torch

    print_values(torch=torch.__version__, cuda=torch.version.cuda, hip=torch.version.hip)
    with warnings.catch_warnings(record=True) as caught_warnings:
        warnings.simplefilter("always")
        num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    print_values(
        seen=num_devices, warning=str(caught_warnings[0].message).partition("\n")[0][:160] if caught_warnings else ""
    )
    for device_index in range(num_devices):
        torch.ones(
            2, device=f"cuda:{device_index}"
        ).sum().item()  # fails on a busy or broken device, or on a device that is too new for the build
    print_values(computes=True)
    print_values(vllm=import_vllm_kernels())
    if num_devices < 2:
        return
    tensors = [
        torch.full((2**20,), float(device_index + 1), device=f"cuda:{device_index}")
        for device_index in range(num_devices)
    ]
    if not torch.cuda.nccl.is_available(tensors):
        return
    start_time = time.monotonic()
    torch.cuda.nccl.all_reduce(tensors)
    is_correct = all(bool((tensor == num_devices * (num_devices + 1) / 2).all()) for tensor in tensors)
    print_values(nccl=is_correct, nccl_s=time.monotonic() - start_time)


if __name__ == "__main__":
    print_values(driver=newest_cuda())
    try:
        probe_torch()
    except Exception as error:  # the doctor reports any error
        text = next(iter(str(error).strip().splitlines()), "")
        print_values(error=f"{type(error).__name__}: {text[:200]}")
