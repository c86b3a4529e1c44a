"""Explanations of error messages by a stable short name, for `rlhpc explain` and docs/troubleshooting.md.

The package has texts and regular expressions only, so that it can be imported while an error is reported.
"""

from __future__ import annotations

import re
import textwrap
from functools import cache

from rlhpc.troubleshooting.cause import Cause
from rlhpc.troubleshooting.configuration import FAULT_CAUSES, KEY_CAUSES, VALUE_CAUSES
from rlhpc.troubleshooting.machines import MACHINE_CAUSES, SLURM_CAUSES
from rlhpc.troubleshooting.training import DATA_CAUSES, MODEL_CAUSES, STATE_CAUSES

__all__ = ["CHAPTERS", "Cause", "causes", "find_by_message", "find_by_slug", "pointer", "render", "render_page"]

#: Title of a chapter → its causes, in the order of the page.
CHAPTERS: dict[str, tuple[Cause, ...]] = {
    "Configuration and commands": (*KEY_CAUSES, *VALUE_CAUSES),
    "Slurm, nodes and workflows": SLURM_CAUSES,
    "Machines: GPUs, memory, files, network": MACHINE_CAUSES,
    "Checkpoints and numbers": STATE_CAUSES,
    "Models and engines": MODEL_CAUSES,
    "Data, rewards, agents, environments": DATA_CAUSES,
    "Faults": FAULT_CAUSES,
}
#: Order in which messages are compared with the causes: the more certain ones first.
_ORDER = (
    *FAULT_CAUSES, *KEY_CAUSES[:2], *STATE_CAUSES[:2], *MACHINE_CAUSES, *SLURM_CAUSES, *KEY_CAUSES[2:], *STATE_CAUSES[2:],
    *VALUE_CAUSES[:1], *MODEL_CAUSES, *DATA_CAUSES, *VALUE_CAUSES[1:],
)  # fmt: skip
#: Beginning of the command that explains a message, at the end of the message.
_POINTER = "rlhpc explain "
#: Maximum number of characters of a message that are compared.
_MAX_CHARACTERS = 8000
#: Source of a value in a message, which only repeats the key and the value after it.
_OVERRIDE = re.compile(r"override (?:'[^']*'|\"[^\"]*\"): (?=[a-z_]+(?:\.[\w\[\]]+)+ is )")
#: Remedy that many messages end with: a command, and what it goes on from. It says nothing about the cause.
_REMEDY = re.compile(r"(?:newest|last) checkpoint\b|rlhpc train <config>(?: (?:[a-z_]+\.[\w.]+=|--)[^\s;,)]+)*")
_POINTER_IN_TEXT = re.compile(rf"{_POINTER}([a-z0-9-]+)")


_PAGE_HEAD = """# Troubleshooting by message

Generated from `rlhpc/troubleshooting` by `python -m rlhpc.reference troubleshooting`.

Each error of a command ends with the name of its explanation: `what to do: rlhpc explain NAME`. The command prints the
explanation in the terminal, without a network; it also takes a message, or the end of a log, from anywhere:

```bash
rlhpc explain no-usable-gpu
rlhpc explain "actor.optim.lr is -1.0; it must be above 0 and at most 10"
tail -n 50 runs/try/logs/segment_0/rollout-0.err | rlhpc explain -
```
"""


def causes() -> list[Cause]:
    """Returns all causes in the order of the page."""
    return [known_cause for chapter in CHAPTERS.values() for known_cause in chapter]


def find_by_slug(slug: str) -> Cause | None:
    """Returns the cause with a short name; None for an unknown name."""
    return next((known_cause for known_cause in causes() if known_cause.slug == slug), None)


def find_by_message(message: str) -> Cause | None:
    """Returns the cause of an error message; None if no cause fits. The text may include other lines of output, and the line
    that names the explanation.
    """
    for slug in _POINTER_IN_TEXT.findall(message):
        if (cause := find_by_slug(slug)) is not None:
            return cause
    if len(message) > _MAX_CHARACTERS:  # a message with a long value or a traceback
        message = message[: _MAX_CHARACTERS // 2] + message[-_MAX_CHARACTERS // 2 :]
    message = _REMEDY.sub("", _OVERRIDE.sub("", message))
    for pattern_kind in ("patterns", "weak_patterns"):
        for cause in _ORDER:
            if getattr(cause, pattern_kind) and _compile(getattr(cause, pattern_kind)).search(message):
                return cause
    return None


@cache
def _compile(patterns: tuple[str, ...]) -> re.Pattern[str]:
    """Compiles patterns to one that fits where any of them fits. The cache of `re` is smaller than their number."""
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns))


def pointer(message: str) -> str:
    """Returns the line that leads from a message to its explanation; "" without one, or if the message has it already."""
    if _POINTER_IN_TEXT.search(message):
        return ""
    cause = find_by_message(message)
    return "" if cause is None else f"  what to do: {_POINTER}{cause.slug}"


def render(cause: Cause, docs_root: str) -> str:
    """Returns an explanation as text for a terminal.

    Args:
        cause: The cause.
        docs_root: Location of the documentation.
    """
    lines = [f"{cause.title} ({cause.slug})"]
    for title, paragraph in (
        ("", cause.cause),
        ("How to see it: ", cause.look),
        ("What to do: ", cause.fix),
    ):
        lines += ["", *textwrap.wrap(title + paragraph, 100, break_long_words=False, break_on_hyphens=False)]
    lines += ["", *(f"  {command}" for command in cause.commands)]
    lines += ["", f"More: {docs_root.rstrip('/')}/{cause.page}"] if cause.page else []
    return "\n".join(lines)


def render_page() -> str:
    """Returns the page with all explanations as Markdown; the heading of an explanation is its short name."""
    lines = [_PAGE_HEAD]
    for chapter, chapter_causes in CHAPTERS.items():
        lines += [f"## {chapter}", "", "| name | cause |", "|---|---|"]
        lines += [
            f"| [`{chapter_cause.slug}`](#{chapter_cause.slug}) | {chapter_cause.title} |"
            for chapter_cause in chapter_causes
        ]
        for chapter_cause in chapter_causes:
            commands = "\n".join(chapter_cause.commands)
            lines += ["", f"### {chapter_cause.slug}", "", f"**{chapter_cause.title}.** {chapter_cause.cause}", ""]
            lines += [
                f"- How to see it: {chapter_cause.look}",
                f"- What to do: {chapter_cause.fix}",
                "",
                f"```bash\n{commands}\n```",
            ]
            lines += ["", f"More: [{chapter_cause.page}](../{chapter_cause.page})"] if chapter_cause.page else []
        lines.append("")
    return "\n".join(lines)
