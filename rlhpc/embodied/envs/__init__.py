"""Vector environments with Gymnasium's same-step auto-reset, which keep the final observation of an episode."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhpc.embodied.envs.base import VectorEnv
from rlhpc.embodied.envs.observations import space_from_json, space_to_json
from rlhpc.embodied.envs.registry import make_env, register_env
from rlhpc.embodied.envs.sync_vector_env import SlotStep, SlotwiseVectorEnv
from rlhpc.runtime.imports import lazy_names

_LAZY = ["TensorEnv", "draw_uniform"]
__all__ = [
    "SlotStep",
    "SlotwiseVectorEnv",
    "TensorEnv",
    "VectorEnv",
    "draw_uniform",
    "make_env",
    "register_env",
    "space_from_json",
    "space_to_json",
]
__getattr__, __dir__ = lazy_names(__name__, {"rlhpc.embodied.envs.tensor_env": _LAZY})

if TYPE_CHECKING:
    from rlhpc.embodied.envs.tensor_env import TensorEnv as TensorEnv
    from rlhpc.embodied.envs.tensor_env import draw_uniform as draw_uniform
