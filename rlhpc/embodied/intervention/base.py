"""What somebody who takes over is to a recording, and who there is, by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch

from rlhpc.embodied.envs.base import VectorEnv
from rlhpc.embodied.envs.observations import as_arrays
from rlhpc.embodied.envs.wrapping import entry
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.files import read_yaml
from rlhpc.runtime.plugins import Registry


class Intervention(ABC):
    """Watches a policy play, and decides at every step who acts.

    Attributes:
        one_slot: Can watch a single slot only.
        needs_pictures: Wants to see the first slot.
    """

    one_slot = False
    needs_pictures = False

    @abstractmethod
    def act(self, obs: Any, actions: np.ndarray, picture: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """What is done in this step.

        Args:
            obs: An array `[N, ...]`, or a dict of them.
            actions: What the policy would do, `[N, dim]`.
            picture: Of the first slot, uint8 `[H, W, 3]`, if `needs_pictures` and the environment can be drawn.

        Returns:
            Actions `[N, dim]`, and in which slots they are not the policy's, bool `[N]`.
        """

    def ended(self, slots: np.ndarray) -> None:  # noqa: B027 (most need not know)
        """Episodes ended in these slots, bool `[N]`."""

    def close(self) -> None:  # noqa: B027 (most have nothing to free)
        """Nothing more is watched."""


INTERVENTIONS: Registry[Any] = Registry(
    "intervention", "--intervene", "rlhpc.interventions",
    {
        "gamepad": "rlhpc.embodied.intervention.person:Gamepad",
        "keyboard": "rlhpc.embodied.intervention.person:Keyboard",
        "scripted": "rlhpc.embodied.intervention.scripted:Scripted",
    },
)  # fmt: skip
register_intervention = INTERVENTIONS.register


def named_intervention(text: str) -> tuple[str, Any, dict[str, Any]]:
    """What a name, or a mapping of it to settings, as in `{scripted: {expert: module:function}}`, is about.

    Returns:
        The name, what is called with the settings, and these.

    Raises:
        ConfigError: It is unknown.
    """
    try:
        given = read_yaml(text)
    except Exception as error:  # whatever the YAML parser has against it
        raise ConfigError(
            f"--intervene is {text!r}, which is no name and no mapping of one to settings: {error}"
        ) from None
    name, settings = entry(given, "--intervene")
    return name, INTERVENTIONS.find(name), settings


def find_intervention(text: str) -> Intervention:
    """Who takes over, from what `named_intervention` takes; a person gets a window.

    Raises:
        ConfigError: It is unknown, or refuses its settings.
    """
    name, factory, settings = named_intervention(text)
    try:
        found: Intervention = factory(**settings)
    except TypeError as error:
        raise ConfigError(f"--intervene is {name!r}, which refuses {settings}: {error}") from None
    return found


def require_single(chunk: int) -> None:
    """Refuses a policy that acts in chunks."""
    if chunk != 1:
        raise ConfigError(
            f"the policy acts in chunks of {chunk} (actor.model.num_action_chunks); people take over between single actions: "
            "allowed is 1"
        )


class Gated:
    """A policy whose actions somebody may replace.

    Args:
        policy: Acts, one action at a time.
        intervention: Watches.
        env: What it acts in.

    Attributes:
        taken: In which slots the last actions were not the policy's, bool `[N]`.
    """

    def __init__(self, policy: Any, intervention: Intervention, env: VectorEnv) -> None:
        if intervention.one_slot and env.num_envs > 1:
            raise ConfigError(f"a person watches one slot at a time: set env.eval.num_envs=1 (it is {env.num_envs})")
        self._policy, self.intervention, self._env = policy, intervention, env
        self.taken = np.zeros(env.num_envs, bool)

    def predict_action_batch(
        self, obs: Any, mode: str = "eval", noise: Any = None
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Actions `[N, 1, dim]`, as a policy's."""
        actions, rest = self._policy.predict_action_batch(obs, mode=mode, noise=noise)
        require_single(actions.shape[1])
        pictures = self._env.render([0]) if self.intervention.needs_pictures else None
        picture = None if pictures is None else pictures[0]
        chosen, self.taken = self.intervention.act(as_arrays(obs), actions[:, 0].cpu().numpy(), picture)
        return torch.from_numpy(np.asarray(chosen))[:, None], rest
