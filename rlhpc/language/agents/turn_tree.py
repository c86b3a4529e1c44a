"""What an episode's calls of the model were, as a tree: a turn continues another where it begins with that one's very tokens.

Each leaf is a sample: what the model reads in one pass. A turn that several leaves share is trained in one of them. So every
token that the model has drawn is in exactly one loss mask, or is left out for a reason that is counted.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rlhpc.language.agents.episodes import Episode
from rlhpc.language.data.images import PromptImages

if TYPE_CHECKING:
    import numpy as np
import functools
import hashlib
import json
import sys
from collections.abc import Mapping
from typing import Any

from rlhpc.language.agents.chat_content import behind_reply, content_of
from rlhpc.language.data.images import Looker, digest_of, joined
from rlhpc.language.hugging_face import REPLY, render_chat
from rlhpc.language.policy_text import parse_arguments, valid_text
from rlhpc.runtime.errors import ConfigError


@dataclass
class AgentTurn:
    """One call of the model.

    Attributes:
        parent: The turn whose tokens it begins with; None begins a tree of its own.
        context: What the model read beyond those: of a first turn, the whole prompt.
        token_ids, logprobs, versions: What it drew.
        experts: `Completion.experts`.
        finish_reason: `stop` or `length`.
        keys: Digests of the messages that it was asked with, and of its reply; empty where it was asked with tokens.
        received: Whether the reply has reached who asked.
        role: Who speaks, where several do.
        reward: What this turn was worth by itself, where the agent says so.
        names: Ids that its clients know it by.
        feedback: What somebody has said of it when it was done (`Feedback`); None before.
        seen: All that it was shown, by it and by the turns before.
    """

    parent: int | None
    context: list[int]
    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: str
    keys: tuple[str, ...] = ()
    received: bool = False
    role: int = 0
    reward: float = 0.0
    experts: np.ndarray | None = None
    names: list[str] = field(default_factory=list)
    feedback: float | None = None
    seen: PromptImages | None = None


@dataclass
class Tree:
    """The turns of an episode, in the order in which they ended.

    Attributes:
        turns: All of them.
    """

    turns: list[AgentTurn] = field(default_factory=list)

    def ids(self, turn: int) -> list[int]:
        """All tokens that a turn read and drew."""
        return [token for at in self.path(turn) for part in self._parts(at) for token in part]

    def path(self, turn: int) -> list[int]:
        """The turns from the first one to this."""
        found = [turn]
        while (parent := self.turns[found[-1]].parent) is not None:
            found.append(parent)
        return found[::-1]

    def continued_by(self, ids: Sequence[int], role: int = 0, seen: PromptImages | None = None) -> int | None:
        """The longest turn of a role whose tokens these begin with, and which was shown what these show up to there; of equal
        ones the last. None if there is none."""
        ids, ends, best = list(ids), dict[int, int](), None
        for at, turn in enumerate(self.turns):  # a parent comes before its children
            begin = 0 if turn.parent is None else ends.get(turn.parent)
            if begin is None or turn.role != role:
                continue
            for part in self._parts(at):
                if ids[begin : begin + len(part)] != part:
                    break
                begin += len(part)
            else:
                ends[at] = begin
                same = _places(turn.seen) == tuple(place for place in _places(seen) if place[0] < begin)
                if same and begin < len(ids) and (best is None or begin >= ends[best]):
                    best = at
        return best

    def _parts(self, at: int) -> tuple[list[int], list[int]]:
        return self.turns[at].context, self.turns[at].token_ids

    def samples(self, number: int) -> list[Episode]:
        """A sample for each leaf, in an order that does not depend on which call ended first. What the model drew and nobody
        received is not trained on, nor are there samples of such turns alone.

        Args:
            number: The episode's.
        """
        kept = set[int]()
        for at, turn in enumerate(self.turns):
            if turn.received:
                kept.update(self.path(at))
        leaves = kept - {self.turns[at].parent for at in kept}
        paths = sorted(
            (self.turns[leaf].role, self.ids(leaf), _places(self.turns[leaf].seen), self.path(leaf)) for leaf in leaves
        )
        trained, found, spoken = set[int](), list[Episode](), collections.Counter[int]()
        numbers = [spoken.update([turn.role]) or spoken[turn.role] - 1 for turn in self.turns]
        for *_, path in paths:
            found.append(self._sample(number, path, trained, numbers))
            trained.update(path)
        return found

    def _sample(self, number: int, path: Sequence[int], trained: set[int], numbers: Sequence[int]) -> Episode:
        first = self.turns[path[0]]
        sample = Episode(
            number,
            tuple(first.context),
            turns=len(path),
            finish_reason=self.turns[path[-1]].finish_reason,
            role=first.role,
            experts=self.turns[path[-1]].experts,
            seen=self.turns[path[-1]].seen,
        )
        for depth, at in enumerate(path):
            turn, between = self.turns[at], 0
            if depth:
                between = len(turn.context)
                sample.token_ids += turn.context
                sample.logprobs += [0.0] * between
                sample.versions += [sample.versions[-1]] * between
                sample.loss_mask += [False] * between
                sample.rewards += [0.0] * between
            drawn = len(turn.token_ids)
            sample.token_ids += turn.token_ids
            sample.logprobs += turn.logprobs
            sample.versions += turn.versions
            own = turn.received and at not in trained
            sample.loss_mask += [own] * drawn
            sample.rewards += [0.0] * drawn
            if own and drawn:
                sample.rewards[-1] = turn.reward
            sample.turn_ids += [numbers[at]] * (between + drawn)
        return sample

    def counts(self) -> collections.Counter[str]:
        """Turns and samples' beginnings, the tokens drawn, and those that nobody received."""
        found = collections.Counter[str]()
        for turn in self.turns:
            found["turns"] += 1
            found["branches"] += turn.parent is None
            found["drawn"] += len(turn.token_ids)
            found["not_received"] += 0 if turn.received else len(turn.token_ids)
        return found


def _places(seen: PromptImages | None) -> tuple[tuple[int, bytes], ...]:
    return () if seen is None else seen.places


#: Stands for the sign of a part of a picture where somebody has only written it.
_SPOKEN = "SPOKENOF9B1C"
#: Code of what is longer than the context or the episode's limits.
OVER = "context_length_exceeded"
#: Characters that a token may have at least: so much room any context has, however short the tokens of its model are.
_TOKEN_CHARACTERS = 16
Message = dict[str, Any]


class RequestError(Exception):
    """A request that cannot be answered.

    Args:
        why: For who asked.
        status: Of HTTP.
        code: As OpenAI's clients know it; `context_length_exceeded` ends the episode of most harnesses.
    """

    def __init__(self, why: str, status: int = 400, code: str | None = None) -> None:
        super().__init__(why)
        self.status, self.code = status, code


def canonical(message: Mapping[str, Any]) -> Message:
    """A message as templates take it, whatever way its client writes it; and its pictures, as `images`, if it shows some.

    Raises:
        Refused: It is no message.
    """
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError("messages must be a list of objects with role and content")
    role = {"developer": "system", "function": "tool"}.get(message["role"], message["role"])
    try:
        content, images = content_of(message.get("content"))
    except ConfigError as error:
        raise RequestError(str(error)) from None
    found: Message = {"role": role, "content": content, **({"images": images} if images else {})}
    reasoning = _text_in(message, "reasoning_content") or _text_in(message, "reasoning")
    if reasoning:
        found["reasoning_content"] = reasoning
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise RequestError("a message's tool_calls must be a list")
    if calls:
        found["tool_calls"] = [_call(call) for call in calls]
    if message.get("function_call"):
        raise RequestError("a message has a function_call; functions are tools here: send tool_calls")
    for name in ("tool_call_id", "name"):
        if value := _text_in(message, name):
            found[name] = value
    return found


def _text_in(message: Mapping[str, Any], name: str) -> str:
    value = message.get(name)
    if value is not None and not isinstance(value, str):
        raise RequestError(f"a message's {name} must be a text")
    return value or ""


def _call(call: Any) -> Message:
    function = call.get("function") if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not isinstance(arguments, (str, dict, type(None))):
        raise RequestError(
            "a message's tool_calls must each have a function with a name, and with arguments as a text or an object"
        )
    ident = call.get("id")
    if ident is not None and not isinstance(ident, str):
        raise RequestError("the id of a message's tool call must be a text")
    return {"id": ident, "type": "function", "function": {"name": name, "arguments": parse_arguments(arguments)}}


def key_of(message: Message) -> str:
    """A digest by which a message is known again: of what it says, not of names of calls or white space around it."""
    said: Message = {**message, "content": _stripped(message["content"])}
    if "images" in said:
        said["images"] = [digest_of(image) for image in said["images"]]
    said.pop("tool_call_id", None)
    said.pop("name", None)
    if "reasoning_content" in said:
        said["reasoning_content"] = said["reasoning_content"].strip()
    if "tool_calls" in said:
        said["tool_calls"] = [call["function"] for call in said["tool_calls"]]
    return _digest(said)


def _stripped(content: Any) -> Any:
    if isinstance(content, str):
        return content.strip()
    return [part["text"].strip() if "text" in part else part for part in content]


def keys_of(messages: Sequence[Message], tools: Any) -> tuple[str, ...]:
    """Digests of the tools, then of each message."""
    return (_digest(tools or []), *map(key_of, messages))


def _digest(said: Any) -> str:
    return hashlib.blake2b(json.dumps(said, sort_keys=True, default=str).encode(), digest_size=12).hexdigest()


class Renderer:
    """Makes tokens of conversations, with a tokenizer's chat template.

    Args:
        tokenizer: Of transformers.
        looker: What looks at pictures; None if the model reads text alone.
        context: Most tokens that the model reads.
    """

    def __init__(self, tokenizer: Any, looker: Looker | None = None, context: int = sys.maxsize) -> None:
        self.tokenizer, self.looker, self.context = tokenizer, looker, context

    @functools.cached_property
    def _most_characters(self) -> int:
        """Characters that the longest tokens could hold in the whole context."""
        return self.context * max(_TOKEN_CHARACTERS, *map(len, self.tokenizer.get_vocab()))

    def check_count(self, messages: Sequence[Any]) -> None:
        """Raises:
        Refused: There are more messages than the context has tokens."""
        if len(messages) > self.context:
            raise RequestError(
                f"{len(messages)} messages leave no room in the context of {self.context} tokens", code=OVER
            )

    def check_length(self, messages: Sequence[Message], tools: Any) -> None:
        """Raises:
        Refused: Messages and tools have more characters than the context can hold, whatever tokens they become."""
        if self.context == sys.maxsize:
            return
        count = _characters([{**message, "images": None} for message in messages]) + _characters(tools)
        if count > self._most_characters:
            raise RequestError(
                f"messages and tools of {count} characters leave no room in the context of {self.context} tokens",
                code=OVER,
            )

    def prompt(
        self, tree: Tree, messages: Sequence[Message], keys: tuple[str, ...], tools: Any, role: int = 0
    ) -> tuple[list[int], int | None, PromptImages | None]:
        """The tokens of a conversation, the turn of the tree that it goes on from, if any, and what it shows, if anything.

        Args:
            tree: What is known.
            messages: The conversation, canonical.
            keys: Its `keys_of`.
            tools: As the client sent them.
            role: Who speaks: nobody goes on from what another has said.

        Raises:
            Refused: The template does not take it, or the model reads no pictures.
        """
        if self.looker is None and any("images" in message for message in messages):
            raise RequestError("a message shows a picture; this model reads text alone")
        known, length = None, 0
        for at, turn in enumerate(tree.turns):
            if turn.role != role:
                continue
            if length <= len(turn.keys) < len(keys) and turn.keys and keys[: len(turn.keys)] == turn.keys:
                known, length = at, len(turn.keys)
        if known is not None:
            reply = tree.turns[known]
            behind = self._behind(messages, length - 2, tools, reply.token_ids)
            if behind is not None:
                before = tree.ids(known)
                ids, seen = self._encode(behind, messages[length - 1 :], len(before))
                return before + ids, known, joined(reply.seen, seen)
        ids, seen = self._encode(self._text(messages, tools), messages)
        return ids, tree.continued_by(ids, role, seen), seen

    def _behind(self, messages: Sequence[Message], reply: int, tools: Any, drawn: list[int]) -> str | None:
        """What the template puts after a reply; None if it does not show it as it stands."""
        shown = [*messages]
        shown[reply] = {"role": "assistant", "content": REPLY}
        try:
            text = self._text(shown, tools)
        except RequestError:  # a template that wants to see the calls that tools answered
            return None
        return behind_reply(self.tokenizer, text, drawn) if text.count(REPLY) == 1 else None

    def _encode(self, text: str, messages: Sequence[Message], behind: int = 0) -> tuple[list[int], PromptImages | None]:
        """Tokens of what a template makes of messages, behind so many others, with all parts of their pictures; and these."""
        ids, spoken, text = list[int](), set[int](), valid_text(text)
        if self.looker is None:
            return self.tokenizer.encode(text, add_special_tokens=False), None
        for number, part in enumerate(text.split(_SPOKEN)):
            if number:
                spoken.add(len(ids))
                ids.append(self.looker.token)
            ids += self.tokenizer.encode(part, add_special_tokens=False)
        images = [image for message in messages for image in message.get("images", ())]
        if not images:
            return ids, None
        try:
            return self.looker.look(images, ids, behind, spoken)
        except ConfigError as error:
            raise RequestError(str(error)) from None

    def _text(self, messages: Sequence[Message], tools: Any) -> str:
        said = [{name: value for name, value in message.items() if name != "images"} for message in messages]
        if self.looker is not None:
            said = _without(said, self.tokenizer.convert_ids_to_tokens(self.looker.token))
        try:
            return render_chat(self.tokenizer, said, tools or (), add_generation_prompt=True)
        except ConfigError as error:
            raise RequestError(str(error)) from None


def _characters(value: Any) -> int:
    """Returns the number of characters in all texts of a value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(_characters(name) + _characters(item) for name, item in value.items())
    return sum(map(_characters, value)) if isinstance(value, list) else 0


def _without(said: Any, sign: str) -> Any:
    """Messages whose texts have no sign of a part of a picture, but `_SPOKEN`."""
    if isinstance(said, str):
        return said.replace(sign, _SPOKEN)
    if isinstance(said, Mapping):
        return {name: _without(value, sign) for name, value in said.items()}
    return [_without(value, sign) for value in said] if isinstance(said, list) else said
