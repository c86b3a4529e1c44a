"""Reference page of all configuration keys, in Markdown."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

from omegaconf import MISSING

from rlhpc.config.constraints import ANY, RANGES, Range
from rlhpc.config.schema import element_of, fields_of, words_of

_HEAD = """# Configuration keys

Generated from the schemas by `python -m rlhpc.reference config`. A configuration is a YAML file;
`defaults: [other.yaml]` (relative to it) reads other files first, and `key=value` on the command
line comes last. `runner.task_type` names the task type, and each has its own keys: the column
"runs" says which, where it is not all. Keys that are unknown, or of another kind, are errors, and so are
numbers outside the interval that stands behind their type: `[` includes the bound, `(` does not; `or -1 (null)`
is a further number, which may be written as null.
A default such as `${env.train.env_id}` is the value of that other key; any value may be written so.

Values have the type of their key: `runner.name=1_2344`, `1e5`, `1.10` and `yes` stay texts, in files,
overrides and sweeps. Keys of files and folders take `~`, `$NAME` and `${NAME}`, environment variables
that must be set; any key takes `${oc.env:NAME,DEFAULT}`. `<<: *name` merges a mapping into another,
whose own keys have precedence.
"""


class _Row(NamedTuple):
    key: str
    type: str
    default: str
    meaning: str


def _docs(cls: type) -> dict[str, str]:
    """Returns the docstring under each field, including those of base classes."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        body = ast.parse(inspect.getsource(base)).body[0]
        assert isinstance(body, ast.ClassDef)
        for item, following in zip(body.body, body.body[1:], strict=False):
            if (
                isinstance(item, ast.AnnAssign)
                and isinstance(item.target, ast.Name)
                and isinstance(following, ast.Expr)
            ):
                assert isinstance(following.value, ast.Constant)
                docs[item.target.id] = " ".join(str(following.value.value).split())
    return docs


def _default(field: dataclasses.Field[Any]) -> str:
    value = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    if value == MISSING:
        return "required"
    return "`null`" if value is None else f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _sections(cls: type, prefix: str, ranges: Mapping[str, Range]) -> dict[str, tuple[str, list[_Row]]]:
    """Returns section → its description and rows; subsections follow their section."""
    rows: list[_Row] = []
    sections = {prefix.rstrip("."): ((cls.__doc__ or "").strip(), rows)} if prefix else {}
    kinds, docs = fields_of(cls), _docs(cls)
    for field in dataclasses.fields(cls):
        kind, key = kinds[field.name], f"{prefix}{field.name}"
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            sections |= _sections(kind, f"{key}.", ranges)
            continue
        if (element := element_of(kind)) is not None:
            sections |= _sections(element, f"{key}[].", ranges)
            name = f"list of `{key}[]`"
        else:
            name = words_of(kind).replace("|", "or")
        allowed = ranges.get(key, ANY).short()
        row = _Row(key, f"{name}, {allowed}" if allowed else name, _default(field), docs.get(field.name, ""))
        if prefix or element is None:
            rows.append(row)
        else:  # a list of sections that is in none
            sections[f"{key}[]"][1].insert(0, row)
    return sections


def _head(section: str) -> str:
    """Returns the part of the file that a section belongs to: `data` for `data.eval[]`."""
    return section.split(".")[0].split("[")[0]


def render(kinds: Mapping[str, tuple[type, Mapping[str, Range]]], other_files: Mapping[str, type]) -> str:
    """Formats the page.

    Args:
        kinds: Name of each task type → its configuration's dataclass, and the ranges of its numbers.
        other_files: Sections of files that are not part of a run's configuration, by name.
    """
    pages = {name: _sections(cls, "", {**RANGES, **ranges}) for name, (cls, ranges) in kinds.items()}
    order = {section: None for page in pages.values() for section in page}
    lines = [_HEAD.rstrip()]
    heads = [_head(section) for section in order]
    for section in sorted(order, key=lambda name: heads.index(_head(name))):
        having = [name for name, page in pages.items() if section in page]
        descriptions = list(dict.fromkeys(pages[name][section][0] for name in having))
        runs = "" if len(having) == len(pages) else f" Runs: {', '.join(having)}."
        lines += [f"\n## {section}\n", f"{descriptions[0]}{runs}\n"]
        lines += ["| key | type | default | runs | meaning |", "|---|---|---|---|---|"]
        rows: dict[_Row, list[str]] = {}
        for name in having:
            for row in pages[name][section][1]:
                rows.setdefault(row, []).append(name)
        for row in sorted(rows, key=lambda row: [other.key for other in rows].index(row.key)):
            where = "" if len(rows[row]) == len(having) else ", ".join(rows[row])
            lines.append(f"| `{row.key}` | {row.type} | {row.default} | {where} | {row.meaning} |")
    for name, cls in other_files.items():
        [(description, section_rows)] = _sections(cls, f"{name}.", {}).values()
        lines += [f"\n## {name}\n", f"{description}\n", "| key | type | default | meaning |", "|---|---|---|---|"]
        lines += [f"| `{row.key}` | {row.type} | {row.default} | {row.meaning} |" for row in section_rows]
    return "\n".join(lines) + "\n"
