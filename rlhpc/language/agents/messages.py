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

from rlhpc.language.agents.tree import Tree

#: Stands for the reply of which the tokens are known, in what the template writes.
_MARK = "REPLYHERE7F3A"
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


def text_of(content: Any) -> str:
    """The text of a message's content.

    Raises:
        Refused: It is something else.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    try:
        parts = [part if isinstance(part, str) else (part["type"], part.get("text")) for part in content]
    except (TypeError, KeyError, AttributeError):
        raise Refused("a message's content must be a text, or a list of parts of type text") from None
    texts = []
    for part in parts:
        if isinstance(part, str):
            texts.append(part)
        elif part[0] in ("text", "input_text", "output_text") and isinstance(part[1], str):
            texts.append(part[1])
        else:
            raise Refused(f"a message has a part of type {part[0]}; this model reads text alone")
    return "".join(texts)


def canonical(message: Mapping[str, Any]) -> Message:
    """A message as templates take it, whatever way its client writes it.

    Raises:
        Refused: It is no message.
    """
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise Refused("messages must be a list of objects with role and content")
    role = {"developer": "system", "function": "tool"}.get(message["role"], message["role"])
    found: Message = {"role": role, "content": text_of(message.get("content"))}
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
    said: Message = {**message, "content": message["content"].strip()}
    said.pop("tool_call_id", None)
    said.pop("name", None)
    if "reasoning_content" in said:
        said["reasoning_content"] = said["reasoning_content"].strip()
    if "tool_calls" in said:
        said["tool_calls"] = [call["function"] for call in said["tool_calls"]]
    return _digest(said)


def keys_of(messages: Sequence[Message], tools: Any) -> tuple[str, ...]:
    """Digests of the tools, then of each message."""
    return (_digest(tools or []), *map(key_of, messages))


def _digest(said: Any) -> str:
    return hashlib.blake2b(json.dumps(said, sort_keys=True, default=str).encode(), digest_size=12).hexdigest()


class Renderer:
    """Makes tokens of conversations, with a tokenizer's chat template.

    Args:
        tokenizer: Of transformers.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def prompt(
        self, tree: Tree, messages: Sequence[Message], keys: tuple[str, ...], tools: Any, role: int = 0
    ) -> tuple[list[int], int | None]:
        """The tokens of a conversation, and the turn of the tree that it goes on from, if any.

        Args:
            tree: What is known.
            messages: The conversation, canonical.
            keys: Its `keys_of`.
            tools: As the client sent them.
            role: Who speaks: nobody goes on from what another has said.

        Raises:
            Refused: The template does not take it.
        """
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
                return tree.ids(known) + behind, known
        ids = self._encode(self._text(messages, tools))
        return ids, tree.continued_by(ids, role)

    def _behind(self, messages: Sequence[Message], reply: int, tools: Any, drawn: list[int]) -> list[int] | None:
        """The tokens that the template puts after a reply; None if it does not show it as it stands."""
        shown = [*messages]
        shown[reply] = {"role": "assistant", "content": _MARK}
        try:
            _, found, text = self._text(shown, tools).partition(_MARK)
        except Refused:  # a template that wants to see the calls that tools answered
            return None
        if not found or _MARK in text:
            return None
        end = self.tokenizer.decode(drawn[-1:], skip_special_tokens=False) if drawn else ""
        return self._encode(text.removeprefix(end) if end else text)

    def _text(self, messages: Sequence[Message], tools: Any) -> str:
        try:
            text: str = self.tokenizer.apply_chat_template(
                list(messages), tools=tools or None, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # jinja's, and whatever a template's author has it raise
            raise Refused(f"the model's chat template refuses the conversation: {error}") from None
        return text

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids
