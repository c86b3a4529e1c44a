"""Options of a component: section `kwargs` next to the component's name, checked against the component's declaration.

A component declares its options as a dataclass, with ranges and choices in the annotations, or as the parameters of its class
or function.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

from rlhpc.config.constraints import Fail, values_at
from rlhpc.config.schema import ConfigKey, words_of
from rlhpc.config.typed import plain, select
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.former_names import current_keywords
from rlhpc.runtime.key_metadata import INTERNAL, Choices, Range
from rlhpc.runtime.plugins import meant
from rlhpc.runtime.text import short_repr

Options = TypeVar("Options")
Option = TypeVar("Option")


@dataclasses.dataclass(frozen=True)
class NoOptions:
    """Empty options, for a component that has no options."""


def read_options(declaration: type[Options], values: object, key: str, component: str) -> Options:
    """Returns section `kwargs` as the component's dataclass of options. The arguments are those of `check_options`.

    Raises:
        ConfigError: `check_options` refuses an option, or the dataclass raises a ValueError, whose message must begin with
            the option's name.
    """
    try:
        return declaration(**check_options(declaration, values, key, component))
    except ValueError as error:
        raise ConfigError(f"{key}.{error}") from None


def check_options(
    declaration: Callable[..., Any],
    values: object,
    key: str,
    component: str,
    num_positional: int = 0,
    fail: Fail | None = None,
) -> dict[str, Any]:
    """Checks options against the parameters of a dataclass, a class or a function.

    Args:
        declaration: Dataclass, class or function that takes the options. Values are checked against its annotations: types
            of YAML, `Range` and `Choices`.
        values: Section `kwargs`.
        key: Dotted key of the section.
        component: Name of the component in messages, such as "the mlp".
        num_positional: Number of leading parameters that are not options.
        fail: Function that builds the error, for messages that name the source of the key.

    Returns:
        The options by their current names, without OmegaConf's types. Words with `Choices` are in lower case, because their
        case does not matter.

    Raises:
        ConfigError: An option is unknown, missing, of another type or out of range.
    """
    content = plain(values)
    if not isinstance(content, Mapping):
        raise ConfigError(f"{key} is {content!r}; write a mapping of options")
    options = current_keywords(declaration, {str(name): value for name, value in content.items()})
    try:
        parameters = list(inspect.signature(declaration).parameters.values())[num_positional:]
    except ValueError:  # some C functions have no signature
        return options
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    parameters = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    names = [parameter.name for parameter in parameters]
    fields = dataclasses.fields(declaration) if dataclasses.is_dataclass(declaration) else ()
    public_names = [name for name in names if name not in {f.name for f in fields if f.metadata.get(INTERNAL)}]
    allowed = f"allowed: {', '.join(public_names) or 'none'}"
    annotations = _annotations_of(declaration)
    for name, value in options.items():
        rule = _broken_rule(value, annotations[name]) if name in annotations else ""
        if name not in names and not takes_any:
            rule = f"{meant(name, public_names)}{component} has no such option; {allowed}"
        if rule:
            raise (fail(f"{key}.{name}", rule) if fail else ConfigError(f"{key}.{name} is {short_repr(value)}; {rule}"))
        if name in annotations and any(
            isinstance(rule, Choices) for rule in getattr(annotations[name], "__metadata__", ())
        ):
            options[name] = _to_lower_case(value)
    for parameter in parameters:
        if parameter.name not in options and parameter.default is parameter.empty:
            raise ConfigError(f"{key}.{parameter.name} is not set; {component} needs it; {allowed}")
    return options


def check_components(cfg: object, keys: Mapping[str, ConfigKey], fail: Fail) -> None:
    """Checks the options of all components of a configuration that declare them.

    Raises:
        ConfigError: Names the first option that its component does not take.
    """
    for key in keys.values():
        if key.options is None:
            continue
        for path, values in values_at(cfg, key.path):
            name = str(select(cfg, f"{path.removesuffix(key.name)}{key.options.selector}"))
            declaration = key.options_of(name)
            if declaration is not None:
                check_options(declaration, values, path, f"{key.options.selector} {name}", fail=fail)


def as_list(option: Option | list[Option]) -> list[Option]:
    """Returns the distinct values of an option, which is one value or a list, in their order."""
    return list(dict.fromkeys(option)) if isinstance(option, list) else [option]


def _annotations_of(declaration: Callable[..., Any]) -> dict[str, Any]:
    is_plain_class = isinstance(declaration, type) and not dataclasses.is_dataclass(declaration)
    target: Any = vars(declaration).get("__init__", declaration.__init__) if is_plain_class else declaration
    try:
        return typing.get_type_hints(inspect.unwrap(target), include_extras=True)
    except (NameError, TypeError, AttributeError):  # types that are imported for type checkers only
        return {}


def _broken_rule(value: Any, annotation: Any) -> str:
    """Formats the rule that a value breaks; "" if the value breaks no rule."""
    metadata: Sequence[Any] = ()
    if typing.get_origin(annotation) is Annotated:
        annotation, *metadata = typing.get_args(annotation)
    if not _has_type(value, annotation):
        return f"it must be {_type_text(annotation)}"
    if metadata and value == []:
        return "it must not be empty"
    for number in value if isinstance(value, list) else [value]:
        for rule in metadata:
            if isinstance(rule, Range) and number is not None and not (math.isfinite(number) and number in rule):
                return rule.rule()
            if isinstance(rule, Choices) and number is not None and _to_lower_case(number) not in rule:
                return f"{meant(_to_lower_case(number), rule)}allowed: {', '.join(rule)}"
    return ""


def _to_lower_case(value: Any) -> Any:
    """Returns a word, or the words of a list, in lower case; other values unchanged."""
    return (
        [_to_lower_case(item) for item in value]
        if isinstance(value, list)
        else value.lower()
        if isinstance(value, str)
        else value
    )


def _type_text(value_type: Any) -> str:
    origin, arguments = typing.get_origin(value_type), typing.get_args(value_type)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(_type_text, arguments))
    if isinstance(origin, type) and issubclass(origin, Sequence) and arguments:
        return f"a list of {_type_text(arguments[0])}"
    return "a mapping" if isinstance(origin, type) and issubclass(origin, Mapping) else words_of(value_type)


def _has_type(value: Any, value_type: Any) -> bool:
    """Returns whether a YAML value has a type; True for types that YAML does not have."""
    origin, arguments = typing.get_origin(value_type), typing.get_args(value_type)
    if origin in (typing.Union, types.UnionType):
        return any(_has_type(value, option) for option in arguments)
    if origin is typing.Literal:
        return value in arguments
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return isinstance(value, list) and (origin is tuple or all(_has_type(item, arguments[0]) for item in value))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return isinstance(value, Mapping)
    if value_type in (None, type(None)):
        return value is None
    if value_type in (int, float):
        return isinstance(value, (int, value_type)) and not isinstance(value, bool)
    return isinstance(value, value_type) if value_type in (bool, str, dict, list) else True
