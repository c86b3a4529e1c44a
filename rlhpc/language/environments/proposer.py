"""A proposer asks, a solver answers, several times: who proposes earns most where the solver is right half the time."""

from __future__ import annotations

from rlhpc.language.agents.tools import calculator
from rlhpc.language.data.prompts import Prompt
from rlhpc.language.environments.base import Environment, Message, Said, Step, Task


class Proposer(Environment):
    """Arithmetic. The solver's attempts are turns with the same context, which `algorithm.credit: state` compares.

    Args:
        attempts: Of the solver.
        longest: Most characters of a problem.
    """

    roles = ("proposer", "solver")

    def __init__(self, attempts: int = 4, longest: int = 24) -> None:
        self._attempts, self._longest = attempts, longest

    @classmethod
    def problem(
        cls, number: int, question: str = "Write an arithmetic expression that is neither easy nor hard."
    ) -> Prompt:
        """What the proposer is asked."""
        return Prompt(number, ({"role": "user", "content": question},), "", {"part": str(number)})

    def reset(self, task: Task) -> Said:
        """The proposer begins."""
        self._answer: str | None = None
        self._right: list[bool] = []
        return Step(role="proposer")

    def step(self, reply: Message) -> Said:
        """A problem, or an attempt at it."""
        text = str(reply["content"]).strip()
        if self._answer is None:
            self._text = text.removesuffix("=")[: self._longest]
            try:
                self._answer = calculator(self._text)
            except ValueError:
                return Step(reward=-1.0, done=True, metrics={"no_problem": 1.0})
            return self._ask(0.0)
        self._right.append(text == self._answer)
        if len(self._right) < self._attempts:
            return self._ask(float(self._right[-1]))
        share = sum(self._right) / self._attempts
        return Step(reward=float(self._right[-1]), done=True, rewards={"proposer": 4 * share * (1 - share)})

    def _ask(self, reward: float) -> Step:
        return Step(f"{self._text}=", reward=reward, role="solver", afresh=True)
