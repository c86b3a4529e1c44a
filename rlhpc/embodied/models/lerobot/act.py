"""ACT (Zhao et al. 2023): a transformer that predicts a chunk of actions, trained as a variational autoencoder.

It is deterministic when it acts. For reinforcement learning it gets a Gaussian around the chunk, in its own, normalised
actions; its latent is zero then, as always when ACT acts.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rlhpc.embodied.config import ModelConfig
from rlhpc.embodied.models.base import Policy, PolicyObs
from rlhpc.embodied.models.heads import GaussianHead
from rlhpc.embodied.models.lerobot.base import LerobotPolicy
from rlhpc.embodied.models.vlm import values_of


class ActPolicy(LerobotPolicy):
    """LeRobot's ACT; the value head sees the mean of what its encoder makes of the observation.

    `actor.model` of all of LeRobot's, and `log_std_init`.
    """

    def __init__(self, cfg: ModelConfig, observation_space: Any, action_space: Any) -> None:
        super().__init__(cfg, observation_space, action_space)
        self.head = GaussianHead(self.dim, cfg.log_std_init, self.chunk)

    def value_inputs(self) -> int:
        """See `LerobotPolicy.value_inputs`."""
        return int(self.inner.config.dim_model)

    def features(self, obs: Any, policy: bool, value: bool) -> tuple[Tensor | None, Tensor | None]:
        """See `Policy.features`: the chunk, normalised."""
        batch = self.batch(obs)
        if self.inner.config.image_features:
            batch["observation.images"] = [batch[name] for name in self.inner.config.image_features]
        encoded: list[Tensor] = []
        with self.settled() as inner:
            hook = inner.model.encoder.register_forward_hook(lambda module, given, out: encoded.append(out))
            try:
                chunk: Tensor = inner.model(batch)[0]
            finally:
                hook.remove()
        mean = chunk[:, : self.chunk].flatten(1) if policy else None
        return mean, values_of(self.value_head, encoded[0].mean(0), self.value_width) if value else None

    def default_forward(self, inputs: dict[str, Any], *asked: bool, **wanted: bool) -> dict[str, Tensor]:
        """See `Policy.default_forward`; `inputs` has the normalised actions, `scaled`, of `predict_action_batch`."""
        return super().default_forward({**inputs, "actions": inputs.get("scaled")}, *asked, **wanted)

    def predict_action_batch(
        self, obs: PolicyObs, mode: str = "train", noise: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Any]]:
        """Actions for a batch of observations (`Policy.predict_action_batch`)."""
        scaled, extras = Policy.predict_action_batch(self, obs, mode, noise)
        return self.processors.after(scaled), {**extras, "inputs": {"scaled": scaled}}
