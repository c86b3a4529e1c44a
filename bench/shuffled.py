"""Control experiment: rewards permuted among a group's episodes. An improvement under it does not come from the rewards."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from rlhpc.language.algorithms.base import Reduce
from rlhpc.language.algorithms.policy_gradient import TURN_REWARDS, PolicyGradient
from rlhpc.language.models.token_batch import TokenBatch


class ShuffledRewards(PolicyGradient):
    """Policy gradient whose rewards are permuted within each group, so that nothing can be learned."""

    def advantages(self, batch: TokenBatch, all_reduce: Reduce | None) -> Tensor:
        """Returns the advantages from other episodes' rewards."""
        return super().advantages(shuffle_rewards(batch), all_reduce)


def shuffle_rewards(batch: TokenBatch) -> TokenBatch:
    """Returns the same samples, each episode with the reward of another episode of its group;
    deterministic in the tokens.
    """
    generator = torch.Generator().manual_seed(int(batch.ids.sum()))
    reward = batch.reward.clone()
    for group in batch.group.unique():
        is_in_group = batch.group == group
        episodes, episode_index = batch.episode[is_in_group].unique(return_inverse=True)
        episode_rewards = torch.zeros(len(episodes)).index_copy(0, episode_index, batch.reward[is_in_group])
        reward[is_in_group] = episode_rewards[torch.randperm(len(episodes), generator=generator)][episode_index]
    columns = dict(batch.columns)
    if TURN_REWARDS in columns:
        columns[TURN_REWARDS] = torch.zeros_like(columns[TURN_REWARDS])
    return dataclasses.replace(batch, reward=reward, columns=columns)
