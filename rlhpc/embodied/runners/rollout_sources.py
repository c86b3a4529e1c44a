"""Who plays the steps of a run, and what is being played: by env ranks with their rollout ranks, and by those that joined."""

from __future__ import annotations

import collections
import dataclasses
import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlhpc.embodied.rollout.slot_map import Acted, SlotMap, Source
from rlhpc.embodied.rollout.step_outcomes import in_order
from rlhpc.embodied.rollout.work_sharing import PLAYED, DeliveredShard, FullRollout, PartLedger, keys_of, shares
from rlhpc.runs.replicas import Nothing, Originals, Replicas
from rlhpc.runs.run_folder import note
from rlhpc.runtime.channel import Channel, QueueEmpty
from rlhpc.runtime.context import current
from rlhpc.runtime.errors import ChannelError, DeadlineExceeded
from rlhpc.runtime.worker_group import WorkerGroup

#: How often it looks who has gone while it waits for parts.
_HELPER_POLL_S = 0.1


class Helped:
    """The ranks that have joined, and what they play.

    Args:
        env, actor: Launched groups.
        slots: Of the run.
        decisions: `algorithm.rollout_steps`.
        ahead: `algorithm.max_staleness`.
        at_random: Whether actions of a step are drawn at random.
        timeout: Seconds that a step may take.

    Attributes:
        ranks: Those that take part.
    """

    def __init__(
        self,
        env: WorkerGroup,
        actor: WorkerGroup,
        slots: SlotMap,
        decisions: int,
        ahead: int,
        at_random: Callable[[int], bool],
        timeout: float,
    ) -> None:
        self._ahead = ahead
        self._env, self._actor, self._slots, self._timeout = env, actor, slots, timeout
        self._at_random = at_random
        self.ledger = PartLedger(slots.env_ranks, decisions)
        self.ranks: list[int] = []
        #: Parts of a step, and how many steps' shares a rank may have at a time.
        self._parts, self._deep = slots.env_ranks, 1
        #: Version of the weights that each was sent last.
        self._has: dict[int, int] = {}
        self._left: list[int] = []

    def open(self) -> None:
        """Begins anew: nothing is under way, and nobody takes part."""
        self._played = Channel.create(PLAYED)
        self.ledger.clear()
        self._left += self._has
        self.ranks, self._has = [], {}

    def open_rank(self, rank: int, spaces: tuple[Any, Any], begun: int) -> Any:
        """Has a rank build simulators and policy; returns a handle."""
        return self._env.execute_on(rank).open_replica(self._slots, spaces, begun)

    def welcome(self, rank: int) -> None:
        """A rank that has built all takes part from now on."""
        self._env.execute_on(rank).connect_replica().wait(self._timeout)
        self.ranks.append(rank)

    def look(self) -> None:
        """Takes in what ranks say, and what those that have gone had not delivered is left for others."""
        there = set(self._env.present)
        while True:  # who said something before it went is heard: that was confirmed
            try:
                self.ledger.accept(self._played.get_nowait())
            except QueueEmpty:
                break
        for rank in [rank for rank in self.ranks if rank not in there]:
            self.ranks.remove(rank)
            self.ledger.lose(rank)
            if self._has.pop(rank, None) is not None:
                self._left.append(rank)

    @property
    def steps(self) -> list[int]:
        """Steps that these ranks play."""
        return self.ledger.steps

    def would_take(self) -> bool:
        """Whether enough of them have nothing to do for a whole step to be theirs.

        While they play it, the others play as many steps more as there may be ahead, and then wait: few ranks that play a step
        one unit after the other would hold up the run.
        """
        units = self._slots.env_ranks
        idle = sum(self.ledger.held(rank) == 0 for rank in self.ranks)
        enough = len(self.ranks) * (self._ahead + 1) >= units
        return bool(self.ranks) and enough and not self.ledger.waiting and idle >= min(units, len(self.ranks))

    def give(self, step: int, decisions: int | None = None, pieces: int = 1) -> None:
        """A step is theirs, or the last decisions of one; see `PartLedger.give`. Of shared steps they have as many at a time
        as the others."""
        self.ledger.give(step, decisions, pieces)
        self._parts, self._deep = self._slots.env_ranks * pieces, 1 if decisions is None else self._ahead + 1

    def ask(self, version: int) -> None:
        """Has them play what nobody plays, with these weights, which the actor has."""
        if not self.ledger.waiting or not self.ranks:
            if self._left:
                self._actor.lend_weights(version, self._env.name, [], self._left)
                self._left = []
            return
        most = -(-self._parts // len(self.ranks)) * self._deep
        chosen = []
        while self.ledger.waiting:
            rank = min(self.ranks, key=lambda rank: (self.ledger.held(rank), rank))
            if self.ledger.held(rank) >= most:
                break
            asked = self.ledger.ask(rank, version)
            assert asked is not None
            chosen.append((rank, asked))
        without = sorted({rank for rank, _ in chosen if self._has.get(rank, -1) < version})
        if without or self._left:
            self._actor.lend_weights(version, self._env.name, without, self._left)
            self._has |= dict.fromkeys(without, version)
            self._left = []
        for rank, asked in chosen:
            self._env.execute_on(rank).play(asked, self._at_random(asked.step))

    def make(self, step: int, version: int) -> list[list[DeliveredShard]] | None:
        """Waits until a step that is theirs has been played.

        Returns:
            Its parts; None if all have gone, and the step is to be made otherwise.

        Raises:
            DeadlineExceeded: It took too long; says who plays.
        """
        deadline = time.monotonic() + self._timeout
        while True:
            self.look()
            if self.ledger.whole(step):
                return self.ledger.close(step)
            if not self.ranks:
                self.ledger.give_up(step)
                return None
            self.ask(version)
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"step {step} was not played within runner.step_timeout_s ({self._timeout:g} s) by "
                    f"{', '.join(f'{self._env.name}[{rank}]' for rank in self.ranks)}"
                )
            try:
                self.ledger.accept(self._played.get(timeout=_HELPER_POLL_S))
            except DeadlineExceeded:
                continue

    def useless(self) -> list[int]:
        """Parts that actors may have and need not keep; each is told once."""
        return self.ledger.pop_useless()

    def taken_from(self, units: Sequence[Sequence[DeliveredShard]]) -> Counter[int]:
        """Transitions of a step's parts by rank, in decisions of slots."""
        found: Counter[int] = Counter()
        for number, unit in enumerate(units):
            for part in unit:
                found[part.rank] += part.decisions * len(self._slots.unit_share(number))
        return found


#: How often it looks whether a rollout rank has come, where there is none.
_POLL_S = 0.1
#: Steps are shared where the one who has most to do has at most this many times an even share.
_MOST = 1.25


@dataclasses.dataclass
class _Playing:
    """A turn under way.

    Attributes:
        turn: The turn.
        slots: Who has which.
        acting, simulating: The calls.
        gone: Rollout ranks that have gone since.
    """

    turn: FullRollout
    slots: SlotMap
    acting: Any
    simulating: Any
    gone: set[int] = dataclasses.field(default_factory=set)


class Players:
    """Has steps played, in order and as far ahead as it is told.

    In a run that is ahead of its actors ranks come and go. An env rank that the run started with, or a rollout rank, that is
    lost costs its slots of the steps under way; the others go on, and it takes part again when it has been started again. From
    the next step on others act on the slots of a rollout rank that is lost, and one that joins takes its share of all. One
    that is told to leave acts in the steps that it was asked for, and goes once others have its slots. Env ranks that join
    play the last decisions of each step, or whole steps where these cannot be divided (`Helped`).

    Args:
        env, rollout, actor: Launched groups.
        slots: Which rank has which slots.
        decisions: `algorithm.rollout_steps`.
        ahead: Steps that may be played ahead of the actors.
        divisible: Whether the decisions of a slot in a step may be several ranks' one after the other.
        cuts: Parts in which the decisions of a step are played, each a turn.
        generate: Has rollout ranks act in a turn; returns a handle.
        at_random: Whether all actions of a step are drawn at random.
        restarts: How often ranks of a group may be started again.
        timeout: Seconds that a step may take.

    Attributes:
        slots: As the argument; anew where ranks have come or gone.
        env, rollout: The ranks that the run started with.
        lost: Counts ranks, as they are lost.
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
        divisible: bool,
        cuts: int,
        generate: Callable[[WorkerGroup, FullRollout], Any],
        at_random: Callable[[int], bool],
        restarts: Callable[[], int],
        timeout: float,
    ) -> None:
        self._envs, self.env, self._rollouts, self.rollout = env, Originals(env), rollout, Originals(rollout)
        self._actor, self._generate = actor, generate
        self.slots, self._ahead, self._timeout = slots, ahead, timeout
        self._decisions, self._divisible, self._turns = decisions, divisible, 0
        self._part = decisions // cuts
        self._started = range(env.world_size)
        self._there, self._acting = list(self._started), list(range(rollout.world_size))
        self._helped = Helped(env, actor, slots, decisions, ahead, at_random, timeout)
        cost = "what it had not delivered is played by others or left out, and no step is made anew"
        self._env_ranks = Replicas(env, self._open_env, self._join_env, restarts, cost)
        cost = "others act on its slots from the next step on, and no step is made anew"
        self._rollout_ranks = Replicas(rollout, self._open_rollout, self._join_rollout, restarts, cost)
        self._spaces: tuple[Any, Any] = (None, None)
        self._done, self._stale = 0, False
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
        self._there, self._acting = list(self._started), list(range(self._rollouts.world_size))
        for name, home in self.slots.channels().items():
            Channel.create(name, home=home.group, ranks=home.ranks)
        self._helped.open()
        slots = self.slots
        for handle in (self.env.connect(slots), self._actor.connect(), self.rollout.connect(slots)):
            handle.wait(self._timeout)

    def rebuild(self, gone: dict[str, list[int]]) -> None:
        """After a failure: starts environment and rollout ranks again that have ended, and connects all."""
        self.slots = dataclasses.replace(self.slots, token=secrets.token_hex(4), absent=frozenset(), acting=())
        took_part = ((self._rollouts, self._acting), (self._envs, self._there))
        again = {group: self._to_build(group, there, gone.get(group.name, [])) for group, there in took_part}
        again = {group: ranks for group, ranks in again.items() if ranks}
        for group in again:
            group.relaunch()
        for group in again:
            group.wait_ready()
        built = []
        for group, ranks in again.items():
            spaces = self._spaces if group is self._rollouts else ()
            built.append(group.execute_on(*ranks).init_worker(self.slots, *spaces))
        for handle in built:
            handle.wait(self._timeout)
        self.connect()

    @staticmethod
    def _to_build(group: WorkerGroup, there: list[int], gone: list[int]) -> list[int]:
        """Ranks that the run started with and that have nothing: also those that were lost, or about to take part again,
        before what failed did."""
        return [rank for rank in range(group.world_size) if rank in gone or rank not in there]

    def begin(self, step: int) -> None:
        """Begins behind a step: nothing is being played. Ranks that have joined begin anew."""
        self.forget(step)
        if not self._ahead:
            return
        self._env_ranks.begin()
        self._rollout_ranks.begin()
        for rank in [rank for rank in self._env_ranks.ranks if rank not in self._started]:
            self._open_env(rank).wait(self._timeout)
            self._helped.welcome(rank)
        for rank in [rank for rank in self._rollout_ranks.ranks if rank not in self._acting]:
            self._open_rollout(rank).wait(self._timeout)
            self._join_rollout(rank)
        self._keep_connected()

    def forget(self, step: int) -> None:
        """Forgets what was played ahead of a step."""
        self._done, self._next = step, step + 1
        #: What env and rollout ranks play with one another, in this order.
        self._played: collections.deque[_Playing] = collections.deque()

    # -- those who come and go ------------------------------------------------------------------------------------

    def tend(self, step: int) -> None:
        """Before the step that follows a step: leaves out who has gone, and takes in who has come."""
        self._done = step
        if self._ahead:
            self._helped.look()
            self._leave_out()
            self._let_leave()
            self._env_ranks.tend()
            self._rollout_ranks.tend()
            self._keep_connected()

    def _leave_out(self) -> bool:
        """Whether one has gone since."""
        before = len(self._there) + len(self._acting)
        envs, rollouts = self._envs.present, self._rollouts.present
        self._there = [rank for rank in self._there if rank in envs]
        gone = [rank for rank in self._acting if rank not in rollouts]
        if gone:
            self._acting = [rank for rank in self._acting if rank in rollouts]
            self._stale = True
            for playing in self._played:
                playing.gone.update(gone)
        lost = before - len(self._there) - len(self._acting)
        self.lost += lost
        return lost > 0

    def _let_leave(self) -> None:
        """Does without rollout ranks that were told to leave, if others act."""
        leaving = self._rollouts.leaving
        if stays := [rank for rank in self._acting if rank not in leaving]:
            self._stale = self._stale or len(stays) < len(self._acting)
            self._acting = stays

    def _open_env(self, rank: int) -> Any:
        """Has an env rank build what it needs: one that was started again, or one that has joined."""
        if rank in self._started:
            return self._envs.execute_on(rank).init_worker(self.slots)
        return self._helped.open_rank(rank, self._spaces, self._done)

    def _join_env(self, rank: int) -> None:
        """It takes part from the next step on."""
        if rank not in self._started:
            self._helped.welcome(rank)
            return
        self._there = sorted([*self._there, rank])
        self._stale = True

    def _open_rollout(self, rank: int) -> Any:
        """Has a rollout rank build the policy."""
        return self._rollouts.execute_on(rank).init_worker(self.slots, *self._spaces)

    def _join_rollout(self, rank: int) -> None:
        """It acts from the next step on."""
        self._acting = sorted([*self._acting, rank])
        self._stale = True

    def _keep_connected(self) -> None:
        """Divides the slots anew, and connects env and rollout ranks, if others are there than before. What they play is
        waited for: nothing may be under way between them."""
        if not self._stale:
            return
        for playing in self._played:
            playing.acting.wait(self._timeout)
            playing.simulating.wait(self._timeout)
        while self._stale:
            self._leave_out()
            self._await_rollouts()
            try:
                self._connect_playing()
                self._stale = False
            except ChannelError:
                if not self._leave_out():
                    raise
        for rank in {*self._rollouts.leaving} - {*self._acting}:
            self._rollouts.execute_on(rank).dismiss()

    def _await_rollouts(self) -> None:
        """Waits until there is one that acts.

        Raises:
            DeadlineExceeded: None came.
        """
        deadline = time.monotonic() + self._timeout
        while not self._acting:
            current().check()
            self._rollout_ranks.tend()
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"no rank of {self._rollouts.name} could act within runner.step_timeout_s ({self._timeout:g} s)"
                )
            time.sleep(_POLL_S)

    def _connect_playing(self) -> None:
        absent, acting = frozenset(self._started) - {*self._there}, self._acting[: self.slots.most_acting]
        token = secrets.token_hex(4)
        self.slots = slots = dataclasses.replace(self.slots, token=token, absent=absent, acting=tuple(acting))
        for name, home in slots.playing_channels().items():
            Channel.create(name, home=home.group, ranks=home.ranks)
        for handle in (self._here("connect", slots), self._who_act().connect(slots)):
            handle.wait(self._timeout)

    def _here(self, method: str, *args: Any) -> Any:
        """Calls a method of the env ranks that the run started with and that take part; returns a handle."""
        return getattr(self._envs.execute_on(*self._there), method)(*args) if self._there else Nothing()

    def _who_act(self) -> WorkerGroup:
        """The rollout ranks, for one call of those that act."""
        return self._rollouts.execute_on(*self.slots.acting_ranks)

    # -- steps ----------------------------------------------------------------------------------------------------

    def sync(self, version: int) -> list[Any]:
        """Sends those who act the actor's weights, as `version`; returns the handles of both sides."""
        ranks = self.slots.acting_ranks
        return [self._actor.sync_weights(version, ranks), self._who_act().sync_weights()]

    def evaluate(self) -> Any:
        """Has one of those who act play `env.eval`; returns what waits for its metrics."""
        calls = collections.deque([self._rollouts.execute_on(self.slots.acting_ranks[0]).evaluate()])

        def wait() -> dict[str, float]:
            tried = 0
            while not (found := calls.pop().wait(self._timeout)):  # it has gone
                tried += 1
                if tried == len(self.slots.acting_ranks):
                    raise ChannelError(f"all ranks of {self._rollouts.name} ended during an evaluation")
                calls.append(self._rollouts.execute_on(self.slots.acting_ranks[tried]).evaluate())
            metrics: dict[str, float] = found[0]
            return metrics

        return wait

    @property
    def under_way(self) -> bool:
        """Whether steps are being played."""
        return bool(self._played or self._helped.steps)

    def give(self, last: int) -> None:
        """Has all steps up to one played that were not given out before, with the weights that have just been sent."""
        while self._next <= last:
            self._give(self._next)
            self._next += 1
        if self._ahead:
            self._helped.ask(self._done)

    def _give(self, step: int) -> None:
        """Has a step played by all, each of its slots by one after the other; where it cannot be shared, by these or those."""
        own, pieces, takes = self._decisions, 1, math.inf
        if self._helped.ranks and self._there and self._divisible:
            own, pieces, takes = shares(self._decisions, self.slots.env_ranks, len(self._helped.ranks))
        if own < self._decisions and takes <= _MOST:
            self._play(step, 0, own)
            self._helped.give(step, self._decisions - own, pieces)
        elif (self._helped.would_take() and self._played) or (self._helped.ranks and not self._there):
            self._helped.give(step)
        else:
            self._play(step, 0, self._decisions)

    def _play(self, step: int, begin: int, decisions: int) -> None:
        end = begin + decisions
        while begin < end:
            self._turns += 1
            turn = FullRollout(self._turns, step, begin, min(end, (begin // self._part + 1) * self._part) - begin)
            acting = self._generate(self._who_act(), turn)
            self._played.append(_Playing(turn, self.slots, acting, self._here("interact", turn)))
            begin += turn.decisions

    def plays(self, step: int) -> bool:
        """Whether env and rollout ranks that the run started with play a step, or some of it."""
        return bool(self._turns_of(step))

    def _turns_of(self, step: int) -> list[_Playing]:
        return [playing for playing in self._played if playing.turn.step == step]

    def parts_of(self, step: int) -> list[list[DeliveredShard]] | None:
        """The parts of a step that ranks which joined have played; waits for them. None if all of it is the others'."""
        if step not in self._helped.steps:
            return None
        parts = self._helped.make(step, self._done)
        if parts is None:
            note(f"all ranks that joined have gone: step {step} is played by those that the run started with")
            begin = sum(playing.turn.decisions for playing in self._turns_of(step))
            self._play(step, begin, self._decisions - begin)
        return parts

    def receive(self, step: int, parts: list[list[DeliveredShard]] | None) -> Any:
        """Has the actors take in a step; returns a handle."""
        present = self._rollouts.present

        def acted(playing: _Playing) -> Acted:
            gone = playing.gone.union(rank for rank in playing.slots.acting_ranks if rank not in present)
            return Acted(playing.turn, playing.slots, frozenset(gone))

        turns = tuple(acted(playing) for playing in self._turns_of(step))
        later = frozenset(playing.turn.number for playing in self._played if playing.turn.step != step)
        units = None if parts is None else keys_of(parts)
        return self._actor.receive(step, Source(self.slots, turns, later, units, tuple(self._helped.useless())))

    def outcome(
        self, step: int, parts: list[list[DeliveredShard]] | None
    ) -> tuple[dict[str, np.ndarray], float, float]:
        """The episodes of a step, and the seconds in which rollout ranks acted and in which env ranks simulated; waits for it.

        Args:
            step: The step.
            parts: What `parts_of` gave of it.
        """
        episodes = [part.episodes for unit in parts or () for part in unit]
        joined_s, act_s, simulate_s = max((float(part["busy_s"].max()) for part in episodes), default=0.0), 0.0, 0.0
        turns = self._turns_of(step)
        for playing in turns:
            told = playing.simulating.wait(self._timeout)
            simulate_s += max((float(part["busy_s"].max()) for part in told), default=0.0)
            act_s += max((facts["busy_s"] for facts in playing.acting.wait(self._timeout)), default=0.0)
            # Restarts are counted since the rank's start.
            episodes += told if playing is turns[-1] else [{**part, "restarts": np.zeros(1)} for part in told]
            self._played.remove(playing)
        return in_order(episodes), act_s, max(joined_s, simulate_s)

    def joined(self, parts: list[list[DeliveredShard]] | None) -> collections.Counter[int]:
        """Decisions of a step, in all slots, from each rank that has joined."""
        return self._helped.taken_from(parts or ())
