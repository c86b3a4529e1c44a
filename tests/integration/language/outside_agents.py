"""Agents of tests. Nothing heavy is imported: each rank's agents are started with an interpreter of their own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any


def own_loop(task: Any, model: Any) -> dict[str, Any]:
    """Multiplies by tool, then answers."""
    tools = [{"type": "function", "function": {"name": "multiply", "parameters": {"type": "object"}}}]
    messages = list(task.messages)
    for _ in range(4):
        reply = model.chat(messages, tools)
        messages.append(reply)
        if not reply.get("tool_calls"):
            break
        for call in reply["tool_calls"]:
            said = json.loads(call["function"]["arguments"])
            result = str(said["a"] * said["b"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    answer = str(messages[-1]["content"])
    return {"reward": float(task.answer in answer), "response": answer, "messages": len(messages)}


async def three_turns(task: Any, model: Any) -> float:
    """Goes on twice, whatever the model says."""
    messages = list(task.messages)
    for _ in range(3):
        messages += [model.chat(messages), {"role": "user", "content": "Go on."}]
    return float(len(messages))


def paid_by_turn(task: Any, model: Any) -> dict[str, Any]:
    """Two turns, each with a reward; one too many where it is told so."""
    messages = list(task.messages)
    for _ in range(2):
        messages += [model.chat(messages), {"role": "user", "content": "Go on."}]
    return {"turn_rewards": [0.5, -1.0] + [0.0] * task.kwargs.get("more", 0)}


def one_key(task: Any, model: Any) -> float:
    """Asks as a process would that has one key for all episodes."""
    assert os.environ["RLHPC_PROCESS_KEY"] == model.process_key and os.environ["RLHPC_SESSION_ID"] == model.session_id
    head = {"Authorization": f"Bearer {model.process_key}", "X-Session-ID": model.session_id}
    body = json.dumps({"messages": task.messages}).encode()
    with urllib.request.urlopen(urllib.request.Request(f"{model.base_url}/chat/completions", body, head)) as said:
        json.load(said)
    if task.seed % 2:
        raise ValueError(f"{model.api_key} {model.process_key} {model.session_id}")
    return 1.0


def chaos(task: Any, model: Any) -> float:
    """Does what its seed says."""
    model.chat(task.messages)
    what, notes = task.kwargs["what"], Path(task.kwargs["notes"])
    if task.seed % 2:
        return 1.0
    if what == "hang":
        time.sleep(1000)
    if what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "raise":
        raise ValueError(f"no, with {model.api_key}")
    if what == "fork":  # and out of its group
        started = subprocess.Popen(
            [sys.executable, "-c", "import os, time; os.fork() or os.setsid(); time.sleep(1000)"],
            start_new_session=True,
        )
        notes.joinpath(f"{task.seed}.pid").write_text(str(started.pid))
        raise ValueError("it has started something")
    if what == "flood":
        while True:
            print("x" * 65536)
    if what == "late":  # goes on asking after its end
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                while True:
                    model.chat(task.messages)
            os._exit(0)
        raise ValueError("it goes on")
    if what == "storm":  # floods the endpoint

        def ask() -> None:
            while True:
                with contextlib.suppress(Exception):
                    model.chat(task.messages)

        for _ in range(64):
            threading.Thread(target=ask, daemon=True).start()
        time.sleep(1000)
    if what == "pay":  # the model's key is no key to the reward
        for path in ("/reward", "/../rlhpc/reward", "/sessions"):
            model.post(path, {"reward": 1e9})
    return 1.0


def branching(task: Any, model: Any) -> float:
    """Asks, then asks something else."""
    model.chat(task.messages)
    model.chat([{"role": "user", "content": "Something else"}])
    return 0.5


def odd_digits(task: Any, model: Any) -> dict[str, Any]:
    """Two turns; the reward is the share of odd digits. Some episodes fail, and some are of two samples."""
    said, messages = "", list(task.messages)
    for _ in range(2):
        reply = model.chat(messages, max_tokens=6)
        said += reply["content"]
        messages += [reply, {"role": "user", "content": "+1="}]
    if task.seed % 7 == 0:
        raise RuntimeError("a tool broke")
    if task.seed % 3 == 0:
        said += model.chat([{"role": "user", "content": "1+1="}], max_tokens=6)["content"]
    return {"reward": sum(c in "13579" for c in said) / max(len(said), 1), "response": said, "letters": len(said)}


def awaits_feedback(task: Any, model: Any) -> dict[str, Any]:
    """One turn. What it was worth is said later: by whoever reads the folder of notes."""
    said = model.chat(task.messages, max_tokens=6)["content"]
    note = {"id": model.ids[-1], "key": model.api_key, "said": said, "url": model.base_url, "seed": task.seed}
    _note(Path(task.kwargs["notes"]), note)
    return {"later": task.kwargs.get("later", True), "response": said}


def waits_for_word(task: Any, model: Any) -> dict[str, Any]:
    """Is done only when somebody has said so."""
    found = awaits_feedback(task, model)
    while not (Path(task.kwargs["notes"]) / f"{model.ids[-1]}.word").exists():
        time.sleep(0.01)
    return found


def _note(folder: Path, note: dict[str, Any]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / f"{note['id']}.new").write_text(json.dumps(note))
    (folder / f"{note['id']}.new").rename(folder / f"{note['id']}.json")


def slow_digits(task: Any, model: Any) -> dict[str, Any]:
    """Takes its time, and leaves processes about, while it is asked to."""
    pause = Path(os.environ["RLHPC_TEST_PAUSE"])
    seconds = ""
    with contextlib.suppress(FileNotFoundError):  # it may be gone at any time
        seconds = pause.read_text()
    if seconds:
        started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
        pause.with_name(f"left-{started.pid}").touch()
        time.sleep(float(seconds))
    return odd_digits(task, model)


def game(task: Any, model: Any) -> dict[str, Any]:
    """Two players, each with a context of its own; the second wins."""
    said: dict[str, list[Any]] = {"first": list(task.messages), "second": list(task.messages)}
    for _ in range(2):
        for player, messages in said.items():
            reply = model.post("/chat/completions", {"model": player, "messages": messages})["choices"][0]["message"]
            messages += [reply, {"role": "user", "content": "Go on."}]
    if task.kwargs.get("third"):
        model.post("/chat/completions", {"model": "third", "messages": task.messages})
    return {"rewards": {"first": -1, "second": 1 + task.seed}}


def looks_again(task: Any, model: Any) -> float:
    """Is shown another picture by a tool; and asks the same about that alone, as if the model had said the same."""
    other = {"type": "image_url", "image_url": {"url": task.kwargs["other"]}}
    said = model.chat(task.messages)
    shown = {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "a"}, other]}
    model.chat([*task.messages, said, shown])
    parts = [other if part["type"] == "image_url" else part for part in task.messages[-1]["content"]]
    instead = {**task.messages[-1], "content": parts}
    model.chat([*task.messages[:-1], instead, said, {"role": "user", "content": "<|image_pad|>="}])
    with contextlib.suppress(Exception):
        model.chat(
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}}]}]
        )
        return -1.0  # it would have been fetched
    return float(len(said["content"]))


def broken(task: Any, model: Any) -> float:
    """Fails in every episode."""
    raise ValueError("no such database")
