"""Requests to the endpoint by unmodified clients, drawn by a seed, each with what its client must get.

Read in the clients' Python."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from typing import Any

#: What the model always says.
TEXT = "Thought: I look.\nAction: find[x]\nObservation: none of 12 found, so I stop."
STOPS = ["\nObservation", "Action", "none", "zzz", "look.\nA", "Observation:", "12", "Thought", ".", "I stop"]
TOOL = {
    "name": "multiply",
    "description": "m",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
CALL = {"id": "c1", "type": "function", "function": {"name": "multiply", "arguments": '{"a": 1}'}}


def expected(stops: list[str]) -> tuple[str, str | None]:
    """The text up to the first stop text, and that one; of those at one place the first that was named."""
    at, match = min(
        ((TEXT.find(stop), stop) for stop in stops if stop in TEXT), key=lambda one: one[0], default=(len(TEXT), None)
    )
    return TEXT[:at], match


def conversation(draw: random.Random) -> list[dict[str, Any]]:
    """A conversation in one of the ways in which clients write it."""
    question: Any = draw.choice(
        ["find x", "", "𝄞 é", [{"type": "text", "text": "find"}, {"type": "text", "text": " x"}]]
    )
    messages: list[dict[str, Any]] = []
    if draw.random() < 0.4:
        messages.append({"role": draw.choice(["system", "developer"]), "content": "Be brief."})
    messages.append({"role": "user", "content": question, **({"name": "me"} if draw.random() < 0.2 else {})})
    if draw.random() < 0.4:
        reply: dict[str, Any] = {
            "role": "assistant",
            "content": draw.choice([None, "", "I multiply."]),
            "tool_calls": [CALL],
        }
        messages += [
            reply,
            {"role": "tool", "tool_call_id": "c1", "content": draw.choice(["1", "", [{"type": "text", "text": "1"}]])},
        ]
    return messages


def options(draw: random.Random) -> tuple[dict[str, Any], bool]:
    """Options of OpenAI's, and whether they can be had."""
    tools = [{"type": "function", "function": TOOL}]
    good: list[dict[str, Any]] = [
        {}, {"temperature": 0.2, "top_p": 0.9}, {"n": 1}, {"seed": 7}, {"user": "me"}, {"max_tokens": 300}, {"tools": tools},
        {"max_completion_tokens": 300}, {"tools": tools, "tool_choice": "auto"}, {"tools": tools, "tool_choice": "none"},
        {"presence_penalty": 0}, {"response_format": {"type": "text"}}, {"logprobs": True}, {"logit_bias": {}},
        {"tools": tools, "parallel_tool_calls": True},
        {"metadata": {"run": "1"}, "store": False}, {"extra_body": {"return_token_ids": True}}, {"reasoning_effort": "low"},
    ]  # fmt: skip
    bad: list[dict[str, Any]] = [
        {"tools": tools, "tool_choice": "required"}, {"n": 3}, {"logprobs": True, "top_logprobs": 5},
        {"logit_bias": {"5": 10}},
        {"tools": tools, "tool_choice": {"type": "function", "function": {"name": "multiply"}}}, {"frequency_penalty": 0.7},
        {"functions": [TOOL]}, {"response_format": {"type": "json_object"}}, {"extra_body": {"min_p": 0.1}},
        {"extra_body": {"guided_regex": "a+"}}, {"tools": tools, "parallel_tool_calls": False}, {"presence_penalty": 1.5},
        {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}, {"extra_body": {"ignore_eos": True}},
        {"modalities": ["text", "audio"], "audio": {"voice": "alloy", "format": "wav"}}, {"max_tokens": -3},
        {"max_tokens": "many"}, {"stop": ["x"] * 40}, {"stop": ["y" * 4000]}, {"stream_options": "x"},
        {"tools": [{"type": "function"}]},
    ]  # fmt: skip
    ok = draw.random() < 0.65
    return draw.choice(good if ok else bad), ok


def of_openai(draw: random.Random, model: Any) -> tuple[dict[str, Any], str]:
    """A request by OpenAI's client: what was asked, and what is wrong with what came; "" if nothing."""
    import openai

    asked, ok = options(draw)
    stops = draw.sample(STOPS, draw.randint(0, 4))
    body = {
        "model": model.name,
        "messages": conversation(draw),
        **({"stop": stops[0] if len(stops) == 1 else stops} if stops else {}),
        **asked,
    }
    client = openai.OpenAI(max_retries=0)
    stream = draw.random() < 0.4 and "stream_options" not in asked
    extra = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    return body, answered(lambda: client.chat.completions.create(**body, **extra), stream, ok, stops)


def answered(ask: Callable[[], Any], stream: bool, ok: bool, stops: list[str]) -> str:
    """Asks by a client with OpenAI's answers and errors; returns what is wrong with what came; "" if nothing."""
    import openai

    try:
        reply = ask()
        if stream:
            choices = [chunk.choices[0] for chunk in reply if chunk.choices]
            text = "".join(choice.delta.content or "" for choice in choices)
            reasons = [choice.finish_reason for choice in choices if choice.finish_reason]
        else:
            text, reasons = reply.choices[0].message.content or "", [reply.choices[0].finish_reason]
    except openai.BadRequestError:
        return "" if not ok else "refused, though it can be had"
    except openai.APIError as error:
        return f"{type(error).__name__}: {error}"[:100]
    return verdict(ok, text, expected(stops)[0]) or ("" if reasons == ["stop"] else f"finish_reason {reasons}")


def of_anthropic(draw: random.Random, model: Any) -> tuple[dict[str, Any], str]:
    """A request by Anthropic's client; see `of_openai`."""
    import anthropic

    tools = [{"name": "multiply", "description": "m", "input_schema": TOOL["parameters"]}]
    good: list[dict[str, Any]] = [
        {}, {"extra_body": {"temperature": 0.5}}, {"system": "Be brief."}, {"tools": tools},
        {"system": [{"type": "text", "text": "Be brief."}]},
        {"tools": tools, "tool_choice": {"type": "auto"}}, {"tools": tools, "tool_choice": {"type": "none"}},
        {"thinking": {"type": "disabled"}}, {"metadata": {"user_id": "me"}}, {"extra_body": {"top_k": 5}},
    ]  # fmt: skip
    bad: list[dict[str, Any]] = [
        {"tools": tools, "tool_choice": {"type": "any"}},
        {"tools": tools, "tool_choice": {"type": "tool", "name": "multiply"}},
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, {"stop_sequences": [""]}, {"system": 5},
        {"tools": tools, "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        {"extra_body": {"thinking": "x"}},
        {"extra_body": {"tool_choice": "auto"}}, {"extra_body": {"output_format": {"type": "json_schema", "schema": {}}}},
    ]  # fmt: skip
    ok = draw.random() < 0.65
    stops = draw.sample(STOPS, draw.randint(0, 4))
    asked = draw.choice(good if ok else bad)
    content: Any = draw.choice(["find x", [{"type": "text", "text": "find x"}]])
    messages: list[Any] = [{"role": "user", "content": content}]
    if draw.random() < 0.4:
        used = {"type": "tool_use", "id": "c1", "name": "multiply", "input": {"a": 1}}
        result = {
            "type": "tool_result",
            "tool_use_id": "c1",
            "content": draw.choice(["1", [{"type": "text", "text": "1"}]]),
        }
        messages += [{"role": "assistant", "content": [used]}, {"role": "user", "content": [result]}]
    body = {
        "model": model.name,
        "max_tokens": 300,
        "messages": messages,
        **({"stop_sequences": stops} if stops else {}),
        **asked,
    }
    client = anthropic.Anthropic(max_retries=0)
    try:
        if draw.random() < 0.4:
            with client.messages.stream(**body) as stream:
                reply = stream.get_final_message()
        else:
            reply = client.messages.create(**body)
    except anthropic.BadRequestError:
        return body, "" if not ok else "refused, though it can be had"
    except anthropic.APIError as error:
        return body, f"{type(error).__name__}: {error}"[:100]
    text, (due, match) = "".join(block.text for block in reply.content if block.type == "text"), expected(stops)
    wanted = ("end_turn", None) if match is None else ("stop_sequence", match)
    came = (reply.stop_reason, reply.stop_sequence)
    return body, verdict(ok, text, due) or ("" if came == wanted else f"stop_reason {came}, not {wanted}")


def of_langchain(draw: random.Random, model: Any) -> tuple[dict[str, Any], str]:
    """A request by LangChain's client; see `of_openai`."""
    import openai
    from langchain_openai import ChatOpenAI

    stops = draw.sample(STOPS, draw.randint(1, 4))
    chat: Any = ChatOpenAI(model=model.name, use_responses_api=False, max_retries=0)
    ok = draw.random() < 0.6
    if draw.random() < 0.5:
        chat = chat.bind_tools(
            [{"type": "function", "function": TOOL}], tool_choice="auto" if ok else draw.choice(["any", "multiply"])
        )
    elif not ok:
        chat = chat.bind(response_format={"type": "json_object"})
    try:
        if draw.random() < 0.4:
            text = "".join(str(chunk.content) for chunk in chat.stream([("user", "find x")], stop=stops))
        else:
            text = str(chat.invoke([("user", "find x")], stop=stops).content)
    except openai.BadRequestError:
        return {"stop": stops}, "" if not ok else "refused, though it can be had"
    except openai.APIError as error:
        return {"stop": stops}, f"{type(error).__name__}: {error}"[:100]
    return {"stop": stops}, verdict(ok, text, expected(stops)[0])


def of_litellm(draw: random.Random, model: Any) -> tuple[dict[str, Any], str]:
    """A request by LiteLLM, which passes on OpenAI's options; see `of_openai`."""
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the web at its import
    import litellm

    asked, ok = options(draw)
    # Of these it leaves out itself what it does not pass.
    while "stream_options" in asked or len(asked.get("stop", ())) > 4:
        asked, ok = options(draw)
    stops = draw.sample(STOPS, draw.randint(0, 4))
    body = {
        "model": f"openai/{model.name}",
        "messages": conversation(draw),
        **({"stop": stops} if stops else {}),
        **asked,
    }
    stream = draw.random() < 0.4
    extra = {"api_base": model.base_url, "num_retries": 0, "max_retries": 0, "stream": stream}
    return body, answered(lambda: litellm.completion(**body, **extra), stream, ok, stops)


def of_pydantic_ai(draw: random.Random, model: Any) -> tuple[dict[str, Any], str]:
    """A request by Pydantic AI's agent; see `of_openai`. A reply without text it would ask for again."""
    import pydantic_ai
    from pydantic_ai.models.openai import OpenAIChatModel

    ok = draw.random() < 0.6
    good: list[dict[str, Any]] = [
        {}, {"temperature": 0.3, "top_p": 0.9}, {"max_tokens": 300}, {"seed": 3}, {"presence_penalty": 0.0}, {"timeout": 30.0},
        {"parallel_tool_calls": True}, {"extra_body": {"top_k": 5}}, {"openai_reasoning_effort": "low"},
    ]  # fmt: skip
    bad: list[dict[str, Any]] = [
        {"frequency_penalty": 0.4}, {"presence_penalty": 1.0}, {"logit_bias": {"5": 10}}, {"parallel_tool_calls": False},
        {"extra_body": {"min_p": 0.1}}, {"extra_body": {"guided_regex": "a+"}}, {"output": pydantic_ai.NativeOutput},
        {"output": pydantic_ai.ToolOutput},
    ]  # fmt: skip
    asked = dict(draw.choice(good if ok else bad))
    output = asked.pop("output", None)
    tools = [] if output else [pydantic_ai.Tool(lambda a: a, name="multiply", description="m")]
    stops = draw.sample([stop for stop in STOPS if expected([stop])[0]], draw.randint(0, 4))
    agent: Any = pydantic_ai.Agent(
        OpenAIChatModel(model.name), instructions="Be brief.", tools=tools, retries=0,
        output_type=output(int) if output else str,
    )  # fmt: skip
    settings = {**({"stop_sequences": stops} if stops else {}), **asked}
    body = {**settings, "output": str(output)}
    try:
        if draw.random() < 0.4:
            with agent.run_stream_sync("find x", model_settings=settings) as result:
                text = str(result.get_output())
        else:
            text = str(agent.run_sync("find x", model_settings=settings).output)
    except pydantic_ai.ModelHTTPError as error:
        refused = error.status_code == 400
        return body, "" if refused and not ok else f"{error.status_code}: {error}"[:100]
    except pydantic_ai.AgentRunError as error:
        return body, f"{type(error).__name__}: {error}"[:100]
    return body, verdict(ok, text, expected(stops)[0])


def verdict(ok: bool, text: str, due: str) -> str:
    if not ok:
        return "answered, though it cannot be had"
    return "" if text.strip() == due.strip() else f"says {text!r}, not {due!r}"


def solve(task: Any, model: Any) -> dict[str, Any]:
    """The agent: as many requests as `count` says; the response lists those of wrong results."""
    draw, wrong = random.Random(task.kwargs["seed"]), list[Any]()
    for number in range(task.kwargs["count"]):
        client = draw.choice([of_openai, of_anthropic, of_langchain, of_litellm, of_pydantic_ai])
        asked, why = client(draw, model)
        if why:
            wrong.append([number, client.__name__, why, json.dumps(asked, default=str)[:300]])
    return {"response": json.dumps(wrong), "reward": float(len(wrong))}
