"""A model of success: from what an environment shows, numbers or pictures, to the probability that the task is done.

It learns from recorded episodes that say so step by step, and its word can take the place of rewards
(`env.train.reward_model`).
"""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor
from torch.nn import functional as F

from rlhpc.embodied.config import PolicyConfig
from rlhpc.embodied.models.base import Policy, PolicyObs
from rlhpc.embodied.models.mlp import flat_width, mlp
from rlhpc.embodied.models.seeing import encoder_of, seen_by
from rlhpc.runtime.errors import ConfigError

_ENCODER, _CHANNELS = "encoder", "channels"


class SuccessModel(Policy):
    """Probabilities of success; it acts on nothing.

    `actor.model.kwargs`: `encoder` (of images: cnn or resnet), `channels` (of resnet).
    """

    has_head = False
    judges = True

    def __init__(self, cfg: PolicyConfig, observation_space: Any, action_space: Any) -> None:
        super().__init__(cfg, observation_space, action_space)
        options = dict(cfg.kwargs)
        if unknown := sorted(set(options) - {_ENCODER, _CHANNELS}):
            raise ConfigError(
                f"actor.model.kwargs of success has {', '.join(unknown)}; allowed: {_ENCODER}, {_CHANNELS}"
            )
        self.encoder = encoder_of(cfg, observation_space, action_space, options)
        sizes = [flat_width(observation_space), *cfg.hidden_sizes] if self.encoder is None else [self.encoder.hidden]
        self.judge = mlp(sizes, 1, cfg.activation, cfg.ortho_init, 0.01)

    def logits(self, obs: PolicyObs) -> Tensor:
        """Log-odds of success `[B]`."""
        found: Tensor = self.judge(seen_by(self.encoder, obs))
        return found.squeeze(-1)

    def features(self, obs: Any, policy: bool, value: bool) -> tuple[Tensor | None, Tensor | None]:
        """Probabilities of success in the place of values (`Policy.features`)."""
        if policy:
            self._acts_not()
        return None, self.logits(obs).sigmoid() if value else None

    def predict_action_batch(
        self, obs: PolicyObs, mode: str = "train", noise: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Any]]:
        """Refused."""
        del obs, mode, noise
        self._acts_not()

    def bc_loss(self, inputs: dict[str, Any]) -> Tensor:
        """Cross-entropy `[B]` with `success [B]`, which is 1 where the task is done at `obs`."""
        return F.binary_cross_entropy_with_logits(self.logits(inputs["obs"]), inputs["success"], reduction="none")

    def _acts_not(self) -> NoReturn:
        raise ConfigError("a model of success (model_type success) judges what it sees and does not act")
