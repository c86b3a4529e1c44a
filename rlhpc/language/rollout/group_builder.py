"""Group building: makes a sample group from the scored answers of a prompt, or decides to replace the prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from rlhpc.algorithms.advantages import differs_in_group, overlong_penalty
from rlhpc.algorithms.nonfinite import nonfinite, skips
from rlhpc.language.agents.episodes import (
    UNTRAINED_ROLE,
    Episode,
    id_array,
    logprob_array,
    repeated_value,
    token_array,
    tokens_of,
)
from rlhpc.language.algorithms.base import LanguageAlgorithm
from rlhpc.language.config.rewards import RewardConfig
from rlhpc.language.config.run import GrpoConfig
from rlhpc.language.rewards.pool import Scored
from rlhpc.language.rollout.pending_group import PendingGroup, ScoredGroup, count_trainable_tokens
from rlhpc.language.rollout.sample_group import FINISHED, SampleGroup, build_sample_group, read_rollout_columns

#: Term of `reward.terms` that depends only on an answer's length.
LENGTH = "length"


def group_metrics(
    step: int,
    episodes: Sequence[Episode],
    scores: Sequence[Scored],
    rewards: np.ndarray,
    num_refills: int,
    rewards_differ: bool,
) -> dict[str, float]:
    """Returns the sums over a group's episodes from which the step's metrics are computed; `max_*` are maxima.

    Args:
        step: Step of the prompt.
        episodes: Episodes of the group.
        scores: Score of each episode.
        rewards: `[G]` float32.
        num_refills: Number of prompts that this prompt has replaced.
        rewards_differ: Whether the task rewards of the compared episodes differ.
    """
    episode_lengths = [tokens_of(episode) for episode in episodes]
    oldest_versions = [
        oldest_version for episode in episodes if (oldest_version := _find_oldest_version(episode)) is not None
    ]
    staleness = [step - 1 - version for version in oldest_versions]
    first_term = next(iter(scores[0].terms), "")
    metrics = {
        "samples": float(len(episodes)),
        "groups": 1.0,
        "reward": float(rewards.sum()),
        "reward_squared": float((rewards**2).sum()),
        "accuracy": float(sum(score.terms.get(first_term, 0.0) >= 1.0 for score in scores)),
        "length": float(sum(episode_lengths)),
        "truncated": float(sum(map(is_truncated, episodes))),
        "varied": float(rewards_differ),
        "failed": float(sum(score.failed for score in scores)),
        "stale": float(sum(staleness)),
        "refills": float(num_refills),
        "max_length": float(max(episode_lengths)),
        "max_stale": float(max(staleness, default=0)),
    }
    metrics |= {f"term/{name}": float(sum(score.terms.get(name, 0.0) for score in scores)) for name in scores[0].terms}
    outcomes = [episode.outcome for episode in episodes if episode.outcome is not None]
    for name in sorted({name for agent_outcome in outcomes for name in agent_outcome.metrics}):
        metrics[f"agent/{name}"] = sum(agent_outcome.metrics.get(name, 0.0) for agent_outcome in outcomes)
    return metrics


def find_non_finite(rewards: np.ndarray, episodes: Sequence[Episode], scores: Sequence[Scored]) -> str:
    """Returns a description of the first non-finite reward, or log-prob of a trained token, of a group; "" if none."""
    for member, (reward, episode, score) in enumerate(zip(rewards.tolist(), episodes, scores, strict=True)):
        if not math.isfinite(reward):
            terms_text = ", ".join(f"{name} {term_value}" for name, term_value in score.terms.items())
            return f"the reward of response {member} is {reward} ({terms_text})"
        for sample in episode.samples:
            if not np.isfinite(logprob_array(sample.logprobs)[token_array(sample.loss_mask, np.bool_)]).all():
                return f"a log-probability of response {member} is not finite"
    return ""


def overlong_penalties(episodes: Sequence[Episode], max_tokens: int, buffer: int) -> np.ndarray:
    """Returns the penalties `[E]` of answers whose length exceeds `max_tokens` − `buffer`.

    Args:
        episodes: The answers.
        max_tokens: Maximum number of tokens of an answer.
        buffer: `algorithm.overlong_buffer`.
    """
    if not buffer:
        return np.zeros(len(episodes), np.float32)
    episode_lengths = torch.tensor([len(episode.token_ids) for episode in episodes])
    return np.asarray(overlong_penalty(lengths=episode_lengths, max_length=max_tokens, buffer=buffer))


def task_rewards(scores: Sequence[Scored], reward: RewardConfig) -> np.ndarray:
    """Returns the rewards by which groups are filtered: the weighted sums of `reward.terms` without length penalties.

    Length penalties are the term `length` and `algorithm.overlong_buffer`. DAPO (Yu et al. 2025) filters by accuracy, so that
    wrong answers of different lengths are equal; these rewards keep that property.

    Args:
        scores: Scores of the compared answers.
        reward: Section `reward`.

    Returns:
        `[E]` float64.
    """
    terms = [term for term in reward.terms if term.name != LENGTH]
    if not terms or len(terms) == len(reward.terms):
        return np.asarray([score.total for score in scores])
    # Sum the remaining terms: subtracting the length term from the total would leave rounding errors.
    weights = {term.name: term.weight for term in terms}
    return np.asarray(
        [
            score.total
            if score.failed
            else sum(weight * score.terms.get(name, 0.0) for name, weight in weights.items())
            for score in scores
        ]
    )


def rewards_vary(rewards: np.ndarray) -> bool:
    """Returns whether a group's rewards differ; equal rewards give no learning signal."""
    one_group = torch.zeros(len(rewards), dtype=torch.int64)
    return len(rewards) > 0 and bool(differs_in_group(torch.from_numpy(rewards), one_group, 1)[0])


class GroupBuilder:
    """Builder of groups from scored answers.

    Args:
        cfg: The configuration.
        algorithm: The algorithm, which defines the rollout columns of a group.
        num_choices: Router choices per token (`RolloutBackend.choices`); 0 if there is no routing replay.
        rank_name: Name of the rollout rank, for messages.
    """

    def __init__(self, cfg: GrpoConfig, algorithm: LanguageAlgorithm, num_choices: int, rank_name: str) -> None:
        self._cfg = cfg
        # Reading a key of the configuration takes as long as a hundred tokens.
        self._max_new_tokens = cfg.rollout.max_new_tokens
        self._overlong_buffer = cfg.algorithm.overlong_buffer
        self._overlong_filter = cfg.algorithm.overlong_filter
        self._filter_groups = cfg.algorithm.filter_groups
        self._max_staleness = cfg.algorithm.max_staleness
        self._algorithm = algorithm
        self._choices = num_choices
        self._rank_name = rank_name
        self._size = cfg.algorithm.group_size
        self._agent_weight = sum(term.weight for term in cfg.reward.terms if term.name == "agent")

    def has_too_few_members(self, group: PendingGroup) -> bool:
        """Returns whether too few episodes of a group can be compared (`trained_members`)."""
        return len(trained_members(group, self._find_min_version(group))) < min(2, self._size)

    def score_group(self, group: PendingGroup, *, may_refill: bool) -> ScoredGroup | None:
        """Returns the group's scores and rewards, or None if the prompt is to be replaced.

        Args:
            group: Group whose answers are complete and scored.
            may_refill: Whether another prompt may replace this one.

        Raises:
            RlhpcError: A number is not finite, and the configuration does not skip such groups.
        """
        has_too_few = self.has_too_few_members(group)
        if has_too_few and may_refill:
            return None
        indices = [0] if has_too_few else trained_members(group, self._find_min_version(group))
        episodes, scores = [group.episodes[m] for m in indices], [group.scores[m] for m in indices]
        rewards = np.asarray([score.total for score in scores], np.float32)
        rewards += overlong_penalties(episodes, self._max_new_tokens, self._overlong_buffer)
        if non_finite_message := find_non_finite(rewards, episodes, scores):
            if not skips(self._cfg):
                raise nonfinite(
                    f"step {group.step}, prompt {group.position} ({group.prompt.question!r:.80}), {self._rank_name}: "
                    f"{non_finite_message}"
                )
            rewards = np.zeros_like(rewards)
        drop_reason = "nonfinite" if non_finite_message else "alone" if has_too_few else ""
        trained_flags = [
            not drop_reason and not (self._overlong_filter and is_truncated(episode)) for episode in episodes
        ]
        trained_scores = [score for score, is_trained in zip(scores, trained_flags, strict=True) if is_trained]
        rewards_differ = rewards_vary(task_rewards(trained_scores, self._cfg.reward))
        if may_refill and self._is_dropped_by_dynamic_sampling(rewards_differ):
            return None
        compared_episodes = dict(zip(indices, episodes, strict=True))
        return ScoredGroup(compared_episodes, scores, rewards, trained_flags, rewards_differ, drop_reason)

    def _is_dropped_by_dynamic_sampling(self, rewards_differ: bool) -> bool:
        """Returns whether dynamic sampling replaces a group with these rewards (`algorithm.filter_groups`)."""
        return self._filter_groups and not rewards_differ

    def build(self, group: PendingGroup, scored_group: ScoredGroup) -> tuple[SampleGroup, dict[str, float]]:
        """Returns the sample group for the actor, and the group's sums for the step's metrics."""
        drop_tokens(
            group, self._find_min_version(group), drop_truncated=self._overlong_filter, drop_reason=scored_group.drop_reason
        )  # fmt: skip
        episodes = list(scored_group.episodes.values())
        columns = [
            read_rollout_columns(self._algorithm, sample, score, group.prompt)
            for episode, score in zip(episodes, scored_group.scores, strict=True)
            for sample in episode.samples
        ]
        sample_group = build_sample_group(
            group.step, group.position, scored_group.episodes, scored_group.rewards, columns, trained=scored_group.trained,
            size=self._size, num_choices=self._choices, agent_weight=self._agent_weight,
        )  # fmt: skip
        metrics = {"refills": float(group.num_refills)}
        if scored_group.drop_reason == "nonfinite":
            metrics["nonfinite"] = float(self._size)
        elif not scored_group.drop_reason:
            metrics = group_metrics(
                group.step,
                episodes,
                scored_group.scores,
                scored_group.rewards,
                group.num_refills,
                scored_group.rewards_differ,
            )
        return sample_group, metrics | dropped_token_metrics(group)

    def _find_min_version(self, group: PendingGroup) -> int:
        """Returns the oldest version of the weights whose tokens may be trained on."""
        return group.step - 1 - self._max_staleness


#: Reasons why sampled tokens are not trained on. `lost`: the agent's client disconnected before it received the tokens.
#: `failed`: the agent of the episode failed. `role`: the role of the tokens is not trained (`agent.untrained_roles`). `cut`:
#: the answer was truncated (`algorithm.overlong_filter`). `old`: the tokens' weights are older than `algorithm.max_staleness`
#: allows. `refilled`: another prompt replaced the group's prompt. `alone`: the group has no other episode to compare with.
#: `nonfinite`: the group has a non-finite number.
REASONS = ("lost", "failed", "role", "cut", "old", "refilled", "alone", "nonfinite")
PREFIX = "untrained/"


def trained_members(group: PendingGroup, min_version: int) -> list[int]:
    """Returns the members of a group that are compared.

    Episodes with a failed agent are omitted, because they give no information about the policy. Episodes sampled only by
    weights before version `min_version` are omitted, too. Omitted episodes count neither as a reward of 0 nor in a baseline.
    """
    return [
        m
        for m, episode in sorted(group.episodes.items())
        if not episode.failed and not _is_too_old(episode, min_version)
    ]


def _is_too_old(episode: Episode, min_version: int) -> bool:
    """Returns whether the episode has trained tokens, all of versions before `min_version`."""
    trained_versions = (
        v for s in episode.samples for v, is_trained in zip(s.versions, s.loss_mask, strict=True) if is_trained
    )
    newest_version = next(trained_versions, None)
    return (
        newest_version is not None and newest_version < min_version and all(v < min_version for v in trained_versions)
    )


def _find_oldest_version(episode: Episode) -> int | None:
    """Returns the oldest version of an episode's trained tokens; None if there are no trained tokens."""
    versions: list[int] = []
    for sample in episode.samples:
        version = repeated_value(sample.versions)
        if version is not None:
            versions += [version] if any(sample.loss_mask) else []
        elif any(sample.loss_mask):
            trained_versions = id_array(*sample.versions)[token_array(sample.loss_mask, np.bool_)]
            versions.append(int(trained_versions.min()))
    return min(versions, default=None)


def failure_of(group: PendingGroup) -> str:
    """Returns the reason of the group's last failed score, or else of its last failed episode; "" if there are no failures."""
    reasons = [
        episode.outcome.error for _, episode in sorted(group.episodes.items()) if episode.failed and episode.outcome
    ]
    reasons += [
        scored_answer.reason
        for _, scored_answer in sorted(group.scores.items())
        if scored_answer.failed and scored_answer.reason
    ]
    return reasons[-1] if reasons else ""


def is_truncated(episode: Episode) -> bool:
    """Returns whether an episode's answer was truncated at a length limit."""
    return episode.finish_reason not in FINISHED


def drop_tokens(group: PendingGroup, min_version: int, *, drop_truncated: bool, drop_reason: str) -> None:
    """Counts the tokens of a complete group that are not trained on in `dropped_tokens`; masks tokens that are too old.

    Args:
        group: The group.
        min_version: Oldest version of the weights whose tokens may be trained on.
        drop_truncated: Whether truncated answers are not trained on.
        drop_reason: Reason why the whole group is not trained on, from `REASONS`; "" if it is trained on.
    """
    dropped_counts = group.dropped_tokens
    for episode in group.episodes.values():
        dropped_counts["lost"] += int(episode.outcome.metrics.get("not_received", 0)) if episode.outcome else 0
        if episode.failed or drop_reason:
            dropped_counts["failed" if episode.failed else drop_reason] += count_trainable_tokens([episode])
            continue
        if episode.outcome and UNTRAINED_ROLE in episode.outcome.metrics:
            dropped_counts["role"] += int(episode.outcome.metrics[UNTRAINED_ROLE])
        dropped_counts["old"] += _mask_old_tokens(episode, min_version)
        if episode.branches:  # a role without trained samples would count as a role with reward 0
            episode.branches = [s for s in episode.branches if any(s.loss_mask)] or episode.branches
        if drop_truncated and is_truncated(episode):
            dropped_counts["cut"] += count_trainable_tokens([episode])


def _mask_old_tokens(episode: Episode, min_version: int) -> int:
    num_dropped = 0
    for sample in episode.samples:
        version = repeated_value(sample.versions)
        if (min(sample.versions, default=min_version) if version is None else version) >= min_version:
            continue
        for index, (is_trained, version) in enumerate(zip(sample.loss_mask, sample.versions, strict=True)):
            if is_trained and version < min_version:
                sample.loss_mask[index] = False
                num_dropped += 1
    return num_dropped


def dropped_token_metrics(group: PendingGroup) -> dict[str, float]:
    """Returns a group's numbers of failed episodes, answers and tokens resumed from another rank, and untrained tokens.

    Untrained tokens are counted by reason. Zeros are omitted.
    """
    num_failed = sum(episode.failed for episode in group.episodes.values())
    metrics = {"agent_failed": float(num_failed)} if num_failed else {}
    if group.resumed_tokens:
        resumed_tokens = group.resumed_tokens.values()
        metrics |= {"continued": float(len(resumed_tokens)), "continued_tokens": float(sum(resumed_tokens))}
    return metrics | {
        PREFIX + name: float(num_dropped) for name, num_dropped in group.dropped_tokens.items() if num_dropped
    }
