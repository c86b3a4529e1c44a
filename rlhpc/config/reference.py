"""Descriptions of configuration keys: the reference page, in Markdown, and a single key for a terminal."""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from omegaconf import MISSING

from rlhpc.config.constraints import ANY
from rlhpc.config.schema import ConfigKey, SchemaKeys, element_of, fields_of, nearest_key, tree_of, words_of
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.key_metadata import OnResume
from rlhpc.runtime.text import cut

_HEAD = """# Configuration keys

Generated from the schemas by `python -m rlhpc.reference config`. A configuration is a YAML file;
`defaults: [other.yaml]` (relative to it) reads other files first, and `key=value` on the command
line comes last. `runner.task_type` names the task type, and each has its own keys: the column
"runs" says which, where it is not all. Keys that are unknown, or of another kind, are errors, and so are
numbers outside the interval that stands behind their type: `[` includes the bound, `(` does not; `or -1 (null)`
is a further number, which may be written as null.
An override may change one element of a list of sections: `reward.terms.0.weight=2`, counted from 0.
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


def default_text(default_value: Any) -> str:
    """Formats a default in the syntax of a configuration; `required` if the user must set the key."""
    if default_value == MISSING:
        return "required"
    return (
        "`null`"
        if default_value is None
        else f"`{str(default_value).lower() if isinstance(default_value, bool) else default_value}`"
    )


def _collect_sections(
    cls: type, prefix: str, keys_by_path: Mapping[str, ConfigKey]
) -> dict[str, tuple[str, list[_Row]]]:
    """Returns the description and the rows of each section; subsections follow their section."""
    rows: list[_Row] = []
    sections = {prefix.rstrip("."): ((cls.__doc__ or "").strip(), rows)} if prefix else {}
    for name in fields_of(cls):
        key = keys_by_path[f"{prefix}{name}"]
        if key.is_section:
            sections |= _collect_sections(key.type, f"{key.path}.", keys_by_path)
            continue
        if (element := element_of(key.type)) is not None:
            sections |= _collect_sections(element, f"{key.path}[].", keys_by_path)
        row = _make_row(key)
        if prefix or element is None:
            rows.append(row)
        else:  # a list of sections at the top level
            sections[f"{key.path}[]"][1].insert(0, row)
    return sections


def _make_row(key: ConfigKey) -> _Row:
    is_list = element_of(key.type) is not None
    type_text = f"list of `{key.path}[]`" if is_list else words_of(key.type).replace("|", "or")
    if range_text := (key.range or ANY).short():
        type_text = f"{type_text}, {range_text}"
    return _Row(key.path, type_text, default_text(key.default), key.doc)


def _find_option_holders(schemas: Mapping[str, SchemaKeys]) -> list[ConfigKey]:
    """Returns, for each table of component options, the first key that uses the table."""
    holders = {
        key.options: key
        for schema_keys in reversed(list(schemas.values()))
        for key in reversed(list(schema_keys.tree.values()))
        if key.options
    }
    return list(reversed(holders.values()))


def describe_key(path: str, schemas: Mapping[str, SchemaKeys]) -> str:
    """Formats the metadata of a key, or the keys of a section, for a terminal.

    Args:
        path: Dotted key; an element of a list is written `[]`, `[2]`, `.2`, or left out.
        schemas: Name of each task type → its keys.

    Raises:
        ConfigError: No task type has the key; the message names the most similar key.
    """
    path = _to_canonical_path(path, {name for schema_keys in schemas.values() for name in schema_keys.tree})
    keys_by_schema = {name: schema_keys.tree[path] for name, schema_keys in schemas.items() if path in schema_keys.tree}
    if not keys_by_schema:
        holder, _, option = path.rpartition(".")
        holders = [schema_keys.tree[holder] for schema_keys in schemas.values() if holder in schema_keys.tree]
        trees = {name: tree for key in holders for name, tree in key.option_keys().items() if option in tree}
        if trees:
            return _describe_groups(path, {name: tree[option] for name, tree in trees.items()})
        section, _, key_name = path.rpartition(".")
        names = {name: None for keys in schemas.values() for name in _list_names_in(section, keys.tree)}
        paths = {path: None for keys in schemas.values() for path in keys.schema.keys}
        similar_key = nearest_key(key_name, f"{section}." if section else "", names, paths)
        hint = f"did you mean {similar_key}? " if similar_key else ""
        raise ConfigError(f"there is no key {cut(path)}; {hint}rlhpc config show runner lists the keys of a section")
    if any(key.is_section for key in keys_by_schema.values()):
        return _describe_section(path, {name: schemas[name].tree for name in keys_by_schema})
    return _describe_groups(path, keys_by_schema)


def _describe_groups(path: str, keys_by_schema: Mapping[str, ConfigKey]) -> str:
    """Formats each distinct key once, with the names in `keys_by_schema` to which it belongs."""
    names_by_text: dict[str, list[str]] = {}
    for name, key in keys_by_schema.items():
        names_by_text.setdefault(_describe(key), []).append(name)
    return "\n\n".join(
        f"{path} ({', '.join(schema_names)})\n{key_text}" for key_text, schema_names in names_by_text.items()
    )


def _to_canonical_path(path: str, paths: Collection[str]) -> str:
    """Returns a key in the notation of the tree: `data.eval[].samples` for `data.eval[2].samples` and `data.eval.samples`."""
    path_without_indices = re.sub(r"\[\w*\]|\.\d+\b", "", path)
    return next((candidate for candidate in paths if candidate.replace("[]", "") == path_without_indices), path)


def _list_names_in(section: str, tree: Mapping[str, ConfigKey]) -> list[str]:
    prefix = f"{section}." if section else ""
    return [path.removeprefix(prefix) for path in tree if path.startswith(prefix) and "." not in path[len(prefix) :]]


_ON_RESUME = {
    OnResume.FREE: "may change",
    OnResume.EVALUATION: "may change; evaluations change with it",
    OnResume.FIXED: "may not change: it determines the training",
}


def _describe(key: ConfigKey) -> str:
    """Formats a key without its path."""
    rows = {"type": words_of(key.type).replace("|", "or")}
    if (element := element_of(key.type)) is not None:
        rows["type"] = f"list of sections with {', '.join(fields_of(element))}"
    if range_text := (key.range or ANY).short():
        rows["range"] = range_text
    if key.choices:
        rows["choices"] = ", ".join(key.choices)
    if choice_names := key.names():
        rows["names"] = f"{', '.join(choice_names)}, or an import path"
    for name, options in key.option_keys().items():
        rows[name] = ", ".join(
            f"{option_name} ({default_text(o.default).strip('`')})" for option_name, o in options.items()
        )
    rows["default"] = default_text(key.default).strip("`")
    rows["on resume"] = _ON_RESUME[key.on_resume]
    width = max(map(len, rows)) + 2
    lines = textwrap.wrap(key.doc, 98, initial_indent="  ", subsequent_indent="  ")
    return "\n".join([*lines, *(f"  {name + ':':<{width}}{row_text}" for name, row_text in rows.items())])


def _describe_section(path: str, trees: Mapping[str, Mapping[str, ConfigKey]]) -> str:
    """Formats the docstring of a section and its keys.

    A key has the beginning of its docstring and, if some task types lack the key, the task types that have the key.
    """
    task_types_by_key: dict[str, list[str]] = {}
    for task_type, tree in trees.items():
        for name in _list_names_in(path, tree):
            task_types_by_key.setdefault(name, []).append(task_type)
    first_section = next(iter(trees.values()))[path]
    lines = [
        f"{path} ({', '.join(trees)})",
        *textwrap.wrap(first_section.doc, 98, initial_indent="  ", subsequent_indent="  "),
    ]
    width = max(map(len, task_types_by_key)) + 2
    for name, task_types in task_types_by_key.items():
        doc = trees[task_types[0]][f"{path}.{name}"].doc
        task_types_text = "" if len(task_types) == len(trees) else f" ({', '.join(task_types)})"
        doc_text = textwrap.shorten(doc, max(98 - width - len(task_types_text), 40), placeholder=" …")
        lines.append(f"  {name:<{width}}{doc_text}{task_types_text}")
    return "\n".join(lines)


def _find_top_section(section: str) -> str:
    """Returns the top-level section of a section: `data` for `data.eval[]`."""
    return section.split(".")[0].split("[")[0]


def render(schemas: Mapping[str, SchemaKeys], other_files: Mapping[str, type]) -> str:
    """Formats the reference page of all configuration keys, in Markdown.

    Args:
        schemas: Name of each task type → its keys.
        other_files: Sections of files that are not part of a run's configuration, by name.
    """
    pages = {name: _collect_sections(keys.schema.root, "", keys.tree) for name, keys in schemas.items()}
    section_order = {section: None for page in pages.values() for section in page}
    lines = [_HEAD.rstrip()]
    section_heads = [_find_top_section(section) for section in section_order]
    for section in sorted(section_order, key=lambda name: section_heads.index(_find_top_section(name))):
        task_type_names = [name for name, page in pages.items() if section in page]
        descriptions = list(dict.fromkeys(pages[name][section][0] for name in task_type_names))
        runs_text = "" if len(task_type_names) == len(pages) else f" Runs: {', '.join(task_type_names)}."
        lines += [f"\n## {section}\n", f"{descriptions[0]}{runs_text}\n"]
        lines += ["| key | type | default | runs | meaning |", "|---|---|---|---|---|"]
        rows: dict[_Row, list[str]] = {}
        for name in task_type_names:
            for row in pages[name][section][1]:
                rows.setdefault(row, []).append(name)
        for row in sorted(rows, key=lambda row: [other_row.key for other_row in rows].index(row.key)):
            task_types_text = "" if len(rows[row]) == len(task_type_names) else ", ".join(rows[row])
            lines.append(f"| `{row.key}` | {row.type} | {row.default} | {task_types_text} | {row.meaning} |")
    for holder in _find_option_holders(schemas):
        assert holder.options is not None
        lines += [f"\n## Options in {holder.path}\n", f"By `{holder.options.selector}` beside it.\n"]
        lines += [f"| {holder.options.selector} | option | type | default | meaning |", "|---|---|---|---|---|"]
        for name, options in holder.option_keys().items():
            for key in options.values():
                choices_text = f" One of {', '.join(key.choices)}." if key.choices else ""
                row = _make_row(key)
                lines.append(f"| {name} | `{row.key}` | {row.type} | {row.default} | {row.meaning}{choices_text} |")
    for name, cls in other_files.items():
        keys_by_path = {
            f"{name}.{path}": dataclasses.replace(key, path=f"{name}.{path}") for path, key in tree_of(cls).items()
        }
        [(description, section_rows)] = _collect_sections(cls, f"{name}.", keys_by_path).values()
        lines += [f"\n## {name}\n", f"{description}\n", "| key | type | default | meaning |", "|---|---|---|---|"]
        lines += [f"| `{row.key}` | {row.type} | {row.default} | {row.meaning} |" for row in section_rows]
    return "\n".join(lines) + "\n"
