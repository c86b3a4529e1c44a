"""Base class of wrappers of vector environments, which forward all other attributes and save their own state."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlhpc.embodied.envs.base import Step, VectorEnv
from rlhpc.embodied.envs.observations import Obs

#: Attributes of the wrapped environment that hold for the wrapper.
_ATTRIBUTES = (
    "num_envs", "observation_space", "action_space", "supports_state", "timing", "max_episode_steps", "control_hz",
    "task_names", "record_kwargs", "holds_hardware",
)  # fmt: skip


class VectorEnvWrapper(VectorEnv):
    """Wrapper of a vector environment.

    Args:
        env: Wrapped environment.
    """

    def __init__(self, env: VectorEnv) -> None:
        self.env = env
        for name in _ATTRIBUTES:
            setattr(self, name, getattr(env, name))

    @property
    def restarts(self) -> int:  # type: ignore[override]
        """Number of restarts of the wrapped environment's processes."""
        return self.env.restarts

    def reset(self, seed: int | None = None) -> tuple[Obs, dict[str, Any]]:
        """Starts an episode in every slot (`VectorEnv.reset`)."""
        return self.env.reset(seed)

    @abstractmethod
    def step(self, actions: np.ndarray) -> Step:
        """Steps every slot by one action (`VectorEnv.step`)."""

    @abstractmethod
    def chunk_step(self, actions: np.ndarray) -> Step:
        """Executes a chunk of actions in every slot (`VectorEnv.chunk_step`)."""

    def refresh(self) -> Obs | None:
        """Returns current observations (`VectorEnv.refresh`)."""
        return self.env.refresh()

    def hold(self) -> None:
        """Makes a robot hold still (`VectorEnv.hold`)."""
        self.env.hold()

    def stop(self, reason: str) -> None:
        """Stops a robot for safety (`VectorEnv.stop`)."""
        self.env.stop(reason)

    def env_states(self) -> dict[str, Any] | None:
        """Returns the simulators' states (`VectorEnv.env_states`)."""
        return self.env.env_states()

    def render(self, slots: Sequence[int] | None = None) -> np.ndarray | None:
        """Renders slots (`VectorEnv.render`)."""
        return self.env.render(slots)

    def close(self) -> None:
        """Closes the wrapped environment."""
        self.env.close()

    # -- checkpoint -----------------------------------------------------------------------------------------------

    @abstractmethod
    def own_columns(self) -> dict[str, Any]:
        """Returns the wrapper's own state by name: arrays `[N, ...]`, dicts of them, or lists of N entries."""

    @abstractmethod
    def load_own_columns(self, columns: Mapping[str, Any]) -> None:
        """Restores what `own_columns` returned."""

    def state_dict(self) -> Any:
        """Returns the state of the slots for a checkpoint (`VectorEnv.state_dict`)."""
        return {"env": self.env.state_dict(), **self.own_columns()}

    def load_state_dict(self, state: Any) -> None:
        """Restores the slots from a checkpoint (`VectorEnv.load_state_dict`)."""
        self.env.load_state_dict(state["env"])
        self.load_own_columns(state)

    def slot_state(self, state: Any, index: int) -> Any:
        """Returns one slot's part of a `state_dict` (`VectorEnv.slot_state`)."""
        rows = {name: _select_row(column, index) for name, column in state.items() if name != "env"}
        return {"env": self.env.slot_state(state["env"], index), **rows}

    def merge_states(self, slots: list[Any]) -> Any:
        """Builds a `state_dict` from slots' parts (`VectorEnv.merge_states`)."""
        columns = {name: _join_rows([slot[name] for slot in slots]) for name in slots[0] if name != "env"}
        return {"env": self.env.merge_states([slot["env"] for slot in slots]), **columns}


def _select_row(column: Any, index: int) -> Any:
    if isinstance(column, Mapping):
        return {name: array[index] for name, array in column.items()}
    return column[index]


def _join_rows(rows: list[Any]) -> Any:
    """Returns the column of slots' rows: arrays and dicts of arrays are stacked, others make a list."""
    if isinstance(rows[0], np.ndarray | np.generic):
        return np.stack(rows)
    if isinstance(rows[0], Mapping) and all(isinstance(array, np.ndarray) for array in rows[0].values()):
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    return rows
