"""The worker classes of a run: actor (trains), rollout (acts), env (simulates)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOME_OF = {
    "EmbodiedActor": "rlhpc.roles.actor",
    "MultiStepRolloutWorker": "rlhpc.roles.rollout",
    "EnvWorker": "rlhpc.roles.env",
    "SlotMap": "rlhpc.roles.exchange",
}
__all__ = ["EmbodiedActor", "EnvWorker", "MultiStepRolloutWorker", "SlotMap"]

if TYPE_CHECKING:
    from rlhpc.roles.actor import EmbodiedActor as EmbodiedActor
    from rlhpc.roles.env import EnvWorker as EnvWorker
    from rlhpc.roles.exchange import SlotMap as SlotMap
    from rlhpc.roles.rollout import MultiStepRolloutWorker as MultiStepRolloutWorker


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'rlhpc.roles' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)
