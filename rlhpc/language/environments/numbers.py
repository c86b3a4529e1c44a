"""Games of guessing whose best play is known."""

from __future__ import annotations

import random
import re
from collections import Counter
from typing import Any

from rlhpc.language.data.prompts import Prompt
from rlhpc.language.environments.base import Environment, Message, Said, Task


class Guess(Environment):
    """Finds a number by asking whether it is higher or lower; the reward is 1 for finding it within `turns`."""

    @classmethod
    def problem(cls, number: int, high: int = 15, turns: int = 4, symbols: str = "", question: str = "") -> Prompt:
        """A number to find.

        Args:
            number: Which problem.
            high: The numbers are 1 to this.
            turns: Guesses.
            symbols: A character for each number, for models of a few characters; hints are `+` and `-` then.
            question: How it is put.
        """
        target = random.Random(f"guess {number}").randint(1, high)
        asked = question or f"I think of a number from 1 to {high}. Guess it, in {turns} turns: say a number."
        meta = {"target": target, "high": high, "turns": turns, "symbols": symbols, "part": str(number)}
        return Prompt(number, ({"role": "user", "content": asked},), str(target), meta)

    @staticmethod
    def optimum(high: int, turns: int) -> float:
        """How often the best player finds it: n guesses tell 2ⁿ − 1 numbers apart."""
        return min(1.0, (2**turns - 1) / high)

    def reset(self, task: Task) -> Said:
        """The question, as it is put."""
        self._meta, self._left = task.meta, int(task.meta["turns"])
        self._low, self._high = 1, int(task.meta["high"])
        return None

    def step(self, reply: Message) -> Said:
        """Whether the number is higher or lower."""
        guess, symbols = self._read(str(reply["content"])), self._meta["symbols"]
        self._left -= 1
        if guess == self._meta["target"]:
            return 1.0
        if not self._left:
            return 0.0
        if not guess:
            return "?" if symbols else f"Say a number from 1 to {self._meta['high']}."
        higher = guess < self._meta["target"]
        self._low, self._high = (
            (max(self._low, guess + 1), self._high) if higher else (self._low, min(self._high, guess - 1))
        )
        return ("+" if higher else "-") if symbols else ("higher" if higher else "lower")

    def _read(self, text: str) -> int:
        symbols = self._meta["symbols"]
        if symbols:
            return symbols.find(text[:1]) + 1 if text[:1] else 0
        found = re.search(r"\d{1,9}", text)
        return int(found[0]) if found and int(found[0]) <= self._meta["high"] else 0

    def demonstrate(self, rng: random.Random) -> str:
        """Halves what is left."""
        middle = (self._low + self._high) // 2
        return self._meta["symbols"][middle - 1] if self._meta["symbols"] else str(middle)


class Mastermind(Environment):
    """Finds a code; after each guess it hears how many symbols are in place, and how many more are there elsewhere. The reward
    is 1 for finding it within `turns`."""

    @classmethod
    def problem(
        cls, number: int, symbols: str = "ABCDEF", length: int = 4, turns: int = 8, question: str = ""
    ) -> Prompt:
        """A code to find.

        Args:
            number: Which problem.
            symbols: What it is made of.
            length: Of the code.
            turns: Guesses.
            question: How it is put.
        """
        code = "".join(random.Random(f"mastermind {number}").choices(symbols, k=length))
        asked = question or (
            f"Find a code of {length} letters out of {symbols}, in {turns} turns: say {length} letters. I say how many are in "
            "place, then how many more are elsewhere in the code."
        )
        meta = {"code": code, "symbols": symbols, "turns": turns, "part": str(number)}
        return Prompt(number, ({"role": "user", "content": asked},), code, meta)

    def reset(self, task: Task) -> Said:
        """The question, as it is put."""
        self._meta, self._left = task.meta, int(task.meta["turns"])
        return None

    def step(self, reply: Message) -> Said:
        """`2 1`: in place, and elsewhere."""
        guess, code = str(reply["content"]).strip(), self._meta["code"]
        self._left -= 1
        if guess == code:
            return 1.0
        if not self._left:
            return 0.0
        if len(guess) != len(code) or not set(guess) <= set(self._meta["symbols"]):
            return "?"
        return "{} {}".format(*judged(guess, code))


def judged(guess: str, code: str) -> tuple[int, int]:
    """Symbols in place, and those that are elsewhere in the code."""
    place = sum(a == b for a, b in zip(guess, code, strict=True))
    common: Any = (Counter(guess) & Counter(code)).total()
    return place, common - place
