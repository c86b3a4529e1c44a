"""Environments: vectorised, Gymnasium semantics, auto-reset with the final observation kept."""

from rlhpc.envs.base import VectorEnv
from rlhpc.envs.registry import make_env, register_env
from rlhpc.envs.slotwise import SlotStep, SlotwiseVectorEnv
from rlhpc.envs.spaces import space_from_json, space_to_json

__all__ = ["SlotStep", "SlotwiseVectorEnv", "VectorEnv", "make_env", "register_env", "space_from_json", "space_to_json"]
