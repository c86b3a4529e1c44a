"""Success classifier, and an environment wrapper that uses its probabilities as rewards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from rlhpc.checkpoint.start import find_weights
from rlhpc.embodied.config import PolicyConfig
from rlhpc.embodied.config.model_options import EncoderOptions, model_options
from rlhpc.embodied.envs.base import Step, VectorEnv, env_failed
from rlhpc.embodied.envs.observations import Obs as EnvObs
from rlhpc.embodied.envs.observations import as_arrays, space_to_json
from rlhpc.embodied.models.base import Obs, Policy
from rlhpc.embodied.models.cnn import build_obs_encoder, encode_obs
from rlhpc.embodied.models.mlp import flat_width, mlp
from rlhpc.embodied.models.registry import load_policy
from rlhpc.runs.device import to_tensors
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.trust import Trust

if TYPE_CHECKING:
    from rlhpc.embodied.config import PlayedEnvConfig


class SuccessModel(Policy):
    """Success classifier: predicts the probability of success from observations. It chooses no actions.

    `actor.model.kwargs` are `EncoderOptions`.
    """

    has_head = False
    start_options = ("weights",)
    is_success_classifier = True

    def __init__(self, cfg: PolicyConfig, observation_space: Any, action_space: Any) -> None:
        super().__init__(cfg, observation_space, action_space)
        options = model_options(EncoderOptions, cfg)
        self.encoder = build_obs_encoder(cfg, observation_space, action_space, options)
        layer_sizes = (
            [flat_width(observation_space), *cfg.hidden_sizes] if self.encoder is None else [self.encoder.hidden]
        )
        self.judge = mlp(layer_sizes, 1, cfg.activation, cfg.ortho_init, 0.01)

    def logits(self, obs: Obs) -> Tensor:
        """Returns log-odds of success `[B]`."""
        return self.judge(encode_obs(self.encoder, obs)).squeeze(-1)

    def features(self, obs: Any, policy: bool, value: bool) -> tuple[Tensor | None, Tensor | None]:
        """Returns None as the head's input, and probabilities of success as values (`Policy.features`)."""
        if policy:
            self._refuse_to_act()
        return None, self.logits(obs).sigmoid() if value else None

    def predict_action_batch(
        self, obs: Obs, mode: str = "train", noise: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Any]]:
        """Raises ConfigError, because the classifier does not act."""
        del obs, mode, noise
        self._refuse_to_act()

    def bc_loss(self, inputs: dict[str, Any]) -> Tensor:
        """Returns the binary cross-entropy `[B]` with the labels `success [B]`, which are 1 if the task is done at `obs`."""
        return F.binary_cross_entropy_with_logits(self.logits(inputs["obs"]), inputs["success"], reduction="none")

    def _refuse_to_act(self) -> NoReturn:
        raise ConfigError("a model of success (model_type success) judges what it sees and does not act")


KEY = "env.train.reward_model"


def reward_model(path: str, observation_space: Any) -> SuccessModel:
    """Loads the classifier of a run, a checkpoint or an export folder.

    Raises:
        ConfigError: The folder contains no classifier, or a classifier for other observations.
    """
    model = load_policy(find_weights(path, KEY), Trust())
    if not isinstance(model, SuccessModel):
        raise ConfigError(
            f"{KEY} is {path!r}, a {type(model).__name__}; it must be a model of success (model_type success)"
        )
    if space_to_json(model.observation_space) != space_to_json(observation_space):
        raise ConfigError(f"{KEY} is {path!r}, which sees {model.observation_space}; env.train has {observation_space}")
    return model


class SuccessRewardEnv(VectorEnv):
    """Wrapper of a vector environment that replaces rewards with a classifier's probability that the task is done after
    the step.

    Ends of episodes, statistics and successes still come from the simulator. The last executed action of a chunk gets the
    reward.

    Args:
        env: Wrapped environment.
        cfg: Section `env.train`.
        device: Device of the classifier.
    """

    def __init__(self, env: VectorEnv, cfg: PlayedEnvConfig, device: torch.device) -> None:
        self.env = env
        self.device = device
        self.model = reward_model(str(cfg.reward_model), env.observation_space).to(device)
        self.num_envs = env.num_envs
        self.observation_space, self.action_space = env.observation_space, env.action_space
        self.supports_state = env.supports_state
        self.max_episode_steps = env.max_episode_steps
        self.record_kwargs = env.record_kwargs
        self.timing, self.holds_hardware, self.control_hz = env.timing, env.holds_hardware, env.control_hz
        self._scale = np.float32(cfg.reward_scale)
        self._relative = cfg.use_rel_reward
        self._last_probability = np.zeros(env.num_envs, np.float32)

    @property
    def restarts(self) -> int:  # type: ignore[override]
        """Number of restarts of the wrapped environment's processes."""
        return self.env.restarts

    def reset(self, seed: int | None = None) -> tuple[EnvObs, dict[str, Any]]:
        """Starts an episode in every slot (`VectorEnv.reset`)."""
        self._last_probability[:] = 0
        return self.env.reset(seed)

    def refresh(self) -> EnvObs | None:
        """Returns current observations (`VectorEnv.refresh`)."""
        return self.env.refresh()

    def hold(self) -> None:
        """Makes a robot hold still (`VectorEnv.hold`)."""
        self.env.hold()

    def stop(self, reason: str) -> None:
        """Stops a robot for safety (`VectorEnv.stop`)."""
        self.env.stop(reason)

    def step(self, actions: np.ndarray) -> Step:
        """Steps every slot by one action (`VectorEnv.step`)."""
        return self._replace_rewards(self.env.step(actions))

    def chunk_step(self, actions: np.ndarray) -> Step:
        """Executes a chunk of actions in every slot (`VectorEnv.chunk_step`)."""
        return self._replace_rewards(self.env.chunk_step(actions))

    @torch.no_grad()
    def _replace_rewards(self, step: Step) -> Step:
        obs, _, terminations, truncations, infos = step
        is_done = terminations | truncations
        last_obs = (
            _select_last_obs(as_arrays(obs), as_arrays(infos["final_obs"]), is_done)
            if is_done.any()
            else as_arrays(obs)
        )
        success_probability = self.model.value(to_tensors(last_obs, self.device)).cpu().numpy().astype(np.float32)
        rewards = self._scale * (
            success_probability - self._last_probability if self._relative else success_probability
        )
        rewards[env_failed(infos, self.num_envs)] = 0
        self._last_probability = np.where(is_done, np.float32(0), success_probability)
        if "chunk" in infos:
            mask = infos["chunk"]["mask"]
            last_rewards, is_executed = np.zeros(mask.shape, np.float32), mask.any(1)
            last_rewards[is_executed, mask.sum(1)[is_executed] - 1] = rewards[is_executed]
            infos["chunk"]["rewards"] = last_rewards
        return obs, rewards, terminations, truncations, infos

    def state_dict(self) -> Any:
        """Returns the state of the slots for a checkpoint (`VectorEnv.state_dict`)."""
        return {"env": self.env.state_dict(), "before": self._last_probability.copy()}

    def load_state_dict(self, state: Any) -> None:
        """Restores the slots from a checkpoint (`VectorEnv.load_state_dict`)."""
        self.env.load_state_dict(state["env"])
        self._last_probability = np.asarray(state["before"], np.float32).copy()

    def slot_state(self, state: Any, index: int) -> Any:
        """Returns one slot's part of a `state_dict` (`VectorEnv.slot_state`)."""
        return {"env": self.env.slot_state(state["env"], index), "before": float(state["before"][index])}

    def merge_states(self, slots: list[Any]) -> Any:
        """Builds a `state_dict` from slots' parts (`VectorEnv.merge_states`)."""
        return {
            "env": self.env.merge_states([slot["env"] for slot in slots]),
            "before": np.array([slot["before"] for slot in slots], np.float32),
        }

    def env_states(self) -> dict[str, Any] | None:
        """Returns the simulators' states (`VectorEnv.env_states`)."""
        return self.env.env_states()

    def render(self, slots: Sequence[int] | None = None) -> np.ndarray | None:
        """Renders slots (`VectorEnv.render`)."""
        return self.env.render(slots)

    def close(self) -> None:
        """Closes the wrapped environment."""
        self.env.close()


def _select_last_obs(obs: Any, final_obs: Any, is_done: np.ndarray) -> Any:
    """Returns the observation of each slot after the step: `final_obs` if its episode ended, otherwise `obs`."""
    if isinstance(obs, dict):
        return {key: _select_last_obs(array, final_obs[key], is_done) for key, array in obs.items()}
    return np.where(is_done.reshape(-1, *[1] * (obs.ndim - 1)), final_obs, obs)
