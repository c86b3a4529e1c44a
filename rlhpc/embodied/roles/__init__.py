"""The worker classes of a run: actor (trains), rollout (acts), env (simulates)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOME_OF = {
    "EmbodiedActor": "rlhpc.embodied.roles.ppo",
    "MultiStepRolloutWorker": "rlhpc.embodied.roles.rollout",
    "EnvWorker": "rlhpc.embodied.roles.env",
    "SlotMap": "rlhpc.embodied.roles.slots",
}
__all__ = ["EmbodiedActor", "EnvWorker", "MultiStepRolloutWorker", "SlotMap"]

if TYPE_CHECKING:
    from rlhpc.embodied.roles.env import EnvWorker as EnvWorker
    from rlhpc.embodied.roles.ppo import EmbodiedActor as EmbodiedActor
    from rlhpc.embodied.roles.rollout import MultiStepRolloutWorker as MultiStepRolloutWorker
    from rlhpc.embodied.roles.slots import SlotMap as SlotMap


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'rlhpc.embodied.roles' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)
