"""What becomes of a prompt's answers once all have been judged: a group to train on, or none."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlhpc.algorithms.nonfinite import nonfinite, skips
from rlhpc.language.agents.episodes import Episode
from rlhpc.language.algorithm.base import LanguageAlgorithm
from rlhpc.language.config import GrpoConfig
from rlhpc.language.rewards.pool import Scored
from rlhpc.language.roles import untrained
from rlhpc.language.roles.facts import facts_of, not_finite, overlong, task_rewards, varied
from rlhpc.language.roles.groups import Group, columns_of, group_of
from rlhpc.language.roles.work import Slot


@dataclass(frozen=True)
class Judged:
    """A prompt's answers, all judged.

    Attributes:
        episodes: By member of the group, those that are compared.
        scores: Of each.
        rewards: `[E]` float32, of each.
        trains: Which of them are trained on and compared. The others are in no statistic of the group, and in no loss.
        varied: Whether the task's rewards of those differ.
        why: Why none is trained on, as one of `untrained.REASONS`; "" if some are.
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

    def lacks(self, slot: Slot) -> bool:
        """Whether too few of a prompt's episodes say anything about the policy as it is, in the step that it is for."""
        return len(untrained.members(slot, self._oldest(slot))) < min(2, self._size)

    def judged(self, slot: Slot, *, may_refill: bool) -> Judged | None:
        """What can be said of a prompt's answers.

        Args:
            slot: All are there, and judged.
            may_refill: Whether another prompt may be asked in this one's place.

        Returns:
            None if another prompt is to be asked.

        Raises:
            RlhpcError: A number is not finite, and the run is to end then.
        """
        members, lacking = untrained.members(slot, self._oldest(slot)), self.lacks(slot)
        if lacking:
            if may_refill:
                return None
            members = [0]
        episodes, scores = [slot.episodes[m] for m in members], [slot.scores[m] for m in members]
        rewards = np.asarray([score.total for score in scores], np.float32)
        rewards += overlong(episodes, self._cfg.rollout.max_new_tokens, self._cfg.algorithm.overlong_buffer)
        if fault := not_finite(rewards, episodes, scores):
            if not skips(self._cfg):
                asked = f"prompt {slot.position} ({slot.prompt.question!r:.80})"
                raise nonfinite(f"step {slot.step}, {asked}, {self._where}: {fault}")
            rewards = np.zeros_like(rewards)
        why = "nonfinite" if fault else "alone" if lacking else ""
        drops_cut = self._cfg.algorithm.overlong_filter
        trains = [not why and not (drops_cut and untrained.is_cut(episode)) for episode in episodes]
        differ = varied(task_rewards([s for s, used in zip(scores, trains, strict=True) if used], self._cfg.reward))
        if self._cfg.algorithm.filter_groups and not lacking and not differ and may_refill:
            return None
        return Judged(dict(zip(members, episodes, strict=True)), scores, rewards, trains, differ, why)

    def group(self, slot: Slot, judged: Judged) -> tuple[Group, dict[str, float]]:
        """The group that goes to an actor, and its facts for the step's metrics."""
        untrained.settle(slot, self._oldest(slot), cut=self._cfg.algorithm.overlong_filter, why=judged.why)
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
        facts = {"refills": float(slot.vain)}
        if judged.why == "nonfinite":
            facts["nonfinite"] = float(self._size)
        elif not judged.why:
            facts = facts_of(slot.step, episodes, judged.scores, judged.rewards, slot.vain, judged.varied)
        return made, facts | untrained.facts(slot)

    def _oldest(self, slot: Slot) -> int:
        """The first version of the weights whose tokens may be trained on."""
        return slot.step - 1 - self._cfg.algorithm.max_staleness
