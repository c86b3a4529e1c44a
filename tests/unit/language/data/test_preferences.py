"""Pairs and labels from files: what is read, how it is put to the model, and which rows are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.extras import need_extra

need_extra("llm")

from rlhpc.language.config.data import PreferenceSourceConfig
from rlhpc.language.data.preferences import PreferenceRow, Preferences, encode
from rlhpc.language.data.prompts import Prompt
from rlhpc.runtime.errors import ConfigError
from tests.unit.language.data.pairs import encoder

GOOD = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}


def file_of(folder: Path, *rows: Any) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def read(path: Path, form: str = "pairs", **keys: Any) -> list[PreferenceRow]:
    rows = Preferences(PreferenceSourceConfig(path=str(path), **keys), form)
    return [rows[index] for index in range(len(rows))]


def test_pairs_with_and_without_margins(tmp_path: Path) -> None:
    path = file_of(tmp_path, {**GOOD, "by": 0.5}, {"prompt": "2+2=", "chosen": "4", "rejected": "5", "by": 1})
    plain = read(path)
    assert [row.responses for row in plain] == [("2", "3"), ("4", "5")] and [row.target for row in plain] == [0, 0]
    assert plain[0].prompt.messages == ({"role": "user", "content": "1+1="},)
    assert [row.target for row in read(path, margin_key="by")] == [0.5, 1.0]


def test_labels(tmp_path: Path) -> None:
    path = file_of(tmp_path, {"prompt": "1+1=", "response": "2", "score": 0.75})
    (row,) = read(path, "labels", label_key="score")
    assert row.responses == ("2",) and row.target == 0.75 and row.prompt.response == ""


def test_responses_as_conversations(tmp_path: Path) -> None:
    """As public sets of preferences have them: the whole conversation, or its last turn, in each column."""
    user, two, three = ({"role": "user", "content": "1+1="}, *({"role": "assistant", "content": n} for n in "23"))
    path = file_of(
        tmp_path,
        {"prompt": "1+1=", "chosen": [user, two], "rejected": [user, three]},
        {"prompt": [user], "chosen": [two], "rejected": "3"},
    )
    assert [row.responses for row in read(path, prompt_template="What is {prompt}")] == [("2", "3"), ("2", "3")]


def test_other_columns_level_part_and_template(tmp_path: Path) -> None:
    rows = [{"q": f"{n}+0=", "good": str(n), "bad": "x", "kind": "easy" if n % 2 else "hard"} for n in range(8)]
    path = file_of(tmp_path, *rows)
    keys = {"prompt_key": "q", "chosen_key": "good", "rejected_key": "bad", "level_key": "kind"}
    found = read(path, split="kind=easy", prompt_template="{prompt} {kind}", **keys)
    assert [row.responses[0] for row in found] == ["1", "3", "5", "7"] and found[0].prompt.level == "easy"
    assert found[0].prompt.question == "1+0= {kind}"  # the level's column is named: no template takes it
    sides = [
        {row.prompt.question for row in (lambda d: [d[i] for i in range(len(d))])(
            Preferences(PreferenceSourceConfig(path=str(path), eval_fraction=0.5, **keys), "pairs", part))}
        for part in ("train", "eval")
    ]  # fmt: skip
    assert not sides[0] & sides[1] and len(sides[0] | sides[1]) == 8


@pytest.mark.parametrize("source", ["parquet", "hf"])
def test_other_sources(tmp_path: Path, source: str) -> None:
    need_extra("llm")
    import datasets

    table = datasets.Dataset.from_list([GOOD, {**GOOD, "chosen": ""}])
    path = tmp_path / ("rows.parquet" if source == "parquet" else "folder")
    table.select([0]).to_parquet(path) if source == "parquet" else table.select([0]).save_to_disk(path)
    assert read(path, source=source)[0].responses == ("2", "3")
    table.to_parquet(path) if source == "parquet" else table.save_to_disk(tmp_path / "both")
    at = path if source == "parquet" else tmp_path / "both"
    with pytest.raises(ConfigError, match=rf"{at.name}, row 1: column 'chosen' is \"\"; allowed: a text"):
        read(at, source=source)


def called(arguments: str) -> list[dict[str, Any]]:
    """A response that calls a tool."""
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    return [{"role": "assistant", "content": "", "tool_calls": [call]}]


BAD = [
    ("pairs", {}, {**GOOD, "chosen": ""}, r"rows\.jsonl:2: column 'chosen' is \"\"; allowed: a text that is not empty"),
    ("pairs", {}, {**GOOD, "rejected": 3}, r"rows\.jsonl:2: column 'rejected' is 3; allowed: a text"),
    ("pairs", {}, {**GOOD, "rejected": None}, r"rows\.jsonl:2: column 'rejected' is null"),
    ("pairs", {}, {**GOOD, "chosen": [{"role": "user", "content": "2"}]}, r"rows\.jsonl:2: column 'chosen' is \[\{"),
    (
        "pairs", {},
        {**GOOD, "chosen": [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"}]},
        r"rows\.jsonl:2: column 'chosen' goes on from another conversation than the prompt's \('prompt'\)",
    ),
    (
        "pairs", {}, {"prompt": "1+1=", "response": "2", "label": 1.0},
        r"data\.train\.chosen_key is 'chosen', but .*rows\.jsonl:2 has no such column; it has: prompt, response, label; "
        r"algorithm\.loss_type=regression reads labels, bradley_terry pairs",
    ),
    ("pairs", {"margin_key": "by"}, {**GOOD}, r"data\.train\.margin_key is 'by', but .*rows\.jsonl:2 has no such column"),
    ("pairs", {"margin_key": "by"}, {**GOOD, "by": "1"}, r"rows\.jsonl:2: column 'by' is \"1\"; allowed: a finite number"),
    ("pairs", {}, {"chosen": "2", "rejected": "3"}, r"data\.train\.prompt_key is 'prompt', but .*rows\.jsonl:2 has no such"),
    ("labels", {}, {"prompt": "1+1=", "response": "2", "label": "good"}, r"rows\.jsonl:2: column 'label' is \"good\"; allow"),
    ("labels", {}, {"prompt": "1+1=", "response": "2", "label": True}, r"rows\.jsonl:2: column 'label' is true; allowed"),
    ("labels", {}, {"prompt": "1+1=", "response": "", "label": 1}, r"jsonl:2: column 'response' is \"\"; allowed"),
    ("labels", {}, {"prompt": "1+1=", "label": 1}, r"response_key is 'response', but .*rows\.jsonl:2 has no such column"),
    (
        "pairs", {}, {**GOOD, "prompt": [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]},
        r"rows\.jsonl:2: column 'prompt' ends with the assistant's turn",
    ),
    ("pairs", {}, "{", r"rows\.jsonl:2 is not JSON"),
    ("pairs", {}, {**GOOD, "chosen": called("[" * 100_000)}, r"jsonl:2: column 'chosen' .* arguments are no JSON"),
    ("pairs", {}, {**GOOD, "chosen": called('{"a":' * 90_000 + "1" + "}" * 90_000)}, r"jsonl:2: column 'chosen' .* no JSON"),
    ("labels", {}, '{"prompt": "1+1=", "response": "2", "label": NaN}', r"rows\.jsonl:2"),
]  # fmt: skip


@pytest.mark.parametrize("column", GOOD)
def test_half_of_a_pair_that_writes_one_character_is_named(tmp_path: Path, column: str) -> None:
    """JSON allows it, and no tokenizer takes it."""
    row = Preferences(PreferenceSourceConfig(path=str(file_of(tmp_path, GOOD, {**GOOD, column: "9\ud83d"}))), "pairs")
    with pytest.raises(ConfigError, match=r"rows\.jsonl:2: a text has \\ud83d, half of the pair"):
        row.fit(encoder(), 100)


@pytest.mark.parametrize(("form", "keys", "row", "said"), BAD)
def test_a_bad_row_is_named(tmp_path: Path, form: str, keys: dict, row: Any, said: str) -> None:
    good = {**GOOD, "by": 1} if form == "pairs" else {"prompt": "1+1=", "response": "2", "label": 1}
    with pytest.raises(ConfigError, match=said):
        read(file_of(tmp_path, good, row), form, **keys)


def test_the_reward_is_read_at_the_end_token_unless_that_is_padding() -> None:
    row = PreferenceRow(Prompt(0, ({"role": "user", "content": "1+1="},)), ("2", "34"), 0.0)
    chosen, rejected = encode(row, encoder(), 16)
    assert (chosen[0], chosen[-1], rejected[-1]) == (1, 2, 2) and len(rejected) == len(chosen) + 1 == 8
    assert [ids[-1] for ids in encode(row, encoder(end_pads=True), 16)] == [chosen[-2], rejected[-2]]


def test_rows_that_are_too_long(tmp_path: Path) -> None:
    long = {"prompt": "1+1=", "chosen": "2" * 20, "rejected": "3"}
    path = file_of(tmp_path, GOOD, long, {"prompt": "1234567890=", "chosen": "2", "rejected": "3"})
    rows = Preferences(PreferenceSourceConfig(path=str(path)), "pairs")
    with pytest.raises(ConfigError, match=r"rows\.jsonl:2 has 26 tokens with its response"):
        encode(rows[1], encoder(), 12)
    with pytest.raises(ConfigError, match=r"rows\.jsonl:3 has 12 tokens, more than data\.max_prompt_tokens allows"):
        encode(rows[2], encoder(), 40)
    assert rows.fit(encoder(overlong="drop"), 12) == 2 and len(rows) == 1
    with pytest.raises(ConfigError, match=r"data\.train: all 1 rows are too long"):
        rows.fit(encoder(overlong="drop"), 2)
