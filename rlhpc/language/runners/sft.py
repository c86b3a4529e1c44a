"""The loop of supervised fine-tuning."""

from __future__ import annotations

from rlhpc.language.config import SftConfig
from rlhpc.language.runners.supervised import SupervisedRunner
from rlhpc.runtime.rpc import Handle


class SftRunner(SupervisedRunner[SftConfig]):
    """Trains a language model on demonstrations, with a group of `SftActor`."""

    def train(self, step: int) -> Handle:
        """See `SupervisedRunner.train`."""
        return self.actor.imitate(step)
