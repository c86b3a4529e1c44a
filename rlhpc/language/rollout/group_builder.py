"""What becomes of a prompt's answers once all have been judged: a group to train on, or none."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rlhpc.algorithms.advantages import overlong_penalty, varied_groups
from rlhpc.algorithms.nonfinite import nonfinite, skips
from rlhpc.language.agents.episodes import OF_ROLES, Episode, tokens_of
from rlhpc.language.algorithms.base import LanguageAlgorithm
from rlhpc.language.config.rewards import RewardConfig
from rlhpc.language.config.run import GrpoConfig
from rlhpc.language.rewards.pool import Scored
from rlhpc.language.rollout.pending_group import PendingGroup
from rlhpc.language.rollout.sample_group import FINISHED, SampleGroup, columns_of, group_of

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
    metrics = {
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
        metrics[f"term/{name}"] = float(sum(score.terms.get(name, 0.0) for score in scores))
    outcomes = [episode.outcome for episode in episodes if episode.outcome is not None]
    for name in sorted({name for outcome in outcomes for name in outcome.metrics}):
        metrics[f"agent/{name}"] = sum(outcome.metrics.get(name, 0.0) for outcome in outcomes)
    return metrics


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


@dataclass(frozen=True)
class ScoredGroup:
    """A prompt's answers, all judged.

    Attributes:
        episodes: By member of the group, those that are compared.
        scores: Of each.
        rewards: `[E]` float32, of each.
        trains: Which of them are trained on and compared. The others are in no statistic of the group, and in no loss.
        varied: Whether the task's rewards of those differ.
        why: Why none is trained on, as one of `REASONS`; "" if some are.
    """

    episodes: dict[int, Episode]
    scores: list[Scored]
    rewards: np.ndarray
    trains: list[bool]
    varied: bool
    why: str


class GroupMaker:
    """Makes groups of judged answers.

    Args:
        cfg: The configuration.
        algorithm: What it wants of rollout ranks becomes a group's columns.
        choices: Of routers, a token (`SaysExperts`); 0 without.
        where: Who has drawn them, for messages.
    """

    def __init__(self, cfg: GrpoConfig, algorithm: LanguageAlgorithm, choices: int, where: str) -> None:
        self._cfg, self._algorithm, self._choices, self._where = cfg, algorithm, choices, where
        self._size = cfg.algorithm.group_size
        self._agent_weight = sum(term.weight for term in cfg.reward.terms if term.name.lower() == "agent")

    def lacks(self, slot: PendingGroup) -> bool:
        """Whether too few of a prompt's episodes say anything about the policy as it is, in the step that it is for."""
        return len(trained_members(slot, self._oldest(slot))) < min(2, self._size)

    def judged(self, slot: PendingGroup, *, may_refill: bool) -> ScoredGroup | None:
        """What can be said of a prompt's answers.

        Args:
            slot: All are there, and judged.
            may_refill: Whether another prompt may be asked in this one's place.

        Returns:
            None if another prompt is to be asked.

        Raises:
            RlhpcError: A number is not finite, and the run is to end then.
        """
        indices, lacking = trained_members(slot, self._oldest(slot)), self.lacks(slot)
        if lacking:
            if may_refill:
                return None
            indices = [0]
        episodes, scores = [slot.episodes[m] for m in indices], [slot.scores[m] for m in indices]
        rewards = np.asarray([score.total for score in scores], np.float32)
        rewards += overlong(episodes, self._cfg.rollout.max_new_tokens, self._cfg.algorithm.overlong_buffer)
        if fault := not_finite(rewards, episodes, scores):
            if not skips(self._cfg):
                asked = f"prompt {slot.position} ({slot.prompt.question!r:.80})"
                raise nonfinite(f"step {slot.step}, {asked}, {self._where}: {fault}")
            rewards = np.zeros_like(rewards)
        why = "nonfinite" if fault else "alone" if lacking else ""
        drops_cut = self._cfg.algorithm.overlong_filter
        trains = [not why and not (drops_cut and is_cut(episode)) for episode in episodes]
        differ = varied(task_rewards([s for s, used in zip(scores, trains, strict=True) if used], self._cfg.reward))
        if self._cfg.algorithm.filter_groups and not lacking and not differ and may_refill:
            return None
        return ScoredGroup(dict(zip(indices, episodes, strict=True)), scores, rewards, trains, differ, why)

    def group(self, slot: PendingGroup, judged: ScoredGroup) -> tuple[SampleGroup, dict[str, float]]:
        """The group that goes to an actor, and its facts for the step's metrics."""
        drop_tokens(slot, self._oldest(slot), cut=self._cfg.algorithm.overlong_filter, why=judged.why)
        episodes = list(judged.episodes.values())
        columns = [
            columns_of(self._algorithm, sample, score)
            for episode, score in zip(episodes, judged.scores, strict=True)
            for sample in episode.samples
        ]
        made = group_of(
            slot.step, slot.position, judged.episodes, judged.rewards, columns, trains=judged.trains, size=self._size,
            choices=self._choices, agent_weight=self._agent_weight,
        )  # fmt: skip
        metrics = {"refills": float(slot.vain)}
        if judged.why == "nonfinite":
            metrics["nonfinite"] = float(self._size)
        elif not judged.why:
            metrics = facts_of(slot.step, episodes, judged.scores, judged.rewards, slot.vain, judged.varied)
        return made, metrics | dropped_token_metrics(slot)

    def _oldest(self, slot: PendingGroup) -> int:
        """The first version of the weights whose tokens may be trained on."""
        return slot.step - 1 - self._cfg.algorithm.max_staleness


#: `lost`: for a client that had hung up. `failed`: in an episode whose agent failed. `role`: by one that is not trained
#: (`agent.untrained_roles`). `cut`: in an answer that was cut off (`algorithm.overlong_filter`). `old`: by weights older than
#: `algorithm.max_staleness` allows. `refilled`: in groups whose place another prompt took. `alone`: in a group of which no
#: other episode was left. `nonfinite`: in one that was left out.
REASONS = ("lost", "failed", "role", "cut", "old", "refilled", "alone", "nonfinite")
PREFIX = "untrained/"


def drawn(episodes: Iterable[Episode]) -> int:
    """Tokens that the model has drawn in some episodes and that may be trained on."""
    return sum(sum(sample.loss_mask) for episode in episodes for sample in episode.samples)


def trained_members(slot: PendingGroup, oldest: int) -> list[int]:
    """Which of a group's episodes are compared. What failed for its agent's sake says nothing about the policy, and what was
    drawn by weights before version `oldest` alone says nothing about these: neither is a reward of 0, or in any baseline."""
    return [m for m, found in sorted(slot.episodes.items()) if not found.failed and not _too_old(found, oldest)]


def _too_old(episode: Episode, oldest: int) -> bool:
    versions = [v for s in episode.samples for v, own in zip(s.versions, s.loss_mask, strict=True) if own]
    return bool(versions) and max(versions) < oldest


def failure_of(slot: PendingGroup) -> str:
    """Returns why the last of a group's episodes that failed did, or could not be judged; "" if none has."""
    reasons = [
        episode.outcome.error for _, episode in sorted(slot.episodes.items()) if episode.failed and episode.outcome
    ]
    reasons += [scored.reason for _, scored in sorted(slot.scores.items()) if scored.failed and scored.reason]
    return reasons[-1] if reasons else ""


def is_cut(episode: Episode) -> bool:
    """Tells whether an episode's answer was cut off at a length limit."""
    return episode.finish_reason not in FINISHED


def refilled(slot: PendingGroup) -> Counter[str]:
    """What was drawn in vain in a prompt's place, now that another one is asked there."""
    return slot.untrained + Counter(refilled=drawn(slot.episodes.values()))


def drop_tokens(slot: PendingGroup, oldest: int, *, cut: bool, why: str) -> None:
    """Counts what is not trained of a group that is handed over, and masks what is too old.

    Args:
        slot: The group's.
        oldest: The first version of the weights whose tokens may be trained on.
        cut: Whether answers that were cut off are not.
        why: Why none of it is, as one of `REASONS`; "" if it is.
    """
    found = slot.untrained
    for episode in slot.episodes.values():
        found["lost"] += int(episode.outcome.metrics.get("not_received", 0)) if episode.outcome else 0
        if episode.failed or why:
            found["failed" if episode.failed else why] += drawn([episode])
            continue
        if episode.outcome and OF_ROLES in episode.outcome.metrics:
            found["role"] += int(episode.outcome.metrics[OF_ROLES])
        found["old"] += _mask_old(episode, oldest)
        if episode.branches:  # a role of which nothing is left would be compared as worth 0
            episode.branches = [s for s in episode.branches if any(s.loss_mask)] or episode.branches
        if cut and is_cut(episode):
            found["cut"] += drawn([episode])


def _mask_old(episode: Episode, oldest: int) -> int:
    count = 0
    for sample in episode.samples:
        for at, (own, version) in enumerate(zip(sample.loss_mask, sample.versions, strict=True)):
            if own and version < oldest:
                sample.loss_mask[at] = False
                count += 1
    return count


def dropped_token_metrics(slot: PendingGroup) -> dict[str, float]:
    """What a group cost besides, for the step's metrics: episodes that failed, answers that another rank had begun, and tokens
    that are not trained on. What is 0 is left out."""
    failed = sum(episode.failed for episode in slot.episodes.values())
    found = {"agent_failed": float(failed)} if failed else {}
    if slot.drawn:
        found |= {"continued": float(len(slot.drawn)), "continued_tokens": float(sum(slot.drawn.values()))}
    return found | {PREFIX + name: float(count) for name, count in slot.untrained.items() if count}
