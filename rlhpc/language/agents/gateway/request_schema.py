"""Request bodies of the gateway: one parser for all routes checks each key and refuses unsupported values.

Clients retry a request that fails with status 500, so every error in a body gives status 400 and a message of one line.
Requests to sample from a distribution other than the trained policy are refused, too.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rlhpc.language.agents.turn_tree import RequestError
from rlhpc.language.policy_text import MAX_REQUEST_DEPTH, load_json, repair_json, valid_text

log = logging.getLogger(__name__)
#: Maximum numbers of stop texts, of characters in a stop text, and of stop tokens. The engine checks them at each token.
MAX_STOP_TEXTS, MAX_STOP_CHARACTERS, MAX_STOP_IDS = 16, 256, 64
#: Maximum number of unknown keys that are logged.
_MAX_REPORTED = 20

Check = Callable[[Any], bool]


@dataclass(frozen=True)
class BodySchema:
    """Schema of a route's body. A key with value `null` counts as missing.

    Attributes:
        keys: Check and description of the allowed values, by key.
        neutral: Check for values without effect, by key. Other values of these keys are refused.
        required: Required keys.
        key_prefix: Prefix of the keys in error messages.
        inner: Schemas of keys whose values are objects.
    """

    keys: Mapping[str, tuple[Check, str]]
    neutral: Mapping[str, Check] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    key_prefix: str = ""
    inner: Mapping[str, BodySchema] = field(default_factory=dict)


def read_body(raw_body: bytes, schema: BodySchema) -> dict[str, Any]:
    """Parses and checks the body of a request. The returned body has valid UTF-8 texts, finite numbers and no `null` values.

    Raises:
        RequestError: The body is not a JSON object, or a key has a wrong type or an unsupported value.
    """
    try:
        parsed_body = load_json(raw_body)
        body = repair_json(parsed_body, MAX_REQUEST_DEPTH)
    except ValueError as error:
        raise RequestError(f"the body is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    _check_keys(parsed_body, schema)
    return {name: field_value for name, field_value in body.items() if field_value is not None}


def _check_keys(body: Mapping[str, Any], schema: BodySchema) -> None:
    for name, (is_allowed, allowed_types) in schema.keys.items():
        field_value = body.get(name)
        if (field_value is not None or name in schema.required) and not is_allowed(field_value):
            raise RequestError(f"{schema.key_prefix}{name} must be {allowed_types}")
    for name, nested_schema in schema.inner.items():
        if body.get(name) is not None:
            _check_keys(body[name], nested_schema)
    for name, is_neutral in schema.neutral.items():
        if body.get(name) is not None and not is_neutral(body[name]):
            reason = _REASONS.get(name, "the model is trained on what it draws by itself")
            raise RequestError(f"{schema.key_prefix}{name} cannot be had: {reason}")
    for name in body.keys() - schema.keys.keys() - schema.neutral.keys() - schema.inner.keys() - _reported_keys:
        if len(_reported_keys) < _MAX_REPORTED:
            _reported_keys.add(name)
            log.warning(
                "the endpoint ignores the key %.60r of a request: it does not know it", schema.key_prefix + name
            )


_reported_keys: set[str] = set()
_REASONS = {
    "n": "n must be 1; ask again for another answer",
    "best_of": "it must be 1; ask again for another answer",
    "tool_choice": "the model decides by itself whether it calls a tool; allowed: auto, none",
    "function_call": "functions are tools here; allowed: auto, none",
    "functions": "they are tools here: send tools",
    "top_logprobs": "log-probs are those of the drawn tokens alone",
    "prompt_logprobs": "log-probs are those of the drawn tokens alone",
    "stream": "this route answers when all tokens are drawn",
}


# -- checks of a value ------------------------------------------------------------------------------------------------


def _is_number(json_value: Any) -> bool:
    """Returns whether a value is a finite number in the range of a float."""
    return type(json_value) in (int, float) and abs(json_value) <= sys.float_info.max


def _make_instance_check(type_: type) -> Check:
    return lambda json_value: isinstance(json_value, type_)


def _make_integer_check(minimum: float, max_value: float = math.inf) -> Check:
    return lambda json_value: type(json_value) is int and minimum <= json_value <= max_value


def _list_of(is_element: Check, minimum: int = 0, maximum: float = math.inf) -> Check:
    return lambda json_value: (
        isinstance(json_value, list) and minimum <= len(json_value) <= maximum and all(map(is_element, json_value))
    )


def _is_empty(json_value: Any) -> bool:
    return json_value in (False, 0, "", [], {})


def _equals(*allowed_values: Any) -> Check:
    """Returns a check that a value equals one of `allowed_values` and has the same type, so that True does not equal 1."""
    return lambda json_value: any(
        type(json_value) is type(constant) and json_value == constant for constant in allowed_values
    )


def _is_stop(json_value: Any) -> bool:
    return (
        isinstance(json_value, str)
        and 0 < len(json_value) <= MAX_STOP_CHARACTERS
        and valid_text(json_value) == json_value
    )


def _is_tool(json_value: Any) -> bool:
    return (
        isinstance(json_value, Mapping)
        and json_value.get("type", "function") == "function"
        and _is_function(json_value.get("function"), "parameters")
    )


def _is_anthropic_tool(json_value: Any) -> bool:
    return (
        _is_function(json_value, "input_schema")
        and json_value.get("input_schema") is not None
        and json_value.get("type") in (None, "custom")
    )


def _is_function(json_value: Any, schema: str) -> bool:
    return (
        isinstance(json_value, Mapping)
        and isinstance(json_value.get("name"), str)
        and bool(json_value["name"])
        and isinstance(json_value.get("description") or "", str)
        and isinstance(json_value.get(schema) or {}, Mapping)
    )


def _is_free_choice(tool_choice: Mapping[str, Any]) -> bool:
    return tool_choice.get("type") in ("auto", "none") and not tool_choice.get("disable_parallel_tool_use")


# -- the routes -------------------------------------------------------------------------------------------------------

_are_stops = _list_of(_is_stop, maximum=MAX_STOP_TEXTS)
_are_objects = _list_of(_make_instance_check(Mapping))
_STOPS = (
    lambda json_value: _is_stop(json_value) or _are_stops(json_value),
    f"a text, or a list of at most {MAX_STOP_TEXTS} texts; each of 1 to {MAX_STOP_CHARACTERS} characters that UTF-8 can hold",
)
_STOP_IDS = (
    _list_of(_make_integer_check(0, 2**31 - 1), maximum=MAX_STOP_IDS),
    f"a list of at most {MAX_STOP_IDS} integers that are tokens of the model",
)
_TEXT, _FLAG = (_make_instance_check(str), "a text"), (_make_instance_check(bool), "true or false")
_OBJECT, _NUMBER = (_make_instance_check(Mapping), "an object"), (_is_number, "a number")
_INTEGER, _POSITIVE = (
    (_make_integer_check(-math.inf), "an integer"),
    (_make_integer_check(1), "an integer of at least 1"),
)
_MESSAGES = (_list_of(_make_instance_check(object), 1), "a list with at least one message")

#: Sampling keys that clients may send, but that have no effect, because the run sets them.
_RUN_KEYS = {"temperature": _NUMBER, "top_p": _NUMBER, "top_k": _INTEGER, "seed": _INTEGER}

#: OpenAI's and vLLM's keys that can change the sampling distribution, with a check for values that do not change it.
_SAMPLING: dict[str, Check] = {
    **dict.fromkeys(("n", "best_of"), _equals(1)),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "min_p", "min_tokens"), _equals(0, 0.0)),
    **dict.fromkeys(("repetition_penalty", "length_penalty"), _equals(1, 1.0)),
    **dict.fromkeys(
        (
            "logit_bias", "bad_words", "allowed_token_ids", "logits_processors", "ignore_eos", "use_beam_search",
            "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_decoding",
            "include_stop_str_in_output", "truncate_prompt_tokens", "thinking_token_budget",
        ),
        _is_empty,
    ),
    "prompt_logprobs": _equals(False), "top_logprobs": _equals(0), "functions": _is_empty,
    "function_call": _equals("auto", "none"),
    "response_format": lambda json_value: isinstance(json_value, Mapping) and json_value.get("type", "text") == "text",
}  # fmt: skip

CHAT = BodySchema(
    keys={
        "messages": _MESSAGES, "model": _TEXT,
        "tools": (_list_of(_is_tool), "a list of objects of type function, whose function has a name"),
        "stream": _FLAG, "stream_options": _OBJECT, "max_tokens": _POSITIVE, "max_completion_tokens": _POSITIVE,
        "stop": _STOPS, "stop_token_ids": _STOP_IDS, "logprobs": _FLAG, "return_token_ids": _FLAG,
        "return_tokens_as_token_ids": _FLAG, **_RUN_KEYS,
        **dict.fromkeys(("user", "service_tier", "safety_identifier", "prompt_cache_key"), _TEXT),
        "reasoning_effort": _TEXT, "verbosity": _TEXT,
        "metadata": _OBJECT, "store": _FLAG, "skip_special_tokens": _FLAG, "spaces_between_special_tokens": _FLAG,
    },
    neutral={
        **_SAMPLING,
        "tool_choice": _equals("auto", "none"), "parallel_tool_calls": _equals(True),
        "modalities": _equals(["text"]), "add_generation_prompt": _equals(True),
        **dict.fromkeys(
            (
                "audio", "prediction", "web_search_options", "echo", "continue_final_message", "chat_template",
                "chat_template_kwargs", "documents", "add_special_tokens",
            ),
            _is_empty,
        ),
    },
    required=("messages",),
    inner={"stream_options": BodySchema({"include_usage": _FLAG, "include_obfuscation": _FLAG}, key_prefix="stream_options.")},
)  # fmt: skip

MESSAGES = BodySchema(
    keys={
        "messages": _MESSAGES, "model": _TEXT, "stream": _FLAG,
        "tools": (_list_of(_is_anthropic_tool), "a list of objects that each have a name and an input_schema"),
        "system": (
            lambda json_value: isinstance(json_value, str) or _are_objects(json_value), "a text, or blocks of type text"
        ),
        "max_tokens": _POSITIVE, "stop_sequences": (_are_stops, _STOPS[1]),
        "tool_choice": _OBJECT, "thinking": _OBJECT, "metadata": _OBJECT, "service_tier": _TEXT, "output_config": _OBJECT,
        "context_management": _OBJECT, **_RUN_KEYS,
    },
    neutral={
        **_SAMPLING, "tool_choice": _is_free_choice, "mcp_servers": _is_empty, "container": _is_empty,
        "output_format": _is_empty,
    },
    required=("messages",),
    inner={
        "thinking": BodySchema({"type": _TEXT, "budget_tokens": _INTEGER, "display": _TEXT}, key_prefix="thinking."),
        "output_config": BodySchema({"effort": _TEXT}, neutral={"format": _is_empty}, key_prefix="output_config."),
    },
)  # fmt: skip

GENERATE = BodySchema(
    keys={
        "token_ids": (_list_of(_make_integer_check(-math.inf), 1), "a list of integers, with at least one"), "model": _TEXT,
        "sampling_params": _OBJECT, "request_id": _TEXT, "cache_salt": _TEXT, "priority": _INTEGER,
    },
    neutral={**_SAMPLING, "stream": _equals(False), "features": _is_empty},
    required=("token_ids",),
    inner={
        "sampling_params": BodySchema(
            {
                "max_tokens": _POSITIVE, "stop": _STOPS, "stop_token_ids": _STOP_IDS, **_RUN_KEYS,
                **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens", "detokenize"), _FLAG),
                "output_kind": _INTEGER,
            },
            neutral={**_SAMPLING, "logprobs": _equals(0, 1, True, False)},
            key_prefix="sampling_params.",
        )
    },
)  # fmt: skip

FEEDBACK = BodySchema(
    keys={
        "id": (_make_instance_check(str), "the id of a completion, a text"),
        "reward": (_is_number, "a finite number"),
    },
    required=("id", "reward"),
)
