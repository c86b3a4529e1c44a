"""Who plays the steps of a run, and what is being played: by env ranks with their rollout ranks, and by those that joined."""

from __future__ import annotations

import collections
import dataclasses
import secrets
from collections.abc import Callable
from typing import Any

import numpy as np

from rlhpc.embodied.roles.outcomes import in_order
from rlhpc.embodied.roles.parts import Played, keys_of
from rlhpc.embodied.roles.slots import SlotMap
from rlhpc.embodied.runners.helped import Helped
from rlhpc.runs.folder import note
from rlhpc.runs.replicas import Nothing, Originals, Replicas
from rlhpc.runtime.channel import Channel
from rlhpc.runtime.errors import ChannelError
from rlhpc.runtime.group import WorkerGroup


class Players:
    """Has steps played, in order and as far ahead as it is told.

    In a run that is ahead of its actors env ranks come and go. One that the run started with, and that is lost, costs its
    slots of the steps under way; the others go on, and it takes part again when it has been started again. Those that join
    play steps of their own (`Helped`).

    Args:
        env, rollout, actor: Launched groups.
        slots: Which rank has which slots.
        decisions: `algorithm.rollout_steps`.
        ahead: Steps that may be played ahead of the actors.
        generate: Has the rollout ranks act for a step; returns a handle.
        at_random: Whether all actions of a step are drawn at random.
        restarts: How often env ranks may be started again.
        timeout: Seconds that a step may take.

    Attributes:
        slots: As the argument; anew where ranks have come or gone.
        env: The env ranks that the run started with.
        lost: Counts these, as they are lost.
    """

    def __init__(
        self,
        env: WorkerGroup,
        rollout: WorkerGroup,
        actor: WorkerGroup,
        slots: SlotMap,
        *,
        decisions: int,
        ahead: int,
        generate: Callable[[int], Any],
        at_random: Callable[[int], bool],
        restarts: Callable[[], int],
        timeout: float,
    ) -> None:
        self._all, self.env, self._rollout, self._actor = env, Originals(env), rollout, actor
        self.slots, self._ahead, self._generate, self._timeout = slots, ahead, generate, timeout
        self._started = range(env.world_size)
        self._there = list(self._started)
        self._helped = Helped(env, actor, slots, decisions, ahead, at_random, timeout)
        cost = "what it had not delivered is played by others or left out, and no step is made anew"
        self._replicas = Replicas(env, self._open, self._join, restarts, cost)
        self._spaces: tuple[Any, Any] = (None, None)
        self._done = 0
        self.lost = 0
        self.forget(0)

    # -- start ----------------------------------------------------------------------------------------------------

    def build(self) -> tuple[Any, Any]:
        """Builds the environments; returns what a slot shows and takes."""
        facts = self.env.init_worker(self.slots).wait(self._timeout)[0]
        self._spaces = facts["observation_space"], facts["action_space"]
        return self._spaces

    def connect(self) -> None:
        """Connects all ranks that the run started with."""
        self._there = list(self._started)
        for name, home in self.slots.channels().items():
            Channel.create(name, home=home)
        self._helped.open()
        slots = self.slots
        for handle in (self.env.connect(slots), self._actor.connect(), self._rollout.connect(slots)):
            handle.wait(self._timeout)

    def rebuild(self, gone: dict[str, list[int]]) -> None:
        """After a failure: starts environment and rollout ranks again that have ended, and connects all."""
        self.slots = dataclasses.replace(self.slots, token=secrets.token_hex(4), absent=frozenset())
        env, rollout = self._all.name, self._rollout.name
        # An env rank may have been lost, or about to take part again, before what failed did.
        fresh = {*gone.get(env, ()), *self._started} - {*self._there} | {*gone.get(env, ())}
        again = {env: sorted(fresh & {*self._started}), rollout: gone.get(rollout, [])}
        groups = {group.name: group for group in (self._rollout, self._all) if again[group.name]}
        for group in groups.values():
            group.relaunch()
        for group in groups.values():
            group.wait_ready()
        built = []
        for name, group in groups.items():
            spaces = self._spaces if name == rollout else ()
            built.append(group.execute_on(*again[name]).init_worker(self.slots, *spaces))
        for handle in built:
            handle.wait(self._timeout)
        self.connect()

    def begin(self, step: int) -> None:
        """Begins behind a step: nothing is being played. Ranks that have joined begin anew."""
        self.forget(step)
        if not self._ahead:
            return
        self._replicas.begin()
        for rank in [rank for rank in self._replicas.ranks if rank not in self._started]:
            self._open(rank).wait(self._timeout)
            self._helped.welcome(rank)

    def forget(self, step: int) -> None:
        """Forgets what was played ahead of a step."""
        self._done, self._next = step, step + 1
        #: What env and rollout ranks that the run started with play, in this order.
        self._played: collections.deque[tuple[Any, Any]] = collections.deque()

    # -- those who come and go ------------------------------------------------------------------------------------

    def tend(self, step: int) -> None:
        """Before the step that follows a step: leaves out who has gone, and takes in who has come."""
        self._done = step
        if self._ahead:
            self._helped.look()
            self._leave_out()
            self._replicas.tend()

    def _leave_out(self) -> bool:
        """Whether one that the run started with has gone since."""
        present = self._all.present
        gone = [rank for rank in self._there if rank not in present]
        self._there = [rank for rank in self._there if rank in present]
        self.lost += len(gone)
        return bool(gone)

    def _open(self, rank: int) -> Any:
        """Has an env rank build what it needs: one that was started again, or one that has joined."""
        if rank in self._started:
            return self._all.execute_on(rank).init_worker(self.slots)
        return self._helped.open_rank(rank, self._spaces, self._done)

    def _join(self, rank: int) -> None:
        """It takes part from the next step on."""
        if rank not in self._started:
            self._helped.welcome(rank)
            return None
        for handle in [handle for played in self._played for handle in played]:
            handle.wait(self._timeout)
        self._there = sorted([*self._there, rank])
        while True:
            try:
                return self._reconnect()
            except ChannelError:
                if not self._leave_out():
                    raise

    def _reconnect(self) -> None:
        """Connects env and rollout ranks again, while nothing is under way between them."""
        absent = frozenset(self._started) - {*self._there}
        self.slots = slots = dataclasses.replace(self.slots, token=secrets.token_hex(4), absent=absent)
        for name, home in slots.playing_channels().items():
            Channel.create(name, home=home, absent=absent if home == slots.env_name else ())
        for handle in (self._here("connect", slots), self._rollout.connect(slots)):
            handle.wait(self._timeout)

    def _here(self, method: str, *args: Any) -> Any:
        """Calls a method of the env ranks that the run started with and that take part; returns a handle."""
        return getattr(self._all.execute_on(*self._there), method)(*args) if self._there else Nothing()

    # -- steps ----------------------------------------------------------------------------------------------------

    @property
    def under_way(self) -> bool:
        """Whether steps are being played."""
        return bool(self._played or self._helped.steps)

    def give(self, last: int) -> None:
        """Has all steps up to one played that were not given out before, with the weights that have just been sent."""
        while self._next <= last:
            if (self._helped.would_take() and self._played) or (self._helped.ranks and not self._there):
                self._helped.give(self._next)
            else:
                self._play(self._next)
            self._next += 1
        if self._ahead:
            self._helped.ask(self._done)

    def _play(self, step: int) -> None:
        self._played.append((self._generate(step), self._here("interact", step)))

    def parts_of(self, step: int) -> list[list[Played]] | None:
        """The parts of a step that ranks which joined have played; waits for them. None if the step is the others'."""
        if step not in self._helped.steps:
            return None
        parts = self._helped.make(step, self._done)
        if parts is None:
            note(f"all ranks that joined have gone: step {step} is played by those that the run started with")
            self._play(step)
        return parts

    def receive(self, step: int, parts: list[list[Played]] | None) -> Any:
        """Has the actors take in a step; returns a handle."""
        return self._actor.receive(step, None if parts is None else keys_of(parts), self._helped.useless())

    def outcome(self, parts: list[list[Played]] | None) -> tuple[dict[str, np.ndarray], float]:
        """The episodes of the next step, and the seconds in which rollout ranks acted; waits for it.

        Args:
            parts: What `parts_of` gave of it.
        """
        if parts is not None:
            return in_order([part.episodes for unit in parts for part in unit]), 0.0
        acting, simulating = self._played.popleft()
        episodes = in_order(simulating.wait(self._timeout))
        return episodes, max(facts["busy_s"] for facts in acting.wait(self._timeout))

    def joined(self, parts: list[list[Played]] | None) -> collections.Counter[int]:
        """Decisions of a step, in all slots, from each rank that has joined."""
        return self._helped.taken_from(parts or ())
