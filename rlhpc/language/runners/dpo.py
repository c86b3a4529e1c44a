"""The loop of Direct Preference Optimization."""

from __future__ import annotations

from rlhpc.language.dpo_config import DpoConfig
from rlhpc.language.runners.supervised import SupervisedRunner
from rlhpc.runtime.rpc import Handle


class DpoRunner(SupervisedRunner[DpoConfig]):
    """Trains a language model on preferences, with a group of `DpoActor`."""

    def train(self, step: int) -> Handle:
        """See `SupervisedRunner.train`."""
        return self.actor.prefer(step)
