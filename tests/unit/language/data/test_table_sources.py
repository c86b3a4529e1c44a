"""Problems out of files: what comes out of them, and what is said of those that are wrong."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import h5py
import pytest

from rlhpc.language.data import Prompt, make_dataset, register_source
from rlhpc.language.data.procedural import is_held_out
from rlhpc.runtime.errors import ConfigError
from tests.extras import need_extra
from tests.unit.language.data.problem_files import ROWS, SOURCES, config, write, write_jsonl


@pytest.mark.parametrize("source", SOURCES)
def test_every_kind_of_file_gives_the_same_problems(source: str, tmp_path: Path) -> None:
    path = write(source, tmp_path, ROWS)
    problems = make_dataset(config(source=source, path=path, prompt_key="question", level_key="subject"))
    assert len(problems) == 200
    assert problems[3] == Prompt(
        id=3,
        messages=({"role": "user", "content": "What is 3 + 3?"},),
        answer="6",
        meta={"hint": "add 3"},
        level="odd",
    )


@pytest.mark.parametrize("source", SOURCES)
def test_conversations_and_lists_of_tests_come_through(source: str, tmp_path: Path) -> None:
    talk = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "2+2?"},
    ]
    rows = [{"prompt": talk, "answer": "4", "tests": ["assert f(1) == 2", "assert f(2) == 3"]}] * 2
    problem = make_dataset(config(source=source, path=write(source, tmp_path, rows)))[1]
    assert list(problem.messages) == talk
    assert problem.meta == {"tests": ["assert f(1) == 2", "assert f(2) == 3"]}
    assert json.loads(json.dumps(problem.meta)) == problem.meta


@pytest.mark.parametrize("source", SOURCES)
def test_a_column_that_is_not_there(source: str, tmp_path: Path) -> None:
    path = write(source, tmp_path, ROWS)
    with pytest.raises(ConfigError) as error:
        make_dataset(config(source=source, path=path))
    message = str(error.value)
    assert message.startswith("data.train.prompt_key is 'prompt', but ")
    assert path in message
    assert message.endswith("has no such column; it has: question, answer, subject, hint") or source == "hdf5"
    with pytest.raises(ConfigError, match=r"answer_key is 'solution'.*set data\.train\.answer_key=null"):
        make_dataset(config(source=source, path=path, prompt_key="question", answer_key="solution"))


def test_which_problems_are_held_out_never_changes() -> None:
    # Pinned: a change of the hash would move problems of evaluation into training between two versions.
    assert [i for i in range(40) if is_held_out(f"problem {i}", 0.2)] == [2, 5, 6, 7, 15, 19, 26, 31, 39]
    assert {i for i in range(1000) if is_held_out(str(i), 0.1)} < {i for i in range(1000) if is_held_out(str(i), 0.3)}


def test_size_takes_a_sample_that_the_seed_decides(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS)

    def ids(**fields: Any) -> list[int]:
        return [p.id for p in make_dataset(config(path=path, prompt_key="question", **fields))]

    assert ids(size=20) == ids(size=20) == sorted(ids(size=20))
    assert len(set(ids(size=20))) == 20
    assert ids(size=20) != ids(size=20, seed=1)
    assert ids(size=1000) == list(range(200))


def test_folders_patterns_and_packed_files_are_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    for name, start in (("b", 2), ("a", 0)):
        write_jsonl(folder / f"{name}.jsonl", ROWS[start : start + 2])
    (folder / "notes.txt").write_text("not a row")
    for path in (str(folder), str(folder / "*.jsonl"), str(tmp_path / "**" / "[ab].jsonl")):
        problems = make_dataset(config(path=path, prompt_key="question"))
        assert [p.answer for p in problems] == ["0", "2", "4", "6"]
    with gzip.open(tmp_path / "c.jsonl.gz", "wt") as file:
        file.write(json.dumps(ROWS[5]) + "\n\n" + json.dumps(ROWS[6]))
    assert [p.answer for p in make_dataset(config(path=str(tmp_path / "c.jsonl.gz"), prompt_key="question"))] == [
        "10",
        "12",
    ]


def test_split_filters_rows(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    problems = make_dataset(config(path=path, prompt_key="question", split="subject=odd"))
    assert [p.id for p in problems] == list(range(1, 200, 2))
    with pytest.raises(ConfigError, match=r"data\.train\.split is 'subject=prime'; of 200 rows none fits"):
        make_dataset(config(path=path, prompt_key="question", split="subject=prime"))
    with pytest.raises(ConfigError, match="takes a filter column=value"):
        make_dataset(config(path=path, prompt_key="question", split="train"))


def test_split_names_a_part_of_a_dataset_folder(tmp_path: Path) -> None:
    need_extra("llm")
    import datasets

    parts = {"train": datasets.Dataset.from_list(ROWS[:5]), "test": datasets.Dataset.from_list(ROWS[5:8])}
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "d"))
    cfg = config(source="hf", path=str(tmp_path / "d"), prompt_key="question", split="test")
    assert [p.answer for p in make_dataset(cfg, "eval")] == ["10", "12", "14"]
    for split in (None, "dev"):
        with pytest.raises(ConfigError, match=r"data\.eval\.split is .*has the parts train, test"):
            make_dataset(config(source="hf", path=str(tmp_path / "d"), prompt_key="question", split=split), "eval")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="no folder written by save_to_disk"):
        make_dataset(config(source="hf", path=str(tmp_path / "empty")))


def test_demonstrations(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    path = write_jsonl(tmp_path / "talk.jsonl", [{"messages": talk}])
    problem = make_dataset(config(path=path, prompt_key="messages", answer_key=None), requires_demonstrations=True)[0]
    assert (problem.messages, problem.response) == (({"role": "user", "content": "2+2?"},), "4")

    columns = write_jsonl(tmp_path / "columns.jsonl", [{"q": "2+2?", "a": "4"}, {"q": "3+3?", "a": ""}])
    cfg = config(path=columns, prompt_key="q", answer_key=None, response_key="a")
    assert [p.response for p in make_dataset(cfg)] == ["4", ""]
    with pytest.raises(ConfigError, match=r"columns\.jsonl:2: the demonstration, column 'a', is empty"):
        make_dataset(cfg, requires_demonstrations=True)
    with pytest.raises(
        ConfigError, match=r"response_key is 'response', but .*columns\.jsonl:1 has no such column; it has: q, a"
    ):
        make_dataset(config(path=columns, prompt_key="q", answer_key=None), requires_demonstrations=True)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"prompt": "x", "answer": ', r"rows\.jsonl:3 is not JSON: "),
        ('["x"]', r"rows\.jsonl:3 is a JSON list, not an object"),
        ('{"prompt": null, "answer": "1"}', r"rows\.jsonl:3: column 'prompt' is null; a prompt is a text"),
        ('{"prompt": "", "answer": "1"}', r"rows\.jsonl:3: column 'prompt' is \"\""),
        ('{"prompt": [{"role": "user"}], "answer": "1"}', r"rows\.jsonl:3: column 'prompt' is \[\{\"role\""),
        ('{"question": "x", "answer": "1"}', r"rows\.jsonl:3 has no such column; it has: question, answer"),
    ],
)
def test_a_bad_line_is_named(line: str, said: str, tmp_path: Path) -> None:
    # The empty second line counts, as in an editor.
    (tmp_path / "rows.jsonl").write_text('{"prompt": "x", "answer": "1"}\n\n' + line + "\n")
    with pytest.raises(ConfigError, match=said):
        make_dataset(config(path=str(tmp_path / "rows.jsonl")))


def test_paths_that_lead_nowhere(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("")
    cases = {
        None: "data.train.path is not set",
        str(tmp_path / "trian.jsonl"): f"no such file or folder; did you mean '{tmp_path / 'train.jsonl'}'",
        str(tmp_path / "*.json"): "no file fits this pattern",
        str(
            tmp_path / "train.jsonl"
        ): f"data.train: the dataset is empty (source jsonl, path {tmp_path / 'train.jsonl'})",
    }
    for path, said in cases.items():
        with pytest.raises(ConfigError) as error:
            make_dataset(config(path=path))
        assert said in str(error.value)
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match=r"a folder without files that end in \.jsonl"):
        make_dataset(config(path=str(tmp_path / "folder")))


@pytest.mark.parametrize(("source", "name"), [("parquet", "x.parquet"), ("hdf5", "x.h5")])
def test_a_file_of_another_format(source: str, name: str, tmp_path: Path) -> None:
    need_extra("llm")
    (tmp_path / name).write_text("this is text")
    with pytest.raises(ConfigError, match=rf"{name} cannot be read as (Parquet|HDF5): "):
        make_dataset(config(source=source, path=str(tmp_path / name)))


def test_hdf5_groups_and_uneven_columns(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_group("train").create_dataset("prompt", data=["a", "b"], dtype=h5py.string_dtype())
        file.create_group("bad").create_dataset("prompt", data=["a", "b"], dtype=h5py.string_dtype())
        file["bad"].create_dataset("answer", data=[1])
    fields = {"source": "hdf5", "path": str(tmp_path / "x.h5"), "answer_key": None}
    assert len(make_dataset(config(**fields, kwargs={"group": "train"}))) == 2
    with pytest.raises(ConfigError, match="columns have different lengths: answer 1, prompt 2"):
        make_dataset(config(**fields, kwargs={"group": "bad"}))
    with pytest.raises(ConfigError, match="has no group 'test'; it has: bad, train"):
        make_dataset(config(**fields, kwargs={"group": "test"}))


def test_settings_that_make_no_sense(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    for fields, said in (
        (
            {"source": "jsnol"},
            r"data\.train\.source is 'jsnol', which is unknown; did you mean 'jsonl'\? allowed: arithmetic, ",
        ),
        ({"source": "nowhere:Thing"}, "data.train.source is 'nowhere:Thing', which cannot be imported"),
        ({"eval_fraction": 1.0}, "eval_fraction is 1.0; allowed: from 0 to below 1"),
        ({"size": 0}, "size is 0; allowed: 1 or more"),
        ({"kwargs": {"digits": 2}}, r"kwargs\.digits is 2; source jsonl has no such option; allowed: none"),
    ):
        with pytest.raises(ConfigError, match=said):
            make_dataset(config(path=path, prompt_key="question", **fields))


class Greetings:
    """A source from outside."""

    def __init__(self, cfg: Any, *, part: str, key: str) -> None:
        self.words = ["hi", "hello"] if part == "train" else ["bye"]

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> Prompt:
        return Prompt(index, ({"role": "raw", "content": self.words[index]},))


def test_a_source_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    from rlhpc.language.data import registry

    monkeypatch.setattr(registry.SOURCES, "_items", {})
    register_source("greetings")(Greetings)
    cfg = config(source="Greetings", prompt_template="say {prompt}", system_prompt="polite:")
    assert make_dataset(cfg)[1].messages == ({"role": "raw", "content": "polite:\nsay hello"},)
    assert len(make_dataset(cfg, "eval")) == 1
    with pytest.raises(ConfigError, match="registered twice"):
        register_source("greetings")(Greetings)
    with pytest.raises(ConfigError, match="source 'Greetings' has no demonstrations"):
        make_dataset(cfg, requires_demonstrations=True)
