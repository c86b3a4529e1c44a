"""Policy gradient algorithms: an advantage estimator, a policy loss, and a KL penalty to the reference policy."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlhpc.algorithms import calculate_adv_and_returns, kl_penalty, policy_loss
from rlhpc.algorithms.advantages import masked_whiten
from rlhpc.algorithms.losses import value_loss
from rlhpc.algorithms.registry import ADVANTAGES as ESTIMATORS
from rlhpc.algorithms.registry import POLICY_LOSSES
from rlhpc.language.agents.episodes import Episode
from rlhpc.language.algorithms.base import (
    ACTOR,
    ADVANTAGES,
    RETURNS,
    ROLLOUT,
    ROLLOUT_LOGPROBS,
    VALUE_HEAD,
    VALUES,
    LanguageAlgorithm,
    MinibatchCounts,
    Reduce,
)
from rlhpc.language.config.algorithms import GrpoAlgorithmConfig
from rlhpc.language.config.run import GrpoConfig
from rlhpc.language.models.logprobs import TokenScores
from rlhpc.language.models.token_batch import TokenBatch
from rlhpc.language.rewards.pool import Scored
from rlhpc.language.scoring.registry import Column

if TYPE_CHECKING:
    from rlhpc.algorithms.corrections import Correction

#: Values of `algorithm.credit`: one advantage for all turns of a role; a comparison of turns with the same number, or of all
#: turns; or an additional comparison of turns in the same state, which is the text read just before the turn.
_EPISODE, _TURN, _ALL_TURNS, STATE = "episode", "turn", "all_turns", "state"


@dataclass(frozen=True)
class _Credit:
    """Credit assignment of turns.

    Attributes:
        unit: Unit of the comparison (`algorithm.credit`).
        estimator: `algorithm.adv_type`, which compares the turns' returns.
        gamma: Discount from turn to turn.
        coef: Weight of the comparison of states.
        normalizes: Whether advantages are whitened over the batch.
    """

    unit: str
    estimator: str
    gamma: float
    coef: float
    normalizes: bool


def _compute_turn_advantages(batch: TokenBatch, rewards: Tensor, credit: _Credit) -> Tensor:
    """Returns the advantage of each turn at all its tokens.

    Args:
        batch: Complete groups.
        rewards: `[T]`, reward of each token: process rewards, and the reward of the episode at its last token.
        credit: With `unit` of `_TURN`, `_ALL_TURNS` or `STATE`, which defines the compared turns of a group's role.

    Returns:
        `[T]`, 0 at tokens that are not trained.
    """
    sequence_of_token = torch.repeat_interleave(batch.sequence(), batch.lengths)
    turn_keys = torch.stack([sequence_of_token, batch.turn], 1)[batch.mask]
    credits = torch.zeros(batch.tokens, dtype=rewards.dtype)
    if not len(turn_keys):
        return credits
    turns, turn_index = turn_keys.unique(dim=0, return_inverse=True)  # ordered by sequence, then by time
    turn_rewards = torch.zeros(len(turns), dtype=rewards.dtype).index_add(0, turn_index, rewards[batch.mask])
    if credit.unit == _ALL_TURNS:
        compared_key = torch.zeros(len(turn_keys), dtype=torch.long)
    else:
        compared_key = batch.turn[batch.mask] if credit.unit == _TURN else _number_states(batch)
    group_role = torch.repeat_interleave(batch.group * (int(batch.role.max()) + 1) + batch.role, batch.lengths)[
        batch.mask
    ]
    groups = torch.zeros(len(turns), 2, dtype=torch.long)
    groups[turn_index] = torch.stack([group_role, compared_key], 1)
    advantages, _ = calculate_adv_and_returns(
        credit.estimator, rewards=_returns_to_go(turn_rewards, turns[:, 0], credit.gamma)[:, None],
        loss_mask=torch.ones(len(turns), 1, dtype=torch.bool), group_ids=groups.unique(dim=0, return_inverse=True)[1],
        gamma=1.0,
    )  # fmt: skip
    credits[batch.mask] = advantages[turn_index, 0]
    return credits


def _assign_credit(
    batch: TokenBatch, episode_advantages: Tensor, rewards: Tensor, credit: _Credit, all_reduce: Reduce | None
) -> Tensor:
    """Returns the advantages by `algorithm.credit`.

    Args:
        batch, rewards, credit: See `_compute_turn_advantages`.
        episode_advantages: `[T]`, advantages of the episodes.
        all_reduce: Sums over the ranks.
    """
    if credit.unit == _EPISODE:
        return episode_advantages
    advantages = _compute_turn_advantages(batch, rewards, credit)
    if credit.unit == STATE:  # as in GiGPO (Feng et al. 2025): a weighted sum of both
        advantages = episode_advantages + credit.coef * advantages
    if credit.normalizes:
        advantages = masked_whiten(advantages[None], batch.mask[None], all_reduce=all_reduce)[0]
    return advantages.masked_fill(~batch.mask, 0)


def _returns_to_go(rewards: Tensor, sequence: Tensor, gamma: float) -> Tensor:
    """Returns the discounted return of each turn: the sum of its reward and the rewards of later turns of its sequence.

    Args:
        rewards: `[U]`, reward of each turn, ordered by sequence, then by time.
        sequence: `[U]`, sequence of each turn.
        gamma: `algorithm.turn_gamma`.
    """
    returns, return_to_go, sequence_ids = rewards.tolist(), 0.0, sequence.tolist()
    for index in range(len(returns) - 1, -1, -1):
        return_to_go = returns[index] + (
            gamma * return_to_go
            if index + 1 < len(sequence_ids) and sequence_ids[index + 1] == sequence_ids[index]
            else 0.0
        )
        returns[index] = return_to_go
    return torch.tensor(returns, dtype=rewards.dtype)


def _number_states(batch: TokenBatch) -> Tensor:
    """Returns the state number of each trained token. Turns that read the same text just before have the same number."""
    state_numbers: dict[bytes, int] = {}
    states = torch.zeros(batch.tokens, dtype=torch.long)
    ids, turn, mask, cu_seqlens = batch.ids.numpy(), batch.turn.numpy(), batch.mask.numpy(), batch.cu_seqlens.tolist()
    for sequence_start, sequence_end in itertools.pairwise(cu_seqlens):
        turn_start = sequence_start
        while turn_start < sequence_end:
            turn_end = turn_start
            while turn_end < sequence_end and turn[turn_end] == turn[turn_start]:
                turn_end += 1
            first_trained = turn_start
            while first_trained < turn_end and not mask[first_trained]:
                first_trained += 1
            if first_trained < turn_end:
                states[turn_start:turn_end] = state_numbers.setdefault(
                    ids[turn_start:first_trained].tobytes(), len(state_numbers)
                )
            turn_start = turn_end
    return states[batch.mask]


def value_loss_share(
    predictions: Tensor, batch: TokenBatch, options: GrpoAlgorithmConfig, minibatch: MinibatchCounts
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns a micro-batch's share of the minibatch's value loss.

    Args:
        predictions: `[T]`, with gradients.
        batch: The micro-batch, with the columns `values` and `returns`.
        options: `value_clip`, `huber_delta` and `loss_agg`.
        minibatch: Counts of the minibatch.

    Returns:
        A scalar; and metrics, as shares: `value`, the mean, and `value_clip_fraction`.
    """
    loss, metrics = value_loss(
        values=batch.padded(predictions), returns=batch.padded(batch.columns[RETURNS]),
        loss_mask=batch.padded(batch.mask),
        old_values=batch.padded(batch.columns[VALUES]), value_clip=options.value_clip,
        huber_delta=options.huber_delta,
        weights=batch.padded(minibatch.weights(batch, options.loss_agg, predictions.dtype)),
    )  # fmt: skip
    return loss, {"value": minibatch.mean(predictions, batch), **minibatch.shares_of_means(metrics, batch)}


#: Metric with the share of trained tokens whose two log-probs have different bits.
UNEQUAL = "mismatch_unequal"
#: Prefixes of the mean difference of log-probs in a class of tokens, and of the share of trained tokens in the class.
_CLASS_MISMATCH, _CLASS_SHARE = "mismatch_abs/", "mismatch_share/"
#: Classes of tokens: by the probability with which the engine sampled them, at least 0.9, below 0.1 or between; the first
#: token of each turn, which the engine computes in its prefill; and special tokens, such as those that end a turn or enclose a
#: call of a tool, which the column `SPECIAL` marks.
TOKEN_CLASSES = ("likely", "uncertain", "unlikely", "first", "special")
SPECIAL = "special"


def _compute_class_mismatches(log_ratio: Tensor, batch: TokenBatch, minibatch: MinibatchCounts) -> dict[str, Tensor]:
    """Returns the shares of the metrics of `TOKEN_CLASSES`; `PolicyGradient.summarize` divides them.

    Args:
        log_ratio: `[T]`, trainer's minus engine's log-prob, 0 at tokens that are not trained.
        batch: The micro-batch.
        minibatch: Counts of the minibatch.
    """
    probabilities = batch.columns[ROLLOUT_LOGPROBS].masked_fill(~batch.mask, 0).exp()
    is_first = batch.mask.clone()
    is_first[1:] &= ~batch.mask[:-1]
    is_likely, is_unlikely = probabilities >= 0.9, probabilities < 0.1
    is_special = batch.columns.get(SPECIAL, torch.zeros_like(batch.mask)) & batch.mask
    members = (is_likely, ~is_likely & ~is_unlikely, is_unlikely, is_first, is_special)
    metrics: dict[str, Tensor] = {}
    for name, is_member in zip(TOKEN_CLASSES, members, strict=True):
        metrics[_CLASS_MISMATCH + name] = minibatch.mean(log_ratio.abs() * is_member, batch)
        metrics[_CLASS_SHARE + name] = minibatch.mean(is_member.to(log_ratio.dtype), batch)
    return metrics


def _compute_class_means(metrics: Mapping[str, float]) -> dict[str, float]:
    """Divides the sums of classes of tokens by the classes' shares; leaves out classes without tokens."""
    means = dict(metrics)
    for name in metrics:
        prefix, separator, class_name = name.rpartition(_CLASS_MISMATCH)
        if separator and class_name in TOKEN_CLASSES:
            class_share, class_total = metrics[prefix + _CLASS_SHARE + class_name], means.pop(name)
            if class_share:
                means[name] = class_total / class_share
    return means


OLD, _REFERENCE = "old_logprobs", "ref_logprobs"
#: Prefix of the columns with the rewards of `reward.process_terms` for each token.
_PROCESS = "process/"
#: Column of the turns' rewards, with the weight of the agent's reward.
TURN_REWARDS = "turn_rewards"
#: Estimator that needs a critic.
_GAE = "gae"


class PolicyGradient(LanguageAlgorithm):
    """GRPO and related algorithms: `algorithm.adv_type`, `algorithm.loss_type`, `algorithm.kl_coef` and their options."""

    at_first = frozenset(
        {"mismatch_kl", "mismatch_abs", UNEQUAL}
        | {prefix + name for prefix in (_CLASS_MISMATCH, _CLASS_SHARE) for name in TOKEN_CLASSES}
    )

    def __init__(self, cfg: GrpoConfig) -> None:
        super().__init__(cfg)
        options = cfg.algorithm
        self.entropy = options.entropy_coef != 0.0
        self.kl_coef = options.kl_coef
        # Advantages of a subclass may read the old log-probs.
        loss_only = type(self).advantages is PolicyGradient.advantages and not (
            self.kl_coef and options.kl_in == "reward"
        )
        old_columns = [Column(OLD, ACTOR, loss_only)] if options.recompute_logprobs else []
        self.critic = options.adv_type == _GAE
        self.has_value_head = self.critic and cfg.actor.model.value_head
        self.process = {term.name: term.weight for term in cfg.reward.process_terms}
        normalizes = options.normalize_advantages == "batch" or (self.critic and options.normalize_advantages == "auto")
        self.credit = _Credit(options.credit, options.adv_type, options.turn_gamma, options.turn_coef, normalizes)
        self.turns = cfg.agent.kind != "inline"  # an external agent may reward single turns
        self._agent_weight = sum(term.weight for term in cfg.reward.terms if term.name == "agent")
        self.columns = [
            *old_columns,
            *([Column(TURN_REWARDS, ROLLOUT)] if self.turns else []),
            *[Column(_PROCESS + name, name) for name in self.process],
            *([Column(_REFERENCE, "reference")] if self.kl_coef else []),
            *([Column(VALUES, VALUE_HEAD if self.has_value_head else "critic")] if self.critic else []),
        ]
        self.at_first = self.at_first | {_PROCESS + name for name in self.process}
        # An estimator with a parameter `kl` gets penalties and rewards separately; other estimators get the difference. A loss
        # with `proximal_logprobs` distinguishes the policy that sampled the tokens from the policy before the update.
        self._takes_kl = "kl" in inspect.signature(ESTIMATORS.find(options.adv_type)).parameters
        self._takes_proximal = (
            "proximal_logprobs" in inspect.signature(POLICY_LOSSES.find(options.loss_type)).parameters
        )
        self._corrections: Sequence[Correction] = ()
        if options.corrections:
            from rlhpc.algorithms.corrections import make_corrections

            self._corrections = make_corrections(options.corrections)

    def rollout_columns(self, episode: Episode, scored: Scored) -> Mapping[str, Sequence[float]]:
        """Returns the column of the turns' rewards (`LanguageAlgorithm.rollout_columns`)."""
        if not self.turns:
            return {}
        turn_rewards = episode.rewards or [0.0] * len(episode.token_ids)
        return {TURN_REWARDS: [self._agent_weight * reward for reward in turn_rewards]}

    # -- advantages -----------------------------------------------------------------------------------------------

    def rewards(self, batch: TokenBatch) -> Tensor:
        """Returns the reward of each token, `[E, W]`: process rewards, a turn's reward at its end, and the remaining
        reward of the episode at the last token that the model wrote.

        Args:
            batch: Samples joined by episode (`TokenBatch.by_episode`).
        """
        mask = batch.padded(batch.mask)
        rewards = torch.zeros(mask.shape, dtype=batch.reward.dtype)
        last_trained = (mask * torch.arange(mask.shape[1])).argmax(1)
        rows = torch.nonzero(mask.any(1)).flatten()
        turns = mask * batch.padded(batch.columns[TURN_REWARDS]) if self.turns else rewards
        rewards[rows, last_trained[rows]] = (batch.reward - turns.sum(1))[rows]
        if self.turns:
            rewards += turns
        for name, weight in self.process.items():
            rewards += weight * mask * batch.padded(batch.columns[_PROCESS + name])
        return rewards

    def advantages(self, batch: TokenBatch, all_reduce: Reduce | None) -> Tensor:
        """Returns the estimator's advantages, over the text of each role in each episode (`LanguageAlgorithm.advantages`)."""
        cfg, episodes = self.cfg.algorithm, batch.by_episode()
        mask, rewards = episodes.padded(episodes.mask), self.rewards(episodes)
        estimator_kwargs: dict[str, Any] = {}
        if self.kl_coef and cfg.kl_in == "reward":
            old_logprobs = batch.columns[OLD if cfg.recompute_logprobs else ROLLOUT_LOGPROBS]
            kl = episodes.padded(kl_penalty(old_logprobs, batch.columns[_REFERENCE], cfg.kl_type))
            if self._takes_kl:
                estimator_kwargs = {"kl": kl, "kl_coef": self.kl_coef}
            else:
                rewards = rewards - self.kl_coef * kl * mask
        num_roles = int(episodes.role.max()) + 1 if len(episodes) else 1
        if self.critic:
            estimator_kwargs |= {"values": episodes.padded(batch.columns[VALUES]), "gae_lambda": cfg.gae_lambda}
        advantages, returns = calculate_adv_and_returns(
            cfg.adv_type, rewards=rewards, loss_mask=mask,
            group_ids=episodes.group * num_roles + episodes.role, gamma=cfg.gamma,
            normalize=self.credit.normalizes and self.credit.unit == _EPISODE, all_reduce=all_reduce, **estimator_kwargs,
        )  # fmt: skip
        if self.critic:
            batch.columns[RETURNS] = episodes.flat(returns)
        return _assign_credit(batch, episodes.flat(advantages), episodes.flat(rewards), self.credit, all_reduce)

    # -- loss -----------------------------------------------------------------------------------------------------

    def loss(self, scores: TokenScores, batch: TokenBatch, counts: MinibatchCounts) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns policy loss, KL penalty, entropy bonus and value loss (`LanguageAlgorithm.loss`)."""
        cfg = self.cfg.algorithm
        loss, token_means = self._compute_policy_loss(scores.logprobs, batch, counts)
        metrics: dict[str, Tensor] = {"policy_loss": loss.detach()}
        if self.kl_coef:
            kl = kl_penalty(scores.logprobs, batch.columns[_REFERENCE], cfg.kl_type)
            metrics["ref_kl"] = counts.mean(kl, batch)
            if cfg.kl_in == "loss":
                loss = loss + self.kl_coef * counts.loss(kl, batch, cfg.loss_agg)
        if scores.entropy is not None:
            loss = loss - cfg.entropy_coef * counts.loss(scores.entropy, batch, cfg.loss_agg)
            metrics["entropy"] = counts.mean(scores.entropy, batch)
        else:  # an estimate from the sampled tokens needs no further computation
            metrics["entropy"] = counts.mean(-scores.logprobs, batch)
        metrics |= counts.shares_of_means(token_means, batch)
        log_ratio = scores.logprobs.detach() - batch.columns[ROLLOUT_LOGPROBS]
        log_ratio = log_ratio.masked_fill(~batch.mask, 0)
        metrics["mismatch_kl"] = counts.mean(kl_penalty(-log_ratio, torch.zeros_like(log_ratio), "k3"), batch)
        metrics["mismatch_abs"] = counts.mean(log_ratio.abs(), batch)
        metrics[UNEQUAL] = counts.mean((log_ratio != 0).to(log_ratio.dtype), batch)
        metrics |= _compute_class_mismatches(log_ratio, batch, counts)
        if self.has_value_head:
            loss = loss + self._compute_value_loss(scores, batch, counts, metrics)
        for name in self.process:
            process_reward = batch.columns[_PROCESS + name].masked_fill(~batch.mask, 0).sum()
            metrics[_PROCESS + name] = process_reward / max(counts.sequences, 1.0)
        metrics["loss"] = loss.detach()
        return loss, metrics

    def summarize(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Computes the means of classes of tokens, and the effective sample size of corrections
        (`LanguageAlgorithm.summarize`)."""
        summary = _compute_class_means(metrics)
        if not self._corrections and self.cfg.algorithm.tis_cap is None:
            return summary
        from rlhpc.algorithms.corrections import with_sample_size

        return with_sample_size(summary)

    def _compute_value_loss(
        self, scores: TokenScores, batch: TokenBatch, minibatch: MinibatchCounts, metrics: dict[str, Tensor]
    ) -> Tensor:
        """Returns the loss of the model's value head, and adds its metrics to `metrics`."""
        assert scores.values is not None
        cfg = self.cfg.algorithm
        loss, value_metrics = value_loss_share(scores.values, batch, cfg, minibatch)
        metrics |= {"value_loss": loss.detach(), **value_metrics}
        return cfg.value_coef * loss

    def _compute_policy_loss(
        self, logprobs: Tensor, batch: TokenBatch, minibatch: MinibatchCounts
    ) -> tuple[Tensor, dict[str, Any]]:
        """Returns the share of the minibatch's loss from log-probs `[T]`, and means over the micro-batch's tokens."""
        cfg = self.cfg.algorithm
        behaviour_logprobs = batch.padded(batch.columns[ROLLOUT_LOGPROBS])
        recomputed_logprobs = batch.padded(batch.columns[OLD]) if cfg.recompute_logprobs else None
        loss_kwargs: dict[str, Any] = {}
        if self._takes_proximal:
            old_logprobs, loss_kwargs["proximal_logprobs"] = behaviour_logprobs, recomputed_logprobs
            loss_kwargs["behave_weight_cap"] = cfg.tis_cap
        elif recomputed_logprobs is not None:
            old_logprobs = recomputed_logprobs
            loss_kwargs |= {"rollout_logprobs": behaviour_logprobs, "tis_cap": cfg.tis_cap}
        else:
            old_logprobs = behaviour_logprobs
        if self._corrections:
            loss_kwargs |= {"rollout_logprobs": behaviour_logprobs, "corrections": self._corrections}
        return policy_loss(
            cfg.loss_type, logprobs=batch.padded(logprobs), old_logprobs=old_logprobs,
            advantages=batch.padded(batch.columns[ADVANTAGES]), loss_mask=batch.padded(batch.mask),
            clip_ratio_low=cfg.clip_ratio_low, clip_ratio_high=cfg.clip_ratio_high, clip_ratio_c=cfg.clip_ratio_c,
            weights=batch.padded(minibatch.weights(batch, cfg.loss_agg, logprobs.dtype)), **loss_kwargs,
        )  # fmt: skip
