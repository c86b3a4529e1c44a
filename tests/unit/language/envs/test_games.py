"""Games: hints, values and best play."""

from __future__ import annotations

import random
import re
from types import SimpleNamespace

import pytest

from rlhpc.language.envs import games as kuhn
from rlhpc.language.envs.base import step_of
from rlhpc.language.envs.games import Guess, score_guess
from tests.unit.language.envs.playing import begun, said


@pytest.mark.parametrize(("high", "turns"), [(15, 4), (15, 3), (7, 3)])
def test_halving_finds_what_the_best_player_finds(high: int, turns: int) -> None:
    won = dict[int, float]()
    for number in range(100):
        problem = Guess.problem(number, high=high, turns=turns)
        player = begun(Guess(), problem)
        while not (step := said(player, player.demonstrate(random.Random(0)))).done:
            pass
        won[problem.meta["target"]] = step.reward
    assert len(won) == high and sum(won.values()) / high == Guess.optimum(high, turns)


def test_hints_of_mastermind() -> None:
    assert [score_guess(guess, "AABC") for guess in ("AABC", "BAAC", "CCCC", "DDDA")] == [
        (4, 0),
        (2, 2),
        (1, 0),
        (0, 1),
    ]


def test_kuhn_poker_is_worth_what_is_known() -> None:
    for bluff in (0.0, 0.2, 1 / 3):
        best = kuhn.equilibrium(bluff)
        assert kuhn.value(best, best) == pytest.approx(-1 / 18)
        assert kuhn.exploitability(best) == pytest.approx(0.0, abs=1e-12)
        assert kuhn.against(best, kuhn.uniform()) > 0.1
    assert kuhn.exploitability(kuhn.uniform()) == pytest.approx(11 / 24)
    silent = dict.fromkeys(kuhn.uniform(), (0.0, 0.0))
    assert kuhn.best_response(silent, 1) == kuhn.FORFEIT and kuhn.against(silent, kuhn.uniform()) == -kuhn.FORFEIT
    # Two equilibria in turn are another one; of two ways to bluff each counts as often as it comes to the second bet.
    mixed = kuhn.average([kuhn.equilibrium(0.0), kuhn.equilibrium(1 / 3)])
    assert kuhn.exploitability(mixed) == pytest.approx(0.0, abs=1e-12)
    assert mixed["K", "pb"] == (0.0, 1.0) and mixed["K", ""][1] == pytest.approx(0.5)


def test_a_game_of_kuhn_poker() -> None:
    problem = kuhn.KuhnPoker.problem(3)
    deal, sign = problem.meta["deal"], kuhn.payoff(problem.meta["deal"], "pp")
    game = begun(kuhn.KuhnPoker(short=True), problem)
    first = step_of(game.reset(SimpleNamespace(meta=problem.meta)))  # type: ignore[arg-type]
    assert (first.said, first.role) == (f"1{deal[0]}", "first")
    second = said(game, "p")
    assert (second.said, second.role) == (f"2{deal[1]}p", "second")
    third = said(game, "b")
    assert (third.said, third.role) == ("b", "first")
    assert said(game, "b").rewards == {"first": 2 * sign, "second": -2 * sign}
    assert re.fullmatch("[JQK]{2}", deal)
