"""Gateway sessions: key, limits and model calls of an episode. A client's retry does not repeat a call."""

from __future__ import annotations

import asyncio
import collections
import hashlib
import json
import secrets
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rlhpc.language.agents.gateway.output_parsers import Parsers, Reply
from rlhpc.language.agents.gateway.threads import Threads
from rlhpc.language.agents.turn_tree import (
    OVER,
    AgentTurn,
    Message,
    Renderer,
    RequestError,
    TurnTree,
    canonical,
    key_of,
    keys_of,
)
from rlhpc.language.data.images import PromptImages
from rlhpc.language.engines.base import Completion, SamplingParams

#: Maximum number of answers of an episode that are kept for clients' retries.
_MAX_ANSWERS = 32
#: Maximum number of concurrent calls of an episode.
MAX_CONCURRENT_CALLS = 32
#: Maximum number of an episode's calls that exceed the context; `turns` if that is larger.
_MAX_OVERLONG_CALLS = 8
#: Seconds for which sampling continues after the client has disconnected, because the client may retry.
RETRY_WAIT_S = 10.0
#: Prefix of generated episode names.
NAME_PREFIX = "rs-"


def stop_reason(finish_reason: str) -> str:
    """Returns the finish reason for clients: `stop`, or `length` for any other reason."""
    return "stop" if finish_reason == "stop" else "length"


@dataclass(frozen=True)
class EpisodeLimits:
    """Limits of an episode.

    Attributes:
        turns: Maximum number of calls.
        tokens: Maximum number of tokens sampled in all calls.
        roles: Allowed model names, one per role; without roles any name is allowed.
        untrained: Roles whose tokens are not trained.
        policies: Index of the policy of each role; empty with a single policy.
    """

    turns: int
    tokens: int
    roles: tuple[str, ...] = ()
    untrained: tuple[str, ...] = ()
    policies: tuple[int, ...] = ()


@dataclass
class StoredResponse:
    """Answer to a call.

    Attributes:
        turn: Turn of the episode's tree.
        prompt_ids: Tokens of the prompt.
        reply: Parsed reply; None for requests that send tokens.
        message: Reply as a message.
    """

    turn: AgentTurn
    prompt_ids: list[int]
    reply: Reply | None = None
    message: Message = field(default_factory=dict)


@dataclass
class _PendingCall:
    """Call of the model: the future of its answer, and the number of clients that wait for the answer."""

    response: asyncio.Future[StoredResponse]
    num_waiting: int = 0


#: Sends a request to the engine: called with session, prompt tokens, sampling parameters, seed and images.
Sampler = Callable[
    ["GatewaySession", list[int], SamplingParams, int, "PromptImages | None"], Coroutine[Any, Any, Completion]
]


class GatewaySession:
    """Session of one episode. All methods run on the gateway's event loop; the constructor may run elsewhere.

    Args:
        number: Number of the episode's request.
        sampling: Sampling parameters; a client may request fewer tokens and its own stop texts.
        seed: Seed of the episode. The seed of a call depends on it, on the prompt, and on the number of earlier requests
            with the same prompt.
        limits: Limits of the episode.

    Attributes:
        key: Key of the episode's clients.
        name: Name of the episode for clients that have one key per process.
        names: Additional names that clients gave the episode.
        closed: Whether the episode has ended; later completions are dropped.
        encoding_lock: Lock that allows one conversion of a conversation to tokens at a time.
        started_ns: Time at which the session was made, by `time.monotonic_ns`.
        bytes_in: Total size in bytes of the bodies that are being read or parsed.
    """

    def __init__(self, number: int, sampling: SamplingParams, seed: int, limits: EpisodeLimits) -> None:
        self.number, self.sampling, self.seed, self.limits = number, sampling, seed, limits
        self.key = f"rk-{secrets.token_urlsafe(24)}"
        self.name, self.names = f"{NAME_PREFIX}{secrets.token_urlsafe(24)}", set[str]()
        self.tree = TurnTree()
        self.closed = False
        self.counts = collections.Counter[str]()
        self.encoding_lock = asyncio.Lock()
        self.bytes_in = 0
        self.started_ns = time.monotonic_ns()
        self._calls: collections.OrderedDict[str, _PendingCall] = collections.OrderedDict()
        self._draw_counts = collections.Counter[bytes]()
        self._num_turns = self._num_concurrent = self._num_overlong = 0

    # -- retries --------------------------------------------------------------------------------------------------

    async def answer_once(
        self, body: bytes, is_retry: bool, start_answer: Callable[[], Coroutine[Any, Any, StoredResponse]]
    ) -> StoredResponse:
        """Returns the answer to a call. A retry of the same request gets the same answer.

        Args:
            body: Body of the request.
            is_retry: Whether the client marks the request as a retry.
            start_answer: Function that computes the answer.

        Raises:
            RequestError: The request is refused.
        """
        digest = hashlib.blake2b(body, digest_size=16).hexdigest()
        call = self._calls.get(digest)
        if is_retry and call is not None and not call.response.cancelled():
            self.counts["retried"] += 1
        else:
            call = self._calls[digest] = _PendingCall(asyncio.ensure_future(start_answer()))
            call.response.add_done_callback(_ignore_exception)
            self._calls.move_to_end(digest)
            while len(self._calls) > _MAX_ANSWERS:
                self._calls.popitem(last=False)
        call.num_waiting += 1
        try:
            # The call continues for a while after its client has disconnected, because the client may retry.
            return await asyncio.shield(call.response)
        finally:
            call.num_waiting -= 1
            if not call.response.done():
                asyncio.get_running_loop().call_later(RETRY_WAIT_S, self._give_up, call)

    def _give_up(self, call: _PendingCall) -> None:
        if not call.num_waiting and call.response.cancel():
            self.counts["given_up"] += 1

    # -- calls of the model ---------------------------------------------------------------------------------------

    async def chat(
        self,
        messages: Any,
        tools: Any,
        role: int,
        sampling: SamplingParams,
        renderer: Renderer,
        parsers: Parsers,
        draw: Sampler,
        threads: Threads,
    ) -> StoredResponse:
        """Samples the reply to a conversation and records it as a turn; returns the response.

        Raises:
            RequestError: The conversation is refused.
        """
        async with self.encoding_lock:
            self._check_limits()
            try:
                encoded_prompt = await threads.call_to_end(self._encode, messages, tools, role, renderer)
            except RequestError as error:
                self._num_overlong += error.code == OVER
                raise
        message_keys, prompt, parent, images = encoded_prompt
        completion = await self._draw(prompt, self._with_policy(role, sampling), draw, images)
        reply = parsers.read(completion.token_ids, tools, sampling.stop, prompt)
        message = reply.message()
        turn = self._add_turn(prompt, parent, completion, role, (*message_keys, key_of(canonical(message))), images)
        return StoredResponse(turn, prompt, reply, message)

    def _encode(
        self, messages: list[Any], tools: Any, role: int, renderer: Renderer
    ) -> tuple[tuple[str, ...], list[int], int | None, PromptImages | None]:
        """Returns a conversation's keys, and the values that `Renderer.prompt` returns. Runs in a worker thread."""
        renderer.check_count(messages)
        canonical_messages = [canonical(message) for message in messages]
        renderer.check_length(canonical_messages, tools)
        message_keys = keys_of(canonical_messages, tools)
        return message_keys, *renderer.prompt(self.tree, canonical_messages, message_keys, tools, role)

    async def tokens(self, prompt: list[int], role: int, sampling: SamplingParams, draw: Sampler) -> StoredResponse:
        """Samples a completion of a prompt given as tokens and records it as a turn; returns the response.

        Raises:
            RequestError: The request is refused.
        """
        completion = await self._draw(prompt, self._with_policy(role, sampling), draw)
        return StoredResponse(self._add_turn(prompt, self.tree.find_parent(prompt, role), completion, role), prompt)

    def role_of(self, model: Any) -> int:
        """Returns the index of the role with the model name that a client sent; 0 if there are no roles.

        Raises:
            RequestError: No role has that name.
        """
        if not self.limits.roles:
            return 0
        if model not in self.limits.roles:
            raise RequestError(
                f"model is {model!r}; agent.roles has: {', '.join(self.limits.roles)}", 404, "model_not_found"
            )
        return self.limits.roles.index(model)

    def sampling_of(
        self, max_tokens: int | None = None, stop: str | Sequence[str] = (), stop_token_ids: Sequence[int] = ()
    ) -> SamplingParams:
        """Returns the sampling parameters of a call: the run's parameters with the client's token limit, stop texts and
        stop tokens.
        """
        stop_texts = (stop,) if isinstance(stop, str) else tuple(dict.fromkeys(stop))
        end_token_ids = tuple(sorted(set(stop_token_ids)))
        requested_tokens = self.sampling.max_new_tokens if max_tokens is None else max_tokens
        remaining_tokens = self.limits.tokens - sum(len(turn.token_ids) for turn in self.tree.turns)
        max_new_tokens = min(requested_tokens, self.sampling.max_new_tokens, max(remaining_tokens, 1))
        return replace(self.sampling, max_new_tokens=max_new_tokens, stop=stop_texts, stop_token_ids=end_token_ids)

    def _with_policy(self, role: int, sampling: SamplingParams) -> SamplingParams:
        """Returns the sampling parameters with the policy index of a role."""
        policies = self.limits.policies
        return replace(sampling, policy=policies[role]) if policies else sampling

    def _check_limits(self) -> None:
        """Checks the limits of the episode.

        Raises:
            RequestError: The episode has reached its limit of turns, of tokens, or of calls that exceed the context.
        """
        episode_limits, num_sampled_tokens = self.limits, sum(len(turn.token_ids) for turn in self.tree.turns)
        max_requests = max(episode_limits.turns, _MAX_OVERLONG_CALLS)
        for is_reached, limit_text in (
            (self._num_turns >= episode_limits.turns, f"agent.max_turns ({episode_limits.turns})"),
            (num_sampled_tokens >= episode_limits.tokens, f"agent.max_tokens ({episode_limits.tokens})"),
            (self._num_overlong >= max_requests, f"{max_requests} calls that were longer than the context"),
        ):
            if is_reached:
                self.counts["refused"] += 1
                raise RequestError(f"the episode has reached {limit_text}", code=OVER)

    async def _draw(
        self, prompt: list[int], sampling: SamplingParams, draw: Sampler, images: PromptImages | None = None
    ) -> Completion:
        self._check_limits()
        if self._num_concurrent >= MAX_CONCURRENT_CALLS:
            self.counts["refused"] += 1
            raise RequestError(f"{MAX_CONCURRENT_CALLS} calls of the episode are under way", 429, "rate_limit_exceeded")
        # A repeated prompt gets a different seed, regardless of the calls in between.
        content = json.dumps(prompt).encode() + b"".join(() if images is None else images.digests)
        digest = hashlib.blake2b(content, digest_size=16).digest()
        self._draw_counts[digest] += 1
        seed_bytes = self.seed.to_bytes(8, "little") + digest + self._draw_counts[digest].to_bytes(4, "little")
        seed = int.from_bytes(hashlib.blake2b(seed_bytes, digest_size=8).digest(), "little") >> 1
        self._num_turns += 1
        self._num_concurrent += 1
        try:
            completion = await draw(self, prompt, sampling, seed, images)
        except RequestError as error:
            self._num_turns -= 1
            self._num_overlong += error.code == OVER
            raise
        finally:
            self._num_concurrent -= 1
        if self.closed:
            raise RequestError("the episode has ended", 401, "invalid_api_key")
        return completion

    def _add_turn(
        self,
        prompt: list[int],
        parent: int | None,
        completion: Completion,
        role: int,
        message_keys: tuple[str, ...] = (),
        images: PromptImages | None = None,
    ) -> AgentTurn:
        prefix_length = 0 if parent is None else len(self.tree.ids(parent))
        turn = AgentTurn(
            parent,
            prompt[prefix_length:],
            completion.token_ids,
            completion.logprobs,
            completion.versions,
            completion.finish_reason,
            message_keys,
            role=role,
            experts=completion.experts,
            images=images,
        )
        self.tree.turns.append(turn)
        return turn


def _ignore_exception(future: asyncio.Future[StoredResponse]) -> None:
    """Retrieves a call's exception, so that asyncio does not log it if no client waits for the call."""
    if not future.cancelled():
        future.exception()


#: Maximum number of names of an episode.
_MAX_NAMES = 64


class SessionKeys:
    """Keys of a gateway's sessions. All methods except `open` run on the gateway's event loop.

    Attributes:
        process: Key of clients with one key per process; valid only with the name of a session.
    """

    def __init__(self) -> None:
        self.process = f"rp-{secrets.token_urlsafe(24)}"
        self._session_by_key: dict[str, GatewaySession] = {}
        self._session_by_name: dict[str, GatewaySession] = {}

    def open(self, session: GatewaySession) -> None:
        """Makes a session's key and name valid."""
        self._session_by_key[session.key] = self._session_by_name[session.name] = session

    def end(self, session: GatewaySession) -> None:
        """Makes a session's key and names invalid."""
        self._session_by_key.pop(session.key, None)
        for name in (session.name, *session.names):
            self._session_by_name.pop(name, None)

    def sessions(self) -> list[GatewaySession]:
        """Returns the open sessions."""
        return list(self._session_by_key.values())

    def find(self, key: str, name: str = "") -> GatewaySession:
        """Returns the session of a key.

        Args:
            key: Key of an episode or of the process.
            name: `X-Session-ID`. With the process's key, the name of an episode. With an episode's key, an
                additional name of that episode, which no other episode may have.

        Raises:
            RequestError: No open session has this key and name.
        """
        if is_same_key(key, self.process):
            if not name:
                raise _make_invalid_key_error("this key is of a process: X-Session-ID must say which episode")
            if name not in self._session_by_name:
                raise _make_invalid_key_error("there is no episode of this X-Session-ID, or it has ended")
            return self._session_by_name[name]
        session = self._session_by_key.get(key)
        if session is None:
            raise _make_invalid_key_error("there is no episode of this key, or it has ended")
        if name and name != session.name:
            self._add_name(session, name)
        return session

    def find_by_headers(self, headers: Mapping[str, str]) -> GatewaySession:
        """Returns the session of a request.

        Raises:
            RequestError: No open session has the request's key and name.
        """
        return self.find(key_in(headers), headers.get("X-Session-ID", "").strip())

    def _add_name(self, session: GatewaySession, name: str) -> None:
        if name.startswith(NAME_PREFIX) or self._session_by_name.get(name, session) is not session:
            raise RequestError("X-Session-ID is another episode's, or of one that has ended", 403, "invalid_session")
        if name in session.names:
            return
        if len(session.names) >= _MAX_NAMES:
            raise RequestError(f"X-Session-ID: an episode has at most {_MAX_NAMES}", 403, "invalid_session")
        session.names.add(name)
        self._session_by_name[name] = session


def is_same_key(key: str, other_key: str) -> bool:
    """Returns whether two keys are equal, in constant time. Keys from headers may contain bytes that are not UTF-8."""
    return secrets.compare_digest(key.encode(errors="surrogateescape"), other_key.encode())


def key_in(headers: Mapping[str, str]) -> str:
    """Returns the key in a request's headers; "" if they contain none."""
    return headers.get("Authorization", "").removeprefix("Bearer ").strip() or headers.get("x-api-key", "")


def _make_invalid_key_error(reason: str) -> RequestError:
    return RequestError(reason, 401, "invalid_api_key")
