"""Agents in frameworks as they come from PyPI, unmodified; each is imported in the Python that has it."""

from __future__ import annotations

import json
import os
from typing import Any

TOOL = {
    "type": "function",
    "function": {
        "name": "multiply", "description": "multiplies",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}  # fmt: skip


async def openai_client(task: Any, model: Any) -> dict[str, Any]:
    """OpenAI's own: tools, then a stream that is another conversation."""
    from openai import AsyncOpenAI

    client, messages = AsyncOpenAI(), list(task.messages)
    for _ in range(4):
        reply = await client.chat.completions.create(model=model.name, messages=messages, tools=[TOOL])
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            said = json.loads(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(said["a"] * said["b"])})
    other = [{"role": "user", "content": "stream, 12*7?"}]
    chunks = await client.chat.completions.create(model=model.name, messages=other, stream=True)
    said = "".join([chunk.choices[0].delta.content or "" async for chunk in chunks if chunk.choices])
    return {"response": f"{messages[-1]['content']} | {said}", "reward": float("84" in messages[-1]["content"])}


async def openai_agents(task: Any, model: Any) -> dict[str, Any]:
    """OpenAI Agents."""
    from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
    from openai import AsyncOpenAI

    set_tracing_disabled(True)

    def multiply(a: int, b: int) -> int:
        return a * b

    multiply.__annotations__ = {"a": int, "b": int, "return": int}
    agent = Agent(name="a", instructions="Multiply.", tools=[function_tool(multiply)],
                  model=OpenAIChatCompletionsModel(model.name, AsyncOpenAI()))  # fmt: skip
    said = str((await Runner.run(agent, task.question)).final_output)
    return {"response": said, "reward": float("84" in said)}


def langgraph(task: Any, model: Any) -> dict[str, Any]:
    """LangGraph's agent, over LangChain's client."""
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    def multiply(a: int, b: int) -> int:
        """Multiplies."""
        return a * b

    multiply.__annotations__ = {"a": int, "b": int, "return": int}
    graph = create_react_agent(ChatOpenAI(model=model.name, use_responses_api=False), [tool(multiply)])
    said = graph.invoke({"messages": [("user", task.question)]})["messages"][-1].content
    return {"response": said, "reward": float("84" in said)}


def _smolagents(task: Any, model: Any, kind: str) -> dict[str, Any]:
    import smolagents

    class Multiply(smolagents.Tool):
        name, description, output_type = "multiply", "multiplies", "integer"
        inputs = {name: {"type": "integer", "description": "a factor"} for name in "ab"}  # noqa: RUF012

        def forward(self, a: int, b: int) -> int:
            return a * b

    client = smolagents.OpenAIServerModel(
        model.name, api_base=model.base_url, api_key=model.api_key, tool_choice="auto"
    )
    agent = getattr(smolagents, kind)(tools=[Multiply()], model=client, max_steps=4, verbosity_level=0)
    said = str(agent.run(task.question))
    return {"response": said, "reward": float("84" in said)}


def smolagents_tools(task: Any, model: Any) -> dict[str, Any]:
    """smolagents, by calls of tools: it rewrites its own calls into text."""
    return _smolagents(task, model, "ToolCallingAgent")


def smolagents_code(task: Any, model: Any) -> dict[str, Any]:
    """smolagents, by code."""
    return _smolagents(task, model, "CodeAgent")


async def verifiers(task: Any, model: Any) -> dict[str, Any]:
    """verifiers, which renders conversations itself and asks with tokens. What it has of them comes back as the response."""
    import verifiers.v1 as vf
    from renderers.configs import Qwen3RendererConfig
    from verifiers.v1.agent import Agent
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.configs.client import TrainClientConfig
    from verifiers_harness import InprocConfig, Right

    client = TrainClientConfig(base_url=model.base_url, api_key_var="OPENAI_API_KEY", renderer=Qwen3RendererConfig(),
                               renderer_model_name=task.kwargs["tokenizer"])  # fmt: skip
    cfg = AgentConfig(
        harness=InprocConfig(id="verifiers_harness"), runtime={"type": "subprocess"}, model=model.name, client=client,
        sampling=vf.SamplingConfig(temperature=1.0, max_tokens=200), max_turns=6,
    )  # fmt: skip
    async with Agent(cfg) as agent:
        trace = await agent.run(Right(vf.TaskData(idx=0, prompt=task.question, system_prompt="Multiply.")))
    assert trace.ok, trace.errors
    kept = [{"ids": b.token_ids, "mask": b.sampled_mask, "logprobs": b.logprobs} for b in trace.branches]
    return {"response": json.dumps(kept), "reward": trace.reward}


def openenv(task: Any, model: Any) -> dict[str, Any]:
    """OpenEnv's proxy, which captures tokens, with Anthropic's Messages in front. The response is what it captured."""
    import socket

    import httpx
    from openenv.core.harness.capture import CaptureServer

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = CaptureServer(llm_url=model.base_url, model=model.name, port=port, api_key=model.api_key,
                           capture_level="tokens", max_output_tokens=200)  # fmt: skip
    server.start()
    session = server.registry.create()
    name = str(getattr(session, "session_id", None) or getattr(session, "id", None) or session)
    tools = [{"name": "multiply", "description": "m", "input_schema": TOOL["function"]["parameters"]}]
    messages: list[Any] = [{"role": "user", "content": task.question}]
    for _ in range(3):
        said = httpx.post(
            f"http://127.0.0.1:{port}/v1/messages", headers={"x-api-key": name, "anthropic-version": "2023-06-01"},
            json={"model": model.name, "max_tokens": 150, "messages": messages, "tools": tools}, timeout=60,
        ).json()  # fmt: skip
        messages.append({"role": "assistant", "content": said["content"]})
        used = [part for part in said["content"] if part["type"] == "tool_use"]
        if not used:
            break
        results = [
            {"type": "tool_result", "tool_use_id": u["id"], "content": str(u["input"]["a"] * u["input"]["b"])}
            for u in used
        ]
        messages.append({"role": "user", "content": results})
    nodes = server.registry.get(name).graph.nodes
    nodes = nodes() if callable(nodes) else nodes
    found = list(nodes.values()) if isinstance(nodes, dict) else list(nodes)
    kept = [{"prompt": n.prompt_ids, "ids": n.sampled_ids, "logprobs": n.sampled_logprobs} for n in found]
    server.stop()
    assert os.environ["ANTHROPIC_API_KEY"] == model.api_key
    return {"response": json.dumps(kept), "reward": 1.0}


def anthropic_client(task: Any, model: Any) -> dict[str, Any]:
    """Anthropic's own: tools, the last turn as a stream."""
    import anthropic

    client, messages = anthropic.Anthropic(), [{"role": "user", "content": task.question}]
    tools = [{"name": "multiply", "description": "m", "input_schema": TOOL["function"]["parameters"]}]
    options: dict[str, Any] = {"model": model.name, "max_tokens": 150, "system": "Multiply.", "tools": tools}
    reply = client.messages.create(messages=messages, **options)
    assert reply.stop_reason == "tool_use", reply
    results = [
        {"type": "tool_result", "tool_use_id": part.id, "content": str(part.input["a"] * part.input["b"])}
        for part in reply.content
        if part.type == "tool_use"
    ]
    messages += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": results}]
    with client.messages.stream(messages=messages, **options) as stream:
        said = "".join(stream.text_stream)
        assert stream.get_final_message().stop_reason == "end_turn"
    return {"response": said, "reward": float("84" in said)}
