"""Request and response formats of the gateway: OpenAI's, Anthropic's and vLLM's token-based format."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping
from typing import Any

from rlhpc.language.agents.gateway.sessions import OVER, StoredResponse, stop_reason
from rlhpc.language.agents.turn_tree import Message, RequestError
from rlhpc.language.policy_text import parse_arguments


def chat_reply(answer: StoredResponse, body: Mapping[str, Any], model: str, tokenizer: Any) -> dict[str, Any]:
    """Returns the response to `/v1/chat/completions`."""
    turn = answer.turn
    reason = "tool_calls" if answer.message.get("tool_calls") else stop_reason(turn.finish_reason)
    reply_choice: dict[str, Any] = {"index": 0, "message": answer.message, "finish_reason": reason, "logprobs": None}
    if body.get("logprobs"):
        decoder = None if body.get("return_tokens_as_token_ids") else tokenizer
        reply_choice["logprobs"] = {"content": _format_logprobs(answer, decoder)}
    response = {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [reply_choice],
        "usage": _format_usage(answer),
    }
    if body.get("return_token_ids"):
        response["prompt_token_ids"] = answer.prompt_ids
        reply_choice["token_ids"] = turn.token_ids
    return response


def generate_reply(answer: StoredResponse) -> dict[str, Any]:
    """Returns the response to `/inference/v1/generate`, in vLLM's format."""
    turn = answer.turn
    reply_choice = {
        "index": 0,
        "token_ids": turn.token_ids,
        "finish_reason": stop_reason(turn.finish_reason),
        "logprobs": {"content": _format_logprobs(answer, None)},
    }
    return {"request_id": uuid.uuid4().hex, "choices": [reply_choice], "versions": turn.versions}


def _format_usage(answer: StoredResponse) -> dict[str, int]:
    num_prompt_tokens, num_sampled_tokens = len(answer.prompt_ids), len(answer.turn.token_ids)
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_sampled_tokens,
        "total_tokens": num_prompt_tokens + num_sampled_tokens,
    }


def _format_logprobs(answer: StoredResponse, tokenizer: Any) -> list[dict[str, Any]]:
    """Returns the log-probs of the sampled tokens in OpenAI's format. Without a tokenizer, token ids replace the texts."""
    logprob_entries = []
    for token, logprob in zip(answer.turn.token_ids, answer.turn.logprobs, strict=True):
        token_text = f"token_id:{token}" if tokenizer is None else tokenizer.decode([token], skip_special_tokens=False)
        logprob_entries.append(
            {"token": token_text, "logprob": logprob, "bytes": list(token_text.encode()), "top_logprobs": []}
        )
    return logprob_entries


_REASONS = {"stop": "end_turn", "length": "max_tokens"}


def conversation_of(body: Mapping[str, Any]) -> tuple[list[Message], list[dict[str, Any]] | None]:
    """Converts the messages and tools of an Anthropic request to the format of chat completions.

    Raises:
        RequestError: The content of the request is not supported.
    """
    messages: list[Message] = []
    if body.get("system"):
        messages.append({"role": "system", "content": _join_text(body["system"])})
    for message in body["messages"]:
        if not isinstance(message, Mapping) or message.get("role") not in ("user", "assistant"):
            raise RequestError("messages must be objects with role user or assistant, and content")
        messages += _convert_assistant(message) if message["role"] == "assistant" else _convert_user(message)
    if body.get("tool_choice", {}).get("type") == "none":
        return messages, None
    functions = [
        {"name": tool["name"], "description": tool.get("description") or "", "parameters": tool["input_schema"]}
        for tool in body.get("tools", [])
    ]
    return messages, [{"type": "function", "function": function} for function in functions] or None


def _convert_assistant(message: Mapping[str, Any]) -> list[Message]:
    chat_message: Message = {"role": "assistant", "content": ""}
    for block in _blocks(message.get("content")):
        block_type = block.get("type")
        if block_type == "text":
            chat_message["content"] += _field(block, "text")
        elif block_type == "thinking":
            chat_message["reasoning_content"] = chat_message.get("reasoning_content", "") + _field(block, "thinking")
        elif block_type == "tool_use":
            function = {"name": _field(block, "name"), "arguments": block.get("input") or {}}
            call = {"id": _field(block, "id"), "type": "function", "function": function}
            chat_message.setdefault("tool_calls", []).append(call)
        else:
            raise RequestError(
                f"an assistant's message has a block of type {block_type}; allowed: text, thinking, tool_use"
            )
    return [chat_message]


def _convert_user(message: Mapping[str, Any]) -> list[Message]:
    """Converts a user message to one message per tool result, followed by a message with the other blocks."""
    tool_messages, user_parts = list[Message](), list[Any]()
    for block in _blocks(message.get("content")):
        block_type = block.get("type")
        if block_type == "tool_result":
            result_parts = [_keep_text_or_image(result_part) for result_part in _blocks(block.get("content") or "")]
            tool_messages.append(
                {"role": "tool", "tool_call_id": _field(block, "tool_use_id"), "content": result_parts}
            )
        else:
            user_parts.append(_keep_text_or_image(block))
    if user_parts or not tool_messages:
        return [*tool_messages, {"role": "user", "content": user_parts}]
    return tool_messages


def _keep_text_or_image(block: Mapping[str, Any]) -> Any:
    """Returns a text or image block unchanged, because chat completions accept it.

    Raises:
        RequestError: The block has a different type.
    """
    if block.get("type") not in ("text", "image"):
        raise RequestError(
            f"a user's message or a result of a tool has a block of type {block.get('type')}; this model reads text, pictures "
            "if it looks at them, and results of tools"
        )
    return block


def _blocks(raw_content: Any) -> list[Any]:
    if isinstance(raw_content, str):
        return [{"type": "text", "text": raw_content}]
    if not isinstance(raw_content, list) or not all(isinstance(block, Mapping) for block in raw_content):
        raise RequestError("a message's content must be a text, or a list of blocks")
    return raw_content


def _join_text(raw_content: Any) -> str:
    blocks = _blocks(raw_content)
    if any(block.get("type") != "text" for block in blocks):
        raise RequestError("system must be a text, or blocks of type text")
    return "".join(_field(block, "text") for block in blocks)


def _field(block: Mapping[str, Any], name: str) -> str:
    """Returns a text field of a block; "" if the field is missing.

    Raises:
        RequestError: The field is not a text.
    """
    field_text = block.get(name, "")
    if not isinstance(field_text, str):
        raise RequestError(f"{name} of a block of type {block.get('type')} must be a text")
    return field_text


def message_reply(answer: StoredResponse, model: str) -> dict[str, Any]:
    """Returns the response to `/v1/messages`."""
    message, content_blocks = answer.message, list[dict[str, Any]]()
    if message.get("reasoning_content"):
        content_blocks.append({"type": "thinking", "thinking": message["reasoning_content"], "signature": ""})
    if message["content"]:
        content_blocks.append({"type": "text", "text": message["content"]})
    for call in message.get("tool_calls", []):
        function = call["function"]
        block = {"type": "tool_use", "id": call["id"], "name": function["name"]}
        content_blocks.append({**block, "input": parse_arguments(function["arguments"])})
    reason = _REASONS[stop_reason(answer.turn.finish_reason)]
    stop_sequence = None if answer.reply is None or message.get("tool_calls") else answer.reply.stop
    reason = "tool_use" if message.get("tool_calls") else reason if stop_sequence is None else "stop_sequence"
    return {
        "id": f"msg_{uuid.uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content_blocks,
        "stop_reason": reason,
        "stop_sequence": stop_sequence,
        "usage": {"input_tokens": len(answer.prompt_ids), "output_tokens": len(answer.turn.token_ids)},
    }


def message_error(refusal: RequestError) -> dict[str, Any]:
    """Returns the error response for a refused request, in Anthropic's format."""
    error_types = {401: "authentication_error", 429: "rate_limit_error", 503: "api_error"}
    message = f"prompt is too long: {refusal}" if refusal.code == OVER else str(refusal)
    return {
        "type": "error",
        "error": {"type": error_types.get(refusal.status, "invalid_request_error"), "message": message},
    }


def chat_error(refusal: RequestError) -> dict[str, Any]:
    """Returns the error response for a refused request, in OpenAI's format."""
    return {"error": {"message": str(refusal), "type": "invalid_request_error", "code": refusal.code}}


def _unsent(complete_text: str, sent_text: str) -> str:
    """Returns the unsent remainder of a text; "" if the text does not start with `sent_text`."""
    return complete_text[len(sent_text) :] if complete_text.startswith(sent_text) else ""


class ChatStream:
    """Streamed response to `/v1/chat/completions`.

    Args:
        body: Body of the request.
        model: Name of the model in the client's request.
        tokenizer: Tokenizer of the model.

    Attributes:
        is_requested: Whether the client requests a stream.
        id: Id of the completion.
    """

    error = staticmethod(chat_error)

    def __init__(self, body: Mapping[str, Any], model: str, tokenizer: Any) -> None:
        self._body, self.model, self._tokenizer = body, model, tokenizer
        self.is_requested = bool(body.get("stream"))
        self.id = f"chatcmpl-{uuid.uuid4().hex}"
        self._chunk_fields = {
            "id": self.id,
            "created": int(time.time()),
            "model": model,
            "object": "chat.completion.chunk",
        }
        self._sent_texts = {"reasoning_content": "", "content": ""}
        self._started = False
        #: Whether the whole response is sent at the end, because it contains log-probs or token ids.
        self.is_sent_at_end = bool(body.get("logprobs") or body.get("return_token_ids"))

    def reply(self, answer: StoredResponse) -> dict[str, Any]:
        """Returns the complete response."""
        return chat_reply(answer, self._body, self.model, self._tokenizer)

    def new_events(self, num_prompt_tokens: int, reasoning: str, content: str) -> list[str]:
        """Returns the events for new text of the reply.

        Args:
            num_prompt_tokens: Number of tokens in the prompt.
            reasoning, content: Full texts so far.
        """
        del num_prompt_tokens
        text_by_field = {"reasoning_content": reasoning, "content": content}
        delta = {
            name: unsent_text
            for name, field_text in text_by_field.items()
            if (unsent_text := _unsent(field_text, self._sent_texts[name]))
        }
        if not delta:
            return []
        self._sent_texts = text_by_field
        return [self._format_event(delta)]

    def end(self, answer: StoredResponse) -> list[str]:
        """Returns the remaining events of the complete reply."""
        reply = self.reply(answer)
        reply_choice = reply["choices"][0]
        message = reply_choice["message"]
        delta = {
            **message,
            **{name: _unsent(message[name], self._sent_texts[name]) for name in self._sent_texts if name in message},
        }
        if "tool_calls" in message:
            delta["tool_calls"] = [
                {"index": call_index, **call} for call_index, call in enumerate(message["tool_calls"])
            ]
        logprobs_field = {"logprobs": reply_choice["logprobs"]}
        if "token_ids" in reply_choice:
            logprobs_field["token_ids"] = reply_choice["token_ids"]
            self._chunk_fields["prompt_token_ids"] = reply["prompt_token_ids"]
        events = [self._format_event(delta, **logprobs_field), self._format_event({}, reply_choice["finish_reason"])]
        if (self._body.get("stream_options") or {}).get("include_usage"):
            events.append(_format_data({**self._chunk_fields, "choices": [], "usage": reply["usage"]}))
        return [*events, "data: [DONE]\n\n"]

    def _format_event(self, delta: Mapping[str, Any], reason: str | None = None, **extra_fields: Any) -> str:
        role = {} if self._started else {"role": "assistant"}
        self._started = True
        chunk_choice = {"index": 0, "delta": {**role, **delta}, "finish_reason": reason, **extra_fields}
        return _format_data({**self._chunk_fields, "choices": [chunk_choice]})


def _format_data(chunk: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(chunk)}\n\n"


class MessageStream:
    """Streamed response to `/v1/messages`.

    Args:
        body: Body of the request.
        model: Name of the model in the client's request.

    Attributes:
        is_requested: Whether the client requests a stream.
        id: Id of the message.
    """

    is_sent_at_end = False
    error = staticmethod(message_error)

    def __init__(self, body: Mapping[str, Any], model: str) -> None:
        self.model, self._started, self.id = model, False, f"msg_{uuid.uuid4().hex}"
        self.is_requested = bool(body.get("stream"))
        self._blocks = list[str]()  # types of the content blocks so far
        self._sent_texts = {"thinking": "", "text": ""}

    def reply(self, answer: StoredResponse) -> dict[str, Any]:
        """Returns the complete response."""
        return message_reply(answer, self.model)

    def new_events(self, num_prompt_tokens: int, reasoning: str, content: str) -> list[str]:
        """Returns the events for new text of the reply; see `ChatStream.new_events`."""
        if not reasoning and not content:
            return []
        return self._begin(num_prompt_tokens) + self._text("thinking", reasoning) + self._text("text", content)

    def end(self, answer: StoredResponse) -> list[str]:
        """Returns the remaining events of the complete reply."""
        reply = self.reply(answer)
        events = self._begin(reply["usage"]["input_tokens"])
        for block in reply["content"]:
            if block["type"] != "tool_use":
                events += self._text(block["type"], block[block["type"]])
                continue
            json_delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
            events += [*self._block({**block, "input": {}}), self._delta(json_delta)]
        stop_fields = {"stop_reason": reply["stop_reason"], "stop_sequence": reply["stop_sequence"]}
        usage = {"output_tokens": reply["usage"]["output_tokens"]}
        events += [*self._close(), _format_event({"type": "message_delta", "delta": stop_fields, "usage": usage})]
        return [*events, _format_event({"type": "message_stop"})]

    def _begin(self, num_prompt_tokens: int) -> list[str]:
        if self._started:
            return []
        self._started = True
        message: dict[str, Any] = {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": num_prompt_tokens, "output_tokens": 0},
        }
        return [_format_event({"type": "message_start", "message": message})]

    def _text(self, block_type: str, text: str) -> list[str]:
        """Returns the events for the unsent text of a block, including the block's start if the block is new."""
        unsent_text, is_open = _unsent(text, self._sent_texts[block_type]), block_type in self._blocks
        if not unsent_text or (is_open and self._blocks[-1] != block_type):
            return []
        self._sent_texts[block_type] = text
        empty_block = {"type": block_type, block_type: "", **({"signature": ""} if block_type == "thinking" else {})}
        return [
            *([] if is_open else self._block(empty_block)),
            self._delta({"type": f"{block_type}_delta", block_type: unsent_text}),
        ]

    def _block(self, block: Mapping[str, Any]) -> list[str]:
        events = self._close()
        self._blocks.append(block["type"])
        return [
            *events,
            _format_event({"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": block}),
        ]

    def _delta(self, delta: Mapping[str, Any]) -> str:
        return _format_event({"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta})

    def _close(self) -> list[str]:
        return [_format_event({"type": "content_block_stop", "index": len(self._blocks) - 1})] if self._blocks else []


def _format_event(event: Mapping[str, Any]) -> str:
    return f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"
