"""Task and model client of an episode: the arguments of an agent's function.

`main.py` loads this file. Like `main.py`, it needs only the standard library and Python 3.8 or newer, not rlhpc.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import importlib.util
import inspect
import json
import traceback
import urllib.parse
from pathlib import Path
from typing import Any, Awaitable, Callable, Sequence  # noqa: UP035 (Python 3.8)


def _load(*path: str) -> Any:
    """Loads a file of rlhpc as a module, for interpreters without rlhpc."""
    file = Path(__file__).resolve().parent.joinpath(*path)
    module_spec = importlib.util.spec_from_file_location(f"rlhpc_{file.stem}", file)
    assert module_spec is not None and module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    return module


_proxies: Any = _load("..", "..", "..", "runtime", "proxies.py")


class ModelError(Exception):
    """Error of a refused request to the model.

    Attributes:
        status: HTTP status.
        code: `context_length_exceeded` if the episode or the context is full.
    """

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(f"{status}: {message}")
        self.status, self.code = status, code


class Model:
    """Client of the trained model, for agents that have no client. Other agents use `base_url` and `api_key`.

    Attributes:
        base_url: URL of the OpenAI routes, including `/v1`.
        api_key: Key of the episode.
        name: Name of the model.
        process_key, session_id: Key for a client that serves many episodes, and this episode's `X-Session-ID`.
        reads_images: Whether messages may contain images. The former name `looks` works for two releases.
        ids: Ids of the completions of `chat`, in order, for delayed rewards.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str,
        name: str,
        process_key: str = "",
        session_id: str = "",
        reads_images: bool = False,
    ) -> None:
        self.reads_images = reads_images
        self.base_url, self.api_key, self.name = base_url, api_key, name
        self.process_key, self.session_id = process_key, session_id
        self.ids: list[str] = []

    def __getattr__(self, name: str) -> Any:
        """Returns `reads_images` under its former name."""
        if name == "looks":
            return self.reads_images
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def chat(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None = None, **options: Any
    ) -> dict[str, Any]:
        """Returns the next message that the model samples.

        Args:
            messages: Conversation so far.
            tools: Tools that the model may call, in OpenAI's format.
            options: Additional keys of the request, such as `max_tokens`.

        Raises:
            ModelError: The request is refused.
        """
        body: dict[str, Any] = {"model": self.name, "messages": list(messages), **options}
        if tools:
            body["tools"] = tools
        reply = self.post("/chat/completions", body)
        self.ids.append(reply["id"])
        message: dict[str, Any] = reply["choices"][0]["message"]
        return message

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Sends a request to a route of the gateway below `/v1`; returns the JSON of the response.

        Raises:
            ModelError: The request is refused.
        """
        url = urllib.parse.urlsplit(self.base_url)
        # http.client never uses a proxy
        with contextlib.closing(http.client.HTTPConnection(url.hostname or "", url.port)) as connection:
            headers = {"Authorization": f"Bearer {self.api_key}", "Content-Type": "application/json"}
            connection.request("POST", url.path + path, json.dumps(body).encode(), headers)
            response = connection.getresponse()
            reply_bytes = response.read()
        try:
            answer: dict[str, Any] = json.loads(reply_bytes)
        except ValueError:
            raise ModelError(response.status, reply_bytes[:200].decode(errors="replace")) from None
        if response.status != 200:
            error = answer.get("error") or {}
            raise ModelError(response.status, str(error.get("message")), error.get("code"))
        return answer


class AgentTask:
    """Task of an episode.

    Attributes:
        id: Id of the prompt.
        messages: Initial conversation.
        question: Last user message of the initial conversation.
        answer: Reference answer, as text.
        meta: Additional columns of the dataset.
        seed: Seed of this episode, for the agent's random choices.
        kwargs: `agent.kwargs`.
    """

    def __init__(self, **values: Any) -> None:
        self.id, self.seed = values.get("id", 0), values.get("seed", 0)
        self.messages, self.question = values.get("messages", []), values.get("question", "")
        self.answer, self.meta, self.kwargs = values.get("answer", ""), values.get("meta", {}), values.get("kwargs", {})


def run_agent(run: Callable[..., Any], ticket: dict[str, Any]) -> dict[str, Any]:
    """Runs an agent on a ticket; returns its return value as an outcome.

    Raises:
        TypeError: The agent returned an unsupported type, or both a reward and `later`.
    """
    model_keys = ("base_url", "api_key", "model", "process_key", "session_id", "looks")
    model = Model(*(ticket[key] for key in model_keys))
    return_value = run(AgentTask(**ticket["task"]), model)
    if inspect.isawaitable(return_value):
        return_value = asyncio.run(_await_value(return_value))
    if return_value is None:
        return {}
    if isinstance(return_value, (bool, int, float)):
        return {"reward": float(return_value)}
    if not isinstance(return_value, dict):
        raise TypeError(f"the agent returned a {type(return_value).__name__}; allowed: a number, a dict, None")
    agent_outcome: dict[str, Any] = {}
    for name, field_value in return_value.items():
        if name == "response":
            agent_outcome[name] = str(field_value)
        elif name == "turn_rewards":
            agent_outcome[name] = [float(reward) for reward in field_value]
        elif name == "later":
            agent_outcome[name] = (
                [str(completion_id) for completion_id in field_value]
                if isinstance(field_value, (list, tuple))
                else bool(field_value)
            )
        elif name == "rewards":
            agent_outcome[name] = {str(role): float(reward) for role, reward in field_value.items()}
        elif field_value is not None:
            agent_outcome.setdefault("metrics", {})[name] = float(field_value)
    if "reward" in agent_outcome.get("metrics", {}):
        agent_outcome["reward"] = agent_outcome["metrics"].pop("reward")
    if agent_outcome.get("later") and not {"reward", "rewards", "turn_rewards"}.isdisjoint(agent_outcome):
        raise TypeError(
            "the agent returned a reward and `later`, by which the reward comes from elsewhere: leave one out"
        )
    if "reward" not in agent_outcome and "rewards" not in agent_outcome and "turn_rewards" in agent_outcome:
        agent_outcome["reward"] = sum(agent_outcome["turn_rewards"])
    return agent_outcome


def check_outcome(raw_outcome: Any) -> dict[str, Any]:
    """Checks an outcome that another process has written, and returns it.

    Raises:
        ValueError: The outcome has an unknown key or a value of a wrong type.
    """
    if not isinstance(raw_outcome, dict):
        raise ValueError(f"its outcome is a {type(raw_outcome).__name__}, no object")
    for name, field_value in raw_outcome.items():
        if name not in _CHECKS:
            raise ValueError(f"its outcome has {name[:80]!r}; allowed: {', '.join(_CHECKS)}")
        if not _CHECKS[name](field_value):
            raise ValueError(f"{name} of its outcome is {repr(field_value)[:80]}")
    return raw_outcome


def _is_number(json_value: Any) -> bool:
    return isinstance(json_value, float) or (
        isinstance(json_value, int) and not isinstance(json_value, bool) and abs(json_value) < 1 << 1000
    )


def _is_number_dict(json_value: Any) -> bool:
    return isinstance(json_value, dict) and all(_is_number(dict_value) for dict_value in json_value.values())


def _make_instance_check(type_: type) -> Callable[[Any], bool]:
    return lambda json_value: isinstance(json_value, type_)


def _list_of(is_element: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda json_value: isinstance(json_value, list) and all(map(is_element, json_value))


#: Checks of an outcome's values by key.
_CHECKS: dict[str, Callable[[Any], bool]] = {
    "reward": _is_number, "rewards": _is_number_dict, "turn_rewards": _list_of(_is_number), "metrics": _is_number_dict,
    "response": _make_instance_check(str), "error": _make_instance_check(str),
    "timeout": _make_instance_check(bool), "cut": _make_instance_check(bool),
    "left": _is_number,
    "later": lambda json_value: isinstance(json_value, bool) or _list_of(_make_instance_check(str))(json_value),
}  # fmt: skip


async def _await_value(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


def environment_of(ticket: dict[str, Any]) -> dict[str, str]:
    """Returns an agent's environment variables: the variables of OpenAI's and Anthropic's clients, and rlhpc's."""
    url = urllib.parse.urlsplit(ticket["base_url"])
    return {
        **_proxies.without_proxy([url.hostname or ""]),
        "OPENAI_BASE_URL": ticket["base_url"],
        "OPENAI_API_KEY": ticket["api_key"],
        "OPENAI_API_BASE": ticket["base_url"],
        "ANTHROPIC_BASE_URL": f"{url.scheme}://{url.netloc}",
        "ANTHROPIC_API_KEY": ticket["api_key"],
        "RLHPC_SOCKET": ticket["socket"],
        "RLHPC_PROCESS_KEY": ticket["process_key"],
        "RLHPC_SESSION_ID": ticket["session_id"],
    }


def describe(error: BaseException) -> str:
    """Returns the type and message of an exception, and the line that raised it."""
    last_frame = traceback.extract_tb(error.__traceback__)[-1:]
    location = f" ({Path(last_frame[0].filename).name}, line {last_frame[0].lineno})" if last_frame else ""
    return f"{type(error).__name__}: {error}{location}"


def redact(text: str, ticket: dict[str, Any]) -> str:
    """Replaces the episode's keys in a text by `KEY`."""
    for name in ("api_key", "process_key", "session_id"):
        text = text.replace(ticket[name], "KEY")
    return text


def without_reference(task: dict[str, Any]) -> dict[str, Any]:
    """Returns a task without the reference answer and the metadata."""
    return {name: field_value for name, field_value in task.items() if name not in ("answer", "meta")}
