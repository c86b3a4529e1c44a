"""Groups whose rewards come later. Meanwhile others have their places in the step, and they take one when all has come."""

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


class Late:
    """The groups of a rollout rank of which an episode has ended and has no reward yet.

    Args:
        most: How many may be without a place (`agent.feedback_ahead`). With more, the step waits.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._awaited: dict[int, tuple[PendingGroup, int, Episode]] = {}
        self._aside: list[PendingGroup] = []
        self._ready: collections.deque[PendingGroup] = collections.deque()

    def expects(self, slot: PendingGroup, member: int) -> None:
        """The reward of one of a group's episodes comes later."""
        episode = slot.episodes[member]
        self._awaited[id(episode)] = slot, member, episode

    def paid(self, before: Episode, episode: Episode) -> PendingGroup | None:
        """An episode has its reward.

        Args:
            before: The episode as it had ended.
            episode: With the reward, or failed.

        Returns:
            Its group; None if nobody waits for it.
        """
        slot, member, _ = self._awaited.pop(id(before), (None, 0, None))
        if slot is not None:
            slot.episodes[member] = episode
        return slot

    def waits(self, slot: PendingGroup) -> bool:
        """Whether a group lacks nothing but rewards that come later."""
        return any(other is slot for other, *_ in self._awaited.values())

    def waiting(self) -> int:
        """Episodes whose rewards are yet to come."""
        return len(self._awaited)

    def steps_aside(self, slot: PendingGroup) -> bool:
        """Whether a group that waits may give up its place."""
        may = bool(self._ready) or len(self._aside) < self._most
        if may:
            self._aside.append(slot)
        return may

    def whole(self, slot: PendingGroup) -> bool:
        """A group has all its rewards: whether it is without a place. It then takes the next one that there is."""
        if not any(other is slot for other in self._aside):
            return False
        self._aside = [other for other in self._aside if other is not slot]
        self._ready.append(slot)
        return True

    def next(self) -> PendingGroup | None:
        """The first group of those that wait for a place."""
        return self._ready.popleft() if self._ready else None


@dataclass(frozen=True)
class PartialGroup:
    """A prompt with what a rank had of the answers when it was told to leave.

    Attributes:
        position: Of the prompt, in its step.
        attempt: How many prompts were tried in this place before.
        answers: By member of the group; `finish_reason` is `abort` for those that are not finished.
    """

    position: int
    attempt: int
    answers: Sequence[Completion]


@dataclass
class PendingGroup:
    """A prompt under way.

    Attributes:
        step, position: Of the prompt.
        attempt: How many prompts were asked in this place before.
        prompt, prompt_ids, seen: The prompt, and what it shows.
        vain: How many of those gave nothing to train on.
        first: Step, position and attempt, as it was begun.
        episodes: Its answers that have ended, by member of the group.
        scores: What judges have said of them.
        drawn: Tokens of answers that another rank had drawn.
        untrained: Tokens drawn here for prompts that were tried in this place before, by why they are not trained on.
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
    seen: PromptImages | None = None
    vain: int = 0
    first: tuple[int, int, int] = (0, 0, 0)

    def __post_init__(self) -> None:
        self.first = self.step, self.position, self.attempt

    @property
    def place(self) -> tuple[int, int]:
        """Of the prompt: step and position."""
        return self.step, self.position

    def begun(self, episodes: Sequence[Episode]) -> PartialGroup:
        """What another rank goes on with; `episodes` are all members', of one turn, ended or not."""
        answers = [
            Completion(i, e.token_ids, e.logprobs, e.versions, e.finish_reason, e.experts)
            for i, e in enumerate(episodes)
        ]
        return PartialGroup(self.position, self.attempt, answers)
