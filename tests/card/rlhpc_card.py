"""What torch calls when a process imports it with `tests.card.environment`: its accelerator is `card`."""

from __future__ import annotations

import contextlib
import os
from types import ModuleType, SimpleNamespace
from typing import Any

import torch


def load() -> None:
    """Gives torch the device, and what it asks a device's module for."""
    torch.ops.load_library(os.environ["RLHPC_CARD"])
    torch.utils.rename_privateuse1_backend("card")
    module = ModuleType("torch.card")
    module.__dict__.update(
        is_available=lambda: _cards() > 0, is_initialized=lambda: True,
        device_count=_cards, get_device_properties=_properties, current_device=lambda: 0,
        set_device=lambda device: None, _is_in_bad_fork=lambda: False, manual_seed_all=lambda seed: None,
        is_bf16_supported=lambda including_emulation=True: True, synchronize=lambda device=None: None,
        get_amp_supported_dtype=lambda: [torch.bfloat16], get_rng_state=lambda device=0: torch.get_rng_state(),
        set_rng_state=lambda state, device=0: torch.set_rng_state(state), Stream=torch.Stream, Event=torch.Event,
        current_stream=torch.accelerator.current_stream, stream=lambda stream: stream or contextlib.nullcontext(),
        empty_cache=lambda: None, memory_allocated=lambda device=0: torch.accelerator.memory_allocated(),
    )  # fmt: skip
    torch._register_device_module("card", module)
    torch.utils.generate_methods_for_privateuse1_backend()
    if torch.distributed.is_available():
        torch.distributed.Backend.register_backend("hosted", _hosted, devices=["card"])


def _cards() -> int:
    """As many as the process is shown."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", os.environ["RLHPC_CARDS"])
    return len([name for name in shown.split(",") if name])


def _properties(device: Any = 0) -> SimpleNamespace:
    """Of one of those."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", os.environ["RLHPC_CARDS"])
    total = torch.accelerator.get_memory_info()[1]
    return SimpleNamespace(name="card", uuid=f"card-{shown.split(',')[int(device)]}", total_memory=total)


def _hosted(*args: Any) -> Any:
    from tests.card.hosted import make

    return make(*args)
