"""Training loops of embodied runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhpc.runtime.imports import lazy_names

__all__ = ["EmbodiedRunner"]
__getattr__, __dir__ = lazy_names(__name__, {"rlhpc.embodied.runners.rollout_runner": __all__})

if TYPE_CHECKING:
    from rlhpc.embodied.runners.rollout_runner import EmbodiedRunner as EmbodiedRunner
