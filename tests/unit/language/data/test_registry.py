"""What is held out: no built-in source of problems shows evaluation's texts or pictures in training, whatever the seeds."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from rlhpc.language.config.data import DataSourceConfig
from rlhpc.language.data.registry import SOURCES, make_dataset
from rlhpc.language.envs.registry import ENVIRONMENTS
from rlhpc.runtime.errors import ConfigError
from tests.extras import need_extra

ROWS = [{"prompt": f"{n // 2}?", "answer": str(n)} for n in range(600)]  # each prompt twice
#: Environments with one question for all problems: what differs is a draw of the world, and a player meets all of them.
ONE_QUESTION = {"guess", "mastermind", "kuhn_poker", "proposer"}
#: Environments that play a data source's problems and make none.
WITHOUT_PROBLEMS = {"tools"}
#: Sections of each source; those with `eval_fraction` hold out only what it says.
SECTIONS: dict[str, list[dict[str, Any]]] = {
    "jsonl": [{"eval_fraction": 0.2, "path": "rows.jsonl"}],
    "parquet": [{"eval_fraction": 0.2, "path": "rows.parquet"}],
    "hdf5": [{"eval_fraction": 0.2, "path": "rows.h5"}],
    "hf": [{"eval_fraction": 0.2, "path": "folder"}],
    "reasoning_gym": [{"eval_fraction": 0.2, "kwargs": {"task": "chain_sum"}, "sizes": (40, 20)},
                      {"eval_fraction": 0.2, "kwargs": {"task": "coin_flip"}, "sizes": (40, 20)}],
    "arithmetic": [{"kwargs": {"digits": [1, 2], "operators": "+-*"}, "sizes": (3000, 500)}],
    "code": [{"kwargs": {"steps": 1}, "sizes": (40, 10)}],
    "drawn": [{"kwargs": {"tasks": "count"}, "sizes": (400, 100)}, {"kwargs": {"tasks": "side"}, "sizes": (400, 100)},
              {"kwargs": {"tasks": ["area", "count"], "most": 9}, "sizes": (400, 100)}],
    "environment": [{"kwargs": {"name": name}, "sizes": (3, 1) if name == "micro_swe" else (300, 100)}
                    for name in sorted(set(ENVIRONMENTS.names()) - ONE_QUESTION - WITHOUT_PROBLEMS)],
}  # fmt: skip


def test_every_source_is_checked() -> None:
    assert set(SECTIONS) == set(SOURCES.names())
    checked = {section["kwargs"]["name"] for section in SECTIONS["environment"]}
    assert checked | ONE_QUESTION | WITHOUT_PROBLEMS == set(ENVIRONMENTS.names())


@pytest.mark.parametrize(("source", "section"), [(s, c) for s, cases in SECTIONS.items() for c in cases], ids=str)
def test_no_text_and_no_picture_is_in_both_parts(source: str, section: dict[str, Any], tmp_path: Path) -> None:
    fields = dict(section)
    sizes = fields.pop("sizes", (None, None))
    if "path" in fields:
        write_rows(source, tmp_path)
        fields["path"] = str(tmp_path / fields["path"])
    if source == "reasoning_gym":
        need_extra("llm")
    parts = []
    for part, size, seed in (("train", sizes[0], 1), ("train", sizes[0], 2), ("eval", sizes[1], 3)):
        cfg = OmegaConf.structured(DataSourceConfig(source=source, size=size, seed=seed, **fields))
        shown = [content(problem) for problem in make_dataset(cfg, part)]
        assert source in ("jsonl", "parquet", "hdf5", "hf", "reasoning_gym") or len(set(shown)) == len(shown)
        parts.append(set(shown))
    assert all(parts)
    assert not (parts[0] | parts[1]) & parts[2]


def content(problem: Any) -> str:
    """Returns all that a problem shows: its texts, its pictures and, of an environment, the world it stands in."""
    pictures = [hashlib.blake2b(image).hexdigest() for image in problem.images]
    world = {name: value for name, value in problem.meta.items() if name in ("seed", "world", "fault", "tests")}
    return json.dumps([list(problem.messages), pictures, world], sort_keys=True)


def write_rows(source: str, folder: Path) -> None:
    if source == "jsonl":
        folder.joinpath("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        return
    columns = {name: [row[name] for row in ROWS] for name in ROWS[0]}
    if source == "hdf5":
        import h5py

        with h5py.File(folder / "rows.h5", "w") as file:
            for name, values in columns.items():
                file.create_dataset(name, data=values, dtype=h5py.string_dtype())
        return
    if source == "hf":
        need_extra("llm")
        import datasets

        datasets.Dataset.from_dict(columns).save_to_disk(folder / "folder")
        return
    need_extra("llm")
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(columns), folder / "rows.parquet")


def test_pictures_are_counted_once() -> None:
    """Where more are wanted than there are different ones, the message says how many there are."""
    cfg = OmegaConf.structured(DataSourceConfig(source="drawn", size=8000, kwargs={"tasks": "count"}))
    with pytest.raises(ConfigError, match=r"size is 8000, but only 4\d\d different problems are in the train part"):
        make_dataset(cfg)
