"""The worker classes of a run: actor (trains), rollout (acts), env (simulates)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhpc.runtime.imports import lazy_names

_HOMES = {
    "rlhpc.embodied.roles.ppo": ["EmbodiedActor"],
    "rlhpc.embodied.roles.rollout": ["MultiStepRolloutWorker"],
    "rlhpc.embodied.roles.env": ["EnvWorker"],
    "rlhpc.embodied.roles.slots": ["SlotMap"],
}
__all__ = sorted(name for names in _HOMES.values() for name in names)
__getattr__, __dir__ = lazy_names(__name__, _HOMES)

if TYPE_CHECKING:
    from rlhpc.embodied.roles.env import EnvWorker as EnvWorker
    from rlhpc.embodied.roles.ppo import EmbodiedActor as EmbodiedActor
    from rlhpc.embodied.roles.rollout import MultiStepRolloutWorker as MultiStepRolloutWorker
    from rlhpc.embodied.roles.slots import SlotMap as SlotMap
