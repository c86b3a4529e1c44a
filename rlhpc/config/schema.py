"""Configuration schema: names, types and locations of keys, from a tree of dataclasses."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import re
import textwrap
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeGuard

from rlhpc.config.yaml_files import Scalar
from rlhpc.runtime.key_metadata import EVALUATION, FREE, INTERNAL, Choices, OnResume, OptionsOf, Range, Registered
from rlhpc.runtime.plugins import import_attribute
from rlhpc.runtime.similar_names import similar_names

#: Key names of other projects → ours, for hints.
_ALSO_KNOWN_AS = {
    "learning_rate": "lr",
    "lambda": "gae_lambda",
    "batch_size": "global_batch_size",
    "epsilon": "adam_eps",
    "clip_range": "clip_ratio_high",
    "n_steps": "rollout_steps",
    "num_steps": "rollout_steps",
    "n_envs": "num_envs",
    "n_epochs": "update_epochs",
    "max_grad_norm": "clip_grad",
    "ent_coef": "entropy_coef",
    "vf_coef": "value_coef",
    "env": "env_id",
}
#: Mappings whose keys the user chooses.
_OPEN_MAPPINGS = ("kwargs", "component_placement", "env_vars", "deepspeed.config", "sweep.grid")
#: Last parts of the keys whose values are paths.
PATHS = frozenset(
    (
        "run_dir", "resume_dir", "init_from", "scratch", "python_interpreter", "simulator_python", "python", "path",
        "model_path", "load_path", "reward_model", "value_model", "sft", "demos_expert", "container_python",
        "environment_archive",
    )
)  # fmt: skip
_VARIABLE = re.compile(r"(?<!\\)\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)\})")


def open_mapping_of(key: str) -> str | None:
    """Returns the mapping with user-chosen keys that contains or equals a dotted key: `env.train.kwargs` for
    `env.train.kwargs.g`; None if there is no such mapping.
    """
    key_parts = key.split(".")
    paths = [".".join(key_parts[: last_index + 1]) for last_index in range(len(key_parts))]
    return next((path for path in paths if path.endswith(_OPEN_MAPPINGS)), None)


@functools.cache
def _read_annotations(cls: type) -> Mapping[str, tuple[Any, tuple[Any, ...]]]:
    """Returns the type and the metadata of each field of a dataclass.

    A field that overrides a base class's field also has that field's metadata, after its own.
    """
    bases = [
        typing.get_type_hints(base_class, include_extras=True)
        for base_class in cls.__mro__
        if dataclasses.is_dataclass(base_class)
    ]
    annotations = {}
    for field in dataclasses.fields(cls):
        hints = [hints[field.name] for hints in bases if field.name in hints]
        metadata = itertools.chain.from_iterable(getattr(hint, "__metadata__", ()) for hint in hints)
        annotations[field.name] = (
            hints[0].__origin__ if hasattr(hints[0], "__metadata__") else hints[0],
            tuple(metadata),
        )
    return annotations


@functools.cache
def fields_of(cls: type) -> Mapping[str, Any]:
    """Returns the types of a dataclass's fields, by name."""
    return {name: field_type for name, (field_type, _) in _read_annotations(cls).items()}


@functools.cache
def docs_of(cls: type) -> Mapping[str, str]:
    """Returns the docstring under each field of a dataclass, including fields of base classes."""
    docs: dict[str, str] = {}
    for base_class in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(base_class):
            continue
        class_node = ast.parse(textwrap.dedent(inspect.getsource(base_class))).body[0]
        assert isinstance(class_node, ast.ClassDef)
        for statement, next_statement in zip(class_node.body, class_node.body[1:], strict=False):
            if (
                isinstance(statement, ast.AnnAssign)
                and isinstance(statement.target, ast.Name)
                and isinstance(next_statement, ast.Expr)
            ):
                assert isinstance(next_statement.value, ast.Constant)
                docs[statement.target.id] = " ".join(str(next_statement.value.value).split())
    return docs


@dataclasses.dataclass(frozen=True)
class ConfigKey:
    """Key or section of a configuration, declared by a field of a dataclass.

    Attributes:
        path: Dotted key; a key in an element of a list of sections is written `list[].name`.
        type: Type of the value; the dataclass of a section.
        section: Dataclass with the field.
        range: Range of the number, or of each number of a list.
        choices: Allowed words; empty if any value is allowed.
        registry: Registry, as `module:NAME`, whose names the value or each element of a list may have; empty if
            there is no registry.
        options: Declarations of the component options in this key; None if the key has none.
        is_free: True if the value may change when a run continues.
        is_evaluations: True if the value only affects evaluations.
    """

    path: str
    type: Any
    section: type
    range: Range | None = None
    choices: tuple[str, ...] = ()
    registry: str = ""
    options: OptionsOf | None = None
    is_free: bool = False
    is_evaluations: bool = False

    @property
    def name(self) -> str:
        """Last part of the path."""
        return self.path.rpartition(".")[2]

    @property
    def doc(self) -> str:
        """Docstring under the field, in one line; for a section without it, the docstring of the section's dataclass."""
        field_doc = docs_of(self.section).get(self.name, "")
        return field_doc if field_doc or not self.is_section else " ".join((self.type.__doc__ or "").split())

    @property
    def default(self) -> Any:
        """Default of the field: `omegaconf.MISSING` if the user must set it, `${…}` if it follows another key."""
        field = self.section.__dataclass_fields__[self.name]
        return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()

    def names(self) -> list[str]:
        """Returns the names in the key's registry, built-in names first; the value may also be an import path."""
        return import_attribute(self.registry, self.path).choices()[:-1] if self.registry else []

    def options_of(self, name: str) -> type | None:
        """Returns the dataclass of a component's options in this key; None if the component declares none."""
        options_type = self._find_options_types().get(name.lower())
        options: type | None = (
            import_attribute(options_type, self.path) if isinstance(options_type, str) else options_type
        )
        return options

    def option_keys(self) -> dict[str, Mapping[str, ConfigKey]]:
        """Returns the options of each component that has options, by component."""
        trees = {name: tree_of(options) for name in self._find_options_types() if (options := self.options_of(name))}
        visible_options = {
            name: {key: o for key, o in tree.items() if not o.is_internal} for name, tree in trees.items()
        }
        return {name: options for name, options in visible_options.items() if options}

    def _find_options_types(self) -> Mapping[str, str | type]:
        options_types: Mapping[str, str | type] = {}
        return import_attribute(self.options.options_types, self.path) if self.options else options_types

    @property
    def is_internal(self) -> bool:
        """True if rlhpc itself sets the key; messages do not suggest such keys."""
        return bool(self.section.__dataclass_fields__[self.name].metadata.get(INTERNAL))

    @property
    def is_section(self) -> bool:
        """True if the key is a section."""
        return is_section(self.type)

    @property
    def on_resume(self) -> OnResume:
        """Rule for a changed value when a run continues."""
        return OnResume.EVALUATION if self.is_evaluations else OnResume.FREE if self.is_free else OnResume.FIXED


def is_section(value_type: Any) -> TypeGuard[type]:
    """Returns whether a type is a dataclass, which declares a section."""
    return isinstance(value_type, type) and dataclasses.is_dataclass(value_type)


@functools.cache
def tree_of(root: type) -> Mapping[str, ConfigKey]:
    """Returns the keys and sections of a configuration by path, each section before its keys."""
    return {key.path: key for key in _iter_keys(root, "", ())}


@functools.cache
def keys_of(root: type) -> Mapping[str, ConfigKey]:
    """Returns the keys of a configuration by path, without sections."""
    return {path: key for path, key in tree_of(root).items() if not key.is_section}


def _iter_keys(cls: type, prefix: str, inherited_metadata: tuple[Any, ...]) -> Iterator[ConfigKey]:
    """Yields the keys and sections below a section.

    A section's resume rules hold for all its keys. A list of sections changes as one value, so its keys have only its rules.
    """
    for name, (field_type, metadata) in _read_annotations(cls).items():
        is_element = "[]" in prefix
        resume_rules = (
            *inherited_metadata,
            *(annotation for annotation in metadata if isinstance(annotation, OnResume) and not is_element),
        )
        path = f"{prefix}{name}"
        yield ConfigKey(
            path,
            field_type,
            cls,
            next((annotation for annotation in metadata if isinstance(annotation, Range)), None),
            next((annotation for annotation in metadata if isinstance(annotation, Choices)), ()),
            next((annotation.registry for annotation in metadata if isinstance(annotation, Registered)), ""),
            next((annotation for annotation in metadata if isinstance(annotation, OptionsOf)), None),
            FREE in resume_rules,
            EVALUATION in resume_rules,
        )
        if is_section(field_type):
            yield from _iter_keys(field_type, f"{path}.", resume_rules)
        elif (element := element_of(field_type)) is not None:
            yield from _iter_keys(element, f"{path}[].", resume_rules)


def element_of(value_type: Any) -> type | None:
    """Returns the dataclass of a list's elements; None if the elements are not sections."""
    element = typing.get_args(value_type)[0] if typing.get_origin(value_type) is list else None
    return element if is_section(element) else None


def without_null(value_type: Any) -> tuple[Any, bool]:
    """Returns a type without `None`, and whether it allows `None`; a union of several other types becomes `Any`."""
    if typing.get_origin(value_type) not in (typing.Union, types.UnionType):
        return value_type, False
    other_types = [type_argument for type_argument in typing.get_args(value_type) if type_argument is not type(None)]
    return (other_types[0] if len(other_types) == 1 else Any), len(other_types) < len(typing.get_args(value_type))


def typed_value(raw_value: Any, value_type: Any) -> Any:
    """Replaces each `Scalar` by its text if the type is `str`, and by its YAML value for other types.

    Args:
        raw_value: Value as it was written, or a section.
        value_type: Type of the key.

    Raises:
        ValueError: Two keys of a mapping are the same.
    """
    value_type, _ = without_null(value_type)
    if isinstance(raw_value, Scalar):
        return raw_value.text if value_type is str else raw_value.value
    if isinstance(raw_value, list):
        item_type = typing.get_args(value_type)[0] if typing.get_origin(value_type) is list else Any
        return [typed_value(element, item_type) for element in raw_value]
    if not isinstance(raw_value, dict):
        return raw_value
    fields = fields_of(value_type) if is_section(value_type) else None
    key_type, nested_type = (
        typing.get_args(value_type) if typing.get_origin(value_type) is dict else (str if fields else Any, Any)
    )
    typed_values: dict[Any, Any] = {}
    for raw_key, item_value in raw_value.items():
        key = typed_value(raw_key, key_type)
        if key in typed_values:
            raise ValueError(f"key {key!r} is given twice")
        typed_values[key] = typed_value(item_value, fields.get(key, Any) if fields else nested_type)
    return typed_values


def with_variables(raw_value: Any, value_type: Any, name: str = "") -> Any:
    """Replaces `$NAME` and `${NAME}` in the values of path keys by `${oc.env:NAME}`, which reads the environment variable.

    Args:
        raw_value: Typed value, or a section.
        value_type: Type of the key.
        name: Last part of the key.
    """
    if isinstance(raw_value, str) and name in PATHS:
        return _VARIABLE.sub(lambda match: f"${{oc.env:{match[1] or match[2]}}}", raw_value)
    if isinstance(raw_value, list):
        return [with_variables(element, element_of(value_type), name) for element in raw_value]
    if isinstance(raw_value, dict) and is_section(value_type):
        return {
            key: with_variables(item_value, fields_of(value_type).get(key), key)
            for key, item_value in raw_value.items()
        }
    return raw_value


def words_of(value_type: Any) -> str:
    """Formats a type's name for messages and for the reference."""
    type_text = (
        str(getattr(value_type, "__name__", value_type)) if not hasattr(value_type, "__args__") else str(value_type)
    )
    return type_text.replace("NoneType", "null").replace("None", "null").replace("typing.", "")


class Schema:
    """Keys of one configuration.

    Args:
        root: Dataclass of the configuration.
        name: Name of the configuration in messages.

    Attributes:
        keys: Dotted keys, without sections.
        open: Keys whose values are mappings with user-chosen keys.
    """

    def __init__(self, root: type, name: str = "") -> None:
        self.root, self.name = root, name
        self.keys = tuple(path for path in keys_of(root) if "[]" not in path)
        self.open = frozenset(key for key in self.keys if key.endswith(_OPEN_MAPPINGS))

    def type_of(self, path: str) -> Any:
        """Returns the type of a key or section; None if the key does not exist. List elements are `[]`, `[2]` or `.2`."""
        field_type: Any = self.root
        for key_part in path.split("."):
            if key_part.isdecimal() and (element := element_of(field_type)) is not None:
                field_type = element
                continue
            name, bracket, _ = key_part.partition("[")
            field_type = fields_of(field_type).get(name) if is_section(field_type) else None
            field_type = element_of(field_type) if bracket else field_type
        return field_type

    def type_name(self, path: str) -> str:
        """Returns the type of a key or section, in words."""
        key_type = self.type_of(path)
        return "another type" if key_type is None else words_of(key_type)

    def __contains__(self, path: str) -> bool:
        """Returns whether a key or section exists; `path` has the form that `type_of` accepts."""
        return self.type_of(path) is not None


def nearest_key(
    key: str, prefix: str, allowed_names: Iterable[str], paths: Iterable[str], foreign_names: Iterable[str] = ()
) -> str | None:
    """Returns the key most similar to an unknown key below `prefix`.

    Args:
        key: Last part of the unknown key.
        prefix: The part before it, with its dot; empty at the top.
        allowed_names: Names that are allowed there.
        paths: All keys, of which one of another section may be meant.
        foreign_names: Names that other task types allow there.

    Returns:
        The key, or None if no key is similar. A foreign key is more similar than all others, and clearly similar.
    """
    allowed_names = list(allowed_names)
    name = _ALSO_KNOWN_AS.get(key, key)
    if name in allowed_names:
        return f"{prefix}{name}"
    closest = similar_names(name, [*allowed_names, *similar_names(name, foreign_names, 1, 0.6)], 1, 0.5)
    if closest:
        return f"{prefix}{closest[0]}"
    paths = list(paths)
    same_name = [path for path in paths if path.rsplit(".", 1)[-1] == name]
    return next(iter(same_name or similar_names(f"{prefix}{name}", paths, 1, 0.6)), None)


class SchemaKeys(Protocol):
    """Keys of a task type."""

    @property
    def schema(self) -> Schema:
        """Schema of its configuration."""

    @property
    def tree(self) -> Mapping[str, ConfigKey]:
        """Keys and sections by path, each section before its keys."""
