"""Kuhn poker: three cards, two players, one bet; and how far a way of playing is from the best, exactly.

Each pays 1. The first passes or bets 1; the second answers; a bet that is passed is lost, one that is called shows the cards.
The value of the game is −1/18 to the first player (Kuhn 1950).
"""

from __future__ import annotations

import itertools
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rlhpc.language.data.prompts import Prompt
from rlhpc.language.envs.base import Environment, Message, Said, Step, Task
from rlhpc.language.envs.tools import calculator

CARDS = "JQK"
ROLES = ("first", "second")
#: After which moves somebody is to move, and who: `p` passes, `b` bets, or calls.
TURNS = {"": 0, "p": 1, "b": 1, "pb": 0}
#: What a move that is none costs: as much as can be lost.
FORFEIT = 2.0
Policy = Mapping[tuple[str, str], tuple[float, float]]
"""By card and moves before: how likely a pass is, and a bet. What is missing to 1 is no move."""


class KuhnPoker(Environment):
    """Two players, each with a context of its own; both are the model.

    Args:
        short: Says `1K`, or `2Qb`, in place of sentences: for models of a few characters.
    """

    roles = ROLES

    def __init__(self, short: bool = False) -> None:
        self._short = short

    @classmethod
    def problem(cls, number: int) -> Prompt:
        """A deal; all members of a group play the same."""
        deal = random.Random(f"kuhn {number}").sample(CARDS, 2)
        meta = {"deal": "".join(deal), "part": str(number)}
        return Prompt(number, ({"role": "user", "content": "Kuhn poker"},), "", meta)

    def reset(self, task: Task) -> Said:
        """The first player's card."""
        self._deal, self._moves = task.meta["deal"], ""
        return self._ask()

    def step(self, reply: Message) -> Said:
        """A move."""
        move, seat = str(reply["content"]).strip().lower()[:1], TURNS[self._moves]
        if move not in ("p", "b"):
            won = FORFEIT if seat else -FORFEIT
            return Step(done=True, rewards=dict(zip(ROLES, (won, -won), strict=True)), metrics={"no_move": 1.0})
        self._moves += move
        if self._moves in TURNS:
            return self._ask()
        won = payoff(self._deal, self._moves)
        return Step(done=True, rewards=dict(zip(ROLES, (won, -won), strict=True)), metrics={"no_move": 0.0})

    def _ask(self) -> Step:
        seat = TURNS[self._moves]
        again = len(self._moves) > 1  # it knows its card already
        if self._short:
            said = self._moves[-1] if again else f"{seat + 1}{self._deal[seat]}{self._moves}"
        else:
            other = {"p": "The other passes. ", "b": "The other bets. "}.get(self._moves[-1:], "")
            card = "" if again else f"You are {ROLES[seat]}. Your card is {self._deal[seat]}. "
            said = f"{card}{other}Say p to pass, or b to bet or call."
        return Step(said, role=ROLES[seat])


def payoff(deal: str, moves: str) -> float:
    """What the first player has won at the end."""
    higher = 1.0 if CARDS.index(deal[0]) > CARDS.index(deal[1]) else -1.0
    return {"pp": higher, "bp": 1.0, "pbp": -1.0, "bb": 2 * higher, "pbb": 2 * higher}[moves]


def value(first: Policy, second: Policy) -> float:
    """What the first player wins a game, on average."""

    def after(deal: str, moves: str) -> float:
        if moves not in TURNS:
            return payoff(deal, moves)
        seat = TURNS[moves]
        passes, bets = (first, second)[seat][deal[seat], moves]
        none = (1 - passes - bets) * (FORFEIT if seat else -FORFEIT)
        return passes * after(deal, moves + "p") + bets * after(deal, moves + "b") + none

    deals = list(itertools.permutations(CARDS, 2))
    return sum(after("".join(deal), "") for deal in deals) / len(deals)


def best_response(policy: Policy, seat: int) -> float:
    """The most that a player in a seat wins a game against a policy in the other."""
    places = [(card, moves) for moves, turn in TURNS.items() if turn == seat for card in CARDS]
    found = []
    for choice in itertools.product(((1.0, 0.0), (0.0, 1.0)), repeat=len(places)):
        own = dict(zip(places, choice, strict=True))
        found.append(-value(policy, own) if seat else value(own, policy))
    return max(found)


def exploitability(policy: Policy) -> float:
    """How much a player who knows a policy wins a game against it, on average over both seats; 0 for an equilibrium."""
    return (best_response(policy, 0) + best_response(policy, 1)) / 2


def against(policy: Policy, other: Policy) -> float:
    """What a policy wins a game of another, on average over both seats."""
    return (value(policy, other) - value(other, policy)) / 2


def equilibrium(bluff: float = 0.0) -> dict[tuple[str, str], tuple[float, float]]:
    """One of the equilibria: the first player bets a jack with probability `bluff`, from 0 to 1/3."""
    bets = {
        ("J", ""): bluff, ("Q", ""): 0.0, ("K", ""): 3 * bluff, ("J", "pb"): 0.0, ("Q", "pb"): bluff + 1 / 3, ("K", "pb"): 1.0,
        ("J", "p"): 1 / 3, ("Q", "p"): 0.0, ("K", "p"): 1.0, ("J", "b"): 0.0, ("Q", "b"): 1 / 3, ("K", "b"): 1.0,
    }  # fmt: skip
    return {place: (1 - bet, bet) for place, bet in bets.items()}


def uniform() -> dict[tuple[str, str], tuple[float, float]]:
    """Passes and bets alike."""
    return {(card, moves): (0.5, 0.5) for card in CARDS for moves in TURNS}


def average(policies: Sequence[Policy]) -> dict[tuple[str, str], tuple[float, float]]:
    """The policy that plays like one of several, drawn before each game: each counts at a place as often as its own moves lead
    there."""
    found = {}
    for card, moves in itertools.product(CARDS, TURNS):
        weights = [_reach(policy, card, moves) for policy in policies]
        whole = sum(weights)
        sums = [sum(w * p[card, moves][move] for w, p in zip(weights, policies, strict=True)) for move in (0, 1)]
        found[card, moves] = (sums[0] / whole, sums[1] / whole) if whole else policies[-1][card, moves]
    return found


def _reach(policy: Policy, card: str, moves: str) -> float:
    """How likely whoever is to move has made the moves of its own that led here."""
    return policy[card, ""][0] if moves == "pb" else 1.0


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
