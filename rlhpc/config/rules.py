"""What checks of a configuration have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.lookup import meant

#: Makes the error for a key and the rule that it breaks.
Fail = Callable[[str, str], ConfigError]


def check_choice(key: str, found: str, allowed: Iterable[str], fail: Fail) -> None:
    """Refuses a value that is not one of a few words; case does not matter.

    Raises:
        ConfigError: It is another; names the nearest and all allowed ones.
    """
    check_name(key, found.lower(), allowed, fail)


def check_name(key: str, found: str, allowed: Iterable[str], fail: Fail) -> None:
    """The same for names that the user has chosen, where case matters.

    Raises:
        ConfigError: It is another; names the nearest and all allowed ones.
    """
    allowed = list(allowed)
    if found not in allowed:
        raise fail(key, f"{meant(found, allowed)}allowed: {', '.join(allowed)}")
