"""Prompts: held out by problem, and worded by a template."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhpc.language.data import make_dataset
from rlhpc.runtime.errors import ConfigError
from tests.unit.language.data.problem_files import ROWS, SOURCES, config, write, write_jsonl


@pytest.mark.parametrize("source", SOURCES)
def test_the_two_sides_of_eval_fraction_share_nothing_and_miss_nothing(source: str, tmp_path: Path) -> None:
    path = write(source, tmp_path, ROWS)
    cfg = config(source=source, path=path, prompt_key="question", eval_fraction=0.3)
    train, held_out = ({p.id for p in make_dataset(cfg, part)} for part in ("train", "eval"))
    assert not train & held_out
    assert train | held_out == set(range(200))
    assert 40 <= len(held_out) <= 80


def test_the_side_depends_on_the_problem_and_not_on_its_place_or_wording(tmp_path: Path) -> None:
    first = config(path=write_jsonl(tmp_path / "a.jsonl", ROWS), prompt_key="question", eval_fraction=0.25)
    other = config(
        path=write_jsonl(tmp_path / "b.jsonl", [*ROWS[100:], ROWS[7], *ROWS[:100]]),
        prompt_key="question",
        eval_fraction=0.25,
        seed=9,
        system_prompt="Think.",
    )
    one, two = ({p.messages[-1]["content"] for p in make_dataset(cfg, "eval")} for cfg in (first, other))
    assert one == two


def test_wording(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    template = "Question: {prompt}\nHint: {hint}. Answer in \\boxed{} {nothing}."
    cfg = config(path=path, prompt_key="question", prompt_template=template, system_prompt="Be brief.")
    assert make_dataset(cfg)[1].messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Question: What is 1 + 1?\nHint: add 1. Answer in \\boxed{} {nothing}."},
    )
    with pytest.raises(ConfigError, match=r"prompt_template is 'Solve it'; it must contain \{prompt\}"):
        make_dataset(config(path=path, prompt_key="question", prompt_template="Solve it"))


def test_wording_leaves_what_the_question_says_alone(tmp_path: Path) -> None:
    path = write_jsonl(
        tmp_path / "rows.jsonl", [{"prompt": "Explain {answer} and {hint}.", "answer": "", "hint": "secret"}]
    )
    problem = make_dataset(config(path=path, prompt_template="Q: {prompt}"))[0]
    assert problem.messages[0]["content"] == "Q: Explain {answer} and {hint}."


def test_wording_of_a_conversation(tmp_path: Path) -> None:
    talk = [{"role": "system", "content": "Be rude."}, {"role": "user", "content": "hi"}]
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": talk, "answer": ""}])
    problem = make_dataset(config(path=path, system_prompt="Be kind.", prompt_template="<{prompt}>"))[0]
    assert problem.messages == ({"role": "system", "content": "Be kind."}, {"role": "user", "content": "<hi>"})
