"""Rules by which `lora.target_modules` selects module names, as in peft.

The module imports neither torch nor peft, so that memory plans can use it, too.
"""

from __future__ import annotations

import re
from collections.abc import Collection

#: Value that selects every linear layer except the head.
ALL_LINEAR = "all-linear"


def is_all_linear(targets: str | Collection[str]) -> bool:
    """Returns whether `target_modules` selects every linear layer except the head."""
    return isinstance(targets, str) and targets.lower() == ALL_LINEAR


def is_target(name: str, targets: str | Collection[str]) -> bool:
    """Returns whether `target_modules` names a module.

    Args:
        name: The module's name in the model.
        targets: A regular expression that must match the full name, or a list of full names or their last parts.
    """
    if isinstance(targets, str):
        return re.fullmatch(targets, name) is not None
    return any(name == target or name.endswith(f".{target}") for target in targets)
