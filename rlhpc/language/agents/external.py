"""Episodes of external agents: programs that call the model over the gateway.

Rollout ranks use `ExternalEpisodes` like `EpisodeRunner`: they add requests, and each step returns the episodes that ended.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from rlhpc.language.agents.agent_processes import AgentProcesses, AgentReply, Program, Ticket
from rlhpc.language.agents.chat_content import image_processor_of, make_image_parts
from rlhpc.language.agents.episodes import UNTRAINED_ROLE, Episode, Outcome
from rlhpc.language.agents.gateway.feedback import awaited_turns
from rlhpc.language.agents.gateway.output_parsers import Parsers
from rlhpc.language.agents.gateway.server import MODEL, EngineRequest, Gateway
from rlhpc.language.agents.gateway.sessions import EpisodeLimits, GatewaySession, stop_reason
from rlhpc.language.agents.inline_agents import InlineAgents, InlineEnvironment
from rlhpc.language.agents.turn_tree import AgentTurn, RequestError, TurnTree
from rlhpc.language.data.images import insert_image_parts
from rlhpc.language.data.prompts import Prompt
from rlhpc.language.engines.base import Completion, Request, RolloutBackend
from rlhpc.runtime.errors import ConfigError, RlhpcError
from rlhpc.runtime.host import host_id
from rlhpc.runtime.text import first_line
from rlhpc.runtime.trace_recorder import NO_SPAN, record, recorder, span

log = logging.getLogger(__name__)
_IDLE_S = 0.01
#: Number of failed agents whose errors a rank logs.
_MAX_LOGGED = 5


@dataclass(frozen=True)
class AgentOptions:
    """Options of external agents on a rank, from section `agent`.

    Attributes:
        limits: Limits of an episode.
        timeout_s: Time limit of an episode, from its start to its outcome, in seconds.
        kwargs: Arguments of the agent.
        feedback_s: Time limit for delayed rewards after the outcome, in seconds; 0 if rewards are not delayed.
    """

    limits: EpisodeLimits
    timeout_s: float
    kwargs: dict[str, Any]
    feedback_s: float = 0.0


@dataclass(frozen=True)
class AgentRanks:
    """Connection to the ranks of a group `agent`, which run the agents.

    Attributes:
        post: Message interface to these ranks.
        rank: Rank of this process.
    """

    post: Post
    rank: int


class ExternalEpisodes:
    """Runner of the episodes of external agents on an engine. Not thread-safe, like the engine.

    Args:
        backend: Engine. No other object may add requests to it.
        tokenizer: Tokenizer of the model.
        parsers: Parsers of replies.
        context: Maximum number of tokens of prompt and reply.
        runs: Agent program, inline environment, or connection to the ranks that run the agents.
        address: Address of this host for processes on other hosts; "" to refuse them.
        options: Options of the agents.
        on_close: Callback at the end of `close`.
        check: Callback at the start of each step; an exception that it raises ends the rank.

    Raises:
        ConfigError: The agent cannot be started.
    """

    def __init__(
        self,
        backend: RolloutBackend,
        tokenizer: Any,
        parsers: Parsers,
        context: int,
        runs: Program | InlineEnvironment | AgentRanks,
        options: AgentOptions,
        on_close: Callable[[], None] = lambda: None,
        address: str = "",
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_close, self._check = on_close, check
        self._backend, self._options = backend, options
        self._agent_processes: AgentProcesses | InlineAgents | RemoteAgents
        #: Name in traces of the agents that run in other processes; "" if they run in this one.
        self._agents_name = runs.kind if isinstance(runs, Program) else "agent ranks" * isinstance(runs, AgentRanks)
        if isinstance(runs, Program):
            self._agent_processes = AgentProcesses(runs, self._on_outcome)
        self._gateway = Gateway(
            tokenizer,
            parsers,
            context,
            address,
            image_processor := image_processor_of(tokenizer),
            accepts_feedback=options.feedback_s > 0.0,
        )
        self._has_images = image_processor is not None
        if isinstance(runs, InlineEnvironment):
            self._agent_processes = InlineAgents(runs, self._gateway, self._on_outcome)
        if isinstance(runs, AgentRanks):
            self._agent_processes = RemoteAgents(runs, self._on_outcome, self._restart)
        self._sessions: dict[int, tuple[GatewaySession, Prompt | None, tuple[int, ...]]] = {}
        self._engine_requests: dict[int, EngineRequest] = {}
        self._reward_queue: queue.SimpleQueue[tuple[Episode, Episode]] = queue.SimpleQueue()
        self._unrewarded_episodes, self._early_rewards = dict[int, Episode](), list[tuple[Episode, Episode]]()
        self._num_requests = self._num_tickets = self._num_failures = 0

    def add(self, requests: Iterable[Request], prompt: Prompt | None = None) -> None:
        """Starts an episode for each request. All turns of an episode use the request's sampling parameters and seed."""
        for request in requests:
            session = GatewaySession(request.id, request.sampling, request.seed, self._options.limits)
            self._num_tickets += 1  # unique, because the outcome of an aborted episode may still arrive
            self._sessions[self._num_tickets] = session, prompt, tuple(request.prompt_ids)
            self._gateway.open(session)
            self._agent_processes.run(self._build_ticket(self._num_tickets, session, prompt))

    def _restart(self, number: int) -> dict[str, Any]:
        """Restarts an episode with a new session and the same seed; returns its new ticket."""
        old_session, prompt, ids = self._sessions[number]
        session = GatewaySession(old_session.number, old_session.sampling, old_session.seed, old_session.limits)
        session.counts["begun_again"] = old_session.counts["begun_again"] + 1
        self._gateway.loop.call_soon_threadsafe(self._gateway.end, old_session)
        self._gateway.open(session)
        self._sessions[number] = session, prompt, ids
        return self._build_ticket(number, session, prompt)

    def _build_ticket(self, episode_number: int, session: GatewaySession, prompt: Prompt | None) -> dict[str, Any]:
        task = {"messages": [], "question": "", "seed": session.seed, "kwargs": self._options.kwargs}
        if prompt is not None:
            task |= {name: getattr(prompt, name) for name in ("id", "question", "answer", "meta")}
            task["messages"] = _build_conversation(prompt)
        return {
            "id": episode_number,
            "task": task,
            "base_url": f"{self._gateway.url}/v1",
            "api_key": session.key,
            "socket": self._gateway.socket,
            "model": MODEL,
            "timeout_s": self._options.timeout_s,
            "host": host_id(),
            "far": self._gateway.far,
            "session_id": session.name,
            "process_key": self._gateway.keys.process,
            "looks": self._has_images,
        }

    def resume(self, request: Request, partial_completion: Completion, prompt: Prompt | None = None) -> None:
        """Raises AssertionError, because no rank can resume the episode of an external agent."""
        raise AssertionError("what an agent has under way cannot be handed on")

    def step(self) -> list[Episode]:
        """Advances the engine by a step; returns the episodes that ended."""
        self._check()
        if isinstance(self._agent_processes, RemoteAgents):
            self._agent_processes.poll()
        episodes = self._start_queued_requests(should_wait=not self._backend.unfinished())
        self._abort_abandoned()
        if self._backend.unfinished():
            for completion in self._backend.step():
                if (engine_request := self._engine_requests.pop(completion.id, None)) is not None:
                    if recorder.is_on:  # before the answer, after which the next turn may begin
                        span_details = {"tokens": len(completion.token_ids), "episode": engine_request.session.number}
                        lane = f"episodes/{engine_request.session.number}"
                        record("turn", "turn", engine_request.started_ns, time.monotonic_ns(), span_details, lane)
                    engine_request.answer(completion)
            self._send_stream_tokens()
        return episodes

    def delayed_rewards(self) -> list[tuple[Episode, Episode]]:
        """Returns the episodes whose delayed rewards have arrived or timed out, as pairs: the episode that `step` returned,
        and the same episode with its reward or, after a timeout, with an error.
        """
        with contextlib.suppress(queue.Empty):
            while True:
                self._early_rewards.append(self._reward_queue.get_nowait())
        # The reward of an episode may arrive before `step` has returned the episode.
        rewarded_pairs = [pair for pair in self._early_rewards if id(pair[0]) in self._unrewarded_episodes]
        self._early_rewards = [pair for pair in self._early_rewards if id(pair[0]) not in self._unrewarded_episodes]
        for unrewarded_episode, _ in rewarded_pairs:
            del self._unrewarded_episodes[id(unrewarded_episode)]
        return rewarded_pairs

    @property
    def feedback_s(self) -> float:
        """Time limit for delayed rewards after an episode, in seconds; 0 if rewards are not delayed."""
        return self._options.feedback_s

    @property
    def scorer(self) -> dict[str, str]:
        """Access data for sending delayed rewards: URLs for this host and for other hosts, this host's id, and the key."""
        gateway = self._gateway
        return {"near": gateway.url, "far": gateway.far, "host": host_id(), "key": gateway.feedback.key}

    def unfinished(self) -> int:
        """Returns the number of episodes that were added but not yet returned."""
        return len(self._sessions)

    def abort(self) -> list[Episode]:
        """Ends all episodes; returns them without samples and with `finish_reason` "abort"."""
        self._agent_processes.abort()
        sessions, self._sessions = self._sessions, {}
        for session, *_ in sessions.values():
            session.closed = True
            self._gateway.loop.call_soon_threadsafe(self._gateway.end, session)
        self._gateway.loop.call_soon_threadsafe(self._gateway.feedback.forget)
        self._unrewarded_episodes.clear()
        self._early_rewards.clear()
        self._backend.abort()
        for engine_request in self._engine_requests.values():
            engine_request.answer(RequestError("the episode has ended", 401))
        self._engine_requests.clear()
        return [Episode(s.number, ids, prompt, finish_reason="abort") for s, prompt, ids in sessions.values()]

    def close(self) -> None:
        """Closes the agents, then the gateway."""
        self._agent_processes.close()
        self._gateway.close()
        self._on_close()

    # -- inside ---------------------------------------------------------------------------------------------------

    def _abort_abandoned(self) -> None:
        """Aborts the engine requests of ended episodes and of disconnected clients."""
        abandoned_ids = [
            request_id
            for request_id, engine_request in self._engine_requests.items()
            if engine_request.session.closed or engine_request.given_up
        ]
        if not abandoned_ids:
            return
        if self._backend.can_drop:
            self._backend.drop(abandoned_ids)
        elif len(abandoned_ids) < len(self._engine_requests):
            return
        else:
            self._backend.abort()
        for request_id in abandoned_ids:
            self._engine_requests.pop(request_id).answer(RequestError("the episode has ended", 401))

    def _send_stream_tokens(self) -> None:
        """Passes the tokens sampled so far to streaming clients."""
        callbacks = {
            request_id: engine_request.show
            for request_id, engine_request in self._engine_requests.items()
            if engine_request.show is not None
        }
        if callbacks and self._backend.can_drop:
            for request_id, ids in self._backend.sampled_tokens(callbacks.keys()).items():
                if ids:
                    callbacks[request_id](ids)

    def _start_queued_requests(self, should_wait: bool) -> list[Episode]:
        """Starts queued engine requests; returns the episodes that ended. With `should_wait`, waits briefly for an item."""
        deadline, episodes = time.monotonic() + _IDLE_S if should_wait else 0.0, list[Episode]()
        while True:
            try:
                with span("agents", "wait") if deadline else NO_SPAN:
                    queue_item = self._gateway.engine_queue.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return episodes
            deadline = 0.0
            if isinstance(queue_item, EngineRequest):
                self._start_request(queue_item)
            else:
                episode_number, episode = queue_item
                if self._sessions.pop(episode_number, None) is not None:
                    self._log_failure(episode)
                    episodes.append(episode)
                    if episode.has_delayed_reward:
                        self._unrewarded_episodes[id(episode)] = episode

    def _start_request(self, engine_request: EngineRequest) -> None:
        if engine_request.session.closed:
            engine_request.answer(RequestError("the episode has ended", 401))
            return
        self._num_requests += 1
        request = Request(
            self._num_requests,
            engine_request.prompt_ids,
            engine_request.sampling,
            engine_request.seed,
            engine_request.images,
        )
        try:
            self._backend.add([request])
        except ConfigError as error:  # for example, an invalid token
            engine_request.answer(RequestError(str(error)))
            return
        except RlhpcError:  # an error of the engine, not of the request
            raise
        except Exception as error:  # a faulty request must not end the run
            log.warning("the engine refuses a request of episode %d: %r", engine_request.session.number, error)
            engine_request.answer(RequestError(f"the engine refuses the request: {first_line(error)}"))
            return
        self._engine_requests[self._num_requests] = engine_request

    def _on_outcome(self, episode_number: int, raw_outcome: dict[str, Any]) -> None:
        """Passes an outcome from a harness's thread to the gateway's event loop, which owns the episode's turns."""
        self._gateway.loop.call_soon_threadsafe(self._on_end, episode_number, raw_outcome)

    def _on_end(self, episode_number: int, raw_outcome: dict[str, Any]) -> None:
        session_fields = self._sessions.get(episode_number)
        if session_fields is None:
            return
        self._gateway.end(session_fields[0])
        turns, delayed_rewards = dict[str, AgentTurn](), raw_outcome.get("later")
        if delayed_rewards and not self._options.feedback_s:
            raw_outcome = {
                "error": "its reward comes `later`: set agent.feedback_timeout_s to how long to wait for that"
            }
        elif delayed_rewards:
            try:
                turns = awaited_turns(session_fields[0].tree.turns, delayed_rewards)
            except RequestError as error:
                raw_outcome = {"error": str(error)}
        episode = self._build_episode(*session_fields, raw_outcome)
        if turns and episode.outcome is not None and not episode.outcome.error:
            episode.outcome.delay_reward()
        if recorder.is_on and self._agents_name:
            session = session_fields[0]
            span_details = {"episode": session.number, "turns": len(session.tree.turns), "agents": self._agents_name}
            # A wait of this rank: the agent works in its own process, between the turns that the gateway answers.
            record(
                "episode", "wait", session.started_ns, time.monotonic_ns(), span_details, f"episodes/{session.number}"
            )
        self._gateway.engine_queue.put((episode_number, episode))
        if episode.has_delayed_reward:
            on_reward = partial(
                self._on_delayed_reward, episode, partial(self._build_episode, *session_fields), raw_outcome
            )
            self._gateway.feedback.expect(turns, self._options.feedback_s, on_reward)

    def _on_delayed_reward(
        self,
        unrewarded_episode: Episode,
        build_episode: Callable[[dict[str, Any]], Episode],
        raw_outcome: dict[str, Any],
        reward: float | None,
    ) -> None:
        """Queues an episode with the sum of its delayed rewards, or with an error if they did not arrive (None)."""
        raw_outcome = {**raw_outcome, "metrics": {**raw_outcome.get("metrics", {}), "later": 1.0}, "reward": reward}
        if reward is None:
            raw_outcome["error"] = (
                f"no reward came for it within agent.feedback_timeout_s ({self._options.feedback_s:g} s)"
            )
        self._reward_queue.put((unrewarded_episode, build_episode(raw_outcome)))

    def _build_episode(
        self, session: GatewaySession, prompt: Prompt | None, ids: tuple[int, ...], raw_outcome: dict[str, Any]
    ) -> Episode:
        episode_outcome = Outcome(
            raw_outcome.get("reward"),
            raw_outcome.get("response"),
            raw_outcome.get("error", ""),
            raw_outcome.get("metrics", {}),
        )
        if "turn_rewards" in raw_outcome:
            episode_outcome.error = episode_outcome.error or _assign_turn_rewards(
                session.tree, raw_outcome["turn_rewards"]
            )
        branches = session.tree.samples(session.number)
        num_untrained_tokens = _mask_untrained_roles(branches, session.limits)
        role_rewards = raw_outcome.get("rewards", {})
        if role_rewards and episode_outcome.reward is None:
            episode_outcome.reward = sum(role_rewards.values()) / len(role_rewards)
        for branch_episode in branches if role_rewards else []:
            name = session.limits.roles[branch_episode.role] if session.limits.roles else ""
            if name not in role_rewards:
                episode_outcome.error = (
                    episode_outcome.error or f"rewards has none for {name or 'any role: agent.roles is empty'}"
                )
                break
            branch_episode.role_reward_offset = role_rewards[name] - (episode_outcome.reward or 0.0)
        if not branches and not episode_outcome.error:
            episode_outcome.error = "it ended without an answer of the model"
        last_turn = next((turn for turn in reversed(session.tree.turns) if turn.received), None)
        is_truncated = raw_outcome.get("cut") or (
            last_turn is not None and stop_reason(last_turn.finish_reason) == "length"
        )
        reason = "error" if episode_outcome.error else "length" if is_truncated else "stop"
        session_counts = session.tree.counts() + session.counts
        episode = Episode(
            session.number,
            ids,
            prompt,
            turns=session_counts["turns"],
            finish_reason=reason,
            outcome=episode_outcome,
            branches=branches,
        )
        if last_turn is not None:
            episode.append(last_turn.token_ids, 0, last_turn.logprobs, last_turn.versions)
        count_names = ["turns", "not_received", "retried", "refused", "given_up"]
        if isinstance(self._agent_processes, RemoteAgents):
            count_names.append("begun_again")
        episode_outcome.metrics |= {name: float(session_counts[name]) for name in count_names}
        episode_outcome.metrics["samples"] = float(len(branches))
        if num_untrained_tokens:
            episode_outcome.metrics[UNTRAINED_ROLE] = float(num_untrained_tokens)
        return episode

    def _log_failure(self, episode: Episode) -> None:
        """Logs the first failures of agents, then each thousandth."""
        if episode.outcome is None or not episode.outcome.error:
            return
        self._num_failures += 1
        if self._num_failures <= _MAX_LOGGED or self._num_failures % 1000 == 0:
            message = "episode %d: the agent failed (number %d of these): %s"
            log.warning(message, episode.id, self._num_failures, episode.outcome.error)


def _build_conversation(prompt: Prompt) -> list[dict[str, Any]]:
    """Returns a prompt's messages for agents, including its images."""
    if not prompt.images:
        return [{**m, "role": "user"} if m["role"] == "raw" else m for m in prompt.messages]
    image_parts, messages = (
        iter(make_image_parts(prompt.images)),
        insert_image_parts(prompt.messages, len(prompt.images)),
    )
    for message in messages:
        message["content"] = [
            next(image_parts) if content_part["type"] == "image" else content_part
            for content_part in message["content"]
        ]
    return messages


def _mask_untrained_roles(branches: list[Episode], episode_limits: EpisodeLimits) -> int:
    """Removes the tokens of untrained roles from the loss masks; returns their number."""
    num_masked = 0
    for branch_episode in branches:
        if episode_limits.untrained and episode_limits.roles[branch_episode.role] in episode_limits.untrained:
            num_masked += sum(branch_episode.loss_mask)
            branch_episode.loss_mask = [False] * len(branch_episode.loss_mask)
    return num_masked


def _assign_turn_rewards(tree: TurnTree, rewards: list[float]) -> str:
    """Sets the rewards of the received turns; returns an error message if the number of rewards is wrong, else ""."""
    turns = [turn for turn in tree.turns if turn.received]
    if len(rewards) != len(turns):
        return f"turn_rewards has {len(rewards)} numbers; the model answered {len(turns)} times"
    for turn, reward in zip(turns, rewards, strict=True):
        turn.reward = reward
    return ""


#: Maximum number of starts of an episode. It is restarted when the rank that runs it is lost.
_MAX_STARTS = 3
#: Seconds beyond `agent.timeout_s` that the transfer of an outcome may take.
_GRACE_S = 4.0


class Post(Protocol):
    """Message interface between a rollout rank and the ranks that run agent processes."""

    def offer(self, item: tuple[int, str, int]) -> None:
        """Queues an episode as (rollout rank, the rank's ident, the episode's number)."""

    def send(self, rank: int, message: dict[str, Any]) -> None:
        """Sends a message to a rank that runs agent_processes, without waiting."""

    def receive(self) -> list[dict[str, Any]]:
        """Returns the new messages of these ranks."""


@dataclass
class _RemoteEpisode:
    """Episode that runs on another rank.

    Attributes:
        ticket: Ticket of the episode.
        num_starts: Number of starts.
        runner: Rank that runs the episode, and that rank's number for it.
        deadline: Deadline of the outcome (`time.monotonic`); 0 before a rank has taken the episode.
    """

    ticket: Ticket
    num_starts: int = 0
    runner: tuple[int, int] = (-1, -1)
    deadline: float = 0.0


class RemoteAgents:
    """Runner of agent programs on other ranks, with one process per ticket.

    Args:
        ranks: Ranks that run the programs.
        on_outcome: Callback with the ticket's id and the outcome.
        on_restart: Callback with the ticket's id before a restart; returns the ticket with a new key.
    """

    def __init__(
        self, ranks: AgentRanks, on_outcome: Callable[[int, AgentReply], None], on_restart: Callable[[int], Ticket]
    ) -> None:
        self._post, self._rank, self._on_outcome, self._on_restart = ranks.post, ranks.rank, on_outcome, on_restart
        self._episodes: dict[int, _RemoteEpisode] = {}
        #: Identifier of this process; a restarted rank has a new one.
        self.ident = secrets.token_hex(8)

    def run(self, ticket: Ticket) -> None:
        """Queues a ticket for the ranks that run the program."""
        self._episodes[ticket["id"]] = _RemoteEpisode(ticket)
        self._post.offer((self._rank, self.ident, ticket["id"]))

    def poll(self) -> None:
        """Handles the messages of the ranks that run the program; fails overdue episodes."""
        for message in self._post.receive():
            if "take" in message:
                self._on_take(message)
            elif message["ident"] == self.ident:
                episode = self._episodes.get(message["number"])
                if episode is not None and episode.runner == (message["agent"], message["of"]):
                    self._end_episode(message["number"], message["outcome"])
        now = time.monotonic()
        for episode_number, episode in list(self._episodes.items()):
            if episode.deadline and now > episode.deadline:
                self._kill(episode)
                time_limit_s = episode.ticket["timeout_s"] + _GRACE_S
                reason = f"agent-{episode.runner[0]}, which ran it, said nothing within {time_limit_s:g} s"
                self._end_episode(episode_number, {"error": reason})

    def abort(self) -> None:
        """Ends all running programs and removes queued tickets, without reporting outcomes."""
        for episode in self._episodes.values():
            if episode.num_starts:
                self._kill(episode)
        self._episodes.clear()

    def close(self) -> None:
        """Ends all episodes."""
        self.abort()

    # -- inside ---------------------------------------------------------------------------------------------------

    def _on_take(self, message: dict[str, Any]) -> None:
        """Sends an episode's ticket to the rank that has taken it; sends None if the episode has ended."""
        runner, episode_number, ticket = (message["agent"], message["take"]), message["number"], None
        episode = self._episodes.get(episode_number) if message["ident"] == self.ident else None
        if episode is not None and episode.num_starts == _MAX_STARTS:
            self._end_episode(
                episode_number, {"error": f"{_MAX_STARTS} ranks of the group agent were lost while they ran it"}
            )
        elif episode is not None:
            if episode.num_starts:
                lost_rank = episode.runner[0]
                log.info(
                    "episode %d is begun again on agent-%d: agent-%d was lost", episode_number, runner[0], lost_rank
                )
                episode.ticket = self._on_restart(episode_number)
            episode.num_starts += 1
            episode.runner, ticket = runner, episode.ticket
            episode.deadline = time.monotonic() + ticket["timeout_s"] + _GRACE_S
        self._post.send(runner[0], {"of": runner[1], "ticket": ticket})

    def _kill(self, episode: _RemoteEpisode) -> None:
        self._post.send(episode.runner[0], {"kill": episode.runner[1]})

    def _end_episode(self, number: int, outcome: AgentReply) -> None:
        del self._episodes[number]
        self._on_outcome(number, outcome)
