"""What torch calls when a process imports it with `tests.card.environment`: its accelerator is `card`."""

from __future__ import annotations

import os
from types import ModuleType

import torch


def load() -> None:
    """Gives torch the device, and what it asks a device's module for."""
    torch.ops.load_library(os.environ["RLHPC_CARD"])
    torch.utils.rename_privateuse1_backend("card")
    module = ModuleType("torch.card")
    module.__dict__.update(
        is_available=lambda: True, is_initialized=lambda: True, device_count=lambda: 1, current_device=lambda: 0,
        set_device=lambda device: None, _is_in_bad_fork=lambda: False, manual_seed_all=lambda seed: None,
        is_bf16_supported=lambda including_emulation=True: True, synchronize=lambda device=None: None,
        get_amp_supported_dtype=lambda: [torch.bfloat16], get_rng_state=lambda device=0: torch.get_rng_state(),
        set_rng_state=lambda state, device=0: torch.set_rng_state(state),
    )  # fmt: skip
    torch._register_device_module("card", module)
    torch.utils.generate_methods_for_privateuse1_backend()
