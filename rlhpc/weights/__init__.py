"""Weight sync: transfer of new weights from the actor to the workers that act. Importing the package imports no torch."""

from rlhpc.weights.base import Update, WeightSync, frozen_names, make_sync, register_sync, sends_shards

__all__ = ["Update", "WeightSync", "frozen_names", "make_sync", "register_sync", "sends_shards"]
