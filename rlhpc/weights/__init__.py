"""Weight synchronisation: how new weights get from the actor to whoever acts with them."""

from rlhpc.weights.broadcast import BroadcastSync
from rlhpc.weights.strategy import WeightSync, frozen_names, make_sync, register_sync

__all__ = ["BroadcastSync", "WeightSync", "frozen_names", "make_sync", "register_sync"]
