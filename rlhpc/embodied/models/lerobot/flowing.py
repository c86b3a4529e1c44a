"""What LeRobot's policies share that go along a flow: SmolVLA, π0 and π0.5.

For reinforcement learning the steps of the flow are those of `rlhpc.embodied.models.flow`, as for rlhpc's own π0.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rlhpc.embodied.config import ModelConfig
from rlhpc.embodied.models.base import PolicyObs
from rlhpc.embodied.models.flow import Flow
from rlhpc.embodied.models.guidance import Guide, Velocity
from rlhpc.embodied.models.lerobot.denoising import DenoisingPolicy


class FlowPolicy(DenoisingPolicy):
    """A policy whose configuration has `chunk_size` and `max_action_dim`; a subclass sees.

    `actor.model` of all of LeRobot's, and in `kwargs`: `vlm` (a local folder in place of the hub name that the folder has),
    `task` (the instruction where observations have none), `num_steps` (by default what the folder says) and
    `noise_level` (0.5).
    """

    #: The key of K in the folder's config.json.
    steps_key: str

    def __init__(self, cfg: ModelConfig, observation_space: Any, action_space: Any) -> None:
        super().__init__(cfg, observation_space, action_space)
        self.steps = int(cfg.kwargs.get("num_steps") or getattr(self.inner.config, self.steps_key))
        self.flow = Flow(self.steps, float(cfg.kwargs.get("noise_level", 0.5)))

    @property
    def state_shape(self) -> tuple[int, int]:
        """See `DenoisingPolicy.state_shape`."""
        return int(self.inner.config.chunk_size), int(self.inner.config.max_action_dim)

    def chain(self, seen: Velocity, noise: Tensor) -> Tensor:
        """See `DenoisingPolicy.chain`."""
        return self.flow.act(seen, noise[:, 1:], noise[:, 0])

    def chain_logprobs(self, seen: Velocity, chain: Tensor) -> Tensor:
        """See `DenoisingPolicy.chain_logprobs`."""
        return self.flow.logprobs(seen, chain)

    def noise_entropy(self) -> float:
        """See `DenoisingPolicy.noise_entropy`."""
        return self.flow.entropy()

    @property
    def horizon(self) -> int:
        """See `Policy.horizon`: all that the network predicts."""
        return self.state_shape[0]

    def plan(self, obs: PolicyObs, guide: Guide | None = None, noise: Tensor | None = None) -> Tensor:
        """See `Policy.plan`."""
        with self.settled():
            velocity, hidden = self.see(obs)
            return self.evaluated(velocity if guide is None else guide(velocity), hidden, obs, noise)

    def played(self, plan: Tensor, part: slice) -> Tensor:
        """See `Policy.played`."""
        return self.processors.after(plan[:, part, : self.dim])

    def denoise(self, seen: Velocity, x: Tensor) -> Tensor:
        """See `DenoisingPolicy.denoise`; in LeRobot's own arithmetic."""
        dt = -1.0 / self.steps
        for k in range(self.steps):
            x = x + dt * seen(x, x.new_full((len(x),), 1.0 + k * dt))
        return x
