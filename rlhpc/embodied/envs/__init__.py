"""Vector environments with Gymnasium's same-step auto-reset, which keep the final observation of an episode."""

from rlhpc.embodied.envs.base import VectorEnv
from rlhpc.embodied.envs.observations import space_from_json, space_to_json
from rlhpc.embodied.envs.registry import make_env, register_env
from rlhpc.embodied.envs.sync_vector_env import SlotStep, SlotwiseVectorEnv

__all__ = ["SlotStep", "SlotwiseVectorEnv", "VectorEnv", "make_env", "register_env", "space_from_json", "space_to_json"]
