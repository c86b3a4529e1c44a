"""The loops: a runner owns phases, timers, checkpoint cadence and the stop decision."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__all__ = ["EmbodiedRunner"]

if TYPE_CHECKING:
    from rlhpc.embodied.runners.ppo import EmbodiedRunner as EmbodiedRunner


def __getattr__(name: str) -> Any:
    if name != "EmbodiedRunner":
        raise AttributeError(f"module 'rlhpc.embodied.runners' has no attribute {name!r}")
    return importlib.import_module("rlhpc.embodied.runners.ppo").EmbodiedRunner
