"""Episodes of several turns: the model writes, an agent answers, the model continues.

An episode consists of exactly the tokens that the model read and sampled. These tokens are never encoded again. The loss mask
excludes the agent's tokens. Many episodes run concurrently: while threads run tools for some of them, the engine
continues the others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import queue
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np

from rlhpc.language.agents.chat_content import content_of, image_processor_of, message_text
from rlhpc.language.data.images import PromptImageProcessor, PromptImages, concatenate_images
from rlhpc.language.data.prompts import Prompt
from rlhpc.language.data.tokenizer import strip_end_tokens
from rlhpc.language.engines.base import Completion, Request, RolloutBackend
from rlhpc.language.policy_text import valid_text
from rlhpc.language.rewards.base import Sample
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.former_names import former_members
from rlhpc.runtime.trace_recorder import NO_SPAN, span

_E = TypeVar("_E")
_T = TypeVar("_T")


class AgentThreads(Generic[_E]):
    """Thread pool that calls an agent. A thread that does not return in time is abandoned and replaced.

    Args:
        respond: Function that answers a turn; called with an episode and the turn's text.
        timeout_s: Time limit of one answer, in seconds.
        num_threads: Maximum number of threads.

    Attributes:
        answers: Queue of tickets, each with the agent's answer or the exception that the agent raised.
    """

    def __init__(self, respond: Callable[[_E, str], Any], timeout_s: float, num_threads: int) -> None:
        self._respond, self._timeout_s = respond, timeout_s
        self._queue: queue.SimpleQueue[tuple[int, _E, str] | None] = queue.SimpleQueue()
        self.answers: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self._start_times: dict[int, float] = {}
        self._num_threads, self._max_threads = 0, num_threads

    def ask(self, ticket: int, episode: _E, text: str) -> None:
        """Queues a turn for the agent's answer."""
        self._queue.put((ticket, episode, text))
        self._add_thread()

    def _add_thread(self) -> None:
        if self._num_threads < self._max_threads and not self._queue.empty():
            self._num_threads += 1
            threading.Thread(target=self._answer_turns, name="rlhpc-agent", daemon=True).start()

    def _answer_turns(self) -> None:
        while (queued_turn := self._queue.get()) is not None:
            ticket, episode, turn_text = queued_turn
            self._start_times[ticket] = time.monotonic()
            try:
                with span("turn", "turn"):
                    answer: Any = self._respond(episode, turn_text)
                if not isinstance(answer, (str, dict, type(None))):
                    raise TypeError(f"respond gave a {type(answer).__name__}; allowed: str, dict, None")
            except Exception as error:
                answer = error
            if self._start_times.pop(ticket, None) is None:
                return  # the call has timed out, and another thread has replaced this one
            self.answers.put((ticket, answer))

    def abandon_overdue(self) -> list[int]:
        """Returns the tickets whose calls have timed out; abandons and replaces their threads."""
        oldest_start = time.monotonic() - self._timeout_s
        tickets = [ticket for ticket, start_time in list(self._start_times.items()) if start_time < oldest_start]
        expired_tickets = [ticket for ticket in tickets if self._start_times.pop(ticket, None) is not None]
        self._num_threads -= len(expired_tickets)
        for _ in expired_tickets:
            self._add_thread()
        return expired_tickets

    def close(self) -> None:
        """Ends the threads once the queued turns are answered; does not wait."""
        for _ in range(self._num_threads):
            self._queue.put(None)


log = logging.getLogger(__name__)
_IDLE_S = 0.01
#: Key in `Outcome.metrics`: number of tokens of untrained roles.
UNTRAINED_ROLE = "untrained_role"


@former_members(seen="images", above="role_reward_offset")
@dataclass
class Episode:
    """Episode of the model: a prompt and all tokens after it. The token lists have one entry per token after the prompt.

    Attributes:
        id: Id of the episode's request.
        prompt_ids: Tokens of the prompt.
        prompt: Prompt; None if the caller passed none.
        token_ids: Tokens of the model's turns and the agent's answers, alternating.
        logprobs: Log-probs of the model's tokens at sampling; 0 for the agent's tokens.
        versions: Weight version that sampled each token; for the agent's tokens, the version of the preceding token.
        loss_mask: True for the model's tokens.
        turn_ids: Turn that sampled each token or, for the agent's tokens, the first turn that reads it. The turns of each
            role are numbered from 0, in the order in which they ended.
        rewards: Rewards of turns, at the last token of each trained turn; empty if the agent sets none.
        turns: Number of turns of the model.
        finish_reason: `stop` (the model or the agent ended the episode), `length`, `turns` (the agent answered the last
            allowed turn), `error` (the agent raised or timed out), or `abort`.
        state: State of the agent for this episode.
        role: Index of the role, if several roles use the model.
        role_reward_offset: Difference of the role's reward and the episode's reward, as reported by the agent.
        outcome: Outcome reported by an external agent; None for an inline agent.
        experts: Experts chosen by routers for the first tokens, including the prompt (`Completion.experts`); None if unknown.
        images: Images of prompt and answers, if any.
        branches: Samples of an episode, each as a separate episode, if an external agent ran it or the model read several
            contexts. `token_ids` and the other lists then contain the last answer.
    """

    id: int
    prompt_ids: tuple[int, ...]
    prompt: Prompt | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    turn_ids: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    turns: int = 0
    finish_reason: str = ""
    state: dict[str, Any] = field(default_factory=dict)
    role: int = 0
    role_reward_offset: float = 0.0
    outcome: Outcome | None = None
    branches: list[Episode] | None = None
    experts: np.ndarray | None = None
    images: PromptImages | None = None

    @property
    def samples(self) -> list[Episode]:
        """Token sequences of the episode; the model read each in one pass."""
        return self.branches or [self]

    def append(
        self,
        token_ids: Sequence[int],
        turn_id: int,
        logprobs: Sequence[float] | None = None,
        versions: Sequence[int] = (),
        *,
        is_trained: bool = True,
    ) -> None:
        """Appends tokens that the model sampled or, without log-probs, tokens that it read.

        Args:
            token_ids: The tokens.
            turn_id: Value of `turn_ids` for these tokens.
            logprobs: Log-probs of sampled tokens; None for tokens that the model read.
            versions: Weight versions of sampled tokens.
            is_trained: Whether sampled tokens are trained.
        """
        num_tokens = len(token_ids)
        self.token_ids += token_ids
        self.logprobs += [0.0] * num_tokens if logprobs is None else logprobs
        self.versions += [self.versions[-1]] * num_tokens if logprobs is None else versions
        self.loss_mask += [logprobs is not None and is_trained] * num_tokens
        self.turn_ids += [turn_id] * num_tokens

    @property
    def failed(self) -> bool:
        """True if the agent failed; a failed episode contains no information about the policy."""
        return self.outcome is not None and bool(self.outcome.error)

    @property
    def has_delayed_reward(self) -> bool:
        """True if the episode's reward is delayed."""
        return self.outcome is not None and self.outcome.has_delayed_reward


@dataclass
class Outcome:
    """Outcome of an episode, reported by an external agent.

    Attributes:
        reward: Reward of the episode; None if reward functions compute it.
        response: Text to score; None for the model's last answer.
        error: Reason for the failure; "" if the episode did not fail.
        metrics: Additional metrics.
        has_delayed_reward: Whether the reward is delayed.
    """

    reward: float | None = None
    response: str | None = None
    error: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    has_delayed_reward: bool = False

    def delay_reward(self) -> None:
        """Marks the reward as delayed."""
        self.has_delayed_reward = True


class Agent:
    """Agent that answers between the model's turns. One object serves all episodes of a rank.

    Attributes:
        stop: Texts that end a turn, such as `</tool>`.
        timeout_s: Time limit of one answer; an episode that waits longer ends with `error`.
    """

    stop: tuple[str, ...] = ()
    timeout_s: float = 60.0

    def respond(self, episode: Episode, text: str) -> str | dict[str, Any] | None:
        """Answers a turn. Called in threads, concurrently for several episodes but never for the same one.

        Args:
            episode: Episode so far, including this turn.
            text: Text of this turn, without its end token.

        Returns:
            Text that is appended unchanged; or a message (`{"role": "user", "content": ...}`), which the chat template
            renders; or None to end the episode. A message's content is a text or, for a model with image input, parts:
            `{"type": "text", "text": ...}`, and `{"type": "image", "image": ...}` with bytes of a PNG or JPEG file, a path, a
            data URL, or a PIL image.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Releases the agent's resources."""


class EpisodeRunner:
    """Runner of episodes on an engine. It accepts requests at any time; each `step` returns the episodes that ended.

    Not thread-safe, like the engine; agents are called in threads.

    Args:
        backend: Engine. No other object may add requests to it.
        tokenizer: Tokenizer for the agent's answers.
        agent: Agent; None for episodes of one turn.
        max_turns: Maximum number of turns of the model.
        num_threads: Maximum number of concurrent calls of the agent.
    """

    def __init__(
        self,
        backend: RolloutBackend,
        tokenizer: Any,
        agent: Agent | None = None,
        max_turns: int = 1,
        num_threads: int = 8,
    ) -> None:
        self._backend, self._tokenizer, self._agent, self._max_turns = backend, tokenizer, agent, max_turns
        self._agent_threads = None if agent is None else AgentThreads(agent.respond, agent.timeout_s, num_threads)
        self._engine_episodes: dict[int, tuple[Episode, Request]] = {}
        self._agent_episodes: dict[int, tuple[Episode, Request, Completion]] = {}
        self._finished_episodes: list[Episode] = []
        self._num_tickets = 0
        self._image_processor: PromptImageProcessor | None = None

    def add(self, requests: Iterable[Request], prompt: Prompt | None = None) -> None:
        """Starts an episode for each request. `sampling.max_new_tokens` limits all its turns and answers together.

        Raises:
            ConfigError: A prompt fills the context.
        """
        requests = [self._add_stops(request) for request in requests]
        self._backend.add(requests)
        for request in requests:
            self._engine_episodes[request.id] = self._make_episode(request, prompt), request

    def _make_episode(self, request: Request, prompt: Prompt | None) -> Episode:
        return Episode(request.id, tuple(request.prompt_ids), prompt, images=request.images)

    def resume(self, request: Request, partial_completion: Completion, prompt: Prompt | None = None) -> None:
        """Resumes an episode of one turn that another rank has started.

        Its tokens, log-probs and versions remain unchanged. The continuation uses a different seed, because the original
        seed would repeat its random numbers.

        Args:
            request: The prompt's original request.
            partial_completion: The answer so far; if it is finished, the next `step` returns the episode.
            prompt: Prompt of the episode.
        """
        assert self._agent is None, "what an agent has under way cannot be handed on"
        episode = self._make_episode(request, prompt)
        _append_completion(episode, partial_completion)
        if partial_completion.finish_reason != "abort":
            episode.turns = 1
            self._end_episode(episode, partial_completion.finish_reason)
            return
        num_drawn = len(partial_completion.token_ids)
        self._backend.add([_make_continuation(episode, request, num_drawn) if num_drawn else request])
        self._engine_episodes[request.id] = episode, request

    def step(self) -> list[Episode]:
        """Advances the engine by a step and handles the agent's answers; returns the episodes that ended."""
        if self._backend.unfinished():
            for completion in self._backend.step():
                self._on_completion(completion)
        self._receive_answers(should_wait=not self._backend.unfinished() and not self._finished_episodes)
        episodes, self._finished_episodes = self._finished_episodes, []
        return episodes

    def delayed_rewards(self) -> list[tuple[Episode, Episode]]:
        """Returns an empty list: the rewards of these agents are not delayed; see `ExternalEpisodes.delayed_rewards`."""
        return []

    def unfinished(self) -> int:
        """Returns the number of episodes that were added but not yet returned."""
        return len(self._engine_episodes) + len(self._agent_episodes) + len(self._finished_episodes)

    def abort(self) -> list[Episode]:
        """Ends and returns all episodes. Unfinished episodes have their tokens so far and `finish_reason` "abort"."""
        for completion in self._backend.abort():
            if self._agent is None and completion.finish_reason != "abort":  # finished, but not returned yet
                self._on_completion(completion)
                continue
            episode, _ = self._engine_episodes.pop(completion.id)
            _append_completion(episode, completion)
            self._end_episode(episode, "abort")
        for episode, *_ in self._agent_episodes.values():
            self._end_episode(episode, "abort")
        self._agent_episodes.clear()
        episodes, self._finished_episodes = self._finished_episodes, []
        return episodes

    def close(self) -> None:
        """Closes the agent, but not the engine."""
        if self._agent_threads is not None and self._agent is not None:
            self._agent_threads.close()
            self._agent.close()

    # -- turns

    def _add_stops(self, request: Request) -> Request:
        if self._agent is None or not self._agent.stop:
            return request
        stop_texts = tuple(dict.fromkeys((*request.sampling.stop, *self._agent.stop)))
        return dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, stop=stop_texts))

    def _on_completion(self, completion: Completion) -> None:
        episode, request = self._engine_episodes.pop(completion.id)
        _append_completion(episode, completion)
        episode.turns += 1
        if self._agent_threads is None or completion.finish_reason != "stop":
            self._end_episode(episode, completion.finish_reason)
            return
        self._num_tickets += 1
        self._agent_episodes[self._num_tickets] = episode, request, completion
        # Tags may be special tokens, so these are retained; the end token is not part of the text.
        ids = strip_end_tokens(completion.token_ids, self._tokenizer)
        self._agent_threads.ask(self._num_tickets, episode, self._tokenizer.decode(ids, skip_special_tokens=False))

    def _receive_answers(self, should_wait: bool) -> None:
        if self._agent_threads is None:
            return
        deadline = time.monotonic() + _IDLE_S if should_wait and self._agent_episodes else 0.0
        while True:
            try:
                with span("agents", "wait") if deadline else NO_SPAN:
                    ticket, answer = self._agent_threads.answers.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                break
            deadline = 0.0
            if ticket in self._agent_episodes:  # otherwise it has timed out
                self._on_answer(*self._agent_episodes.pop(ticket), answer)
        for ticket in self._agent_threads.abandon_overdue():
            if ticket in self._agent_episodes:
                episode, *_ = self._agent_episodes.pop(ticket)
                log.warning("episode %d: the agent took longer than its timeout_s", episode.id)
                self._end_episode(episode, "error")

    def _on_answer(self, episode: Episode, request: Request, completion: Completion, answer: Any) -> None:
        if isinstance(answer, BaseException):
            log.warning("episode %d: the agent failed", episode.id, exc_info=answer)
            self._end_episode(episode, "error")
            return
        if answer is None:
            self._end_episode(episode, "stop")
            return
        if episode.turns >= self._max_turns:
            self._end_episode(episode, "turns")
            return
        remaining_tokens = request.sampling.max_new_tokens - len(episode.token_ids)
        try:
            ids, images = self._encode_answer(episode, answer, completion.token_ids)
        except _UnusableAnswer as error:
            log.warning("episode %d: the agent's answer cannot be put in: %s", episode.id, error)
            self._end_episode(episode, "error")
            return
        if len(ids) <= remaining_tokens:
            episode.images = concatenate_images(episode.images, images)
        elif images is not None:  # an image must not be truncated
            self._end_episode(episode, "length")
            return
        episode.append(ids[:remaining_tokens], episode.turns)
        if len(ids) >= remaining_tokens:
            self._end_episode(episode, "length")
            return
        try:
            self._backend.add([_make_continuation(episode, request, episode.turns)])
        except ConfigError:  # the context is full
            self._end_episode(episode, "length")
            return
        self._engine_episodes[request.id] = episode, request

    def _encode_answer(
        self, episode: Episode, answer: str | dict[str, Any], sampled_ids: list[int]
    ) -> tuple[list[int], PromptImages | None]:
        """Encodes an agent's answer; returns its tokens and images."""
        images: tuple[bytes, ...] = ()
        if isinstance(answer, dict):
            with _convert_config_errors():
                text_content, images = content_of(answer.get("content"), is_trusted=True)
            answer = message_text(self._tokenizer, {**answer, "content": text_content}, sampled_ids)
        ids: list[int] = self._tokenizer.encode(valid_text(answer), add_special_tokens=False)
        if not images:
            return ids, None
        self._image_processor = self._image_processor or image_processor_of(self._tokenizer)
        if self._image_processor is None:
            raise _UnusableAnswer("it shows a picture, and the model reads text alone")
        with _convert_config_errors():
            return self._image_processor.process_prompt(images, ids, len(episode.prompt_ids) + len(episode.token_ids))

    def _end_episode(self, episode: Episode, reason: str) -> None:
        episode.finish_reason = reason
        self._finished_episodes.append(episode)


class _UnusableAnswer(Exception):
    """Answer of an agent that cannot be inserted into the episode."""


@contextlib.contextmanager
def _convert_config_errors() -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise _UnusableAnswer(str(error)) from None


def _append_completion(episode: Episode, completion: Completion) -> None:
    episode.append(completion.token_ids, episode.turns, completion.logprobs, completion.versions)
    episode.experts = completion.experts  # covers all tokens read, including those of earlier turns


def _make_continuation(episode: Episode, request: Request, num_tokens: int) -> Request:
    """Returns the request that continues an episode after `num_tokens` turns or tokens. It has a different seed, because the
    original seed would repeat its random numbers.
    """
    return dataclasses.replace(
        request,
        prompt_ids=(*episode.prompt_ids, *episode.token_ids),
        seed=(request.seed * 0x9E3779B1 + num_tokens * 0x85EBCA6B) % (1 << 31),
        sampling=dataclasses.replace(
            request.sampling, max_new_tokens=request.sampling.max_new_tokens - len(episode.token_ids)
        ),
        images=episode.images,
    )


def sample_of(prompt: Prompt, episode: Episode, tokenizer: Any, *, has_finished: bool) -> Sample:
    """Builds the reward input from an episode. Its response is the text that the agent reported or, by default, the model's
    last answer.

    Args:
        prompt: Prompt of the episode.
        episode: Finished episode.
        tokenizer: Tokenizer of the model.
        has_finished: Whether the episode ended without reaching a limit.
    """
    response, meta = None, prompt.meta
    if (episode_outcome := episode.outcome) is not None:
        response = episode_outcome.response
        meta = {
            **meta,
            "agent": {
                "reward": episode_outcome.reward,
                "error": episode_outcome.error,
                "later": episode_outcome.has_delayed_reward,
            },
        }
    if response is None:
        response = tokenizer.decode(strip_end_tokens(episode.token_ids, tokenizer), skip_special_tokens=True)
    return Sample(
        prompt.question,
        response,
        prompt.answer,
        meta,
        tokens_of(episode),
        has_finished,
        prompt.messages,
        prompt.tools,
    )


def tokens_of(episode: Episode) -> int:
    """Returns the number of trained tokens in all samples of an episode."""
    return sum(sample.loss_mask.count(True) for sample in episode.samples)


def repeated_value(values: Sequence[_T]) -> _T | None:
    """Returns the value of all entries of a list; None if entries differ or the list is empty.

    Most lists of token flags and versions have one value. Comparing is much faster than converting each entry to a number.
    """
    return values[0] if values and values.count(values[0]) == len(values) else None


def token_array(values: Sequence[int], dtype: type[np.generic]) -> np.ndarray:
    """Converts a list with an integer or a flag of each token to an array, like `np.asarray`, but faster."""
    common_value = repeated_value(values)
    return id_array(*values).astype(dtype) if common_value is None else np.full(len(values), common_value, dtype)


def logprob_array(token_logprobs: Sequence[float]) -> np.ndarray:
    """Converts log-probs to float32, like `np.asarray`, but faster."""
    return np.frombuffer(struct.pack(f"{len(token_logprobs)}d", *token_logprobs)).astype(np.float32)


def id_array(*token_ids: int) -> np.ndarray:
    """Converts token ids to int64, like `np.asarray`, but faster."""
    return np.frombuffer(struct.pack(f"{len(token_ids)}q", *token_ids), np.int64)
