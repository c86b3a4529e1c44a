"""SmolVLA (Shukor et al. 2025): a vision-language model that is read once, and an action expert that goes along a flow."""

from __future__ import annotations

import torch
from torch import Tensor

from rlhpc.embodied.models.base import PolicyObs
from rlhpc.embodied.models.guidance import Velocity
from rlhpc.embodied.models.lerobot.flowing import FlowPolicy


class SmolVlaPolicy(FlowPolicy):
    """LeRobot's SmolVLA; the value head sees what the vision-language model makes of the robot's state, its last token."""

    steps_key = "num_steps"

    def value_inputs(self) -> int:
        """See `LerobotPolicy.value_inputs`."""
        return int(self.inner.model.vlm_with_expert.config.text_config.hidden_size)

    def see(self, obs: PolicyObs) -> tuple[Velocity, Tensor]:
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
