"""Framework agents without user code: the model with tool servers, and environments of verifiers and OpenEnv.

`main.py` loads this file. It needs Python 3.8 or newer and the package of the agent's kind, but not rlhpc.
"""

from __future__ import annotations

import contextlib
import importlib
import json
from typing import Any, Callable, Sequence  # noqa: UP035 (Python 3.8)

#: Module that each kind imports.
_PACKAGES = {"verifiers": "verifiers.v1", "openenv": "openenv.core.generic_client"}


def agent_of(framework_name: str, options: dict[str, Any], helpers: dict[str, Any]) -> Callable[[Any, Any], Any]:
    """Returns the function that runs an episode with an agent of this kind.

    Args:
        framework_name: `mcp`, `verifiers` or `openenv`.
        options: Section `agent.framework`; for `mcp`, a mapping with `servers`.
        helpers: The modules `mcp_client` as `servers` and `policy_text` as `text`; the constructor of a shell as `shell`.

    Raises:
        ImportError: The package of the kind is missing.
    """
    if framework_name in _PACKAGES:
        importlib.import_module(_PACKAGES[framework_name])
    return {"mcp": _make_tool_agent, "verifiers": _make_verifiers_agent, "openenv": _make_openenv_agent}[
        framework_name
    ](options, helpers)


# -- tool servers ----------------------------------------------------------------------------------------------------


def _make_tool_agent(options: dict[str, Any], helpers: dict[str, Any]) -> Callable[[Any, Any], Any]:
    servers = helpers["servers"]

    def solve(task: Any, model: Any) -> dict[str, Any]:
        with contextlib.ExitStack() as stack:
            owners, tool_specs = {}, []
            for section in options["servers"]:
                shell = section.get("shell")
                tool_server = (
                    helpers["shell"]()
                    if shell
                    else servers.ToolServer(section["command"], section["url"], model.reads_images)
                )
                server = stack.enter_context(tool_server)
                for tool in server.tools():
                    name = tool["function"]["name"]
                    if name in owners:
                        raise ValueError(
                            f"two of agent.servers have a tool {name!r}; a call says only that: leave one out"
                        )
                    owners[name] = server
                    tool_specs.append(tool)
            return _run_conversation(task, model, owners, tool_specs, servers.ToolFailed, helpers["text"].parse_json)

    return solve


def _run_conversation(
    task: Any, model: Any, owners: dict[str, Any], tool_specs: list[Any], failure: Any, parse: Callable[[str], Any]
) -> dict[str, Any]:
    messages, tool_counts = list(task.messages), {"tool_calls": 0, "tool_errors": 0}
    while True:
        reply = _ask(model, messages, tool_specs)
        if reply is None:
            break
        messages.append(reply)
        if not reply.get("tool_calls"):
            break
        for call in reply["tool_calls"]:
            tool_counts["tool_calls"] += 1
            try:
                result_content = _call_tool(call["function"], owners, parse)
            except (failure, ValueError) as error:
                tool_counts["tool_errors"] += 1
                result_content = f"error: {error}"
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result_content})
    answers = [str(message["content"]) for message in messages if message["role"] == "assistant"]
    return {"response": answers[-1] if answers else "", **tool_counts}


def _ask(model: Any, messages: list[Any], tool_specs: list[Any] | None = None) -> Any:
    """Returns the model's next message; None if the episode or the context is full."""
    try:
        return model.chat(messages, tool_specs or None)
    except Exception as error:
        if getattr(error, "code", None) == "context_length_exceeded":
            return None
        raise


def _call_tool(function: dict[str, Any], owners: dict[str, Any], parse: Callable[[str], Any]) -> Any:
    if function["name"] not in owners:
        raise ValueError(f"there is no tool {function['name']!r}; there are: {', '.join(owners)}")
    arguments = parse(function.get("arguments") or "{}")
    if not isinstance(arguments, dict):
        raise ValueError("arguments must be an object")
    return owners[function["name"]].call(function["name"], arguments)


# -- verifiers --------------------------------------------------------------------------------------------------------


def pick_task(tasks: Sequence[Any], task: Any) -> Any:
    """Returns the task of a problem from a taskset. The problem's `meta["idx"]`, or else its id, is the index.

    Raises:
        ValueError: The index is out of range.
    """
    task_index = int(task.meta.get("idx", task.id))
    if not 0 <= task_index < len(tasks):
        raise ValueError(
            f"agent.framework has tasks 0 to {len(tasks) - 1}, and the source asks for {task_index}: give the source no more "
            "problems (its size), or their numbers in the column idx"
        )
    return tasks[task_index]


def _make_verifiers_agent(options: dict[str, Any], helpers: dict[str, Any]) -> Callable[[Any, Any], Any]:
    """Returns an agent for an environment of verifiers. Task (`pick_task`), harness and rewards are the environment's."""
    del helpers
    import verifiers.v1 as vf
    from verifiers.v1.configs.client import EvalClientConfig

    environment = vf.load_environment(vf.resolve_env_config(options))
    tasks = list(environment.taskset)
    if not tasks:
        raise ValueError("agent.framework has no tasks")

    async def solve(task: Any, model: Any) -> dict[str, Any]:
        client = EvalClientConfig(base_url=model.base_url, api_key_var="OPENAI_API_KEY")
        context = vf.ModelContext(model=model.name, client=client, sampling=vf.SamplingConfig())
        selected_task = pick_task(tasks, task)
        async with environment.serving():
            episode = await environment.run_episode(selected_task, context)
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            raise RuntimeError(
                "; ".join(f"{trace_error.type}: {trace_error.message}" for trace_error in errors)
                or "the episode is not ok"
            )
        traces = [trace for trace in episode.traces if getattr(trace.agent, "trainable", True)] or episode.traces
        episode_outcome = {
            "reward": sum(trace.reward for trace in traces) / len(traces),
            "response": traces[-1].last_reply or "",
        }
        for trace in traces:
            for name, metric_value in trace.metrics.items():
                episode_outcome[name] = episode_outcome.get(name, 0.0) + float(metric_value) / len(traces)
        return episode_outcome

    return solve


# -- OpenEnv ----------------------------------------------------------------------------------------------------------


def _make_openenv_agent(options: dict[str, Any], helpers: dict[str, Any]) -> Callable[[Any, Any], Any]:
    """Returns an agent for an environment of OpenEnv at `base_url`: the model writes actions and reads observations."""
    del helpers
    from openenv.core.generic_client import GenericEnvClient

    key, observation_key = options.get("action", "message"), options.get("observation")

    def text(observation: Any) -> str:
        if observation_key and isinstance(observation, dict):
            observation = observation.get(observation_key, "")
        return observation if isinstance(observation, str) else json.dumps(observation)

    def solve(task: Any, model: Any) -> dict[str, Any]:
        rewards, messages = [], list(task.messages)
        client = GenericEnvClient(base_url=options["base_url"])
        with client.sync() as environment:
            transition = environment.reset(**options.get("reset", {}), seed=task.seed % (1 << 31))
            messages.append({"role": "user", "content": text(transition.observation)})
            while not transition.done:
                reply = _ask(model, messages)
                if reply is None:
                    break
                action = reply.get("content") or ""
                transition = environment.step({key: action})
                if transition.reward is not None:
                    rewards.append(float(transition.reward))
                messages += [reply, {"role": "user", "content": text(transition.observation)}]
        return {"reward": sum(rewards), "steps": len(messages) // 2, "done": float(bool(transition.done))}

    return solve
