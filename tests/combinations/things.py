"""Rewards, agents and pairs of the language runs: `tests.combinations.things:NAME`."""

from __future__ import annotations

from typing import Any

from rlhpc.language.data.prompts import Prompt


def digits(sample: Any) -> float:
    """The part of the answer's characters that are digits: an untrained model's answers differ in it."""
    return sum(c.isdigit() for c in sample.response) / max(len(sample.response), 1)


class Pairs:
    """Sums with a right and a wrong result, as a source of `data.train`; a fifth of them is held out."""

    def __init__(self, cfg: Any, *, part: str, key: str) -> None:
        del key
        every = [number for number in range(100) if (number % 5 == 0) == (part == "eval")]
        self._numbers = every[: cfg.size]

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> Prompt:
        number = self._numbers[index]
        left, right = divmod(number, 10)
        answers = {"chosen": str(left + right), "rejected": str(left + right + 1) * (1 + number % 3)}
        return Prompt(id=number, messages=({"role": "user", "content": f"{left}+{right}="},), meta=answers)


def agent(task: Any, model: Any) -> dict[str, str]:
    """Asks the model twice."""
    messages = list(task.messages)
    reply = model.chat(messages)
    messages += [reply, {"role": "user", "content": "1+1"}]
    return {"response": str(model.chat(messages)["content"])}
