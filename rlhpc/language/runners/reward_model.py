"""The loop of a reward model's training."""

from __future__ import annotations

import time

from rlhpc.algorithms.reward_losses import find_reward_loss
from rlhpc.config.typed import plain
from rlhpc.language.preference_scores import validation_metrics
from rlhpc.language.reward_config import RewardRunConfig
from rlhpc.language.runners.supervised import SupervisedRunner
from rlhpc.runtime.rpc import Handle


class RewardModelRunner(SupervisedRunner[RewardRunConfig]):
    """Trains a reward model, with a group of `RewardModelActor`."""

    def train(self, step: int) -> Handle:
        """See `SupervisedRunner.train`."""
        return self.actor.prefer(step)

    def evaluate(self) -> dict[str, float]:
        """Every `runner.val_check_interval` steps: on all suites of `workflow.eval_suites`."""
        every = self.cfg.runner.val_check_interval
        if every <= 0 or self.step % every:
            return {}
        begin, algorithm = time.perf_counter(), self.cfg.algorithm
        form = find_reward_loss(algorithm.loss_type, plain(algorithm.loss_kwargs))[1]
        found = validation_metrics(self.actor.validate().wait(self.timeout), form)
        return {**found, "time/eval_s": time.perf_counter() - begin}
