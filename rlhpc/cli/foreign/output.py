"""Output of a translated configuration: a YAML file with comments, and a report."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from rlhpc.cli.foreign.rules import Translation
from rlhpc.config.yaml_files import ConfigDumper
from rlhpc.runtime.text import cut, format_names

_WIDTH = 110


def format_config(translation: Translation, source: str, project: str) -> str:
    """Formats the configuration file. A comment at each key names the foreign keys of its value, unless the name is the same.

    Args:
        translation: The translation.
        source: Original file.
        project: Name of the foreign project.
    """
    lines = [
        f"# From {project}'s {Path(source).name}, by `rlhpc config import`: "
        f"{len(translation.used)} of {len(translation.foreign)} keys are used."
    ]
    if omitted := _omitted_by_reason(translation, changes_training=True):
        lines.append("# Left out; training will differ:")
        for reason, texts in omitted.items():
            lines += _wrap(f"{', '.join(texts)} ({reason})", "#   ", "#     ")
    tree: dict[str, Any] = {}
    for key, value in translation.ours.items():
        *sections, leaf_name = key.split(".")
        subtree = tree
        for section in sections:
            subtree = subtree.setdefault(section, {})
        comment = format_names(name for name in translation.origin[key] if name != key)
        subtree[leaf_name] = _Leaf(value, comment or _default_comment(translation, key, project))
    for name, section in tree.items():
        lines += ["", f"{name}:", *_format_section(section, 2)]
    return "\n".join(lines) + "\n"


def format_report(translation: Translation, source: str, project: str, files: Sequence[Path], verdict: str) -> str:
    """Formats a report of every key: its translation, or the reason for its omission.

    Args:
        translation: The translation.
        source: Original file.
        project: Name of the foreign project.
        files: All files that were read.
        verdict: Result of the checks of `rlhpc plan`.
    """
    included_files = [path.name for path in files if path.name != Path(source).name]
    lines = [
        " with ".join([f"{project}: {source}", *([", ".join(included_files)] if included_files else [])]),
        f"task type: {translation.task_type}",
        "",
        f"translated: {len(translation.used)} of {len(translation.foreign)} keys",
    ]
    width = min(48, max((len(key) for key in translation.ours), default=0))
    for key, value in translation.ours.items():
        origin = (
            f"from {', '.join(translation.origin[key])}"
            if translation.origin[key]
            else _default_comment(translation, key, project)
        )
        lines.append(f"  {key:<{width}} {_format_value(value)}{f'   {origin}' if origin else ''}")
    for title, changes_training in (("training will differ", True), ("training is the same", False)):
        omitted = _omitted_by_reason(translation, changes_training=changes_training)
        lines += ["", f"left out; {title}: {sum(map(len, omitted.values()))} keys"]
        for reason, texts in omitted.items():
            lines += [f"  {reason}", *_wrap(", ".join(texts), "    ", "    ")]
    return "\n".join([*lines, "", verdict]) + "\n"


def _default_comment(translated_config: Translation, key: str, project: str) -> str:
    """Returns the comment for a value that comes only from the foreign project's defaults; "" for other values."""
    keys = translated_config.defaults.get(key, ())
    return f"{project}'s default of {', '.join(keys)}" if keys and not translated_config.origin[key] else ""


class _Leaf(NamedTuple):
    """Value with the comment that follows it."""

    value: Any
    comment: str


def _format_section(section: Mapping[str, Any], indent: int) -> Iterable[str]:
    for name, subtree in section.items():
        if isinstance(subtree, _Leaf):
            leaf_text = (
                yaml.dump(subtree.value, Dumper=ConfigDumper, default_flow_style=True, width=10**6, sort_keys=False)
                .removesuffix("...\n")
                .strip()
            )
            yield f"{' ' * indent}{name}: {leaf_text}{f'  # {subtree.comment}' if subtree.comment else ''}"
        else:
            yield f"{' ' * indent}{name}:"
            yield from _format_section(subtree, indent + 2)


def _format_value(value: Any) -> str:
    return cut("null" if value is None else str(value).lower() if isinstance(value, bool) else f"{value}", 80)


def _omitted_by_reason(translation: Translation, *, changes_training: bool) -> dict[str, list[str]]:
    """Returns the omitted keys with their values, by reason."""
    texts_by_reason: dict[str, list[str]] = {}
    for key, (reason, key_changes_training) in translation.omitted.items():
        if key_changes_training == changes_training:
            texts_by_reason.setdefault(reason, []).append(f"{key}: {_format_value(translation.foreign[key])}")
    return texts_by_reason


def _wrap(text: str, indent: str, next_indent: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=indent, subsequent_indent=next_indent, break_long_words=False)
