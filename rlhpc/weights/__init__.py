"""Weight synchronisation: how new weights get from the actor to whoever acts with them."""

from rlhpc.weights.broadcast import BroadcastSync
from rlhpc.weights.strategy import WeightSync, make_sync, register_sync

__all__ = ["BroadcastSync", "WeightSync", "make_sync", "register_sync"]
