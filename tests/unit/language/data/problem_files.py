"""Files of problems."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py
from omegaconf import OmegaConf

from rlhpc.language.config.data import DataSourceConfig
from tests.extras import need_extra

ROWS = [
    {"question": f"What is {i} + {i}?", "answer": 2 * i, "subject": "even" if i % 2 == 0 else "odd", "hint": f"add {i}"}
    for i in range(200)
]


def config(**fields: Any) -> Any:
    return OmegaConf.structured(DataSourceConfig(**fields))


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def write(source: str, folder: Path, rows: list[dict[str, Any]]) -> str:
    """The same rows as each source keeps them."""
    if source == "jsonl":
        return write_jsonl(folder / "rows.jsonl", rows)
    if source == "hdf5":
        with h5py.File(folder / "rows.h5", "w") as file:
            for name in rows[0]:
                values = [row[name] for row in rows]
                if isinstance(values[0], list):
                    column = file.create_dataset(name, data=[json.dumps(v) for v in values], dtype=h5py.string_dtype())
                    column.attrs["encoding"] = "json"
                elif isinstance(values[0], str):
                    file.create_dataset(name, data=values, dtype=h5py.string_dtype())
                else:
                    file.create_dataset(name, data=values)
        return str(folder / "rows.h5")
    if source == "parquet":
        need_extra("llm")
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet", row_group_size=7)
        return str(folder / "rows.parquet")
    need_extra("llm")
    import datasets

    datasets.Dataset.from_list(rows).save_to_disk(str(folder / "rows"))
    return str(folder / "rows")


SOURCES = ["jsonl", "parquet", "hdf5", "hf"]
