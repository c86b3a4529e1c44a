"""Cause of error messages that a user can meet, with its explanation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cause:
    """Cause of a group of error messages.

    Attributes:
        slug: Stable short name, which `rlhpc explain` and the page's address take.
        title: Title of the section.
        patterns: Regular expressions. A message belongs to the first cause in whose pattern it is found.
        cause: Cause of the error, in a sentence or two.
        look: Place where it can be seen.
        fix: Steps that mend it.
        commands: Commands of the fix, the most useful first.
        page: Page of the documentation with more, relative to its root; "" for none.
        weak_patterns: Regular expressions of single words, which count only if no pattern of any cause fits.
    """

    slug: str
    title: str
    patterns: tuple[str, ...]
    cause: str
    look: str
    fix: str
    commands: tuple[str, ...]
    page: str = ""
    weak_patterns: tuple[str, ...] = ()
