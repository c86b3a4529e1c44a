"""Capabilities of rlhpc, as its schemas and registries tell them, and the claims of the importer about what is missing."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator

from rlhpc.config.schema import tree_of
from rlhpc.runs.task_type import all_task_types


@functools.cache
def capabilities() -> tuple[str, ...]:
    """Returns a line for each key, word, registered name and option of every task type."""
    return tuple(dict.fromkeys(_lines()))


def _lines() -> Iterator[str]:
    for task_type in all_task_types():
        yield f"name {task_type.name}"
        for key in tree_of(task_type.config).values():
            yield f"{task_type.name} key {key.path}: {key.doc}"
            yield from (f"{task_type.name} key {key.path} takes {word}" for word in key.choices)
            yield from (f"name {name}" for name in key.names())
            for component, options in key.option_keys().items():
                yield from (f"option {component}.{option.path}: {option.doc}" for option in options.values())


def contradictions(pattern: str) -> list[str]:
    """Returns the capabilities that a claim of absence denies."""
    return [line for line in capabilities() if re.search(pattern, line, re.IGNORECASE)]


#: Words by which a reason claims that rlhpc lacks something.
_ABSENCE = re.compile(
    r"\b(rlhpc(?:'s \w+)? has no|rlhpc does not|is missing|there (is|are) no|cannot|no such|not here|without pictures)\b",
    re.IGNORECASE,
)


def claims_absence(reason: str) -> bool:
    """Returns whether a reason says that rlhpc lacks something."""
    return bool(_ABSENCE.search(reason))
