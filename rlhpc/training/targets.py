"""Modules that `lora.target_modules` names, by peft's rules. Needs neither torch nor peft, so that a plan asks here, too."""

from __future__ import annotations

import re
from collections.abc import Collection

#: In place of names: every linear layer but the head.
ALL_LINEAR = "all-linear"


def is_all_linear(targets: str | Collection[str]) -> bool:
    """Tells whether `target_modules` asks for every linear layer but the head."""
    return isinstance(targets, str) and targets.lower() == ALL_LINEAR


def is_target(name: str, targets: str | Collection[str]) -> bool:
    """Tells whether `target_modules` names a module.

    Args:
        name: The module's name in the model.
        targets: A text is a regular expression that the whole name matches. A list has names, or their last parts.
    """
    if isinstance(targets, str):
        return re.fullmatch(targets, name) is not None
    return any(name == target or name.endswith(f".{target}") for target in targets)
