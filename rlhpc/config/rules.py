"""What the checks of a configuration have in common."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import Any

from omegaconf import OmegaConf

from rlhpc.runtime.errors import ConfigError

#: Makes the error for a key and the rule that it breaks.
Fail = Callable[[str, str], ConfigError]


def check_signs(cfg: Any, positive: Iterable[str], not_negative: Iterable[str], fail: Fail) -> None:
    """Numbers that must be greater than 0, and those that may be 0 as well; null is neither.

    Raises:
        ConfigError: The first that is not.
    """
    for key in positive:
        if (found := OmegaConf.select(cfg, key)) is not None and found <= 0:
            raise fail(key, "it must be greater than 0")
    for key in not_negative:
        if (found := OmegaConf.select(cfg, key)) is not None and found < 0:
            raise fail(key, "it must not be negative")


def check_choice(key: str, found: str, allowed: Iterable[str], fail: Fail) -> None:
    """One of a few words, in any case.

    Raises:
        ConfigError: It is another; names the nearest and all allowed ones.
    """
    allowed = list(allowed)
    if found.lower() not in allowed:
        near = difflib.get_close_matches(found.lower(), allowed, 1)
        raise fail(key, f"{f'did you mean {near[0]!r}? ' if near else ''}allowed: {', '.join(allowed)}")
