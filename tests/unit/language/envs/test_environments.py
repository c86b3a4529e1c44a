"""What comes with the package: each game is won by whoever plays it well, and by nobody who does not."""

from __future__ import annotations

import json
import random
import re
from types import SimpleNamespace
from typing import Any

import pytest

from rlhpc.language.config.data import DataSourceConfig
from rlhpc.language.data.registry import make_dataset
from rlhpc.language.envs import games as kuhn
from rlhpc.language.envs.base import Environment, step_of
from rlhpc.language.envs.games import Guess, judged
from rlhpc.language.envs.problems import EnvironmentProblems
from rlhpc.language.envs.registry import ENVIRONMENTS
from rlhpc.language.envs.search import Bm25, Search, world_of
from rlhpc.runtime.errors import ConfigError


def begun(environment: Environment, problem: Any) -> Environment:
    task: Any = SimpleNamespace(
        messages=problem.messages, question=problem.question, answer=problem.answer, meta=problem.meta, seed=0
    )
    environment.reset(task)
    return environment


def said(environment: Environment, text: str) -> Any:
    return step_of(environment.step({"role": "assistant", "content": text}))


@pytest.mark.parametrize("name", ["search", "guess", "sql", "micro_swe"])
def test_who_plays_well_wins_and_who_says_nothing_does_not(name: str) -> None:
    kind = ENVIRONMENTS.find(name)
    for number in range(min(kind.count(), 12)):
        problem = kind.problem(number)
        player, silent = begun(kind(), problem), begun(kind(), problem)
        for _ in range(10):
            step = said(player, player.demonstrate(random.Random(0)))
            if step.done:
                break
        assert (step.done, step.reward) == (True, 1.0), f"{name} {number}"
        while not (step := said(silent, "")).done:
            pass
        assert step.reward == 0.0
        player.close()


def test_a_search_finds_the_page_and_a_closed_one_nothing() -> None:
    found = Bm25(["a rare word", "a common word", "a common text of common things"])
    assert found.best("rare word", 3) == [0, 1] and found.best("common", 1) == [2] and found.best("nobody", 3) == []
    world = world_of(400, 0)
    assert all(world.search(name, 1) == [world.page(name)] for name in world.names)
    problem = Search.problem(1)
    player = begun(Search(closed=True), problem)
    assert said(player, "search: " + problem.question).said == "nothing."
    asked = begun(Search(results=3), problem)
    call = {"id": "call_1", "function": {"name": "search", "arguments": json.dumps({"query": world.names[3]})}}
    (message,) = step_of(asked.step({"content": "", "tool_calls": [call]})).said
    assert (
        message["role"] == "tool"
        and message["tool_call_id"] == "call_1"
        and world.page(world.names[3]) in message["content"]
    )
    schema = asked.tools[0]["function"]
    assert (
        schema["parameters"]["properties"] == {"query": {"type": "string"}} and "pages" in schema["description"].lower()
    )


def test_problems_are_held_out_and_demonstrations_show_each_turn() -> None:
    def source(part: str, **kwargs: Any) -> Any:
        cfg = DataSourceConfig(source="environment", size=60, eval_fraction=0.2, kwargs={"name": "search", **kwargs})
        return make_dataset(cfg, part, demonstrations="demonstrations" in kwargs)

    train, held_out = source("train"), source("eval")
    asked = {train[at].question for at in range(60)}
    assert not asked & {held_out[at].question for at in range(60)}
    rows = source("train", demonstrations=True)
    turns = [rows[at] for at in range(len(rows))]
    assert {row.messages[0]["content"] for row in turns} == asked
    for row in turns:
        calls = [m["content"] for m in row.messages if m["role"] == "assistant"]
        assert all(call.startswith("search: ") for call in calls) and row.messages[-1]["role"] == "user"
        hops = int(row.level[0])
        assert (row.response == row.answer) == (len(calls) == hops)
    for kwargs in ({"pages": 0}, {"pages": 1066}, {"pages": 2000}):
        given = DataSourceConfig(source="environment", kwargs={"name": "search", **kwargs})
        with pytest.raises(ConfigError, match=rf"kwargs.pages .* search is {kwargs['pages']}; allowed: 1 to 1065"):
            EnvironmentProblems(given, part="train", key="data.train")
    for name, kwargs in (("guess", {"high": 0}), ("mastermind", {"symbols": ""}), ("search", {"hops": "two"})):
        given = DataSourceConfig(source="environment", kwargs={"name": name, **kwargs})
        with pytest.raises(ConfigError, match=rf"data.train.kwargs: {name} makes no problem of \{{.*: "):
            EnvironmentProblems(given, part="train", key="data.train")
    with pytest.raises(ConfigError, match=r"kwargs\.name is 'serch'.*did you mean 'search'"):
        source("train", name="serch")


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
    assert [judged(guess, "AABC") for guess in ("AABC", "BAAC", "CCCC", "DDDA")] == [(4, 0), (2, 2), (1, 0), (0, 1)]


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


def test_sql_can_be_read_and_nothing_else() -> None:
    kind = ENVIRONMENTS.find("sql")
    player = begun(kind(), kind.problem(0))
    for query in ("DELETE FROM person", "ATTACH 'x' AS y", "PRAGMA table_info(person)"):
        assert "not authorized" in said(player, f"query: {query}").said
    endless = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT max(x) FROM n"
    assert "interrupted" in said(player, f"query: {endless}").said


def test_tests_that_the_model_does_not_see_judge_its_mend() -> None:
    kind = ENVIRONMENTS.find("micro_swe")
    cheat = begun(kind(), kind.problem(0))
    assert "FAILED assert total" in said(cheat, "pytest: {}").said
    assert (
        said(cheat, 'replace: {"path": "stock/counts.py", "old": "return result", "new": "return 5"}').said
        == "replaced"
    )
    assert said(cheat, "pytest: {}").said == "all tests pass"
    assert said(cheat, "done").reward == 0.0


@pytest.mark.parametrize(
    ("query", "error"),
    [
        ("select printf('%.*c', 999999999, 'x')", "not authorized"),  # half a minute within one opcode
        ("select FORMAT('%*d', 999999999, 1)", "not authorized"),
        ("select hex(zeroblob(300000000))", "too big"),  # two GiB
        ("select replace(hex(zeroblob(8000)), '0', hex(zeroblob(8000)))", "too big"),
        ("select '" + "x" * 20_000 + "'", "too large"),
        ("with recursive t(x) as (select 1 union all select x + 1 from t) select count(*) from t", "interrupted"),
    ],
)
def test_a_query_cannot_take_the_hosts_memory_or_time(query: str, error: str) -> None:
    kind = ENVIRONMENTS.find("sql")
    problem = kind.problem(3)
    player = begun(kind(), problem)
    assert error in said(player, f"query: {query}").said
    assert problem.answer in said(player, f"query: {problem.meta['query']}").said, "the next one is answered"
    player.close()
