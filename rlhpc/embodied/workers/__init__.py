"""Worker classes of embodied runs: actors train, rollout workers act, and env workers simulate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhpc.runtime.imports import lazy_names

_HOMES = {
    "rlhpc.embodied.workers.ppo_actor": ["EmbodiedActor"],
    "rlhpc.embodied.workers.rollout": ["MultiStepRolloutWorker"],
    "rlhpc.embodied.workers.env": ["EnvWorker"],
    "rlhpc.embodied.rollout.slot_map": ["SlotMap"],
}
__all__ = sorted(name for home_names in _HOMES.values() for name in home_names)
__getattr__, __dir__ = lazy_names(__name__, _HOMES)

if TYPE_CHECKING:
    from rlhpc.embodied.rollout.slot_map import SlotMap as SlotMap
    from rlhpc.embodied.workers.env import EnvWorker as EnvWorker
    from rlhpc.embodied.workers.ppo_actor import EmbodiedActor as EmbodiedActor
    from rlhpc.embodied.workers.rollout import MultiStepRolloutWorker as MultiStepRolloutWorker
