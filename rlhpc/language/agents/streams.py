"""Replies as streams, in the forms of OpenAI's and Anthropic's: pieces as they are written, then whatever is left.

A client puts the pieces together and sends them back: what it then says must be what the reply says. So only what is
certain is sent before the end.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping
from typing import Any

from rlhpc.language.agents.messages_api import message_reply
from rlhpc.language.agents.sessions import Answer
from rlhpc.language.agents.wire import chat_reply


def _rest(whole: str | None, sent: str) -> str:
    """What of a text was not sent yet; nothing, if something else was."""
    return (whole or "")[len(sent) :] if (whole or "").startswith(sent) else ""


class ChatStream:
    """The answer to `/v1/chat/completions` in pieces.

    Args:
        body: The request.
        model: What the client calls the model.
        tokenizer: Of the model.

    Attributes:
        id: Of the completion.
    """

    def __init__(self, body: Mapping[str, Any], model: str, tokenizer: Any) -> None:
        self._body, self._model, self._tokenizer = body, model, tokenizer
        self.id = f"chatcmpl-{uuid.uuid4().hex}"
        self._base = {"id": self.id, "created": int(time.time()), "model": model, "object": "chat.completion.chunk"}
        self._reasoning = self._content = ""
        self._begun = False
        #: Log-probs and token ids come with the whole.
        self.whole = bool(body.get("logprobs") or body.get("return_token_ids"))

    def more(self, read: int, reasoning: str, content: str) -> list[str]:
        """Events for what has come to it.

        Args:
            read: Tokens of the prompt.
            reasoning, content: All so far.
        """
        del read
        delta = {"reasoning_content": _rest(reasoning, self._reasoning), "content": _rest(content, self._content)}
        delta = {name: text for name, text in delta.items() if text}
        if not delta:
            return []
        self._reasoning, self._content = reasoning, content
        return [self._event(delta)]

    def end(self, answer: Answer) -> list[str]:
        """Events for the rest."""
        reply = chat_reply(answer, self._body, self._model, self._tokenizer)
        choice = reply["choices"][0]
        message = choice["message"]
        delta = {**message, "content": _rest(message["content"], self._content)}
        if "reasoning_content" in message:
            delta["reasoning_content"] = _rest(message["reasoning_content"], self._reasoning)
        if "tool_calls" in message:
            delta["tool_calls"] = [{"index": at, **call} for at, call in enumerate(message["tool_calls"])]
        more = {"logprobs": choice["logprobs"]}
        if "token_ids" in choice:
            more["token_ids"] = choice["token_ids"]
            self._base["prompt_token_ids"] = reply["prompt_token_ids"]
        found = [self._event(delta, **more), self._event({}, choice["finish_reason"])]
        if (self._body.get("stream_options") or {}).get("include_usage"):
            found.append(_data({**self._base, "choices": [], "usage": reply["usage"]}))
        return [*found, "data: [DONE]\n\n"]

    def _event(self, delta: Mapping[str, Any], reason: str | None = None, **more: Any) -> str:
        role = {} if self._begun else {"role": "assistant"}
        self._begun = True
        choice = {"index": 0, "delta": {**role, **delta}, "finish_reason": reason, **more}
        return _data({**self._base, "choices": [choice]})


def _data(chunk: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(chunk)}\n\n"


class MessageStream:
    """The answer to `/v1/messages` in pieces.

    Args:
        model: What the client calls the model.

    Attributes:
        id: Of the message.
    """

    whole = False

    def __init__(self, model: str) -> None:
        self._model, self._begun, self.id = model, False, f"msg_{uuid.uuid4().hex}"
        self._blocks = list[str]()  # their types
        self._sent = {"thinking": "", "text": ""}

    def more(self, read: int, reasoning: str, content: str) -> list[str]:
        """Events for what has come to it; see `ChatStream.more`."""
        if not reasoning and not content:
            return []
        return self._begin(read) + self._text("thinking", reasoning) + self._text("text", content)

    def end(self, answer: Answer) -> list[str]:
        """Events for the rest."""
        reply = message_reply(answer, self._model)
        found = self._begin(reply["usage"]["input_tokens"])
        for block in reply["content"]:
            if block["type"] != "tool_use":
                found += self._text(block["type"], block[block["type"]])
                continue
            given = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
            found += [*self._block({**block, "input": {}}), self._delta(given)]
        ended = {"stop_reason": reply["stop_reason"], "stop_sequence": reply["stop_sequence"]}
        used = {"output_tokens": reply["usage"]["output_tokens"]}
        found += [*self._close(), _event({"type": "message_delta", "delta": ended, "usage": used})]
        return [*found, _event({"type": "message_stop"})]

    def _begin(self, read: int) -> list[str]:
        if self._begun:
            return []
        self._begun = True
        message: dict[str, Any] = {
            "id": self.id, "type": "message", "role": "assistant", "model": self._model, "content": [],
            "stop_reason": None, "stop_sequence": None, "usage": {"input_tokens": read, "output_tokens": 0},
        }  # fmt: skip
        return [_event({"type": "message_start", "message": message})]

    def _text(self, kind: str, text: str) -> list[str]:
        """A block of text, or more of it."""
        more, begun = _rest(text, self._sent[kind]), kind in self._blocks
        if not more or (begun and self._blocks[-1] != kind):
            return []
        self._sent[kind] = text
        empty = {"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {})}
        return [*([] if begun else self._block(empty)), self._delta({"type": f"{kind}_delta", kind: more})]

    def _block(self, block: Mapping[str, Any]) -> list[str]:
        found = self._close()
        self._blocks.append(block["type"])
        return [*found, _event({"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": block})]

    def _delta(self, delta: Mapping[str, Any]) -> str:
        return _event({"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta})

    def _close(self) -> list[str]:
        return [_event({"type": "content_block_stop", "index": len(self._blocks) - 1})] if self._blocks else []


def _event(event: Mapping[str, Any]) -> str:
    return f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"
