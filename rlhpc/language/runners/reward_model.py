"""The loop of a reward model's training."""

from __future__ import annotations

from rlhpc.algorithms.preference_losses import find_reward_loss
from rlhpc.config.typed import plain
from rlhpc.language.preference_scores import preference_validation_metrics
from rlhpc.language.reward_config import RewardRunConfig
from rlhpc.language.runners.supervised import SupervisedRunner
from rlhpc.runtime.rpc import Handle


class RewardModelRunner(SupervisedRunner[RewardRunConfig]):
    """Trains a reward model, with a group of `RewardModelActor`."""

    def train(self, step: int) -> Handle:
        """See `SupervisedRunner.train`."""
        return self.actor.prefer(step)

    def validate(self) -> dict[str, float]:
        """See `SupervisedRunner.validate`: on all suites of `workflow.eval_suites`."""
        algorithm = self.cfg.algorithm
        loss, form = find_reward_loss(algorithm.loss_type, plain(algorithm.loss_kwargs))
        return preference_validation_metrics(self.actor.validate().wait(self.timeout), form, loss)
