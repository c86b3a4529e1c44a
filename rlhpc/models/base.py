"""Policy: what the rollout acts with and the actor trains."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from rlhpc.envs.observations import count_rows
from rlhpc.envs.spaces import space_to_json
from rlhpc.models.heads import CategoricalHead, GaussianHead, make_head


def layer(inputs: int, outputs: int, gain: float, orthogonal: bool) -> nn.Linear:
    """A linear layer with zero bias and, as PPO's implementations have it, orthogonal weights."""
    linear = nn.Linear(inputs, outputs)
    if orthogonal:
        nn.init.orthogonal_(linear.weight, gain)
        nn.init.zeros_(linear.bias)
    return linear


#: An observation, or several by name.
Obs = Tensor | dict[str, Tensor]


class Policy(nn.Module):
    """An actor-critic. A subclass builds its networks and implements `features`.

    Args:
        cfg: Section `actor.model`.
        observation_space, action_space: Of one environment slot.
    """

    def __init__(self, cfg: Any, observation_space: Any, action_space: Any) -> None:
        super().__init__()
        self.observation_space, self.action_space = observation_space, action_space
        self.head: CategoricalHead | GaussianHead = make_head(action_space, float(cfg.log_std_init))
        self._cfg = cfg

    @abstractmethod
    def features(self, obs: Any, policy: bool, value: bool) -> tuple[Tensor | None, Tensor | None]:
        """What the head needs `[B, head.inputs]` and values `[B]`, each only if asked for."""

    def default_forward(
        self,
        inputs: dict[str, Any],
        compute_logprobs: bool = True,
        compute_entropy: bool = False,
        compute_values: bool = False,
    ) -> dict[str, Tensor]:
        """The training pass.

        Args:
            inputs: `obs` (`[B, ...]`, or a dict of such tensors) and `actions [B, chunk, dim]`.
            compute_logprobs, compute_entropy, compute_values: What to return.

        Returns:
            `logprobs`, `entropy`, `values`, each `[B]`.
        """
        head_input, values = self.features(inputs["obs"], compute_logprobs or compute_entropy, compute_values)
        out: dict[str, Tensor] = {}
        if head_input is not None:
            logprobs, entropy = self.head.evaluate(head_input, inputs["actions"], compute_entropy)
            out["logprobs"] = logprobs
            if entropy is not None:
                out["entropy"] = entropy
        if values is not None:
            out["values"] = values
        return out

    def predict_action_batch(
        self, obs: Obs, mode: str = "train", noise: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Acts.

        Args:
            obs: `[B, ...]`, or a dict of such tensors where the environment shows several things.
            mode: "train" samples, "eval" takes the most likely action.
            noise: `[B, ...]` rows of `sample_noise`; drawn here if a sample is wanted and none is given.

        Returns:
            Actions `[B, chunk, dim]` and `prev_logprobs`, `prev_values`, each `[B]`.
        """
        head_input, values = self.features(obs, True, True)
        assert head_input is not None and values is not None
        if mode == "eval":
            noise = None
        elif noise is None:
            noise = self.head.sample_noise((count_rows(obs),), torch.default_generator).to(head_input.device)
        actions, logprobs = self.head.act(head_input, noise)
        return actions, {"prev_logprobs": logprobs, "prev_values": values}

    def sample_noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Noise for `predict_action_batch`, `[*shape, ...]`; a row belongs to one slot and step."""
        return self.head.sample_noise(shape, generator)

    def value(self, obs: Obs) -> Tensor:
        """Values `[B]`."""
        values = self.features(obs, False, True)[1]
        assert values is not None
        return values

    def spec(self) -> dict[str, Any]:
        """JSON from which `policy_from_spec` builds the same network."""
        from omegaconf import OmegaConf

        plain = OmegaConf.to_container(self._cfg, resolve=True) if OmegaConf.is_config(self._cfg) else vars(self._cfg)
        return {
            "model": plain,
            "observation_space": space_to_json(self.observation_space),
            "action_space": space_to_json(self.action_space),
        }
