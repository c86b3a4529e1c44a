"""Options of a component: section `kwargs` next to the component's name, checked against the type of the component's options.

A component declares its options as a dataclass, with ranges and choices in the annotations, or as the parameters of its class
or function.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

from rlhpc.config.constraints import Fail, values_at
from rlhpc.config.schema import ConfigKey, words_of
from rlhpc.config.typed import plain, select
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.former_names import current_keywords
from rlhpc.runtime.key_metadata import INTERNAL, Choices, Range
from rlhpc.runtime.plugins import suggest_name
from rlhpc.runtime.similar_names import similar_names
from rlhpc.runtime.text import short_repr

Options = TypeVar("Options")
Option = TypeVar("Option")


@dataclasses.dataclass(frozen=True)
class NoOptions:
    """Empty options, for a component that has no options."""


def read_options(options_type: type[Options], values: object, key: str, component: str) -> Options:
    """Returns section `kwargs` as the component's dataclass of options. The arguments are those of `check_options`.

    Raises:
        ConfigError: `check_options` refuses an option, or the dataclass raises a ValueError, whose message must begin with
            the option's name.
    """
    try:
        return options_type(**check_options(options_type, values, key, component))
    except ValueError as error:
        raise ConfigError(f"{key}.{error}") from None


def check_options(
    options_type: Callable[..., Any],
    user_options: object,
    key: str,
    component: str,
    num_positional: int = 0,
    fail: Fail | None = None,
    list_other_options: Callable[[], Mapping[str, Iterable[str]]] = dict,
) -> dict[str, Any]:
    """Checks options against the parameters of a dataclass, a class or a function.

    Args:
        options_type: Dataclass, class or function that takes the options. Values are checked against its annotations: types
            of YAML, `Range` and `Choices`.
        user_options: Section `kwargs`.
        key: Dotted key of the section.
        component: Name of the component in messages, such as "the mlp".
        num_positional: Number of leading parameters that are not options.
        fail: Function that builds the error, for messages that name the source of the key.
        list_other_options: Function that returns the options of the components that could be chosen instead.

    Returns:
        The options by their current names, without OmegaConf's types. Words with `Choices` are in lower case, because their
        case does not matter.

    Raises:
        ConfigError: An option is unknown, missing, of a different type or out of range.
    """
    plain_options = plain(user_options)
    if not isinstance(plain_options, Mapping):
        raise ConfigError(f"{key} is {plain_options!r}; write a mapping of options")
    options = current_keywords(options_type, {str(name): value for name, value in plain_options.items()})
    try:
        parameters = list(inspect.signature(options_type).parameters.values())[num_positional:]
    except ValueError:  # some C functions have no signature
        return options
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    parameters = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    parameter_names = [parameter.name for parameter in parameters]
    fields = dataclasses.fields(options_type) if dataclasses.is_dataclass(options_type) else ()
    public_names = [
        name for name in parameter_names if name not in {f.name for f in fields if f.metadata.get(INTERNAL)}
    ]
    allowed_text = f"allowed: {', '.join(public_names) or 'none'}"
    annotations = _read_annotations(options_type)
    for name, option_value in options.items():
        rule = _format_broken_rule(option_value, annotations[name]) if name in annotations else ""
        if name not in parameter_names and not takes_any:
            hint = _hint_at_option(name, public_names, list_other_options())
            rule = f"{hint}{component} has no such option; {allowed_text}"
        if rule:
            raise (
                fail(f"{key}.{name}", rule)
                if fail
                else ConfigError(f"{key}.{name} is {short_repr(option_value)}; {rule}")
            )
        if name in annotations and any(
            isinstance(rule, Choices) for rule in getattr(annotations[name], "__metadata__", ())
        ):
            options[name] = _to_lower_case(option_value)
    for parameter in parameters:
        if parameter.name not in options and parameter.default is parameter.empty:
            raise ConfigError(f"{key}.{parameter.name} is not set; {component} needs it; {allowed_text}")
    return options


def _hint_at_option(name: str, public_names: Sequence[str], other_options: Mapping[str, Iterable[str]]) -> str:
    """Returns a hint with the option most similar to an unknown one, and the components that have it if this one does not."""
    names_of_others = {other for names in other_options.values() for other in names} - {*public_names}
    closest = next(iter(similar_names(name, [*public_names, *names_of_others])), None)
    if closest not in names_of_others:
        return suggest_name(name, public_names)
    owners = [component for component, names in other_options.items() if closest in names]
    return (
        f"{'' if closest == name else f'did you mean {closest!r}? '}{closest!r} is an option of {', '.join(owners)}; "
    )


def check_components(cfg: object, keys_by_path: Mapping[str, ConfigKey], fail: Fail) -> None:
    """Checks the options of all components of a configuration that declare them.

    Raises:
        ConfigError: Names the first option that its component does not take.
    """
    for key in keys_by_path.values():
        if key.options is None:
            continue
        for path, configured_names in values_at(cfg, key.path):
            name = str(select(cfg, f"{path.removesuffix(key.name)}{key.options.selector}"))
            options_type = key.options_of(name)
            if options_type is not None:
                check_options(
                    options_type,
                    configured_names,
                    path,
                    f"{key.options.selector} {name}",
                    fail=fail,
                    list_other_options=key.option_keys,
                )


def as_list(option_or_list: Option | list[Option]) -> list[Option]:
    """Returns the distinct values of an option, which is one value or a list, in their order."""
    return list(dict.fromkeys(option_or_list)) if isinstance(option_or_list, list) else [option_or_list]


def _read_annotations(options_type: Callable[..., Any]) -> dict[str, Any]:
    is_plain_class = isinstance(options_type, type) and not dataclasses.is_dataclass(options_type)
    target: Any = vars(options_type).get("__init__", options_type.__init__) if is_plain_class else options_type
    try:
        return typing.get_type_hints(inspect.unwrap(target), include_extras=True)
    except (NameError, TypeError, AttributeError):  # types that are imported for type checkers only
        return {}


def _format_broken_rule(user_value: Any, annotation: Any) -> str:
    """Formats the rule that a value breaks; "" if the value breaks no rule."""
    metadata: Sequence[Any] = ()
    if typing.get_origin(annotation) is Annotated:
        annotation, *metadata = typing.get_args(annotation)
    if not _has_type(user_value, annotation):
        return f"it must be {_describe_type(annotation)}"
    if metadata and user_value == []:
        return "it must not be empty"
    for number_or_null in user_value if isinstance(user_value, list) else [user_value]:
        for rule in metadata:
            if (
                isinstance(rule, Range)
                and number_or_null is not None
                and not (math.isfinite(number_or_null) and number_or_null in rule)
            ):
                return rule.rule()
            if isinstance(rule, Choices) and number_or_null is not None and _to_lower_case(number_or_null) not in rule:
                return f"{suggest_name(_to_lower_case(number_or_null), rule)}allowed: {', '.join(rule)}"
    return ""


def _to_lower_case(text_or_list: Any) -> Any:
    """Returns a word, or the words of a list, in lower case; other values unchanged."""
    return (
        [_to_lower_case(list_item) for list_item in text_or_list]
        if isinstance(text_or_list, list)
        else text_or_list.lower()
        if isinstance(text_or_list, str)
        else text_or_list
    )


def _describe_type(value_type: Any) -> str:
    origin, arguments = typing.get_origin(value_type), typing.get_args(value_type)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(_describe_type, arguments))
    if isinstance(origin, type) and issubclass(origin, Sequence) and arguments:
        return f"a list of {_describe_type(arguments[0])}"
    return "a mapping" if isinstance(origin, type) and issubclass(origin, Mapping) else words_of(value_type)


def _has_type(user_value: Any, value_type: Any) -> bool:
    """Returns whether a YAML value has a type; True for types that YAML does not have."""
    origin, arguments = typing.get_origin(value_type), typing.get_args(value_type)
    if origin in (typing.Union, types.UnionType):
        return any(_has_type(user_value, union_member) for union_member in arguments)
    if origin is typing.Literal:
        return user_value in arguments
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return isinstance(user_value, list) and (
            origin is tuple or all(_has_type(list_item, arguments[0]) for list_item in user_value)
        )
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return isinstance(user_value, Mapping)
    if value_type in (None, type(None)):
        return user_value is None
    if value_type in (int, float):
        return isinstance(user_value, (int, value_type)) and not isinstance(user_value, bool)
    return isinstance(user_value, value_type) if value_type in (bool, str, dict, list) else True
