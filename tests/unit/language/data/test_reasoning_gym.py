"""Problems of reasoning-gym."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rlhpc.language.data import make_dataset
from rlhpc.runtime.errors import ConfigError
from tests.extras import need_extra
from tests.unit.language.data.procedural_sources import config, made_elsewhere, questions

GYM = {"task": "chain_sum", "min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 2}


def test_reasoning_gym_problems_are_those_of_the_package() -> None:
    need_extra("llm")
    import reasoning_gym as gym

    problems = make_dataset(config("reasoning_gym", kwargs=GYM, size=5, seed=3))
    own = gym.create_dataset("chain_sum", seed=3 * 2**20, size=5, **{k: v for k, v in GYM.items() if k != "task"})
    for problem, entry in zip(problems, own, strict=True):
        assert problem.messages[0]["content"] == entry["question"]
        assert problem.answer == entry["answer"]
        assert problem.meta["entry"] == entry
        assert own.score_answer(problem.answer, problem.meta["entry"]) == 1.0


def test_reasoning_gym_parts_and_seeds_share_no_problem() -> None:
    need_extra("llm")
    kwargs = {"task": "base_conversion", "max_value": 10**9}
    drawn = [
        set(questions(make_dataset(config("reasoning_gym", kwargs=kwargs, size=400, seed=seed), part)))
        for seed in (0, 1, 2047)
        for part in ("train", "eval")
    ]
    assert len(set.union(*drawn)) == sum(map(len, drawn)) == 2400


def test_reasoning_gym_holds_questions_out_where_a_task_has_few() -> None:
    need_extra("llm")
    fields: dict[str, Any] = {"kwargs": {"task": "gcd", "max_value": 20}, "size": 300}
    without = [set(questions(make_dataset(config("reasoning_gym", **fields), part))) for part in ("train", "eval")]
    assert without[0] & without[1]
    split = [make_dataset(config("reasoning_gym", eval_fraction=0.3, **fields), part) for part in ("train", "eval")]
    train, held_out = (set(questions(dataset)) for dataset in split)
    assert not train & held_out
    # In any order of asking.
    again = make_dataset(config("reasoning_gym", eval_fraction=0.3, **fields), "eval")
    assert [again[i] for i in (250, 3, 0)] == [split[1][i] for i in (250, 3, 0)]


def test_reasoning_gym_difficulty_and_mixtures() -> None:
    need_extra("llm")
    lengths = []
    for difficulty in (0, 3):
        problems = make_dataset(
            config("reasoning_gym", kwargs={"task": "chain_sum", "difficulty": difficulty}, size=50)
        )
        assert {p.level for p in problems} == {f"difficulty {difficulty}"}
        lengths.append(sum(map(len, questions(problems))))
    assert lengths[1] > lengths[0]
    mixed = make_dataset(config("reasoning_gym", kwargs={"tasks": {"gcd": {"max_value": 50}, "lcm": None}}, size=5))
    assert [p.level for p in mixed] == [p.meta["task"] for p in mixed] == ["gcd", "lcm", "gcd", "lcm", "gcd"]
    assert len({p.messages[0]["content"] for p in mixed}) == 5


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({}, r"data\.train\.kwargs\.task is not set; there are ab, acre"),
        ({"task": "chain_sums"}, "task is 'chain_sums', which reasoning-gym does not have; did you mean 'chain_sum'"),
        ({"task": "gcd", "digits": 2}, "kwargs.digits is no argument of task gcd; allowed: difficulty, max_numbers"),
        ({"task": "gcd", "seed": 2}, r"kwargs\.seed is no argument of task gcd \(data\.train\.seed says it\)"),
        ({"task": "gcd", "difficulty": 99}, "difficulty of task gcd is 99; allowed: 0 to "),
        ({"task": "gcd", "min_value": 5, "max_value": 2}, "kwargs of task gcd: "),
        ({"tasks": {"gcd": {}}, "max_value": 2}, "max_value beside tasks"),
    ],
)
def test_reasoning_gym_arguments(kwargs: dict[str, Any], said: str) -> None:
    need_extra("llm")
    with pytest.raises(ConfigError, match=said):
        make_dataset(config("reasoning_gym", kwargs=kwargs))


@pytest.mark.timeout(900)
@pytest.mark.long
def test_every_task_is_the_same_in_every_process_and_scores_its_own_answer() -> None:
    need_extra("llm")
    from rlhpc.language.data.reasoning_gym import score

    with ThreadPoolExecutor(2) as both:
        # Not the third: comparing 42 with that answer of intermediate_integration takes sympy half a minute.
        one, two = both.map(made_elsewhere, ("1", "2"), ([], []), ([4, 1], [1, 4]))
    assert len(one) > 90
    for task, problems in one.items():
        assert problems == two[task][::-1], task
        for problem in problems:
            meta = json.loads(json.dumps(problem.meta))
            if problem.answer:
                assert score(problem.answer, problem.meta) == score(problem.answer, meta) == 1.0, task
            for wrong in ("", "no idea", "42"):
                scored = score(wrong, meta)
                assert scored == score(wrong, problem.meta), task
                # This one's scorer only looks whether "False" is what it says.
                assert scored < 1.0 or problem.answer == wrong or task == "game_of_life_halting", task
