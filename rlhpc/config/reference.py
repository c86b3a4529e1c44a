"""The reference of all configuration keys: `python -m rlhpc.config.reference > docs/reference/config.md`."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import typing
from typing import Any

from omegaconf import MISSING

from rlhpc.config import schema
from rlhpc.config.ranges import ANY, RANGES

_HEAD = """# Configuration keys

Generated from the schema by `python -m rlhpc.config.reference`. A configuration is a YAML file;
`defaults: [other.yaml]` (relative to it) reads other files first, and `key=value` on the command
line comes last. Unknown keys are errors, and so are numbers outside the interval that stands
behind their type: `[` includes the bound, `(` does not.
A default such as `${env.train.env_id}` is the value of that other key; any value may be written so.
"""


def _docs(cls: type) -> dict[str, str]:
    """The string under each field."""
    body = ast.parse(inspect.getsource(cls)).body[0]
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for item, following in zip(body.body, body.body[1:], strict=False):
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and isinstance(following, ast.Expr):
            assert isinstance(following.value, ast.Constant)
            docs[item.target.id] = " ".join(str(following.value.value).split())
    return docs


def _all_docs(cls: type) -> dict[str, str]:
    merged: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            merged |= _docs(base)
    return merged


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    else:
        value = field.default
    if value == MISSING:
        return "required"
    return "`null`" if value is None else f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _section(cls: type, prefix: str) -> list[str]:
    hints, docs = typing.get_type_hints(cls), _all_docs(cls)
    lines = [f"\n## {prefix.rstrip('.')}\n", f"{(cls.__doc__ or '').strip()}\n", "| key | type | default | meaning |",
             "|---|---|---|---|"]  # fmt: skip
    below: list[str] = []
    for field in dataclasses.fields(cls):
        kind = hints[field.name]
        if dataclasses.is_dataclass(kind):
            assert isinstance(kind, type)
            below += _section(kind, f"{prefix}{field.name}.")
            continue
        items = typing.get_args(kind)
        if typing.get_origin(kind) is list and dataclasses.is_dataclass(items[0]):
            assert isinstance(items[0], type)
            below += _section(items[0], f"{prefix}{field.name}[].")
        name = getattr(kind, "__name__", str(kind)) if not items else str(kind)
        name = (
            name.replace("typing.", "").replace("rlhpc.config.schema.", "").replace("None", "null").replace("|", "or")
        )
        if allowed := RANGES.get(f"{prefix}{field.name}", ANY).short():
            name += f", {allowed}"
        lines.append(f"| `{prefix}{field.name}` | {name} | {_default(field)} | {docs.get(field.name, '')} |")
    return lines + below


def render() -> str:
    """The page, in Markdown."""
    lines = [_HEAD.rstrip()]
    hints = typing.get_type_hints(schema.Config)
    for field in dataclasses.fields(schema.Config):
        lines += _section(hints[field.name], f"{field.name}.")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(render(), end="")
