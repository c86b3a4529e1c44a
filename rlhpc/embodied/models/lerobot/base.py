"""What LeRobot's policies share here: inputs, processors, their own loss, and their own folders."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhpc.embodied.config import ModelConfig
from rlhpc.embodied.envs.observations import count_rows, decode_text
from rlhpc.embodied.models.base import Policy, PolicyObs
from rlhpc.embodied.models.lerobot import folder, library
from rlhpc.embodied.models.lerobot.folder import FAMILIES
from rlhpc.embodied.models.vlm import ValueHead


class LerobotPolicy(Policy):
    """One of LeRobot's policies. A subclass acts, and says what the value head sees.

    `actor.model`: `model_path`, `num_action_chunks` (how many of the predicted actions are played), `add_value_head`;
    `kwargs`: `statistics` (a LeRobot dataset's folder, or its stats.json, in place of the folder's own); `cameras` (the
    environment's camera of each of the folder's, where their names differ).

    Attributes:
        inner: The policy of LeRobot's library.
    """

    has_head = False
    inner: Any
    value_head: ValueHead | None

    def __init__(self, cfg: ModelConfig, observation_space: Any, action_space: Any) -> None:
        super().__init__(cfg, observation_space, action_space)
        self.described = folder.describe(cfg, observation_space, action_space)
        self.dim = math.prod(action_space.shape)
        self.inner = library.load(self.described, cfg.kwargs.get("vlm"))
        self.processors = library.Processors(
            self.described, self.inner.config, cfg.kwargs.get("statistics"), cfg.kwargs.get("vlm")
        )
        self._task = str(cfg.kwargs.get("task") or "")
        self.value_head = ValueHead(self.value_inputs(), self.value_width) if cfg.add_value_head else None

    def value_inputs(self) -> int:
        """Width of what the value head sees."""
        raise NotImplementedError

    @property
    def imitated(self) -> range:
        """See `Policy.imitated`: as many as the network predicts, from the first observation on that it sees."""
        return range(self.before, self.before + int(getattr(self.inner.config, FAMILIES[self.described.family])))

    @property
    def before(self) -> int:
        """When the first observation is that it sees, 0 or less: the present one is 0."""
        return 1 - self.described.looks

    # -- inputs ---------------------------------------------------------------------------------------------------

    def batch(self, obs: PolicyObs, actions: Tensor | None = None, is_pad: Tensor | None = None) -> dict[str, Any]:
        """Observations, and actions if given, as LeRobot's networks take them: named, scaled, pictures by camera.

        Args:
            obs: As the environment shows them; where the network sees several, they have an axis of time, `[B, looks, ...]`.
            actions: `[B, imitated, dim]`, as the environment takes them.
            is_pad: `[B, imitated]`, which of them lie outside of the episode; none by default.
        """
        parts = obs if isinstance(obs, dict) else {"": obs}
        found: dict[str, Any] = {}
        for name, source in self.described.sources.items():
            found[name] = self._camera(name, parts) if source is None else self._numbers(parts[source])
        found["task"] = self._tasks(parts, count_rows(obs))
        if actions is not None:
            found["action"] = actions.reshape(len(actions), -1, self.dim).float()
            found["action_is_pad"] = torch.zeros(found["action"].shape[:2], dtype=torch.bool, device=actions.device)
            if is_pad is not None:
                found["action_is_pad"] = is_pad
        return self.processors.before(found)

    def framed(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The batch, with an axis of time for observations where the network wants one."""
        return batch

    def _numbers(self, part: Tensor) -> Tensor:
        return part.flatten(1 if self.described.looks == 1 else 2).float()

    def _camera(self, name: str, parts: dict[str, Tensor]) -> Tensor:
        """The pictures of an input, channels first, 0 to 1."""
        key, number = self.described.cameras[name]
        picture = parts[key][..., 3 * number : 3 * number + 3]
        return (picture.movedim(-1, -3).float() / 255).contiguous()

    def _tasks(self, parts: dict[str, Tensor], rows: int) -> list[str]:
        if "instruction" not in parts:
            return [self._task] * rows
        words = parts["instruction"] if self.described.looks == 1 else parts["instruction"][:, -1]
        return [decode_text(bytes(row)) for row in words.cpu().numpy()]

    @contextmanager
    def settled(self) -> Iterator[Any]:
        """LeRobot's policy without dropout and random crops: whoever acts and whoever trains by log-probs see the same."""
        was = self.inner.training
        self.inner.eval()
        try:
            yield self.inner
        finally:
            self.inner.train(was)

    # -- learning and files ---------------------------------------------------------------------------------------

    def bc_loss(self, inputs: dict[str, Any]) -> Tensor:
        """See `Policy.bc_loss`: LeRobot's own loss, which is a mean over the rows, for each of them."""
        batch = self.framed(self.batch(inputs["obs"], inputs["actions"], inputs.get("is_pad")))
        self.inner.train()
        loss: Tensor = self.inner(batch)[0]
        return loss.expand(len(inputs["actions"]))

    def release(self, target: Path, step: int) -> None:
        """Writes the policy as LeRobot's `save_pretrained` does, with its processors."""
        del step
        self.inner.save_pretrained(target)
        self.processors.save(target)
