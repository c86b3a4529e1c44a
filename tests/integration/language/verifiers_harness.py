"""A harness and a task of verifiers: the loop runs in its own process, without a container."""

from __future__ import annotations

import json
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.harness import Harness
from verifiers.v1.runtimes import ProgramResult

TOOL = {
    "type": "function",
    "function": {
        "name": "multiply", "description": "multiplies",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}  # fmt: skip


class InprocConfig(HarnessConfig):
    """No options."""


class Inproc(Harness[InprocConfig]):
    """Multiplies by tool, then answers."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any,
        tool_interception_url: Any = None,
    ) -> ProgramResult:  # fmt: skip
        system, prompt = self.resolve_text_prompt(data)
        messages: list[Any] = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": prompt})
        client = AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0)
        for _ in range(6):
            reply = await client.chat.completions.create(model=ctx.model, messages=messages, tools=[TOOL])
            message = reply.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                said = json.loads(call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": str(said["a"] * said["b"])})
        return ProgramResult(0, "", "")


class Right(vf.Task[vf.TaskData]):
    """1 where the last reply has the product."""

    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float("84" in (trace.last_reply or ""))


__all__ = ["Inproc", "InprocConfig", "Products"]


class Products(vf.Taskset[Right]):
    """Two tasks."""

    def load(self) -> list[Right]:
        """Both have the same answer."""
        return [
            Right(vf.TaskData(idx=i, prompt=p, system_prompt="Multiply.")) for i, p in enumerate(("12*7?", "7*12?"))
        ]
