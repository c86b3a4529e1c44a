"""JSON schema of configuration files (draft 2020-12), for completion and checks in editors.

The schema follows the loader: it refuses unknown keys, allows null if a key allows null, and allows a text with `${…}` for any
value. Names that plugins can add are not restricted. YAML 1.2 reads `1_000` and `yes` as texts, but the loader reads a number
and a boolean; the schema accepts texts of these forms.
"""

from __future__ import annotations

import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from omegaconf import MISSING

from rlhpc.config.schema import ConfigKey, SchemaKeys, element_of, fields_of, tree_of, without_null
from rlhpc.config.sites import SiteConfig
from rlhpc.config.sweep import SWEEP, SweepConfig
from rlhpc.runtime.key_metadata import Range

DRAFT = "https://json-schema.org/draft/2020-12/schema"
#: Name of the schema of site files.
SITE = "site"
_INTERPOLATION = {"type": "string", "pattern": r"\$\{"}
_TEXTS = {
    bool: r"^([Yy]es|YES|[Nn]o|NO|[Tt]rue|TRUE|[Ff]alse|FALSE|[Oo]n|ON|[Oo]ff|OFF)$",
    int: r"^[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F_]+|0b[01_]+)$",
    float: r"^[-+]?([0-9][0-9_]*(\.[0-9_]*)?|\.[0-9_]+)([eE][-+]?[0-9]+)?$",
}
_TYPES = {bool: "boolean", int: "integer", float: "number"}

Schema = dict[str, Any]


def task_type_schema(task_types: Sequence[SchemaKeys]) -> Schema:
    """Returns the schema of configuration files of one or several task types; `runner.task_type` selects among several.

    A file without `runner.task_type` may have the keys of any of the task types, because another file may include it
    (`defaults`).
    """
    sections = _Sections()
    schema_references = {
        schema_keys.schema.name: sections.root(schema_keys.schema.name, schema_keys.schema.root, schema_keys.tree)
        for schema_keys in task_types
    }
    head = {"$schema": DRAFT, "title": f"rlhpc configuration ({', '.join(schema_references)})", "type": "object"}
    if len(schema_references) == 1:
        return {**head, **next(iter(schema_references.values())), "$defs": sections.definitions}
    is_named = {"properties": {"runner": {"required": ["task_type"]}}, "required": ["runner"]}
    branches = [
        {
            "if": {"properties": {"runner": {"properties": {"task_type": {"const": name}}}}},
            "then": reference,
        }
        for name, reference in schema_references.items()
    ]
    return {
        **head,
        "if": is_named,
        "then": {
            "allOf": [
                {"properties": {"runner": {"properties": {"task_type": _task_type(schema_references)}}}},
                *branches,
            ]
        },
        "else": {"anyOf": list(schema_references.values())},
        "$defs": sections.definitions,
    }


def _task_type(task_type_names: Iterable[str]) -> Schema:
    """Returns the schema of `runner.task_type`: a name, or the import path of a task type with unknown keys."""
    return {"anyOf": [{"enum": list(task_type_names)}, {"type": "string", "pattern": r":|\$\{"}]}


def site_schema() -> Schema:
    """Returns the schema of site files."""
    sections = _Sections()
    reference = sections.root(SITE, SiteConfig, tree_of(SiteConfig))
    title = "rlhpc site file"
    return {"$schema": DRAFT, "title": title, "type": "object", **reference, "$defs": sections.definitions}


class _Sections:
    """Collection of section schemas; `$defs` contains each schema once.

    Attributes:
        definitions: Name → schema.
    """

    def __init__(self) -> None:
        self.definitions: dict[str, Schema] = {}

    def root(self, name: str, config: type, tree: Mapping[str, ConfigKey]) -> Schema:
        """Adds the schema of a file and returns a reference to it."""
        schema = self._build_section_schema(config, "", tree)
        schema["properties"]["defaults"] = {
            "description": "Files that are read first, relative to this one.",
            "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}],
        }
        if name != SITE:
            sweep = self._add_definition(
                SweepConfig.__name__, self._build_section_schema(SweepConfig, "", tree_of(SweepConfig))
            )
            schema["properties"][SWEEP] = {"anyOf": [sweep, {"type": "null"}]}
            task_type = schema["properties"]["runner"] = dict(schema["properties"]["runner"])
            task_type["properties"] = {"task_type": {"const": name}}
        return self._add_definition(name, schema)

    def _add_definition(self, name: str, schema: Schema) -> Schema:
        """Adds a definition and returns a reference to it; numbers the name if another schema already has this name."""
        suffix = 1
        while self.definitions.setdefault(label := f"{name}{suffix if suffix > 1 else ''}", schema) != schema:
            suffix += 1
        return {"$ref": f"#/$defs/{label}"}

    def _build_section_schema(self, cls: type, prefix: str, tree: Mapping[str, ConfigKey]) -> Schema:
        """Returns the schema of a section, whose keys begin with `prefix` in `tree`."""
        properties = {name: self._build_key_schema(tree[f"{prefix}{name}"], tree) for name in fields_of(cls)}
        schema = {"type": "object", "properties": properties, "additionalProperties": False}
        keys_with_options = [key for name in fields_of(cls) if (key := tree[f"{prefix}{name}"]).options]
        return schema | (
            {"allOf": [rule for key in keys_with_options for rule in self._build_option_rules(key)]}
            if keys_with_options
            else {}
        )

    def _build_option_rules(self, key: ConfigKey) -> list[Schema]:
        """Returns a rule for each component that declares options; the rule lists the keys that `kwargs` may have."""
        assert key.options is not None
        rules = []
        for name, options in key.option_keys().items():
            options_type = key.options_of(name)
            assert options_type is not None
            section: Schema = {
                "type": "object",
                "properties": {option_name: self._build_key_schema(o, options) for option_name, o in options.items()},
                "additionalProperties": False,
            }
            reference = self._add_definition(options_type.__name__, section)
            selector_condition = {
                "properties": {key.options.selector: {"const": name}},
                "required": [key.options.selector],
            }
            rules.append(
                {
                    "if": selector_condition,
                    "then": {"properties": {key.name: _combine_any_of([reference, _INTERPOLATION])}},
                }
            )
        return rules

    def _build_key_schema(self, key: ConfigKey, tree: Mapping[str, ConfigKey]) -> Schema:
        """Returns the schema of a key or section."""
        if key.is_section:
            section = self._add_definition(
                key.type.__name__, self._build_section_schema(key.type, f"{key.path}.", tree)
            )
            return {"description": key.doc, **section}
        if (element := element_of(key.type)) is not None:
            element_schema = self._add_definition(
                element.__name__, self._build_section_schema(element, f"{key.path}[].", tree)
            )
            return {"description": describe(key), "type": "array", "items": element_schema}
        return {
            "description": describe(key),
            **({} if key.default == MISSING else {"default": key.default}),
            **_build_value_schema(key),
        }


def describe(key: ConfigKey) -> str:
    """Formats the docstring of a key with its range, and states whether the key is required."""
    sentences = [key.doc]
    if key.range is not None and key.range.short():
        sentences.append(f"Range: {key.range.short()}.")
    if key.default == MISSING:
        sentences.append("Required.")
    return " ".join(sentences)


def _build_value_schema(key: ConfigKey) -> Schema:
    """Returns the schema of a key's value; {} if the key allows any type."""
    value_type, is_nullable = without_null(key.type)
    union = (
        [union_type for union_type in typing.get_args(key.type) if union_type is not type(None)]
        if value_type is Any
        else []
    )
    if value_type is Any and not union:
        return {}
    choice_names = key.names()
    if key.choices:
        any_case_pattern = "|".join("".join(_match_any_case(letter) for letter in choice) for choice in key.choices)
        options: list[Schema] = [
            {"enum": list(key.choices)},
            {"type": "string", "pattern": rf"^({any_case_pattern})$|\$\{{"},
        ]
    else:
        type_schemas = [
            schema for union_type in union or [value_type] for schema in _build_type_schemas(union_type, key.range)
        ]
        options = [*([{"enum": choice_names}] if choice_names else []), *type_schemas]
    if key.range is not None and key.range.also is not None:
        options += [{"const": key.range.also[0], "description": key.range.also[1]}, {"type": "null"}]
    elif is_nullable:
        options.append({"type": "null"})
    return _combine_any_of(options)


def _match_any_case(letter: str) -> str:
    if letter.isalpha():
        return f"[{letter.upper()}{letter.lower()}]"
    return letter if letter.isalnum() or letter in "_-" else f"\\{letter}"


def _build_type_schemas(value_type: Any, value_range: Range | None) -> list[Schema]:
    """Returns the schemas of the forms in which a value of a type may be written."""
    if value_type in _TYPES:
        return [
            {"type": _TYPES[value_type], **_build_range_keywords(value_range)},
            {"type": "string", "pattern": rf"{_TEXTS[value_type]}|\$\{{"},
        ]
    if value_type is str:
        return [{"type": ["string", "number", "boolean"]}]  # a number without quotes is a text
    if typing.get_origin(value_type) is list:
        return [
            {
                "type": "array",
                "items": _combine_any_of(_build_type_schemas(typing.get_args(value_type)[0], value_range)),
            },
            _INTERPOLATION,
        ]
    if typing.get_origin(value_type) is dict:
        value_schemas = _build_type_schemas(typing.get_args(value_type)[1], None)
        return [{"type": "object", "additionalProperties": _combine_any_of(value_schemas)}, _INTERPOLATION]
    return [{}]


def _combine_any_of(options: Sequence[Schema]) -> Schema:
    return options[0] if len(options) == 1 else {"anyOf": list(options)}


def _build_range_keywords(value_range: Range | None) -> Schema:
    """Returns the bounds of a range as keywords of JSON schema."""
    if value_range is None:
        return {}
    bounds = {
        "exclusiveMinimum" if value_range.above else "minimum": value_range.low,
        "exclusiveMaximum" if value_range.below else "maximum": value_range.high,
    }
    return {name: bound for name, bound in bounds.items() if bound is not None}
