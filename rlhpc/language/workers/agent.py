"""Agent worker: rank that runs the agents of all rollout ranks' episodes, and the link of a rollout rank to these ranks.

An agent worker leases as many episodes from the queue as it runs at a time. If the worker is lost, its unacknowledged episodes
return to the queue, and another rank leases them.
"""

from __future__ import annotations

import queue
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhpc.language.agents.agent_processes import AgentProcesses, AgentReply
from rlhpc.language.agents.episodes import EpisodeRunner
from rlhpc.language.agents.gateway.feedback import FEEDBACK
from rlhpc.language.agents.registry import Generation, program_of
from rlhpc.language.agents.services import Relays, Services
from rlhpc.language.config.run import GrpoConfig
from rlhpc.language.scoring.groups import AGENT, placed_groups
from rlhpc.language.training.prompt_dispatch import AGENT_MESSAGES, EPISODES, TICKETS, PromptMap
from rlhpc.runtime.channel import LeasedItem, QueueEmpty
from rlhpc.runtime.comm.background import in_background
from rlhpc.runtime.comm.context import current
from rlhpc.runtime.errors import ConfigError, DeadlineExceeded
from rlhpc.runtime.trace_recorder import IdleSpan, record, recorder
from rlhpc.runtime.worker import Worker

if TYPE_CHECKING:
    from rlhpc.language.agents.external import AgentRanks

#: Pause in seconds if no message has arrived; seconds before the next attempt to lease from an empty queue.
_IDLE_S, _AGAIN_S = 0.004, 0.05
#: Seconds between two checks that the rollout ranks of the leased episodes are alive.
_LIVENESS_CHECK_S = 2.0
#: Table of the registry with the addresses of a node's services; seconds added to the services' time limits for their start.
SERVICES, _STARTS_S = "services", 60.0


def _notify_in_background(message: dict[str, Any], group: str, rank: int, message_topic: str) -> None:
    """Sends a message to a rank's inbox in the background, because the rank may have ended; messages keep their order."""
    in_background(f"{message_topic}-{group}-{rank}", partial(Worker.notify, message, group, rank, message_topic))


class RolloutPost:
    """Link of a rollout rank to the ranks that run agents (`external.Post`).

    Args:
        worker: The rollout rank, after `connect`.
        group: Name of the agents' group.
    """

    def __init__(self, worker: Worker, group: str) -> None:
        self._worker = worker
        self._group = group

    def offer(self, item: tuple[int, str, int]) -> None:
        """Puts an episode into the queue (`Post.offer`)."""
        self._worker.connect_channel(EPISODES).put(item)

    def send(self, rank: int, message: dict[str, Any]) -> None:
        """Sends a message to a rank that runs agents (`Post.send`)."""
        _notify_in_background(message, self._group, rank, TICKETS)

    def receive(self) -> list[dict[str, Any]]:
        """Returns the messages that have arrived (`Post.receive`)."""
        return _receive_messages(AGENT_MESSAGES)


def connect_agent_ranks(worker: Worker, cfg: GrpoConfig) -> AgentRanks | None:
    """Returns the link to the ranks that run agents; None if the rollout rank runs its agents itself."""
    if AGENT not in placed_groups(cfg):
        return None
    from rlhpc.language.agents.external import AgentRanks

    return AgentRanks(RolloutPost(worker, AGENT), worker.rank)


def publish_feedback_endpoint(worker: Worker, generation: Generation, resources: ExitStack) -> None:
    """Publishes in the registry the address and key of a rollout rank's endpoint for delayed rewards.

    Args:
        worker: The rollout rank.
        generation: Generation of the rank; nothing is published if it has no delayed rewards.
        resources: Stack whose closing removes the registry entry.
    """
    if isinstance(generation, EpisodeRunner) or not generation.feedback_s:
        return
    registry, name = current().registry, f"{worker.group_name}-{worker.rank}"
    registry.put(FEEDBACK, name, {**generation.scorer, "node": worker.node})
    resources.callback(registry.remove, FEEDBACK, name)


def address_for_others(cfg: GrpoConfig) -> str:
    """Returns this host's address for remote agents and delayed rewards; "" in a run without both."""
    if AGENT not in placed_groups(cfg) and not cfg.agent.feedback_timeout_s:
        return ""
    tcp_address: str = current().service.endpoint["tcp"]  # the listener for other hosts
    return tcp_address.removeprefix("tcp://").rpartition(":")[0]


def _receive_messages(message_topic: str) -> list[dict[str, Any]]:
    messages = list[dict[str, Any]]()
    try:
        while True:
            messages.append(Worker.notice(message_topic))
    except queue.Empty:
        return messages


@dataclass
class _LeasedEpisode:
    """Episode that this rank has leased.

    Attributes:
        lease: Lease of the queue item: the rollout rank, the identity of its process, and the rank's number of the episode.
        incarnation: Incarnation of the rollout rank at the time of the lease.
        started_ns: Time of the lease, by `time.monotonic_ns`, for traces.
    """

    lease: LeasedItem
    incarnation: str
    started_ns: int

    @property
    def rollout(self) -> int:
        rank: int = self.lease.item[0]
        return rank


class AgentWorker(Worker):
    """Rank that runs agents; it has no state in checkpoints."""

    def __init__(self, cfg: GrpoConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self._agent_processes: AgentProcesses | None = None
        self._relays: Relays | None = None
        self._services: Services | None = None
        self._outcomes: queue.SimpleQueue[tuple[int, AgentReply]] = queue.SimpleQueue()
        self._leased_episodes: dict[int, _LeasedEpisode] = {}
        self._ended_phases = set[str]()
        self._last_number = 0
        self._empty_at = 0.0
        self._checked_at = 0.0

    def close(self) -> None:
        """Ends all agents, their processes, and the services."""
        if self._agent_processes is not None:
            self._agent_processes.close()
        for helper in (self._relays, self._services):
            if helper is not None:
                helper.close()

    def init_worker(self, prompts: PromptMap) -> None:
        """Starts the node's services and the processes that run agents.

        Raises:
            ConfigError: The processes cannot be started on this node.
        """
        self.prompts = prompts
        try:
            program = program_of(self.cfg, self._addresses())
            self._agent_processes = AgentProcesses(
                program, lambda episode_number, reply: self._outcomes.put((episode_number, reply))
            )
        except ConfigError as error:
            raise ConfigError(f"on {self.node}: {error}") from None
        agent = self.cfg.agent
        self.log.info("runs %s, %d at a time", agent.target or agent.command, agent.episodes_per_rank)

    def _addresses(self) -> dict[str, str]:
        """Returns the addresses of the node's services; the first rank on the node starts the services."""
        sections, registry = self.cfg.agent.services, current().registry
        if not sections:
            return {}
        if self.local_rank:
            timeout_s = sum(section.timeout_s for section in sections) + _STARTS_S
            waited_for = f"the services of {self.node} (agent.services), which another rank starts"
            address_record = registry.wait_for(SERVICES, self.node, timeout_s, waited_for, current().check)
            return dict(address_record["addresses"])
        previous_record = registry.get(SERVICES, self.node) or {"addresses": {}}
        folder = Path(current().rank_record(self.group_name, self.rank)["log_err"]).parent
        self._services = Services(sections, folder, previous_record["addresses"])
        registry.put(SERVICES, self.node, {"addresses": self._services.addresses})
        return self._services.addresses

    def connect(self) -> None:
        """Connects to the queue of episodes, once the driver has created it."""
        self._episodes = self.connect_channel(EPISODES)

    def begin(self) -> None:
        """Ends all episodes in flight."""
        self._running_agent_processes.abort()
        self._leased_episodes.clear()
        self._ended_phases.clear()
        _receive_messages(TICKETS)

    @property
    def _running_agent_processes(self) -> AgentProcesses:
        assert self._agent_processes is not None
        return self._agent_processes

    # -- the loop -------------------------------------------------------------------------------------------------

    def serve(self, phase: str) -> dict[str, float]:
        """Runs episodes of any rollout rank until the driver ends the phase.

        Returns:
            `busy_s`: seconds with an episode in flight; `episodes`: number of finished episodes.

        Raises:
            DeadlineExceeded: The phase did not end within `runner.step_timeout_s`.
        """
        start_time, busy_s, num_finished, idle_span = time.monotonic(), 0.0, 0, IdleSpan("episodes")
        deadline = start_time + self.cfg.runner.step_timeout_s
        while phase not in self._ended_phases:
            loop_start = time.monotonic()
            if loop_start > deadline:
                raise DeadlineExceeded(
                    f"{phase} was not over for {self.group_name}-{self.rank} within runner.step_timeout_s "
                    f"({self.cfg.runner.step_timeout_s:g} s)"
                )
            had_episodes, num_delivered = bool(self._leased_episodes), self._send_outcomes()
            num_finished += num_delivered
            if not (self._handle_messages() | self._lease_episodes()) and not num_delivered:
                time.sleep(_IDLE_S)
            self._drop_orphaned_episodes()
            if self._services is not None:
                self._services.check()
            busy_s += time.monotonic() - loop_start if had_episodes else 0.0
            if had_episodes:
                idle_span.end()
            else:
                idle_span.begin()
        idle_span.end()
        self._ended_phases.discard(phase)
        return {"busy_s": busy_s, "episodes": float(num_finished)}

    def _lease_episodes(self) -> bool:
        """Leases episodes while this rank has capacity, and requests their tickets; returns whether any was leased."""
        has_leased = False
        while (
            len(self._leased_episodes) < self.cfg.agent.episodes_per_rank
            and time.monotonic() > self._empty_at + _AGAIN_S
        ):
            try:
                lease = self._episodes.take_nowait()
            except QueueEmpty:
                self._empty_at = time.monotonic()
                break
            rank, incarnation_id, episode_number = lease.item
            self._last_number += 1
            self._leased_episodes[self._last_number] = _LeasedEpisode(
                lease, self._incarnation(rank), time.monotonic_ns()
            )
            self._send_to_rollout(rank, {"take": self._last_number, "ident": incarnation_id, "number": episode_number})
            has_leased = True
        return has_leased

    def _send_to_rollout(self, rollout: int, message: dict[str, Any]) -> None:
        _notify_in_background({"agent": self.rank, **message}, self.prompts.rollout_name, rollout, AGENT_MESSAGES)

    def _handle_messages(self) -> bool:
        """Handles the messages that have arrived: tickets, episodes to end, ends of phases; returns whether any arrived."""
        messages = _receive_messages(TICKETS)
        for message in messages:
            if "end" in message:
                self._ended_phases.add(message["end"])
            elif "kill" in message:
                self._drop_episode(message["kill"])
            elif message["of"] in self._leased_episodes:
                if message["ticket"] is None:
                    self._drop_episode(message["of"])
                else:
                    self._running_agent_processes.run(self._make_local_ticket(message["of"], message["ticket"]))
        return bool(messages)

    def _make_local_ticket(self, episode_number: int, ticket: dict[str, Any]) -> dict[str, Any]:
        """Returns a copy of a ticket with this rank's number of the episode and a model address reachable from this node."""
        ticket = {**ticket, "id": episode_number}
        if ticket["host"] != current().host and ticket["far"]:
            self._relays = self._relays or Relays()
            ticket |= {"base_url": ticket["far"] + "/v1", "socket": self._relays.socket_for(ticket["far"])}
        return ticket

    def _drop_episode(self, episode_number: int) -> None:
        """Ends an episode that is no longer needed, and acknowledges its lease."""
        leased_episode = self._leased_episodes.pop(episode_number, None)
        if leased_episode is not None:
            self._running_agent_processes.kill(episode_number)
            self._episodes.done(leased_episode.lease)

    def _send_outcomes(self) -> int:
        """Sends the outcomes of finished episodes to their rollout ranks; returns their number."""
        num_sent = 0
        while not self._outcomes.empty():
            local_number, raw_outcome = self._outcomes.get()
            leased_episode = self._leased_episodes.pop(local_number, None)
            if leased_episode is None:  # dropped before it ended
                continue
            if recorder.is_on:
                lane = f"episodes/{local_number}"
                record("episode", "turn", leased_episode.started_ns, time.monotonic_ns(), None, lane)
            _, incarnation_id, remote_number = leased_episode.lease.item
            self._send_to_rollout(
                leased_episode.rollout,
                {"of": local_number, "ident": incarnation_id, "number": remote_number, "outcome": raw_outcome},
            )
            self._episodes.done(leased_episode.lease)
            num_sent += 1
        return num_sent

    def _drop_orphaned_episodes(self) -> None:
        """Ends the episodes of rollout ranks that have left or were restarted; checks every `_LIVENESS_CHECK_S` seconds."""
        if not self._leased_episodes or time.monotonic() < self._checked_at + _LIVENESS_CHECK_S:
            return
        self._checked_at = time.monotonic()
        incarnations = {
            rank: self._incarnation(rank) for rank in {episode.rollout for episode in self._leased_episodes.values()}
        }
        for local_number, episode in list(self._leased_episodes.items()):
            if incarnations[episode.rollout] != episode.incarnation or current().has_left(
                self.prompts.rollout_name, episode.rollout
            ):
                self._drop_episode(local_number)

    def _incarnation(self, rollout: int) -> str:
        return str(current().rank_record(self.prompts.rollout_name, rollout)["incarnation"])
