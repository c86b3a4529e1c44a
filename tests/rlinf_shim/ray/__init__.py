"""Stand-in for Ray, which tests of RLinf import beside it. There is no Ray here, so it was never initialized."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


def is_initialized() -> bool:
    return False


def shutdown() -> None:
    """Does nothing."""


#: `ray.actor`, whose `ActorHandle` tests use in annotations.
actor = ModuleType("ray.actor")
actor.__dict__["ActorHandle"] = Any
sys.modules["ray.actor"] = actor
