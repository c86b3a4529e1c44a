"""How a rank that has joined a run learns that it is to leave, and what it does first."""

from __future__ import annotations

from collections.abc import Callable


class Farewell:
    """What stands between the notice to leave and a rank's end.

    The notice comes on a thread, or in a signal handler, and must not wait for the main thread; so there is no lock.

    Attributes:
        told: Whether the rank is to leave.
        wake: Called with the notice, so that a main thread which waits for calls looks up.
        announce: Tells the driver that the rank is to leave.
    """

    def __init__(self) -> None:
        self.told = self._stays = False
        self.wake: Callable[[], None] = lambda: None
        self.announce: Callable[[], None] = lambda: None
        self._first: Callable[[], None] | None = None
        self._leaves = False

    def first(self, act: Callable[[], None] | None) -> None:
        """Says what is to be done before the rank ends; with None it may end at any moment."""
        self._first, self._stays = act, False

    def stay(self) -> None:
        """The rank tells the driver before it ends, and takes calls until `first` says otherwise."""
        self._first, self._stays = self.announce, True

    @property
    def over(self) -> bool:
        """Whether the rank is to leave, and to take no further call."""
        return self.told and not self._stays

    def tell(self) -> bool:
        """Gives notice; it may come more than once, as from Slurm and from the process that started this one.

        Returns:
            Whether the main thread has something to do first, and ends the rank afterwards. Otherwise it may end at once.
        """
        self.told = True
        self._leaves = self._leaves or self._first is not None
        if self._leaves:
            self.wake()
        return self._leaves

    def say(self) -> None:
        """Does what is to be done first; on the main thread."""
        act, self._first = self._first, None
        if act is not None:
            act()
