"""The reward, by hand and on the data: pytest test_my_reward.py"""

import json
from pathlib import Path

import pytest
from my_reward import letters_in_order

from rlhpc.language.rewards import Sample

DATA = Path(__file__).parent / "data"


@pytest.mark.parametrize(("response", "reward"), [("abde", 1.0), ("abed", 0.5), ("abd", 0.0), ("", 0.0)])
def test_the_share_of_letters_in_their_place(response: str, reward: float) -> None:
    assert letters_in_order(Sample("ebda=", response, answer="abde")) == reward


@pytest.mark.parametrize("name", ["train.jsonl", "test.jsonl"])
def test_the_answers_of_the_data_are_right(name: str) -> None:
    rows = [json.loads(line) for line in (DATA / name).read_text().splitlines()]
    assert all(letters_in_order(Sample(row["prompt"], row["answer"], row["answer"])) == 1.0 for row in rows)
    assert all(row["answer"] == "".join(sorted(row["prompt"].removesuffix("="))) for row in rows)


def test_no_problem_of_the_evaluation_is_trained_on() -> None:
    train, test = (
        {json.loads(line)["prompt"] for line in (DATA / f"{name}.jsonl").open()} for name in ("train", "test")
    )
    assert not train & test
