"""SmolVLA (Shukor et al. 2025): a vision-language model that is read once, and an action expert that goes along a flow.

For reinforcement learning the steps of the flow are those of `rlhpc.embodied.models.flow`, as for π0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlhpc.embodied.config import ModelConfig
from rlhpc.embodied.models.base import Obs
from rlhpc.embodied.models.flow import Flow, Velocity
from rlhpc.embodied.models.lerobot.denoising import DenoisingPolicy


class SmolVlaPolicy(DenoisingPolicy):
    """LeRobot's SmolVLA; the value head sees what the vision-language model makes of the robot's state, its last token.

    `actor.model` of all of LeRobot's, and in `kwargs`: `vlm` (a local folder in place of the vision-language model that the
    folder names), `task` (the instruction where observations have none), `num_steps` (by default what the folder says) and
    `noise_level` (0.5).
    """

    def __init__(self, cfg: ModelConfig, observation_space: Any, action_space: Any) -> None:
        super().__init__(cfg, observation_space, action_space)
        self.steps = int(cfg.kwargs.get("num_steps") or self.inner.config.num_steps)
        self.flow = Flow(self.steps, float(cfg.kwargs.get("noise_level", 0.5)))

    def value_inputs(self) -> int:
        """See `LerobotPolicy.value_inputs`."""
        return int(self.inner.model.vlm_with_expert.config.text_config.hidden_size)

    @property
    def state_shape(self) -> tuple[int, int]:
        """See `DenoisingPolicy.state_shape`."""
        return int(self.inner.config.chunk_size), int(self.inner.config.max_action_dim)

    def see(self, obs: Obs) -> tuple[Velocity, Tensor]:
        """See `DenoisingPolicy.see`: the velocity for it."""
        from lerobot.policies.smolvla.modeling_smolvla import make_att_2d_masks

        inner, batch = self.inner, self.batch(obs)
        pictures, shown = inner.prepare_images(batch)
        words, spoken = (batch[f"observation.language.{name}"] for name in ("tokens", "attention_mask"))
        embedded, mask, causal = inner.model.embed_prefix(
            pictures, shown, words, spoken, state=inner.prepare_state(batch)
        )
        (read, _), cache = inner.model.vlm_with_expert.forward(
            attention_mask=make_att_2d_masks(mask, causal), position_ids=mask.cumsum(1) - 1, past_key_values=None,
            inputs_embeds=[embedded, None], use_cache=True, fill_kv_cache=True,
        )  # fmt: skip

        def velocity(x: Tensor, t: Tensor) -> Tensor:
            found: Tensor = inner.model.denoise_step(mask, cache, x, t)
            return found

        last = (mask * torch.arange(mask.shape[1], device=mask.device)).argmax(1)
        return velocity, read[torch.arange(len(read)), last].float()

    def chain(self, seen: Velocity, noise: Tensor) -> Tensor:
        """See `DenoisingPolicy.chain`."""
        return self.flow.act(seen, noise[:, 1:], noise[:, 0])

    def chain_logprobs(self, seen: Velocity, chain: Tensor) -> Tensor:
        """See `DenoisingPolicy.chain_logprobs`."""
        return self.flow.logprobs(seen, chain)

    def noise_entropy(self) -> float:
        """See `DenoisingPolicy.noise_entropy`."""
        return self.flow.entropy()

    def denoise(self, seen: Velocity, x: Tensor) -> Tensor:
        """See `DenoisingPolicy.denoise`; in LeRobot's own arithmetic."""
        dt = -1.0 / self.steps
        for k in range(self.steps):
            x = x + dt * seen(x, x.new_full((len(x),), 1.0 + k * dt))
        return x
