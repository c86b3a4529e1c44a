"""Pairs for the evaluation of preferences."""

from __future__ import annotations

from rlhpc.language.data.prompts import Prompt
from rlhpc.language.evaluation.preference_pairs import labels_of, pairs_of, shuffle

PROMPT = Prompt(7, ({"role": "user", "content": "1+1="},), answer="2", level="easy")


def answers(*told: tuple[str, float], failed: str = "") -> list[dict]:
    return [{"response": t, "right": r >= 1, "reward": r, "failed": t == failed} for t, r in told]


def test_one_right_answer_beside_each_different_wrong_one() -> None:
    given = answers(("3", 0), ("2", 1), ("3", 0), ("4", 0), ("02", 1), ("", 0), ("5", 0), failed="5")
    assert list(pairs_of(PROMPT, given)) == [
        {"prompt": "1+1=", "level": "easy", "chosen": "2", "rejected": wrong} for wrong in ("3", "4")
    ]
    assert not list(pairs_of(PROMPT, answers(("3", 0)))) and not list(pairs_of(PROMPT, answers(("2", 1))))
    assert [(row["response"], row["label"]) for row in labels_of(PROMPT, given)] == [
        ("3", 0.0), ("2", 1.0), ("4", 0.0), ("02", 1.0),
    ]  # fmt: skip
    talk = Prompt(0, ({"role": "system", "content": "add"}, {"role": "user", "content": "1+1="}))
    assert next(pairs_of(talk, given))["prompt"] == list(talk.messages)


def test_the_control_says_nothing_about_the_answers() -> None:
    rows = [{"prompt": str(n), "chosen": "right", "rejected": "wrong"} for n in range(1000)]
    shuffle(rows, "pairs", 1)
    swapped = [row["chosen"] == "wrong" for row in rows]
    assert 420 < sum(swapped) < 580 and all({row["chosen"], row["rejected"]} == {"right", "wrong"} for row in rows)
    again = [{"prompt": str(n), "chosen": "right", "rejected": "wrong"} for n in range(1000)]
    shuffle(again, "pairs", 1)
    assert again == rows
    labelled = [{"prompt": str(n), "response": "r", "label": float(n)} for n in range(100)]
    shuffle(labelled, "labels", 1)
    assert sorted(row["label"] for row in labelled) == [float(n) for n in range(100)]
    assert sum(row["label"] == float(row["prompt"]) for row in labelled) < 10
