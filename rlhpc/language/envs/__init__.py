"""Worlds that a language model acts in, turn by turn, and that say what it was worth."""

from rlhpc.language.envs.base import Environment, Step, ToolEnvironment, tool
from rlhpc.language.envs.registry import register_environment

__all__ = ["Environment", "Step", "ToolEnvironment", "register_environment", "tool"]
