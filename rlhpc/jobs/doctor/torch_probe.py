"""What the doctor asks torch on a node with GPUs. Its text goes to the Python that trains there, so it imports no rlhpc.

It prints a line of JSON after each stage: if it hangs or dies, the last one tells how far it got.
"""

from __future__ import annotations

import ctypes
import json
import time
import warnings
from typing import Any


def say(**found: Any) -> None:
    print(json.dumps(found), flush=True)


def newest_cuda() -> str:
    """The newest CUDA that the node's driver takes; empty where there is no driver."""
    number = ctypes.c_int()
    try:
        code = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return ""
    return "" if code else f"{number.value // 1000}.{number.value % 1000 // 10}"


def look() -> None:
    import torch

    say(torch=torch.__version__, cuda=torch.version.cuda, hip=torch.version.hip)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    say(seen=seen, warning=str(said[0].message).partition("\n")[0][:160] if said else "")
    for number in range(seen):
        torch.ones(
            2, device=f"cuda:{number}"
        ).sum().item()  # a busy or broken one, or one too new for the build, fails here
    say(computes=True)
    if seen < 2:
        return
    parts = [torch.full((2**20,), float(number + 1), device=f"cuda:{number}") for number in range(seen)]
    if not torch.cuda.nccl.is_available(parts):
        return
    begun = time.monotonic()
    torch.cuda.nccl.all_reduce(parts)
    right = all(bool((part == seen * (seen + 1) / 2).all()) for part in parts)
    say(nccl=right, nccl_s=time.monotonic() - begun)


if __name__ == "__main__":
    say(driver=newest_cuda())
    try:
        look()
    except Exception as error:  # whatever it is, the doctor says it
        text = next(iter(str(error).strip().splitlines()), "")
        say(error=f"{type(error).__name__}: {text[:200]}")
