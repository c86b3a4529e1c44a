"""Networks of DSRL (Wagenmaker et al. 2025, "Steering Your Diffusion Policy with Latent Space Reinforcement Learning"): SAC
whose action is the starting noise of a frozen flow policy, which maps the noise deterministically to a chunk of actions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from torch import Tensor

from rlhpc.checkpoint.start import find_weights
from rlhpc.embodied.config import BcModelConfig, SacModelConfig
from rlhpc.embodied.config.model_options import DsrlOptions, model_options
from rlhpc.embodied.envs.observations import space_to_json
from rlhpc.embodied.models.action_heads import SquashedGaussianHead
from rlhpc.embodied.models.base import Obs
from rlhpc.embodied.models.flow import BaseFlowPolicy
from rlhpc.embodied.models.off_policy import SACPolicy
from rlhpc.embodied.models.registry import load_policy, policy_from_spec
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.trust import Trust

_KEY = "actor.model.kwargs.base"


class DSRLPolicy(SACPolicy):
    """Actor and critics on noise, with the flow policy that maps noise to actions.

    `actor.model.kwargs` are `DsrlOptions`; the networks on noise have a separate encoder for images. Checkpoints set
    `base_spec`, because their weights include the flow policy's weights.

    Attributes:
        base: Frozen flow policy.
    """

    base: BaseFlowPolicy
    acting_prefixes = ("actor.", "base.")
    options_type = DsrlOptions

    def build_head(self, cfg: SacModelConfig | BcModelConfig, action_space: Any) -> SquashedGaussianHead:
        """Loads the flow policy and builds a head for its starting noise."""
        options = model_options(DsrlOptions, cfg)
        self.base = self._load_base(options, cfg.num_action_chunks, action_space)
        noise_limit = np.full(self.base.state_shape, options.noise_bound, np.float32)
        return SquashedGaussianHead(spaces.Box(-noise_limit, noise_limit), chunk=1)

    def _load_base(self, options: DsrlOptions, chunk: int, action_space: Any) -> BaseFlowPolicy:
        if options.base_spec is not None:
            flow = policy_from_spec(options.base_spec, origin="actor.model.kwargs.base_spec")
        elif options.base:
            flow = load_policy(find_weights(options.base, _KEY), Trust())
        else:
            raise ConfigError(f"model_type dsrl needs {_KEY}: a run, checkpoint or export folder of a flow policy")
        if not isinstance(flow, BaseFlowPolicy):
            raise ConfigError(
                f"{_KEY} is {options.base!r}, a {type(flow).__name__}; dsrl steers flows (model_type flow)"
            )
        env_spaces = {"observations": self.observation_space, "actions": action_space}
        base_spaces = {"observations": flow.observation_space, "actions": flow.action_space}
        for space_name, space in env_spaces.items():
            if space_to_json(space) != space_to_json(base_spaces[space_name]):
                raise ConfigError(
                    f"{_KEY}: its {space_name} are {base_spaces[space_name]}, and those of env.train are {space}"
                )
        if flow.chunk != chunk:
            raise ConfigError(
                f"actor.model.num_action_chunks is {chunk}, and {flow.chunk} in {_KEY}, whose chunks are acted: set it to that"
            )
        return flow.requires_grad_(False)

    def executed(self, obs: Obs, actions: Tensor) -> Tensor:
        """Returns the flow policy's actions for the chosen noise (`ActorCritic.executed`)."""
        velocity, _ = self.base.prepare(obs, True, False)
        assert velocity is not None
        flow_start = actions.reshape(-1, *self.base.state_shape)
        return self.base.decode_plan(self.base.flow.act(velocity, None, flow_start)[0][:, -1], slice(self.base.chunk))

    def predict_action_batch(
        self, obs: Obs, mode: str = "train", noise: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Any]]:
        """Chooses actions (`Policy.predict_action_batch`); the log-probabilities are computed for the noise."""
        noise_actions, action_extras = super().predict_action_batch(obs, mode, noise)
        return self.executed(obs, noise_actions), action_extras

    def spec(self) -> dict[str, Any]:
        """Returns the policy's description (`Policy.spec`). The description contains the flow policy's description,
        because the flow policy's folder may be gone when a reader builds the policy.
        """
        policy_spec = super().spec()
        model = dict(policy_spec["model"])
        model["kwargs"] = {**model["kwargs"], "base_spec": self.base.spec()}
        return {**policy_spec, "model": model}
