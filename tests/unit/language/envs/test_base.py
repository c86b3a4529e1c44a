"""What comes with the package: each game is won by whoever plays it well, and by nobody who does not."""

from __future__ import annotations

import random
from typing import Any

import pytest

from rlhpc.language.config.data import DataSourceConfig
from rlhpc.language.data.registry import make_dataset
from rlhpc.language.envs.problems import EnvironmentProblems
from rlhpc.language.envs.registry import ENVIRONMENTS
from rlhpc.runtime.errors import ConfigError
from tests.unit.language.envs.playing import begun, said


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


def test_problems_are_held_out_and_demonstrations_show_each_turn() -> None:
    def source(part: str, **kwargs: Any) -> Any:
        cfg = DataSourceConfig(source="environment", size=60, eval_fraction=0.2, kwargs={"name": "search", **kwargs})
        return make_dataset(cfg, part, requires_demonstrations="demonstrations" in kwargs)

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
    with pytest.raises(ConfigError, match=r"data\.train\.kwargs\.hops is 'two'; it must be a list of int"):
        source("train", hops="two")
    for name, kwargs in (("guess", {"high": 0}), ("mastermind", {"symbols": ""})):
        given = DataSourceConfig(source="environment", kwargs={"name": name, **kwargs})
        with pytest.raises(ConfigError, match=rf"data.train.kwargs: {name} makes no problem of \{{.*: "):
            EnvironmentProblems(given, part="train", key="data.train")
    with pytest.raises(ConfigError, match=r"kwargs\.name is 'serch'.*did you mean 'search'"):
        source("train", name="serch")


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
