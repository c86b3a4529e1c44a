"""Metadata of keys: each stands at its field and nowhere else."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import pytest
from omegaconf import MISSING

from rlhpc.config.constraints import COUNT, EVALUATION, FRACTION, FREE, Choices, Range, Registered
from rlhpc.config.schema import keys_of, tree_of
from rlhpc.config.sections import RunConfig
from rlhpc.runs.task_parts import ConfigChecks
from rlhpc.runs.task_type import ConfigKeys, TaskType, all_task_types
from rlhpc.runtime.key_metadata import OnResume
from tests.structure.measure import read_modules, tables_of_keys

ROOT = Path(__file__).resolve().parents[3]
#: Module-level tables that name keys without describing them: when a key is read, which were removed, which a search varies.
OTHER_TABLES = {
    "rlhpc/config/load.py:_REMOVED_KEYS",
    "rlhpc/config/schema.py:_OPEN_MAPPINGS",
    "rlhpc/config/sweep.py:_FIXED_KEYS",
    *(f"rlhpc/embodied/conditional_keys.py:{name}" for name in ("BC", "OFF_POLICY", "PPO", "_RECORDING_CONDITION")),
    *(f"rlhpc/embodied/conditional_keys.py:_{name}_CONDITIONS" for name in ("DEMONSTRATION", "POLICY", "SIMULATOR")),
    "rlhpc/embodied/models/openvla.py:_EXTRA_PREFIXES",
    "rlhpc/embodied/planning.py:(STAGES, STALENESS, MICRO)",
    "rlhpc/embodied/task_types.py:_ENVIRONMENT_KEYS",
    *(
        f"rlhpc/language/conditional_keys.py:{name}"
        for name in ("ANSWERING", "DPO", "REASONING", "SUPERVISED", "TRAINED")
    ),
    "rlhpc/language/evaluation/layer_mismatch.py:_TRAINER_SETTINGS",
    "rlhpc/language/planning/workload.py:(MICRO, BATCH)",
    "rlhpc/language/planning/workload.py:(STALENESS, OFFLOAD)",
    *(f"rlhpc/runs/conditional_keys.py:{name}" for name in ("CLIPPED", "COMMON")),
    "rlhpc/runs/config_changes.py:_TASK_TYPE_KEY",
    "rlhpc/runs/tuning/tune.py:SHORT_RUN_OVERRIDES",
    *(f"rlhpc/runtime/trust.py:{name}" for name in ("_JOB_TEXTS", "_SWITCHES")),
}
#: Modules that define ranges and marks, and that read them.
OF_METADATA = (
    "rlhpc/runtime/key_metadata.py",
    *(f"rlhpc/config/{name}.py" for name in ("constraints", "options", "schema")),
)
MARKS = {"ATTENTION", "COUNT", "DTYPES", "ENGINE_DTYPES", "EVALUATION", "FRACTION", "FREE", "INTERVAL", "INTERVAL_OR_0"}
MARKS |= {"NOT_NEGATIVE", "PART", "POSITIVE", "RATE", "SEED", "Choices", "Range", "Registered"}


@dataclass
class Inner:
    """An inner section."""

    size: Annotated[int, COUNT, FREE] = 3
    """How many."""
    mode: Annotated[str, Choices("a", "b")] = "a"
    name: str = MISSING
    """Its
    name."""


@dataclass
class Overriding(Inner):
    """Another default."""

    size: int = 4
    mode: Annotated[str, Choices("c")] = "c"


@dataclass
class Outer:
    """An outer section."""

    inner: Overriding = field(default_factory=Overriding)
    """The first."""
    judged: Annotated[Inner, EVALUATION] = field(default_factory=Inner)
    several: list[Inner] = field(default_factory=list)
    parts: Annotated[list[float], FRACTION] = field(default_factory=lambda: [0.5])
    backend: Annotated[str, Registered("rlhpc.training.registry:BACKENDS")] = "local"


def test_a_key_has_what_its_field_says() -> None:
    keys = keys_of(Outer)
    assert list(keys) == [
        "inner.size", "inner.mode", "inner.name", "judged.size", "judged.mode", "judged.name", "several",
        "several[].size", "several[].mode", "several[].name", "parts", "backend",
    ]  # fmt: skip
    size = keys["judged.size"]
    assert (size.type, size.default, size.doc, size.range, size.name) == (int, 3, "How many.", COUNT, "size")
    assert keys["inner.name"].default == MISSING and keys["inner.name"].doc == "Its name."
    assert keys["parts"].range == FRACTION and keys["parts"].default == [0.5]
    assert keys["backend"].names()[:1] == ["local"] and keys["parts"].names() == []


def test_an_overridden_field_keeps_its_metadata() -> None:
    keys = keys_of(Outer)
    assert (keys["inner.size"].range, keys["inner.size"].default, keys["inner.size"].is_free) == (COUNT, 4, True)
    assert keys["inner.size"].doc == "How many." and keys["inner.mode"].choices == ("c",)


def test_a_section_marks_its_keys_and_a_list_is_one_value() -> None:
    tree = tree_of(Outer)
    assert tree["judged"].is_section and tree["judged"].doc == "An inner section." and tree["inner"].doc == "The first."
    assert {path for path, key in tree.items() if key.on_resume is OnResume.EVALUATION} == {
        "judged", "judged.size", "judged.mode", "judged.name"
    }  # fmt: skip
    assert {path for path, key in tree.items() if key.on_resume is OnResume.FREE} == {"inner.size"}


def test_a_task_type_may_add_metadata() -> None:
    checks = ConfigChecks[RunConfig]()
    checks.ranges, checks.choices = {"runner.seed": Range(5)}, {"runner.name": ("a",)}
    checks.free, checks.evaluation = ("runner.seed",), ("runner.logger.",)
    keys = ConfigKeys("own", RunConfig, checks)
    assert keys.by_path["runner.seed"].range == Range(5) and keys.by_path["runner.name"].choices == ("a",)
    assert keys.on_resume("runner.seed") is OnResume.FREE and keys.on_resume("runner.task_type") is OnResume.FIXED
    assert keys.on_resume("runner.logger.kwargs.wandb.mode") is OnResume.EVALUATION
    assert keys.on_resume("cluster.removed_key") is OnResume.FREE and keys.on_resume("nosuch") is OnResume.FIXED


@pytest.mark.parametrize("kind", all_task_types(), ids=lambda kind: kind.name)
def test_every_key_is_described(kind: TaskType[RunConfig]) -> None:
    assert [path for path, key in kind.keys.tree.items() if not key.doc] == []
    for key in kind.keys.by_path.values():
        if key.registry:
            module, _, name = key.registry.partition(":")
            assert key.names() == getattr(importlib.import_module(module), name).choices()[:-1]
    checks = kind.checks
    assert not (checks.ranges or checks.choices or checks.free or checks.evaluation), "they stand at the fields"


def test_no_second_table_describes_keys() -> None:
    assert set(tables_of_keys(read_modules(ROOT))) == OTHER_TABLES


def outside_annotations(node: ast.AST) -> Iterator[ast.Name]:
    """Yields the names in a module that are not in the annotation of a field or a parameter."""
    for name, value in ast.iter_fields(node):
        if isinstance(node, ast.AnnAssign | ast.arg) and name == "annotation":
            continue
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, ast.Name):
                yield each
            elif isinstance(each, ast.AST):
                yield from outside_annotations(each)


def test_ranges_and_choices_stand_in_annotations() -> None:
    """A table by any other form of key, such as a class and a field's name, would name them elsewhere."""
    modules = [module for module in read_modules(ROOT) if str(module.path) not in OF_METADATA]
    wrong = []
    for module in modules:
        imported = {
            alias.asname or alias.name
            for node in ast.walk(module.tree)
            if isinstance(node, ast.ImportFrom)
            and node.module in ("rlhpc.config.constraints", "rlhpc.runtime.key_metadata")
            for alias in node.names
            if alias.name in MARKS
        }
        wrong += [
            f"{module.path}:{name.lineno} {name.id}" for name in outside_annotations(module.tree) if name.id in imported
        ]
    assert [each for each in wrong if not each.startswith("rlhpc/config/json_schema.py")] == []
