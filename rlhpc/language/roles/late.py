"""Groups whose rewards come later. Meanwhile others have their places in the step, and they take one when all has come."""

from __future__ import annotations

import collections

from rlhpc.language.agents.episodes import Episode
from rlhpc.language.roles.work import Slot


class Late:
    """The groups of a rollout rank of which an episode has ended and has no reward yet.

    Args:
        most: How many may be without a place (`agent.feedback_ahead`). With more, the step waits.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._awaited: dict[int, tuple[Slot, int, Episode]] = {}
        self._aside: list[Slot] = []
        self._ready: collections.deque[Slot] = collections.deque()

    def expects(self, slot: Slot, member: int) -> None:
        """The reward of one of a group's episodes comes later."""
        episode = slot.episodes[member]
        self._awaited[id(episode)] = slot, member, episode

    def paid(self, before: Episode, episode: Episode) -> Slot | None:
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

    def waits(self, slot: Slot) -> bool:
        """Whether a group lacks nothing but rewards that come later."""
        return any(other is slot for other, *_ in self._awaited.values())

    def waiting(self) -> int:
        """Episodes whose rewards are yet to come."""
        return len(self._awaited)

    def steps_aside(self, slot: Slot) -> bool:
        """Whether a group that waits may give up its place."""
        may = bool(self._ready) or len(self._aside) < self._most
        if may:
            self._aside.append(slot)
        return may

    def whole(self, slot: Slot) -> bool:
        """A group has all its rewards: whether it is without a place. It then takes the next one that there is."""
        if not any(other is slot for other in self._aside):
            return False
        self._aside = [other for other in self._aside if other is not slot]
        self._ready.append(slot)
        return True

    def next(self) -> Slot | None:
        """The first group of those that wait for a place."""
        return self._ready.popleft() if self._ready else None
