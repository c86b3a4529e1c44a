"""Problems that are made: right answers, the same everywhere, and none in training that is held out."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from rlhpc.language.data import make_dataset
from rlhpc.runtime.errors import ConfigError
from tests.extras import need_extra
from tests.unit.language.data.procedural_sources import config, made_elsewhere, questions


def test_arithmetic_answers() -> None:
    problems = make_dataset(config("arithmetic", kwargs={"digits": [1, 2, 3], "operators": "+-*"}, size=300))
    for problem in problems:
        expression = problem.messages[0]["content"].removesuffix("=")
        assert problem.answer == problem.response == str(eval(expression))
    assert {problem.level for problem in problems} == {
        f"{sign} {digits}" for sign in "+-*" for digits in ("1 digit", "2 digits", "3 digits")
    }
    assert {p.level for p in make_dataset(config("arithmetic", size=20))} == {"2 digits"}


@pytest.mark.parametrize(
    "kwargs", [{"digits": 2}, {"digits": 2, "operators": "+*"}, {"digits": [2, 4], "operators": "+-"}]
)
def test_arithmetic_is_held_out_from_every_seed(kwargs: dict[str, Any]) -> None:
    training = [questions(make_dataset(config("arithmetic", kwargs=kwargs, seed=seed, size=3000))) for seed in (0, 1)]
    held_out = questions(make_dataset(config("arithmetic", kwargs=kwargs, seed=7, size=500), "eval"))
    for drawn in (*training, held_out):
        assert len(set(drawn)) == len(drawn)
    assert training[0] != training[1]

    def sums(drawn: list[str]) -> set[Any]:
        # 34+12 is no new problem to someone who has learnt 12+34.
        return {
            q
            if "-" in q
            else frozenset([q[:-1], *[f"{b}{s}{a}" for s in "+*" if s in q for a, b in [q[:-1].split(s)]]])
            for q in drawn
        }

    assert not sums(held_out) & (sums(training[0]) | sums(training[1]))


def test_arithmetic_takes_all_there_are() -> None:
    parts = [
        questions(make_dataset(config("arithmetic", size=None, eval_fraction=0.05), part)) for part in ("train", "eval")
    ]
    assert len(parts[0]) + len(parts[1]) == 8100
    assert 250 <= len(parts[1]) <= 560
    with pytest.raises(
        ConfigError, match=r"data\.train\.size is 90, but only \d\d of all 100 problems are in the train part"
    ):
        make_dataset(config("arithmetic", kwargs={"digits": 1}, size=90))


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({"digit": 2}, r"kwargs\.digit is 2; did you mean 'digits'.*allowed: digits, operators"),
        ({"digits": 0}, "digits is 0; it must lie between 1 and 9"),
        ({"operators": "+/"}, r"operators is '\+/'; allowed: characters out of \+-\*"),
    ],
)
def test_arithmetic_arguments(kwargs: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_dataset(config("arithmetic", kwargs=kwargs))


def passes(code: str, tests: list[str]) -> bool:
    names: dict[str, Any] = {}
    exec(code, names)
    try:
        for test in tests:
            exec(test, names)
    except AssertionError:
        return False
    return True


def test_code_solutions_pass_their_tests_and_others_do_not() -> None:
    problems = make_dataset(config("code", kwargs={"steps": [1, 2, 3]}, size=120))
    solutions = []
    for problem in problems:
        assert problem.response.startswith("```python\n")
        solutions.append(problem.response.removeprefix("```python\n").removesuffix("```"))
        assert passes(solutions[-1], problem.meta["tests"])
        assert json.loads(json.dumps(problem.meta)) == problem.meta
        for constant in ("0", "[]", "numbers"):
            assert not passes(f"def solve(numbers):\n    return {constant}\n", problem.meta["tests"])
    wrong = [passes(solutions[i - 1], problem.meta["tests"]) for i, problem in enumerate(problems)]
    assert sum(wrong) <= 6
    assert {problem.level for problem in problems} == {"1 step", "2 steps", "3 steps"}


def test_code_that_is_held_out_does_what_no_training_task_does() -> None:
    train, held_out = (
        {tuple(p.meta["tests"]) for p in make_dataset(config("code", seed=s), part)}
        for s, part in ((0, "train"), (1, "eval"))
    )
    assert len(train) > 2000
    assert len(held_out) > 300
    assert not train & held_out


def test_code_arguments() -> None:
    with pytest.raises(ConfigError, match=r"steps is \[1, 9\]; it must lie between 1 and 6"):
        make_dataset(config("code", kwargs={"steps": [1, 9]}))


def test_global_generators_are_left_alone() -> None:
    need_extra("llm")
    import numpy as np

    for task in ("pool_matrix", "gcd"):
        problems = make_dataset(config("reasoning_gym", kwargs={"task": task}))
        np.random.seed(4)
        random.seed(4)
        expected = np.random.rand(3).tolist(), random.random()
        np.random.seed(4)
        random.seed(4)
        assert problems[0] == problems[0]
        assert (np.random.rand(3).tolist(), random.random()) == expected


def test_problems_are_the_same_in_every_process() -> None:
    need_extra("llm")
    tasks = ["ransom_note", "acre", "gcd", "list_functions"]
    elsewhere = made_elsewhere("0", tasks, [2, 4])
    for task in tasks:
        here = make_dataset(config("reasoning_gym", kwargs={"task": task}, size=10, seed=5), "eval")
        assert [here[4], here[2]] == elsewhere[task][::-1]
