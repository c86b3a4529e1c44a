"""Games: Kuhn poker, number guessing, Mastermind, and arithmetic self-play.

Kuhn poker has three cards, two players and one bet, so the exploitability of a policy can be computed exactly. Each player
antes 1. The first player passes or bets 1, and the second player responds. A player who passes after a bet loses. After two
passes or a called bet, the higher card wins. The value of the game is −1/18 for the first player (Kuhn 1950).
"""

from __future__ import annotations

import itertools
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rlhpc.language.data.prompts import Prompt
from rlhpc.language.envs.base import Environment, EnvResponse, Message, Step, Task
from rlhpc.language.envs.tools import calculator

CARDS = "JQK"
ROLES = ("first", "second")
#: Seat of the next player, by the moves so far: `p` is a pass, `b` is a bet or a call.
TURNS = {"": 0, "p": 1, "b": 1, "pb": 0}
#: Loss after an invalid move, which is the maximum loss of the game.
FORFEIT = 2.0
Policy = Mapping[tuple[str, str], tuple[float, float]]
"""Probabilities of a pass and of a bet, by card and earlier moves. The remainder to 1 is the probability of an invalid
move.
"""


class KuhnPoker(Environment):
    """Kuhn poker with two roles in separate contexts; the model plays both roles.

    Args:
        short: Whether observations are short, such as `1K` or `2Qb`, for models with a small vocabulary.
    """

    roles = ROLES

    def __init__(self, short: bool = False) -> None:
        self._is_short = short

    @classmethod
    def problem(cls, number: int) -> Prompt:
        """Returns a problem with a deal, which all episodes of a group share."""
        dealt_cards = random.Random(f"kuhn {number}").sample(CARDS, 2)
        meta = {"deal": "".join(dealt_cards), "part": str(number)}
        return Prompt(number, ({"role": "user", "content": "Kuhn poker"},), "", meta)

    def reset(self, task: Task) -> EnvResponse:
        """Deals the cards; returns the first player's card."""
        self._deal, self._moves = task.meta["deal"], ""
        return self._next_turn()

    def step(self, reply: Message) -> EnvResponse:
        """Applies a move; returns the next player's observation, or the payoffs at the end. An invalid move loses the game."""
        move_letter, player = str(reply["content"]).strip().lower()[:1], TURNS[self._moves]
        is_valid, reward = move_letter in ("p", "b"), FORFEIT if player else -FORFEIT
        if is_valid:
            self._moves += move_letter
            if self._moves in TURNS:
                return self._next_turn()
            reward = payoff(self._deal, self._moves)
        rewards = dict(zip(ROLES, (reward, -reward), strict=True))
        return Step(done=True, rewards=rewards, metrics={"no_move": float(not is_valid)})

    def _next_turn(self) -> Step:
        player = TURNS[self._moves]
        has_seen_card = len(self._moves) > 1  # the player has its card in the context
        if self._is_short:
            observation = self._moves[-1] if has_seen_card else f"{player + 1}{self._deal[player]}{self._moves}"
        else:
            opponent_move = {"p": "The other passes. ", "b": "The other bets. "}.get(self._moves[-1:], "")
            card_text = "" if has_seen_card else f"You are {ROLES[player]}. Your card is {self._deal[player]}. "
            observation = f"{card_text}{opponent_move}Say p to pass, or b to bet or call."
        return Step(observation, role=ROLES[player])


def payoff(dealt_cards: str, move_history: str) -> float:
    """Returns the first player's payoff after the moves of a finished game."""
    card_sign = 1.0 if CARDS.index(dealt_cards[0]) > CARDS.index(dealt_cards[1]) else -1.0
    return {"pp": card_sign, "bp": 1.0, "pbp": -1.0, "bb": 2 * card_sign, "pbb": 2 * card_sign}[move_history]


def value(first_policy: Policy, second_policy: Policy) -> float:
    """Returns the expected payoff of the first player when policies `first_policy` and `second_policy` play."""

    def value_after(dealt_cards: str, move_history: str) -> float:
        if move_history not in TURNS:
            return payoff(dealt_cards, move_history)
        player = TURNS[move_history]
        pass_probability, bet_probability = (first_policy, second_policy)[player][dealt_cards[player], move_history]
        invalid_value = (1 - pass_probability - bet_probability) * (FORFEIT if player else -FORFEIT)
        return (
            pass_probability * value_after(dealt_cards, move_history + "p")
            + bet_probability * value_after(dealt_cards, move_history + "b")
            + invalid_value
        )

    deals = list(itertools.permutations(CARDS, 2))
    return sum(value_after("".join(dealt_cards), "") for dealt_cards in deals) / len(deals)


def best_response(policy: Policy, seat: int) -> float:
    """Returns the maximum expected payoff of a player in `seat` against a policy in the other seat."""
    information_sets = [(card, move_history) for move_history, turn in TURNS.items() if turn == seat for card in CARDS]
    payoffs = []
    for pure_strategy in itertools.product(((1.0, 0.0), (0.0, 1.0)), repeat=len(information_sets)):
        response = dict(zip(information_sets, pure_strategy, strict=True))
        payoffs.append(-value(policy, response) if seat else value(response, policy))
    return max(payoffs)


def exploitability(policy: Policy) -> float:
    """Returns the expected payoff of a best response against a policy, averaged over both seats; 0 for an equilibrium."""
    return (best_response(policy, 0) + best_response(policy, 1)) / 2


def against(policy: Policy, other_policy: Policy) -> float:
    """Returns the expected payoff of a policy against another policy, averaged over both seats."""
    return (value(policy, other_policy) - value(other_policy, policy)) / 2


def equilibrium(bluff: float = 0.0) -> dict[tuple[str, str], tuple[float, float]]:
    """Returns an equilibrium in which the first player bets a jack with probability `bluff`, from 0 to 1/3."""
    bets = {
        ("J", ""): bluff, ("Q", ""): 0.0, ("K", ""): 3 * bluff, ("J", "pb"): 0.0, ("Q", "pb"): bluff + 1 / 3, ("K", "pb"): 1.0,
        ("J", "p"): 1 / 3, ("Q", "p"): 0.0, ("K", "p"): 1.0, ("J", "b"): 0.0, ("Q", "b"): 1 / 3, ("K", "b"): 1.0,
    }  # fmt: skip
    return {
        information_set: (1 - bet_probability, bet_probability) for information_set, bet_probability in bets.items()
    }


def uniform() -> dict[tuple[str, str], tuple[float, float]]:
    """Returns the policy that passes and bets with equal probability."""
    return {(card, move_history): (0.5, 0.5) for card in CARDS for move_history in TURNS}


def average(policies: Sequence[Policy]) -> dict[tuple[str, str], tuple[float, float]]:
    """Returns the policy that is equivalent to choosing one of the policies at random before each game. The weight of a policy
    at a decision is the probability that the player's earlier moves under this policy lead there.
    """
    mixed_policy = {}
    for card, move_history in itertools.product(CARDS, TURNS):
        # Probability of the moving player's earlier moves under each policy.
        weights = [policy[card, ""][0] if move_history == "pb" else 1.0 for policy in policies]
        weight_sum = sum(weights)
        move_sums = [
            sum(weight * p[card, move_history][move_index] for weight, p in zip(weights, policies, strict=True))
            for move_index in (0, 1)
        ]
        mixed_policy[card, move_history] = (
            (move_sums[0] / weight_sum, move_sums[1] / weight_sum) if weight_sum else policies[-1][card, move_history]
        )
    return mixed_policy


class Guess(Environment):
    """Number guessing with the hints "higher" and "lower". The reward is 1 for the right number within `turns` guesses."""

    @classmethod
    def problem(cls, number: int, high: int = 15, turns: int = 4, symbols: str = "", question: str = "") -> Prompt:
        """Returns a problem with a number to guess.

        Args:
            number: Index of the problem.
            high: Largest number; the smallest is 1.
            turns: Number of guesses.
            symbols: One character per number, for models with a small vocabulary; the hints are then `+` and `-`.
            question: Text of the question.
        """
        target = random.Random(f"guess {number}").randint(1, high)
        question_text = question or f"I think of a number from 1 to {high}. Guess it, in {turns} turns: say a number."
        meta = {"target": target, "high": high, "turns": turns, "symbols": symbols, "part": str(number)}
        return Prompt(number, ({"role": "user", "content": question_text},), str(target), meta)

    @staticmethod
    def optimum(high: int, turns: int) -> float:
        """Returns the success rate of the best strategy; n guesses distinguish 2ⁿ − 1 numbers."""
        return min(1.0, (2**turns - 1) / high)

    def reset(self, task: Task) -> EnvResponse:
        """Starts the game; the observation is the task's question."""
        self._meta, self._num_turns_left = task.meta, int(task.meta["turns"])
        self._low, self._high = 1, int(task.meta["high"])
        return None

    def step(self, reply: Message) -> EnvResponse:
        """Handles a guess: returns a hint, or the reward at the end of the game."""
        guess_text, symbols = self._parse_guess(str(reply["content"])), self._meta["symbols"]
        self._num_turns_left -= 1
        if guess_text == self._meta["target"]:
            return 1.0
        if not self._num_turns_left:
            return 0.0
        if not guess_text:
            return "?" if symbols else f"Say a number from 1 to {self._meta['high']}."
        is_higher = guess_text < self._meta["target"]
        self._low, self._high = (
            (max(self._low, guess_text + 1), self._high) if is_higher else (self._low, min(self._high, guess_text - 1))
        )
        return ("+" if is_higher else "-") if symbols else ("higher" if is_higher else "lower")

    def _parse_guess(self, reply_text: str) -> int:
        symbols = self._meta["symbols"]
        if symbols:
            return symbols.find(reply_text[:1]) + 1 if reply_text[:1] else 0
        number_match = re.search(r"\d{1,9}", reply_text)
        return int(number_match[0]) if number_match and int(number_match[0]) <= self._meta["high"] else 0

    def demonstrate(self, rng: random.Random) -> str:
        """Returns the guess that halves the remaining range."""
        midpoint = (self._low + self._high) // 2
        return self._meta["symbols"][midpoint - 1] if self._meta["symbols"] else str(midpoint)


class Mastermind(Environment):
    """Mastermind. The hint after each guess is the number of symbols in the right place and the number of other symbols that
    occur elsewhere in the code. The reward is 1 for the code within `turns` guesses.
    """

    @classmethod
    def problem(
        cls, number: int, symbols: str = "ABCDEF", length: int = 4, turns: int = 8, question: str = ""
    ) -> Prompt:
        """Returns a problem with a code to guess.

        Args:
            number: Index of the problem.
            symbols: Symbols of the code.
            length: Length of the code.
            turns: Number of guesses.
            question: Text of the question.
        """
        secret_code = "".join(random.Random(f"mastermind {number}").choices(symbols, k=length))
        question_text = question or (
            f"Find a code of {length} letters out of {symbols}, in {turns} turns: say {length} letters. I say how many are in "
            "place, then how many more are elsewhere in the code."
        )
        meta = {"code": secret_code, "symbols": symbols, "turns": turns, "part": str(number)}
        return Prompt(number, ({"role": "user", "content": question_text},), secret_code, meta)

    def reset(self, task: Task) -> EnvResponse:
        """Starts the game; the observation is the task's question."""
        self._meta, self._num_turns_left = task.meta, int(task.meta["turns"])
        return None

    def step(self, reply: Message) -> EnvResponse:
        """Handles a guess: returns a hint, such as `2 1` for two symbols in place and one elsewhere, or the final reward."""
        guessed_code, secret_code = str(reply["content"]).strip(), self._meta["code"]
        self._num_turns_left -= 1
        if guessed_code == secret_code:
            return 1.0
        if not self._num_turns_left:
            return 0.0
        if len(guessed_code) != len(secret_code) or not set(guessed_code) <= set(self._meta["symbols"]):
            return "?"
        return "{} {}".format(*score_guess(guessed_code, secret_code))


def score_guess(guessed_code: str, secret_code: str) -> tuple[int, int]:
    """Returns the number of symbols in the right place, and the number of other symbols that occur elsewhere in the code."""
    num_in_place = sum(
        guess_symbol == code_symbol for guess_symbol, code_symbol in zip(guessed_code, secret_code, strict=True)
    )
    num_common: Any = (Counter(guessed_code) & Counter(secret_code)).total()
    return num_in_place, num_common - num_in_place


class Proposer(Environment):
    """Arithmetic self-play: a proposer writes a problem, and a solver attempts it. All attempts start from the same context,
    so that `algorithm.credit: state` compares them.

    Args:
        attempts: Number of the solver's attempts per problem.
        longest: Maximum number of characters of a problem.
    """

    roles = ("proposer", "solver")

    def __init__(self, attempts: int = 4, longest: int = 24) -> None:
        self._max_attempts, self._max_length = attempts, longest

    @classmethod
    def problem(
        cls, number: int, question: str = "Write an arithmetic expression that is neither easy nor hard."
    ) -> Prompt:
        """Returns the proposer's prompt."""
        return Prompt(number, ({"role": "user", "content": question},), "", {"part": str(number)})

    def reset(self, task: Task) -> EnvResponse:
        """Starts an episode with the proposer's turn."""
        self._answer: str | None = None
        self._attempt_results: list[bool] = []
        return Step(role="proposer")

    def step(self, reply: Message) -> EnvResponse:
        """Handles the proposer's problem or an attempt of the solver. The solver's reward is 1 for a correct attempt. The
        proposer's reward is 4 p (1 − p) for the solver's success rate p, and −1 for an invalid problem.
        """
        proposal = str(reply["content"]).strip()
        if self._answer is None:
            self._text = proposal.removesuffix("=")[: self._max_length]
            try:
                self._answer = calculator(self._text)
            except ValueError:
                return Step(reward=-1.0, done=True, metrics={"no_problem": 1.0})
            return self._next_turn(0.0)
        self._attempt_results.append(proposal == self._answer)
        if len(self._attempt_results) < self._max_attempts:
            return self._next_turn(float(self._attempt_results[-1]))
        solved_fraction = sum(self._attempt_results) / self._max_attempts
        return Step(
            reward=float(self._attempt_results[-1]),
            done=True,
            rewards={"proposer": 4 * solved_fraction * (1 - solved_fraction)},
        )

    def _next_turn(self, reward: float) -> Step:
        return Step(f"{self._text}=", reward=reward, role="solver", afresh=True)
