"""Pending groups of a rollout rank, and delayed rewards: groups set aside until their rewards arrive, while other
prompts use their positions."""

from __future__ import annotations

import collections
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from rlhpc.language.agents.episodes import Episode
from rlhpc.language.data.images import PromptImages
from rlhpc.language.data.prompts import Prompt
from rlhpc.language.engines.base import Completion
from rlhpc.language.rewards.pool import Scored


class DelayedRewards:
    """Groups of a rollout rank with an episode that has ended and has no reward yet.

    Args:
        max_aside: Maximum number of groups without a position (`agent.feedback_ahead`). At the maximum, the step waits.
    """

    def __init__(self, max_aside: int) -> None:
        self._max_aside = max_aside
        self._awaited: dict[int, tuple[PendingGroup, int, Episode]] = {}
        self._aside: list[PendingGroup] = []
        self._ready: collections.deque[PendingGroup] = collections.deque()

    def expects(self, slot: PendingGroup, member: int) -> None:
        """Adds an episode of a group whose reward comes later."""
        episode = slot.episodes[member]
        self._awaited[id(episode)] = slot, member, episode

    def on_reward(self, before: Episode, episode: Episode) -> PendingGroup | None:
        """Replaces an episode by the one with its reward.

        Args:
            before: The episode without the reward.
            episode: The episode with the reward, or failed.

        Returns:
            Its group; None if no group waits for the episode.
        """
        slot, member, _ = self._awaited.pop(id(before), (None, 0, None))
        if slot is not None:
            slot.episodes[member] = episode
        return slot

    def waits(self, slot: PendingGroup) -> bool:
        """Returns whether a group lacks only rewards that come later."""
        return any(other is slot for other, *_ in self._awaited.values())

    def waiting(self) -> int:
        """Returns the number of episodes whose rewards are still to come."""
        return len(self._awaited)

    def steps_aside(self, slot: PendingGroup) -> bool:
        """Sets a waiting group aside if the limit allows it; returns whether it did."""
        allowed = bool(self._ready) or len(self._aside) < self._max_aside
        if allowed:
            self._aside.append(slot)
        return allowed

    def on_complete(self, slot: PendingGroup) -> bool:
        """Returns whether a group that has all its rewards was set aside; if so, it takes the next free position."""
        if not any(other is slot for other in self._aside):
            return False
        self._aside = [other for other in self._aside if other is not slot]
        self._ready.append(slot)
        return True

    def next(self) -> PendingGroup | None:
        """Returns the first complete group that waits for a position."""
        return self._ready.popleft() if self._ready else None


@dataclass(frozen=True)
class PartialGroup:
    """Prompt with the partial answers of a rank that was told to leave.

    Attributes:
        position: Position of the prompt in its step.
        attempt: Number of prompts that were tried at this position before.
        answers: Answers by member of the group; `finish_reason` is `abort` for unfinished ones.
    """

    position: int
    attempt: int
    answers: Sequence[Completion]


@dataclass
class PendingGroup:
    """Group that is being generated.

    Attributes:
        step, position: Step and position of the prompt.
        attempt: Number of prompts that were tried at this position before.
        prompt, prompt_ids, images: The prompt, its tokens and its pictures.
        num_refills: Number of those prompts that gave no group to train on.
        first: Step, position and attempt at the start; they name the group.
        episodes: Finished episodes, by member of the group.
        scores: Their scores.
        drawn: Number of tokens that another rank had sampled, by member.
        untrained: Number of tokens sampled here for earlier prompts of the position, by reason why they are not trained on.
    """

    step: int
    position: int
    attempt: int
    prompt: Prompt
    prompt_ids: tuple[int, ...]
    episodes: dict[int, Episode] = field(default_factory=dict)
    scores: dict[int, Scored] = field(default_factory=dict)
    drawn: dict[int, int] = field(default_factory=dict)
    untrained: Counter[str] = field(default_factory=Counter)
    images: PromptImages | None = None
    num_refills: int = 0
    first: tuple[int, int, int] = (0, 0, 0)

    def __post_init__(self) -> None:
        self.first = self.step, self.position, self.attempt

    @property
    def place(self) -> tuple[int, int]:
        """Step and position of the prompt."""
        return self.step, self.position

    def to_partial(self, episodes: Sequence[Episode]) -> PartialGroup:
        """Returns the group for another rank to resume; `episodes` are those of all members, of one turn each,
        finished or not."""
        answers = [
            Completion(i, e.token_ids, e.logprobs, e.versions, e.finish_reason, e.experts)
            for i, e in enumerate(episodes)
        ]
        return PartialGroup(self.position, self.attempt, answers)
