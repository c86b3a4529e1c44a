"""Messages as clients send them: what makes two of them the same, and the tokens that a conversation is to the model.

What the model wrote is never encoded again: where a conversation goes on from a reply that is known, its tokens are those that
were read and drawn, and behind them what the chat template puts after the reply. What does not go on from one begins anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rlhpc.language.agents.shown import REPLY, behind_reply, content_of
from rlhpc.language.agents.tree import Tree
from rlhpc.language.data.images import digest_of
from rlhpc.language.data.pictures import Looker, Seen, joined
from rlhpc.runtime.errors import ConfigError

#: Stands for the sign of a part of a picture where somebody has only written it.
_SPOKEN = "SPOKENOF9B1C"
Message = dict[str, Any]


class Refused(Exception):
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
        raise Refused("messages must be a list of objects with role and content")
    role = {"developer": "system", "function": "tool"}.get(message["role"], message["role"])
    try:
        content, images = content_of(message.get("content"))
    except ConfigError as error:
        raise Refused(str(error)) from None
    found: Message = {"role": role, "content": content, **({"images": images} if images else {})}
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(reasoning, str) and reasoning:
        found["reasoning_content"] = reasoning
    if message.get("tool_calls"):
        found["tool_calls"] = [_call(call) for call in message["tool_calls"]]
    for name in ("tool_call_id", "name"):
        if message.get(name):
            found[name] = message[name]
    return found


def _call(call: Any) -> Message:
    try:
        name, arguments = call["function"]["name"], call["function"].get("arguments")
    except (TypeError, KeyError):
        raise Refused("a message's tool_calls must each have a function with name and arguments") from None
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):  # as the model wrote it: shown as it stands
            arguments = json.loads(arguments)
    return {"id": call.get("id"), "type": "function", "function": {"name": name, "arguments": arguments or {}}}


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
    """

    def __init__(self, tokenizer: Any, looker: Looker | None = None) -> None:
        self.tokenizer, self.looker = tokenizer, looker

    def prompt(
        self, tree: Tree, messages: Sequence[Message], keys: tuple[str, ...], tools: Any, role: int = 0
    ) -> tuple[list[int], int | None, Seen | None]:
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
            raise Refused("a message shows a picture; this model reads text alone")
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
        except Refused:  # a template that wants to see the calls that tools answered
            return None
        return behind_reply(self.tokenizer, text, drawn) if text.count(REPLY) == 1 else None

    def _encode(self, text: str, messages: Sequence[Message], behind: int = 0) -> tuple[list[int], Seen | None]:
        """Tokens of what a template makes of messages, behind so many others, with all parts of their pictures; and these."""
        ids, spoken = list[int](), set[int]()
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
            raise Refused(str(error)) from None

    def _text(self, messages: Sequence[Message], tools: Any) -> str:
        said = [{name: value for name, value in message.items() if name != "images"} for message in messages]
        if self.looker is not None:
            said = _without(said, self.tokenizer.convert_ids_to_tokens(self.looker.token))
        try:
            text: str = self.tokenizer.apply_chat_template(
                said, tools=tools or None, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # jinja's, and whatever a template's author has it raise
            raise Refused(f"the model's chat template refuses the conversation: {error}") from None
        return text


def _without(said: Any, sign: str) -> Any:
    """Messages whose texts have no sign of a part of a picture, but `_SPOKEN`."""
    if isinstance(said, str):
        return said.replace(sign, _SPOKEN)
    if isinstance(said, Mapping):
        return {name: _without(value, sign) for name, value in said.items()}
    return [_without(value, sign) for value in said] if isinstance(said, list) else said
