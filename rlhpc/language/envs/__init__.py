"""Text environments and tools: multi-turn tasks that score the model's actions."""

from rlhpc.language.envs.base import Environment, Step, ToolEnvironment, tool
from rlhpc.language.envs.registry import register_environment

__all__ = ["Environment", "Step", "ToolEnvironment", "register_environment", "tool"]
