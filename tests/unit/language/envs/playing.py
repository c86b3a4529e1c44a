"""Episodes of an environment with a scripted player."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from rlhpc.language.envs.base import Environment, step_of


def begun(environment: Environment, problem: Any) -> Environment:
    task: Any = SimpleNamespace(
        messages=problem.messages, question=problem.question, answer=problem.answer, meta=problem.meta, seed=0
    )
    environment.reset(task)
    return environment


def said(environment: Environment, text: str) -> Any:
    return step_of(environment.step({"role": "assistant", "content": text}))
