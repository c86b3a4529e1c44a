"""Reference page of configuration keys: sections, rows, and the kinds of runs that have them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from types import SimpleNamespace

from omegaconf import MISSING

from rlhpc.config.constraints import Range
from rlhpc.config.reference import render
from rlhpc.config.schema import Schema, tree_of


@dataclass
class Optim:
    """Optimizer of a run."""

    lr: float = 1e-3
    """Learning rate."""
    steps: int | None = None
    """Steps of the warm-up,
    or none."""


@dataclass
class Term:
    """Term of the sum."""

    name: str = MISSING
    """Name of the term."""


@dataclass
class Runner:
    """Life of a run."""

    name: str = "run"
    """Its name."""
    resume: bool = True
    """Whether it goes on."""
    optim: Optim = field(default_factory=Optim)


@dataclass
class Base:
    """Configuration of these tests."""

    runner: Runner = field(default_factory=Runner)
    terms: list[Term] = field(default_factory=list)
    """All terms."""


@dataclass
class OtherRunner(Runner):
    """Life of a run."""

    name: str = "other"
    """Its name."""


@dataclass
class Other:
    """Another kind of run."""

    runner: OtherRunner = field(default_factory=OtherRunner)


@dataclass
class SweepFile:
    """File of a sweep."""

    seeds: int = 3
    """Number of seeds."""


def page() -> list[str]:
    """Returns the lines of the page of two kinds of runs and a file."""
    keys = tree_of(Base)
    lr = dataclasses.replace(keys["runner.optim.lr"], range=Range(0.0, 1.0))
    kinds = {
        "base": SimpleNamespace(schema=Schema(Base), tree={**keys, "runner.optim.lr": lr}),
        "other": SimpleNamespace(schema=Schema(Other), tree=tree_of(Other)),
    }
    return render(kinds, {"sweep": SweepFile}).splitlines()


def section(name: str) -> list[str]:
    """Returns the lines of a section of the page."""
    lines = page()
    begin = lines.index(f"## {name}")
    ends = [at for at, line in enumerate(lines) if line.startswith("## ") and at > begin]
    return [line for line in lines[begin + 1 : ends[0] if ends else None] if line]


def test_subsections_follow_their_section() -> None:
    assert [line[3:] for line in page() if line.startswith("## ")] == ["runner", "runner.optim", "terms[]", "sweep"]


def test_each_key_has_its_type_default_and_meaning() -> None:
    rows = section("runner.optim")
    assert rows[0] == "Optimizer of a run."
    assert any(row.startswith("| `runner.optim.steps` | int or null | `null` | ") for row in rows)
    assert any("Steps of the warm-up, or none." in row for row in rows)
    assert any(
        row.startswith("| `runner.resume` | bool | `true` |  | Whether it goes on.") for row in section("runner")
    )


def test_a_range_stands_behind_the_type() -> None:
    [row] = [row for row in section("runner.optim") if "`runner.optim.lr`" in row and "base" in row]
    assert row.startswith("| `runner.optim.lr` | float, ") and "0" in row and "1" in row.split("|")[2]


def test_rows_that_differ_name_their_kinds_of_runs() -> None:
    rows = [row for row in section("runner") if "`runner.name`" in row]
    assert rows == [
        "| `runner.name` | str | `run` | base | Its name. |",
        "| `runner.name` | str | `other` | other | Its name. |",
    ]


def test_sections_of_a_list_belong_to_it() -> None:
    rows = section("terms[]")
    assert rows[0] == "Term of the sum. Runs: base."
    assert any(row.startswith("| `terms` | list of `terms[]` | `[]` |") for row in rows)
    assert "| `terms[].name` | str | required |  | Name of the term. |" in rows


def test_other_files_have_no_kinds_of_runs() -> None:
    assert section("sweep")[-1] == "| `sweep.seeds` | int | `3` | Number of seeds. |"
