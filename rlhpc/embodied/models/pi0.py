"""π0 policy (Black et al. 2024): a vision-language model encodes the observation once, and an action expert computes the
flow's velocity.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlhpc.config.sections import PolicyAdapterConfig
from rlhpc.embodied.config import ModelConfig
from rlhpc.embodied.config.model_options import Pi0Options, model_options
from rlhpc.embodied.envs.observations import boxes_of
from rlhpc.embodied.models.base import Obs, Velocity
from rlhpc.embodied.models.flow import BaseFlowPolicy
from rlhpc.embodied.models.normalization import BOUNDS, NormStats, read_norm_stats
from rlhpc.embodied.models.vlm import (
    TINY,
    ImagePreprocessing,
    ValueHead,
    VlmInputs,
    count_image_tokens,
    load_vlm,
    position_ids,
    require_weights,
    state_width,
)
from rlhpc.runtime.errors import ConfigError
from rlhpc.training.lora import inject_lora


def check_folder(cfg: ModelConfig) -> None:
    """Checks that a π0 folder has weights and statistics (`require_weights`, `read_norm_stats`)."""
    require_weights(cfg.model_path)
    read_norm_stats(model_options(Pi0Options, cfg).statistics, str(cfg.model_path or TINY))


class Pi0Policy(BaseFlowPolicy):
    """Policy that predicts action chunks from images, an instruction and the robot's state. Log-probs are computed as
    in `models.flow`, over the executed actions; values are computed from the vision-language model's last token.

    `actor.model`: `model_path` (a Hugging Face folder, or `builtin:tiny`), `dtype`, `add_value_head`; `actor.lora`;
    `kwargs` are `Pi0Options`. State and actions are normalised by the statistics, then padded.

    Raises:
        ConfigError: States, actions or prompts are larger than the model allows.
    """

    options_type = Pi0Options
    options: Pi0Options

    mixed_precision = True
    model: Any
    state_stats: NormStats | None
    action_stats: NormStats | None

    def __init__(self, cfg: ModelConfig, observation_space: Any, action_space: Any) -> None:
        super().__init__(cfg, observation_space, action_space)
        self.state_width = state_width(observation_space)
        model, tokenizer, settings = load_vlm(cfg, "pi0", self.chunk, self.dim, self.state_width)
        self._read_statistics(str(cfg.model_path or TINY))
        self.model = model
        config = self.model.config
        for key, needed_size, max_size in (
            ("actor.model.num_action_chunks", self.chunk, config.chunk_size),
            ("the action space's components", self.dim, config.max_action_dim),
            ("the state's length", self.state_width, config.max_state_dim),
        ):
            if needed_size > max_size:
                raise ConfigError(f"{key}: {needed_size} is more than this model's {max_size}")
        tokens = count_image_tokens(self.model.model.vlm, config.vlm_config)
        prompt = self.options.prompt or "{instruction}\n"
        preprocessing, image = (
            ImagePreprocessing.from_settings(config.vlm_config, settings),
            int(config.vlm_config.image_token_id),
        )
        self.inputs = VlmInputs(observation_space, tokenizer, preprocessing, image, tokens, prompt, image_first=True)
        if self.options.lora:
            inject_lora(self.model, PolicyAdapterConfig(**self.options.lora))
        width = int(config.vlm_config.text_config.hidden_size)
        self.value_head = ValueHead(width, self.value_width) if cfg.add_value_head else None

    def _read_statistics(self, model_path: str) -> None:
        statistics_source, self.state_stats, self.action_stats = self.options.statistics, None, None
        self.statistics = read_norm_stats(statistics_source, model_path)
        if self.statistics is None:
            return
        normalisation = self.options.normalisation or "mean_std"
        shown_source = statistics_source if isinstance(statistics_source, str) else model_path
        source_text = f"actor.model.kwargs.statistics: {shown_source}, of"
        self.action_stats = NormStats(
            self.statistics.get("actions"), normalisation, self.dim, f"{source_text} actions,"
        )
        if self.state_width:
            self.state_stats = NormStats(
                self.statistics.get("state"), normalisation, self.state_width, f"{source_text} the state,"
            )

    def spec(self) -> dict[str, Any]:
        """Returns the policy's description (`Policy.spec`) with the statistics, because the statistics file may be gone
        when a reader builds the policy.
        """
        policy_spec = super().spec()
        statistics = BOUNDS if self.statistics is None else self.statistics
        return {
            **policy_spec,
            "model": {**policy_spec["model"], "kwargs": {**policy_spec["model"]["kwargs"], "statistics": statistics}},
        }

    def scaled(self, actions: Tensor) -> Tensor:
        """Normalises actions by the statistics, or by the bounds without statistics (`BaseFlowPolicy.scaled`)."""
        return super().scaled(actions) if self.action_stats is None else self.action_stats.normalise(actions)

    def unscaled(self, actions: Tensor) -> Tensor:
        """Inverts `scaled` (`BaseFlowPolicy.unscaled`)."""
        return super().unscaled(actions) if self.action_stats is None else self.action_stats.unnormalise(actions)

    def draw_times(self, num_rows: int) -> Tensor:
        """Draws times from Beta(1.5, 1), most of them near 1, the noise (Black et al. 2024, appendix B; openpi)."""
        return torch.rand(num_rows) ** (1 / 1.5) * 0.999 + 0.001

    @property
    def state_shape(self) -> tuple[int, int]:
        """Chunk size and action width of the model (`BaseFlowPolicy.state_shape`)."""
        return int(self.model.config.chunk_size), int(self.model.config.max_action_dim)

    def prepare(self, obs: Obs, policy: bool, value: bool) -> tuple[Velocity | None, Tensor | None]:
        """Encodes images and prompt once for all steps of the flow (`BaseFlowPolicy.prepare`)."""
        ids, mask, pixels = self.inputs(obs)
        if not policy and self.value_head is None:
            return None, self._values(pixels.flatten(1))
        body, dtype = self.model.model, self.model.dtype
        camera_mask = torch.ones(pixels.shape[:2], dtype=torch.bool, device=pixels.device)
        prefix_embeddings = body.embed_prefix(ids, pixels.to(dtype), camera_mask)
        prefix_outputs = body.vlm(
            inputs_embeds=prefix_embeddings,
            attention_mask=mask,
            position_ids=position_ids(mask),
            use_cache=policy,
            token_type_ids=torch.zeros_like(ids),
        )
        cache, state_input = prefix_outputs.past_key_values, self._state(obs, len(ids)).to(dtype)

        def compute_velocity(x: Tensor, t: Tensor) -> Tensor:
            outputs = self.model(
                state=state_input, noise=x.to(dtype), timestep=t, attention_mask=mask, past_key_values=cache
            )
            cache.crop(-(x.shape[1] + 1))  # keeps only the prefix, without this step's state and actions
            return outputs.logits.float()

        return compute_velocity if policy else None, self._values(
            prefix_outputs.last_hidden_state[:, -1]
        ) if value else None

    def _state(self, obs: Any, num_rows: int) -> Tensor:
        padded_state = self.low.new_zeros(num_rows, int(self.model.config.max_state_dim))
        if self.state_width and "state" in boxes_of(self.observation_space):
            env_state = obs["state"].reshape(num_rows, -1).float()
            padded_state[:, : self.state_width] = (
                env_state if self.state_stats is None else self.state_stats.normalise(env_state)
            )
        return padded_state
