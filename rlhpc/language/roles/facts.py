"""What is known about a group of answers: whether it can be trained on, and what the step's metrics are made of."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from rlhpc.algorithms.advantages import overlong_penalty, varied_groups
from rlhpc.language.agents.episodes import Episode
from rlhpc.language.agents.judged import tokens_of
from rlhpc.language.config import RewardConfig
from rlhpc.language.rewards.pool import Scored
from rlhpc.language.roles.groups import FINISHED

#: The term of `reward.terms` that looks at the length alone.
LENGTH = "length"


def facts_of(
    step: int,
    episodes: Sequence[Episode],
    scores: Sequence[Scored],
    rewards: np.ndarray,
    refills: int,
    differ: bool,
) -> dict[str, float]:
    """What a step's metrics are made of: sums over a group's episodes; what begins with `max_` is the largest.

    Args:
        step: Of the prompt.
        episodes: All that answer it.
        scores: What the judges said of each.
        rewards: `[G]` float32.
        refills: Prompts that were tried in its place before.
        differ: Whether the task's rewards of those that are compared differ.
    """
    lengths = [tokens_of(episode) for episode in episodes]
    versions = [
        np.concatenate([np.asarray(s.versions)[np.asarray(s.loss_mask, bool)] for s in episode.samples])
        for episode in episodes
    ]
    oldest = [int(drawn.min()) for drawn in versions if len(drawn)]
    finished = sum(episode.finish_reason in FINISHED for episode in episodes)
    behind = [step - 1 - version for version in oldest]
    first = next(iter(scores[0].terms), "")
    facts = {
        "samples": float(len(episodes)),
        "groups": 1.0,
        "reward": float(rewards.sum()),
        "reward_squared": float((rewards**2).sum()),
        "accuracy": float(sum(score.terms.get(first, 0.0) >= 1.0 for score in scores)),
        "length": float(sum(lengths)),
        "truncated": float(len(episodes) - finished),
        "varied": float(differ),
        "failed": float(sum(score.failed for score in scores)),
        "stale": float(sum(behind)),
        "refills": float(refills),
        "max_length": float(max(lengths)),
        "max_stale": float(max(behind, default=0)),
    }
    for name in scores[0].terms:
        facts[f"term/{name}"] = float(sum(score.terms.get(name, 0.0) for score in scores))
    outcomes = [episode.outcome for episode in episodes if episode.outcome is not None]
    for name in sorted({name for outcome in outcomes for name in outcome.metrics}):
        facts[f"agent/{name}"] = sum(outcome.metrics.get(name, 0.0) for outcome in outcomes)
    return facts


def not_finite(rewards: np.ndarray, episodes: Sequence[Episode], scores: Sequence[Scored]) -> str:
    """What in a group is not finite; empty if everything is. Log-probabilities count where the model wrote the
    token."""
    for member, (reward, episode, score) in enumerate(zip(rewards.tolist(), episodes, scores, strict=True)):
        if not math.isfinite(reward):
            terms = ", ".join(f"{name} {value}" for name, value in score.terms.items())
            return f"the reward of response {member} is {reward} ({terms})"
        for sample in episode.samples:
            if not np.isfinite(np.asarray(sample.logprobs, np.float32)[np.asarray(sample.loss_mask, bool)]).all():
                return f"a log-probability of response {member} is not finite"
    return ""


def overlong(episodes: Sequence[Episode], limit: int, buffer: int) -> np.ndarray:
    """What is added to the rewards of answers that come close to the most tokens.

    Args:
        episodes: The answers.
        limit: Most tokens of one.
        buffer: `algorithm.overlong_buffer`.
    """
    if not buffer:
        return np.zeros(len(episodes), np.float32)
    lengths = torch.tensor([len(episode.token_ids) for episode in episodes])
    punishment: np.ndarray = overlong_penalty(lengths=lengths, max_length=limit, buffer=buffer).numpy()
    return punishment


def task_rewards(scores: Sequence[Scored], reward: RewardConfig) -> np.ndarray:
    """Rewards by which groups are filtered: the sum of `reward.terms` without penalties on length, be it the term `length` or
    `algorithm.overlong_buffer`. DAPO (Yu et al. 2025) filters by accuracy: wrong answers of different lengths are all wrong.

    Args:
        scores: Of the answers that are compared.
        reward: Section `reward`.

    Returns:
        `[E]`.
    """
    terms = [term for term in reward.terms if term.name.lower() != LENGTH]
    if not terms or len(terms) == len(reward.terms):
        return np.asarray([score.total for score in scores])
    # Summed anew, as a difference of sums would be rounded.
    weights = {term.name: term.weight for term in terms}
    return np.asarray(
        [
            score.total
            if score.failed
            else sum(weight * score.terms.get(name, 0.0) for name, weight in weights.items())
            for score in scores
        ]
    )


def varied(rewards: np.ndarray) -> bool:
    """Whether a group's rewards differ: only then do they say anything about its responses."""
    scores = torch.from_numpy(rewards)
    return len(rewards) > 0 and bool(varied_groups(scores, torch.zeros(len(rewards)))[0])


def summed(facts: dict[int, dict[str, float]]) -> dict[str, float]:
    """Sums and maxima over positions, in their order: the order of arrival must not show in the last digit."""
    sums: dict[str, float] = {}
    for _, found in sorted(facts.items()):
        for name, value in found.items():
            known = sums.get(name, 0.0)
            sums[name] = max(known, value) if name.startswith("max_") else known + value
    return sums
