"""AgentWorker: a rank that runs agents, for whichever rollout rank has episodes; and what the two have of each other.

It takes episodes from one queue, as many as it runs at a time. What it had taken and was not done with goes back when it is
lost, and another takes it.
"""

from __future__ import annotations

import queue
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhpc.language.agents.agent_processes import AgentReply, Harnesses
from rlhpc.language.agents.episodes import EpisodeRunner
from rlhpc.language.agents.gateway.feedback import FEEDBACK
from rlhpc.language.agents.registry import Generation, program_of
from rlhpc.language.agents.services import Relays, Services
from rlhpc.language.config.run import GrpoConfig
from rlhpc.language.scoring.groups import AGENT, placed
from rlhpc.language.training.prompt_dispatch import EPISODES, TICKETS, TOLD, PromptMap
from rlhpc.runtime.channel import QueueEmpty, Taken
from rlhpc.runtime.comm.background import in_background
from rlhpc.runtime.context import current
from rlhpc.runtime.errors import ConfigError, DeadlineExceeded
from rlhpc.runtime.ownership import make_private
from rlhpc.runtime.worker import Worker

if TYPE_CHECKING:
    from rlhpc.language.agents.external import AgentRanks

#: Pause in seconds when nothing has come; and before an empty queue is asked again.
_IDLE_S, _AGAIN_S = 0.004, 0.05
#: How often a rank looks whether those whose episodes it runs are still there.
_LOOK_S = 2.0
#: In the registry: where a node's services are. How long the rank that starts them may take beyond their own limits.
SERVICES, _STARTS_S = "services", 60.0


def _tell(message: dict[str, Any], group: str, rank: int, about: str) -> None:
    """Puts a message into a rank's inbox, in order, and without waiting for a rank that may be gone."""
    in_background(f"{about}-{group}-{rank}", partial(Worker.notify, message, group, rank, about))


class RolloutPost:
    """A rollout rank's way to the ranks that run agents (`distant.Post`).

    Args:
        worker: The rollout rank, connected.
        group: The other group's name.
    """

    def __init__(self, worker: Worker, group: str) -> None:
        self._worker, self._group = worker, group

    def offer(self, item: tuple[int, str, int]) -> None:
        """See `Post.offer`."""
        self._worker.connect_channel(EPISODES).put(item)

    def tell(self, rank: int, message: dict[str, Any]) -> None:
        """See `Post.tell`."""
        _tell(message, self._group, rank, TICKETS)

    def receive(self) -> list[dict[str, Any]]:
        """See `Post.receive`."""
        return _heard(TOLD)


def agents_elsewhere(worker: Worker, cfg: GrpoConfig) -> AgentRanks | None:
    """Who runs the agents of a rollout rank's episodes; None if it does so itself."""
    if AGENT not in placed(cfg):
        return None
    from rlhpc.language.agents.external import AgentRanks

    return AgentRanks(RolloutPost(worker, AGENT), worker.rank)


class ScorersDoor:
    """Says in the registry, while it is open, where a rollout rank takes rewards that come later, and by whose key.

    Args:
        worker: The rank.
        generation: Its episodes. Where their rewards do not come later, nothing is said.
    """

    def __init__(self, worker: Worker, generation: Generation) -> None:
        self._registry, self._name = current().registry, f"{worker.group_name}-{worker.rank}"
        if isinstance(generation, EpisodeRunner) or not generation.feedback_s:
            return
        make_private(self._registry.root / FEEDBACK)
        self._registry.put(FEEDBACK, self._name, {**generation.scorer, "node": worker.node})

    def close(self) -> None:
        """Its key is good for nothing any more."""
        self._registry.remove(FEEDBACK, self._name)


def address_for_others(cfg: GrpoConfig) -> str:
    """Where processes of other hosts reach this one, if agents run there or rewards come from there; "" if nowhere."""
    if AGENT not in placed(cfg) and not cfg.agent.feedback_timeout_s:
        return ""
    door: str = current().service.endpoint["tcp"]  # where it listens for other hosts, if there are any
    return door.removeprefix("tcp://").rpartition(":")[0]


def _heard(about: str) -> list[dict[str, Any]]:
    found = list[dict[str, Any]]()
    try:
        while True:
            found.append(Worker.notice(about))
    except queue.Empty:
        return found


@dataclass
class _LeasedEpisode:
    """An episode that this rank has taken.

    Attributes:
        taken: What the queue gave: the rollout rank, what it calls itself, and its number there.
        incarnation: Of the rollout rank.
    """

    taken: Taken
    incarnation: str

    @property
    def rollout(self) -> int:
        rank: int = self.taken.item[0]
        return rank


class AgentWorker(Worker):
    """Runs agents. It keeps nothing."""

    def __init__(self, cfg: GrpoConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self._harnesses: Harnesses | None = None
        self._relays: Relays | None = None
        self._services: Services | None = None
        self._outcomes: queue.SimpleQueue[tuple[int, AgentReply]] = queue.SimpleQueue()
        self._held: dict[int, _LeasedEpisode] = {}
        self._ends = set[str]()
        self._number, self._empty_at, self._looked_at = 0, 0.0, 0.0

    def close(self) -> None:
        """Ends all agents, with all that they have started."""
        if self._harnesses is not None:
            self._harnesses.close()
        for part in (self._relays, self._services):
            if part is not None:
                part.close()

    def init_worker(self, prompts: PromptMap) -> None:
        """Starts what runs the agents.

        Raises:
            ConfigError: It cannot be started here.
        """
        self.prompts = prompts
        try:
            program = program_of(self.cfg, self._addresses())
            self._harnesses = Harnesses(program, lambda number, said: self._outcomes.put((number, said)))
        except ConfigError as error:
            raise ConfigError(f"on {self.node}: {error}") from None
        agent = self.cfg.agent
        self.log.info("runs %s, %d at a time", agent.target or agent.command, agent.episodes_per_rank)

    def _addresses(self) -> dict[str, str]:
        """Where services are; the first rank on a node starts them."""
        sections, registry = self.cfg.agent.services, current().registry
        if not sections:
            return {}
        if self.local_rank:
            limit = sum(section.timeout_s for section in sections) + _STARTS_S
            whom = f"the services of {self.node} (agent.services), which another rank starts"
            found = registry.wait_for(SERVICES, self.node, limit, whom, current().check)
            return dict(found["addresses"])
        before = registry.get(SERVICES, self.node) or {"addresses": {}}
        folder = Path(current().member(self.group_name, self.rank)["log_err"]).parent
        self._services = Services(sections, folder, before["addresses"])
        registry.put(SERVICES, self.node, {"addresses": self._services.addresses})
        return self._services.addresses

    def connect(self) -> None:
        """Connects to the queue, once the driver has created it."""
        self._episodes = self.connect_channel(EPISODES)

    def begin(self) -> None:
        """Ends whatever is under way."""
        self._all.abort()
        self._held.clear()
        self._ends.clear()
        _heard(TICKETS)

    @property
    def _all(self) -> Harnesses:
        assert self._harnesses is not None
        return self._harnesses

    # -- the loop -------------------------------------------------------------------------------------------------

    def serve(self, phase: str) -> dict[str, float]:
        """Runs episodes, whosever they are, until the driver says that a phase is over.

        Returns:
            The seconds in which it had any, and how many it has ended.
        """
        begun, busy, ended = time.monotonic(), 0.0, 0
        deadline = begun + self.cfg.runner.step_timeout_s
        while phase not in self._ends:
            start = time.monotonic()
            if start > deadline:
                raise DeadlineExceeded(
                    f"{phase} was not over for {self.group_name}-{self.rank} within runner.step_timeout_s "
                    f"({self.cfg.runner.step_timeout_s:g} s)"
                )
            had, done = bool(self._held), self._deliver()
            ended += done
            if not (self._listen() | self._take()) and not done:
                time.sleep(_IDLE_S)
            self._look()
            if self._services is not None:
                self._services.check()
            busy += time.monotonic() - start if had else 0.0
        self._ends.discard(phase)
        return {"busy_s": busy, "episodes": float(ended)}

    def _take(self) -> bool:
        """Takes episodes as long as there is room, and asks for their tickets."""
        some = False
        while len(self._held) < self.cfg.agent.episodes_per_rank and time.monotonic() > self._empty_at + _AGAIN_S:
            try:
                taken = self._episodes.take_nowait()
            except QueueEmpty:
                self._empty_at = time.monotonic()
                break
            rank, ident, number = taken.item
            self._number += 1
            self._held[self._number] = _LeasedEpisode(taken, self._incarnation(rank))
            self._answer(rank, {"take": self._number, "ident": ident, "number": number})
            some = True
        return some

    def _answer(self, rollout: int, message: dict[str, Any]) -> None:
        _tell({"agent": self.rank, **message}, self.prompts.rollout_name, rollout, TOLD)

    def _listen(self) -> bool:
        """Takes in what it is told: tickets, whom to end, and that a phase is over."""
        told = _heard(TICKETS)
        for message in told:
            if "end" in message:
                self._ends.add(message["end"])
            elif "kill" in message:
                self._drop(message["kill"])
            elif message["of"] in self._held:
                if message["ticket"] is None:
                    self._drop(message["of"])
                else:
                    self._all.run(self._here(message["of"], message["ticket"]))
        return bool(told)

    def _here(self, number: int, ticket: dict[str, Any]) -> dict[str, Any]:
        """A ticket by this rank's number, with the way to the model that leads there from this node."""
        ticket = {**ticket, "id": number}
        if ticket["host"] != current().host and ticket["far"]:
            self._relays = self._relays or Relays()
            ticket |= {"base_url": ticket["far"] + "/v1", "socket": self._relays.to(ticket["far"])}
        return ticket

    def _drop(self, number: int) -> None:
        """Nobody wants an episode any more."""
        held = self._held.pop(number, None)
        if held is not None:
            self._all.kill(number)
            self._episodes.done(held.taken)

    def _deliver(self) -> int:
        """Sends outcomes to where they belong."""
        count = 0
        while not self._outcomes.empty():
            number, outcome = self._outcomes.get()
            held = self._held.pop(number, None)
            if held is None:  # dropped meanwhile
                continue
            _, ident, there = held.taken.item
            self._answer(held.rollout, {"of": number, "ident": ident, "number": there, "outcome": outcome})
            self._episodes.done(held.taken)
            count += 1
        return count

    def _look(self) -> None:
        """Ends the episodes of rollout ranks that are no more."""
        if not self._held or time.monotonic() < self._looked_at + _LOOK_S:
            return
        self._looked_at = time.monotonic()
        present = {rank: self._incarnation(rank) for rank in {held.rollout for held in self._held.values()}}
        for number, held in list(self._held.items()):
            if present[held.rollout] != held.incarnation or current().has_left(self.prompts.rollout_name, held.rollout):
                self._drop(number)

    def _incarnation(self, rollout: int) -> str:
        return str(current().member(self.prompts.rollout_name, rollout)["incarnation"])
