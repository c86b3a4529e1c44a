"""π0 (Black et al. 2024) and π0.5 (2025) of LeRobot: PaliGemma, which is read once, and an action expert along a flow.

π0's expert is shown the robot's state; π0.5 reads it as words, and its expert's norms are adapted to the flow's time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlhpc.embodied.models.base import PolicyObs
from rlhpc.embodied.models.guidance import Velocity
from rlhpc.embodied.models.lerobot.flowing import FlowPolicy


class PiPolicy(FlowPolicy):
    """LeRobot's π0 or π0.5; the value head sees what PaliGemma makes of the last word, and for π0 the state beside it."""

    steps_key = "num_inference_steps"

    @property
    def _has_state(self) -> bool:
        """Whether the expert is shown it."""
        return self.described.family == "pi0"

    def value_inputs(self) -> int:
        """See `LerobotPolicy.value_inputs`."""
        width = int(self.inner.model.paligemma_with_expert.paligemma.config.text_config.hidden_size)
        return width + (int(self.inner.config.max_state_dim) if self._has_state else 0)

    def see(self, obs: PolicyObs) -> tuple[Velocity, Tensor]:
        """See `DenoisingPolicy.see`: the velocity for it."""
        from lerobot.policies.pi0.modeling_pi0 import make_att_2d_masks

        inner, model, batch = self.inner, self.inner.model, self.batch(obs)
        words, spoken = (batch[f"observation.language.{name}"] for name in ("tokens", "attention_mask"))
        embedded, mask, causal = model.embed_prefix(*inner._preprocess_images(batch), words, spoken)
        both = model.paligemma_with_expert
        # As `sample_actions` has it, whose other steps go without a gradient.
        both.paligemma.language_model.config._attn_implementation = "eager"
        (read, _), cache = both.forward(
            attention_mask=model._prepare_attention_masks_4d(make_att_2d_masks(mask, causal)),
            position_ids=mask.cumsum(1) - 1, inputs_embeds=[embedded, None], use_cache=True,
        )  # fmt: skip
        state = [inner.prepare_state(batch)] if self._has_state else []

        def velocity(x: Tensor, t: Tensor) -> Tensor:
            found: Tensor = model.denoise_step(*state, mask, cache, x, t)
            return found

        last = (mask * torch.arange(mask.shape[1], device=mask.device)).argmax(1)
        return velocity, torch.cat([read[torch.arange(len(read)), last].float(), *state], 1)
