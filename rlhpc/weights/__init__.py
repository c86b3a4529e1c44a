"""Weight synchronisation: how new weights get from the actor to whoever acts with them. Nothing here imports torch."""

from rlhpc.weights.strategy import Update, WeightSync, frozen_names, make_sync, register_sync

__all__ = ["Update", "WeightSync", "frozen_names", "make_sync", "register_sync"]
