"""The group that runs agents, as the loop drives it; nothing happens where there is none."""

from __future__ import annotations

from collections.abc import Callable

from rlhpc.language.roles.prompts import EPISODES, TICKETS, PromptMap
from rlhpc.runs.replicas import Nothing, Replicas
from rlhpc.runtime.channel import Channel
from rlhpc.runtime.comm import p2p
from rlhpc.runtime.rpc import Handle
from rlhpc.runtime.worker_group import WorkerGroup


class Agents:
    """Ranks that come and go: what a lost one had under way, others begin again.

    Args:
        group: The launched group of `AgentWorker`; None if engines' ranks run agents themselves, or there are none.
        prompts: Names the groups.
        timeout: Seconds of a call.
        restarts: How often ranks may be started again.
    """

    def __init__(
        self, group: WorkerGroup | None, prompts: PromptMap, timeout: float, restarts: Callable[[], int]
    ) -> None:
        self._there, self._prompts, self._timeout = group, prompts, timeout
        self._replicas: Replicas | None = None
        if group is not None:
            cost = "other ranks begin its episodes again, and nothing else is lost"
            self._replicas = Replicas(group, self._open, self._join, restarts, cost)

    @property
    def group(self) -> WorkerGroup:
        """The group; only where there is one."""
        assert self._there is not None
        return self._there

    def _open(self, *ranks: int) -> Handle:
        handle: Handle = self.group.execute_on(*ranks).init_worker(self._prompts)
        return handle

    def _join(self, *ranks: int) -> None:
        self.group.execute_on(*ranks).connect().wait(self._timeout)

    def open(self) -> list[Handle]:
        """Has its ranks start what runs agents."""
        return [] if self._there is None else [self._open(*self.group.present)]

    def connect(self) -> list[Handle]:
        """Connects its ranks to the queue, which is there by now."""
        return [] if self._there is None else [self.group.connect()]

    def create_queue(self) -> None:
        """Makes the queue of episodes; one that was there is dropped."""
        if self._there is not None:
            Channel.create(EPISODES)

    def begin(self) -> None:
        """Ends what is under way; all ranks take part."""
        if self._replicas is not None:
            self.group.begin().wait(self._timeout)
            self.create_queue()
            self._replicas.begin()

    def tend(self) -> None:
        """Before a step: see `Replicas.tend`."""
        if self._replicas is not None:
            self._replicas.tend()

    def serve(self, phase: str) -> Handle | Nothing:
        """Has episodes run until a phase is over."""
        if self._replicas is None:
            return Nothing()
        handle: Handle = self._replicas.of_step().serve(phase)
        return handle

    def end(self, phase: str) -> None:
        """A phase is over."""
        for rank in self._replicas.present() if self._replicas is not None else ():
            p2p.post({"end": phase}, TICKETS, self.group.name, rank)
