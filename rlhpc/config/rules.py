"""What the checks of a configuration have in common."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable

from rlhpc.runtime.errors import ConfigError

#: Makes the error for a key and the rule that it breaks.
Fail = Callable[[str, str], ConfigError]


def check_choice(key: str, found: str, allowed: Iterable[str], fail: Fail) -> None:
    """One of a few words, in any case.

    Raises:
        ConfigError: It is another; names the nearest and all allowed ones.
    """
    check_name(key, found.lower(), allowed, fail)


def check_name(key: str, found: str, allowed: Iterable[str], fail: Fail) -> None:
    """The same for names of the user's own, where capitals count.

    Raises:
        ConfigError: It is another; names the nearest and all allowed ones.
    """
    allowed = list(allowed)
    if found not in allowed:
        near = difflib.get_close_matches(found, allowed, 1)
        raise fail(key, f"{f'did you mean {near[0]!r}? ' if near else ''}allowed: {', '.join(allowed)}")
