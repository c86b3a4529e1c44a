"""An episode as its clients see it: a key, limits, and one answer to each call, however often it is asked for."""

from __future__ import annotations

import asyncio
import collections
import hashlib
import json
import secrets
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
    Tree,
    canonical,
    key_of,
    keys_of,
)
from rlhpc.language.data.images import PromptImages
from rlhpc.language.engines.base import Completion, SamplingParams

#: Answers that are kept for a client that asks again.
_KEPT = 32
#: Calls of an episode that may be under way at a time.
MOST_AT_ONCE = 32
#: Calls longer than the context that any episode may make; one of more turns may make as many as these.
_OVERLONG = 8
#: Seconds that a reply is gone on with for a client that has hung up, and may ask again.
PATIENCE_S = 10.0
#: How names of episodes begin that are made here.
NAMED = "rs-"


def stop_reason(finish_reason: str) -> str:
    """Returns `stop` or `length`, the two ends that clients know: a draw that did not end by itself was cut short."""
    return "stop" if finish_reason == "stop" else "length"


@dataclass(frozen=True)
class EpisodeLimits:
    """What an episode may ask of the model.

    Attributes:
        turns: Calls.
        tokens: Drawn in all of them.
        roles: What the model may be called, where several speak; otherwise its name does not matter.
        untrained: Those of them whose tokens are not trained on.
        policies: By which of several policies each of them speaks; empty where there is one.
    """

    turns: int
    tokens: int
    roles: tuple[str, ...] = ()
    untrained: tuple[str, ...] = ()
    policies: tuple[int, ...] = ()


@dataclass
class StoredResponse:
    """What a call was answered with.

    Attributes:
        turn: Of the tree.
        prompt_ids: What the model read.
        reply: What it wrote, read by the parsers; None where it was asked with tokens.
        message: The reply as a message.
    """

    turn: AgentTurn
    prompt_ids: list[int]
    reply: Reply | None = None
    message: Message = field(default_factory=dict)


@dataclass
class _Asked:
    """A call: its answer, and how many wait for that."""

    made: asyncio.Future[StoredResponse]
    waiting: int = 0


#: Has the engine draw: called with the prompt's tokens, how, a seed, and what the prompt shows.
Draw = Callable[
    ["GatewaySession", list[int], SamplingParams, int, "PromptImages | None"], Coroutine[Any, Any, Completion]
]


class GatewaySession:
    """One episode. All but its construction happens on the loop of the gateway.

    Args:
        number: Of its request.
        sampling: How tokens are drawn; a client may have them be fewer, and end at texts of its own.
        seed: What is drawn depends on it, the prompt, and how often that was asked before.
        limits: What it may ask.

    Attributes:
        key: Whoever has it speaks for this episode.
        name: What a client with one key a process calls it; `names`: what else clients have called it.
        closed: Whether it has ended: what is drawn from then on does not count.
        encoding: Lock of the calls that are made into tokens.
        bytes_in: Sum of the bodies that are being read and made into tokens.
    """

    def __init__(self, number: int, sampling: SamplingParams, seed: int, limits: EpisodeLimits) -> None:
        self.number, self.sampling, self.seed, self.limits = number, sampling, seed, limits
        self.key = f"rk-{secrets.token_urlsafe(24)}"
        self.name, self.names = f"{NAMED}{secrets.token_urlsafe(24)}", set[str]()
        self.tree = Tree()
        self.closed = False
        self.counts = collections.Counter[str]()
        #: Held while a conversation of this episode is made into tokens: one at a time.
        self.encoding = asyncio.Lock()
        self.bytes_in = 0
        self._answers: collections.OrderedDict[str, _Asked] = collections.OrderedDict()
        self._asked = collections.Counter[bytes]()
        self._begun = self._under_way = self._overlong = 0

    # -- once for each call ---------------------------------------------------------------------------------------

    async def once(
        self, body: bytes, retried: bool, work: Callable[[], Coroutine[Any, Any, StoredResponse]]
    ) -> StoredResponse:
        """The answer to a call. A client that asks again because the first reply did not come gets that one.

        Args:
            body: What it sent.
            retried: Whether it says that it asks again.
            work: Makes the answer.

        Raises:
            Refused: It gets none.
        """
        digest = hashlib.blake2b(body, digest_size=16).hexdigest()
        asked = self._answers.get(digest)
        if retried and asked is not None and not asked.made.cancelled():
            self.counts["retried"] += 1
        else:
            asked = self._answers[digest] = _Asked(asyncio.ensure_future(work()))
            asked.made.add_done_callback(_looked_at)
            self._answers.move_to_end(digest)
            while len(self._answers) > _KEPT:
                self._answers.popitem(last=False)
        asked.waiting += 1
        try:
            # The draw goes on for a while when its client hangs up: it may ask again.
            return await asyncio.shield(asked.made)
        finally:
            asked.waiting -= 1
            if not asked.made.done():
                asyncio.get_running_loop().call_later(PATIENCE_S, self._give_up, asked)

    def _give_up(self, asked: _Asked) -> None:
        if not asked.waiting and asked.made.cancel():
            self.counts["given_up"] += 1

    # -- the two ways to ask --------------------------------------------------------------------------------------

    async def chat(
        self, messages: Any, tools: Any, role: int, sampling: SamplingParams, renderer: Renderer, parsers: Parsers, draw: Draw,
        threads: Threads,
    ) -> StoredResponse:  # fmt: skip
        """Answers a conversation.

        Raises:
            Refused: It cannot be answered.
        """
        async with self.encoding:
            self._check_limits()
            try:
                encoded = await threads.call_to_end(self._encode, messages, tools, role, renderer)
            except RequestError as why:
                self._overlong += why.code == OVER
                raise
        keys, prompt, parent, pictures = encoded
        completion = await self._draw(prompt, self._by(role, sampling), draw, pictures)
        reply = parsers.read(completion.token_ids, tools, sampling.stop, prompt)
        message = reply.message()
        turn = self._record(prompt, parent, completion, role, (*keys, key_of(canonical(message))), pictures)
        return StoredResponse(turn, prompt, reply, message)

    def _encode(
        self, messages: list[Any], tools: Any, role: int, renderer: Renderer
    ) -> tuple[tuple[str, ...], list[int], int | None, PromptImages | None]:
        """Returns the keys of a conversation, and its `Renderer.prompt`. In a worker thread."""
        renderer.check_count(messages)
        canonicals = [canonical(message) for message in messages]
        renderer.check_length(canonicals, tools)
        keys = keys_of(canonicals, tools)
        return keys, *renderer.prompt(self.tree, canonicals, keys, tools, role)

    async def tokens(self, prompt: list[int], role: int, sampling: SamplingParams, draw: Draw) -> StoredResponse:
        """Goes on from tokens.

        Raises:
            Refused: They cannot be gone on from.
        """
        completion = await self._draw(prompt, self._by(role, sampling), draw)
        return StoredResponse(self._record(prompt, self.tree.continued_by(prompt, role), completion, role), prompt)

    def role_of(self, model: Any) -> int:
        """Which role a client means by what it calls the model.

        Raises:
            Refused: There is none of that name.
        """
        if not self.limits.roles:
            return 0
        if model not in self.limits.roles:
            raise RequestError(
                f"model is {model!r}; agent.roles has: {', '.join(self.limits.roles)}", 404, "model_not_found"
            )
        return self.limits.roles.index(model)

    def sampling_of(
        self, most: int | None = None, stop: str | Sequence[str] = (), stop_token_ids: Sequence[int] = ()
    ) -> SamplingParams:
        """How tokens are drawn for a call: as the run says; a client may want fewer of them, and have them end earlier."""
        texts = (stop,) if isinstance(stop, str) else tuple(dict.fromkeys(stop))
        ends = tuple(sorted(set(stop_token_ids)))
        limit = self.sampling.max_new_tokens if most is None else most
        left = self.limits.tokens - sum(len(turn.token_ids) for turn in self.tree.turns)
        most_now = min(limit, self.sampling.max_new_tokens, max(left, 1))
        return replace(self.sampling, max_new_tokens=most_now, stop=texts, stop_token_ids=ends)

    def _by(self, role: int, sampling: SamplingParams) -> SamplingParams:
        """By the policy by which a role speaks."""
        policies = self.limits.policies
        return replace(sampling, policy=policies[role]) if policies else sampling

    def _check_limits(self) -> None:
        """Raises:
        Refused: The episode gets no more turns, or too many of its calls were longer than the context."""
        limits, drawn = self.limits, sum(len(turn.token_ids) for turn in self.tree.turns)
        allowed = max(limits.turns, _OVERLONG)
        for reached, what in (
            (self._begun >= limits.turns, f"agent.max_turns ({limits.turns})"),
            (drawn >= limits.tokens, f"agent.max_tokens ({limits.tokens})"),
            (self._overlong >= allowed, f"{allowed} calls that were longer than the context"),
        ):
            if reached:
                self.counts["refused"] += 1
                raise RequestError(f"the episode has reached {what}", code=OVER)

    async def _draw(
        self, prompt: list[int], sampling: SamplingParams, draw: Draw, seen: PromptImages | None = None
    ) -> Completion:
        self._check_limits()
        if self._under_way >= MOST_AT_ONCE:
            self.counts["refused"] += 1
            raise RequestError(f"{MOST_AT_ONCE} calls of the episode are under way", 429, "rate_limit_exceeded")
        # The same prompt twice is two draws, whichever calls come between them.
        said = json.dumps(prompt).encode() + b"".join(() if seen is None else seen.digests)
        digest = hashlib.blake2b(said, digest_size=16).digest()
        self._asked[digest] += 1
        own = self.seed.to_bytes(8, "little") + digest + self._asked[digest].to_bytes(4, "little")
        seed = int.from_bytes(hashlib.blake2b(own, digest_size=8).digest(), "little") >> 1
        self._begun += 1
        self._under_way += 1
        try:
            completion = await draw(self, prompt, sampling, seed, seen)
        except RequestError as why:
            self._begun -= 1
            self._overlong += why.code == OVER
            raise
        finally:
            self._under_way -= 1
        if self.closed:
            raise RequestError("the episode has ended", 401, "invalid_api_key")
        return completion

    def _record(
        self, prompt: list[int], parent: int | None, completion: Completion, role: int, keys: tuple[str, ...] = (),
        seen: PromptImages | None = None,
    ) -> AgentTurn:  # fmt: skip
        before = 0 if parent is None else len(self.tree.ids(parent))
        turn = AgentTurn(
            parent, prompt[before:], completion.token_ids, completion.logprobs, completion.versions,
            completion.finish_reason, keys, role=role, experts=completion.experts, seen=seen,
        )  # fmt: skip
        self.tree.turns.append(turn)
        return turn


def _looked_at(made: asyncio.Future[StoredResponse]) -> None:
    """Nobody may be left to see what went wrong; asyncio would complain."""
    if not made.cancelled():
        made.exception()


#: Names that one episode may go by.
_MOST = 64


class SessionKeys:
    """The keys of a gateway. On its loop, but for `open`.

    Attributes:
        process: For clients with one key a process; says nothing without a session's name.
    """

    def __init__(self) -> None:
        self.process = f"rp-{secrets.token_urlsafe(24)}"
        self._of_key: dict[str, GatewaySession] = {}
        self._of_name: dict[str, GatewaySession] = {}

    def open(self, session: GatewaySession) -> None:
        """From now on its key and its name are good."""
        self._of_key[session.key] = self._of_name[session.name] = session

    def end(self, session: GatewaySession) -> None:
        """From now on neither they are, nor the names that its clients gave it."""
        self._of_key.pop(session.key, None)
        for name in (session.name, *session.names):
            self._of_name.pop(name, None)

    def sessions(self) -> list[GatewaySession]:
        """Those that are open."""
        return list(self._of_key.values())

    def find(self, key: str, name: str = "") -> GatewaySession:
        """The episode of a key.

        Args:
            key: An episode's, or the process's.
            name: `X-Session-ID`. With an episode's key, any name that is not another's, which is that episode's from then
                on; with the process's key, one that is an episode's.

        Raises:
            Refused: There is none.
        """
        if same_key(key, self.process):
            if not name:
                raise _refused("this key is of a process: X-Session-ID must say which episode")
            if name not in self._of_name:
                raise _refused("there is no episode of this X-Session-ID, or it has ended")
            return self._of_name[name]
        session = self._of_key.get(key)
        if session is None:
            raise _refused("there is no episode of this key, or it has ended")
        if name and name != session.name:
            self._bind(session, name)
        return session

    def of(self, headers: Mapping[str, str]) -> GatewaySession:
        """The episode of a request.

        Raises:
            Refused: There is none.
        """
        return self.find(key_in(headers), headers.get("X-Session-ID", "").strip())

    def _bind(self, session: GatewaySession, name: str) -> None:
        if name.startswith(NAMED) or self._of_name.get(name, session) is not session:
            raise RequestError("X-Session-ID is another episode's, or of one that has ended", 403, "invalid_session")
        if name in session.names:
            return
        if len(session.names) >= _MOST:
            raise RequestError(f"X-Session-ID: an episode has at most {_MOST}", 403, "invalid_session")
        session.names.add(name)
        self._of_name[name] = session


def same_key(key: str, other: str) -> bool:
    """Returns whether two keys are the same, in a time that tells nothing; headers may have bytes that are no UTF-8."""
    return secrets.compare_digest(key.encode(errors="surrogateescape"), other.encode())


def key_in(headers: Mapping[str, str]) -> str:
    """The key that a request comes with; "" without one."""
    return headers.get("Authorization", "").removeprefix("Bearer ").strip() or headers.get("x-api-key", "")


def _refused(why: str) -> RequestError:
    return RequestError(why, 401, "invalid_api_key")
