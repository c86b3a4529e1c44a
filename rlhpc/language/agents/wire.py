"""What goes over the wire to OpenAI's clients, and to those that speak in tokens."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import Any

from rlhpc.language.agents.sessions import Answer, stop_reason


def chat_reply(answer: Answer, body: Mapping[str, Any], model: str, tokenizer: Any) -> dict[str, Any]:
    """The answer to `/v1/chat/completions`."""
    turn = answer.turn
    reason = "tool_calls" if answer.message.get("tool_calls") else stop_reason(turn.finish_reason)
    choice: dict[str, Any] = {"index": 0, "message": answer.message, "finish_reason": reason, "logprobs": None}
    if body.get("logprobs"):
        as_ids = bool(body.get("return_tokens_as_token_ids"))
        choice["logprobs"] = {"content": _logprobs(answer, None if as_ids else tokenizer)}
    found = {
        "id": f"chatcmpl-{uuid.uuid4().hex}", "object": "chat.completion", "created": int(time.time()), "model": model,
        "choices": [choice], "usage": _usage(answer),
    }  # fmt: skip
    if body.get("return_token_ids"):
        found["prompt_token_ids"] = answer.prompt_ids
        choice["token_ids"] = turn.token_ids
    return found


def generate_reply(answer: Answer) -> dict[str, Any]:
    """The answer to `/inference/v1/generate`, in the form of vLLM's."""
    turn = answer.turn
    choice = {
        "index": 0, "token_ids": turn.token_ids, "finish_reason": stop_reason(turn.finish_reason),
        "logprobs": {"content": _logprobs(answer, None)},
    }  # fmt: skip
    return {"request_id": uuid.uuid4().hex, "choices": [choice], "versions": turn.versions}


def _usage(answer: Answer) -> dict[str, int]:
    read, drawn = len(answer.prompt_ids), len(answer.turn.token_ids)
    return {"prompt_tokens": read, "completion_tokens": drawn, "total_tokens": read + drawn}


def _logprobs(answer: Answer, tokenizer: Any) -> list[dict[str, Any]]:
    """Of each token; without a tokenizer it is shown by its number."""
    found = []
    for token, logprob in zip(answer.turn.token_ids, answer.turn.logprobs, strict=True):
        text = f"token_id:{token}" if tokenizer is None else tokenizer.decode([token], skip_special_tokens=False)
        found.append({"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []})
    return found
