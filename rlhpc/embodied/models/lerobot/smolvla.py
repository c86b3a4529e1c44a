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
from rlhpc.embodied.models.heads import at_level
from rlhpc.embodied.models.lerobot.base import LerobotPolicy
from rlhpc.embodied.models.vlm import values_of


class SmolVlaPolicy(LerobotPolicy):
    """LeRobot's SmolVLA; the value head sees what the vision-language model makes of the robot's state, its last token.

    `actor.model` of all of LeRobot's, and in `kwargs`: `vlm` (a local folder in place of the vision-language model that the
    folder names), `task` (the instruction where observations have none), `num_steps` (by default what the folder says) and
    `noise_level` (0.5).
    """

    def __init__(self, cfg: ModelConfig, observation_space: Any, action_space: Any) -> None:
        super().__init__(cfg, observation_space, action_space)
        self.flow = Flow(
            int(cfg.kwargs.get("num_steps") or self.inner.config.num_steps), float(cfg.kwargs.get("noise_level", 0.5))
        )

    def value_inputs(self) -> int:
        """See `LerobotPolicy.value_inputs`."""
        return int(self.inner.model.vlm_with_expert.config.text_config.hidden_size)

    @property
    def state_shape(self) -> tuple[int, int]:
        """Of the flow's states: the model's own chunk and width."""
        return int(self.inner.config.chunk_size), int(self.inner.config.max_action_dim)

    def _prepare(self, obs: Obs) -> tuple[Velocity, Tensor]:
        """Reads an observation once: the velocity for it, and values."""
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
        return velocity, values_of(self.value_head, read[torch.arange(len(read)), last].float(), self.value_width)

    def features(self, obs: Any, policy: bool, value: bool) -> tuple[Tensor | None, Tensor | None]:
        """See `Policy.features`: there is no head."""
        with self.settled():
            return None, self._prepare(obs)[1] if value else None

    def default_forward(
        self,
        inputs: dict[str, Any],
        compute_logprobs: bool = True,
        compute_entropy: bool = False,
        compute_values: bool = False,
    ) -> dict[str, Tensor]:
        """See `Policy.default_forward`; `inputs` has the `chain` of states of `predict_action_batch`."""
        out: dict[str, Tensor] = {}
        with self.settled():
            velocity, values = self._prepare(inputs["obs"])
            if compute_logprobs:
                out["logprobs"] = self._leveled(self.flow.logprobs(velocity, inputs["chain"]))
        if compute_entropy:  # that of the noise, which is not learned
            out["entropy"] = self._leveled(values.new_full((len(values), *self.state_shape), self.flow.entropy()))
        if compute_values:
            out["values"] = values
        return out

    def predict_action_batch(
        self, obs: Obs, mode: str = "train", noise: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Any]]:
        """Actions for a batch of observations (`Policy.predict_action_batch`); evaluations start from zero."""
        with self.settled():
            velocity, values = self._prepare(obs)
            if mode == "eval":
                x = self.integrated(velocity, values.new_zeros(len(values), *self.state_shape))
                return self._used(x), {"prev_values": values}
            if noise is None:
                noise = self.sample_noise((len(values),), torch.default_generator).to(values.device)
            chain = self.flow.act(velocity, noise[:, 1:], noise[:, 0])
            found = self._leveled(self.flow.logprobs(velocity, chain))
        return self._used(chain[:, -1]), {"prev_logprobs": found, "prev_values": values, "inputs": {"chain": chain}}

    def integrated(self, velocity: Velocity, x: Tensor) -> Tensor:
        """The deterministic way from a state of noise to actions, in LeRobot's own arithmetic."""
        dt = -1.0 / self.flow.steps
        for k in range(self.flow.steps):
            x = x + dt * velocity(x, x.new_full((len(x),), 1.0 + k * dt))
        return x

    def _used(self, actions: Tensor) -> Tensor:
        return self.processors.after(actions[:, : self.chunk, : self.dim])

    def _leveled(self, each: Tensor) -> Tensor:
        return at_level(each[:, : self.chunk, : self.dim], self.logprob_type, self.chunk)

    def sample_noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Standard normal `[*shape, K + 1, chunk, dim]`: where the flow begins, and the noise of its steps."""
        return torch.randn((*shape, self.flow.steps + 1, *self.state_shape), generator=generator)
