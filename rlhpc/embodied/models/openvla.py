"""OpenVLA (Kim et al. 2024) and OpenVLA-OFT (Kim et al. 2025), over the network of `rlhpc.embodied.models.prismatic`.

OpenVLA writes its actions token by token. OFT's attention goes both ways, and all components of a chunk are predicted at once:
their places, empty, stand between prompt and end of the text. They are tokens again, or numbers, by a head of its own; it was
made to minimise their distance, and gets a Gaussian around them for reinforcement learning.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlhpc.embodied.config import ModelConfig
from rlhpc.embodied.envs.observations import boxes_of
from rlhpc.embodied.models import openvla_files as files
from rlhpc.embodied.models.base import Policy, PolicyObs
from rlhpc.embodied.models.heads import GaussianHead
from rlhpc.embodied.models.statistics import Scaling, scaling
from rlhpc.embodied.models.vit import ViT
from rlhpc.embodied.models.vla import ActionTokens, TokenPolicy
from rlhpc.embodied.models.vlm import PROMPT, VlmInputs, load_vlm, numbers_in, positions
from rlhpc.runtime.errors import ConfigError

#: How actions are predicted.
HEADS = ("tokens", "parallel", "l1")


class OpenVLAPolicy(TokenPolicy):
    """Pictures, an instruction, and the robot's state if the model takes it, to chunks of actions.

    `actor.model`: `model_path` (a folder as it was released, or `builtin:tiny`), `dtype`, `add_value_head`, `log_std_init`
    (`l1`); `actor.lora`; `kwargs`:
        head: tokens (OpenVLA), parallel (OFT with tokens) or l1 (OFT); by default l1 if the folder has such a head, else
            tokens.
        proprio: Whether the model takes `state`; by default if the folder has a projector for it.
        unnorm_key: Whose statistics scale actions and state; needless if there are those of one dataset.
        statistics: A file of statistics, or a LeRobot dataset's folder, in place of the model's own; or `bounds`, those of the
            action space.
        normalisation: What becomes −1 and 1: q99 (the quantiles, the default) or bounds.
        center_crop: Shows the middle 90 % of the pictures, as OpenVLA's evaluations do.
        gripper: rlds, if the last component is a gripper as datasets of RLDS have it (`Scaling.gripper`).
        prompt: With `{instruction}`.
    """

    options_known = ("head", "proprio", "unnorm_key", "statistics", "normalisation", "gripper", "center_crop", "prompt")
    state_scaling: Scaling | None
    statistics: dict[str, Any]

    def __init__(self, cfg: ModelConfig, observation_space: Any, action_space: Any) -> None:
        super().__init__(cfg, observation_space, action_space)
        for part in self.vlm.modules():
            if isinstance(part, ViT):
                part.freeze_unused()
        if self.action_head is not None:  # no word is said
            self.vlm.language_model.lm_head.requires_grad_(False)
        files.load_ours(self, self.source)

    def load(self, cfg: ModelConfig) -> None:
        """See `TokenPolicy.load`."""
        space, options = self.observation_space, self.options
        self.vlm, self.tokenizer, settings = load_vlm(cfg, "openvla", self.chunk, self.dim, 0)
        config, self.source = self.vlm.config, files.folder_of(cfg)
        width, beside = int(config.text_config.hidden_size), files.beside(self.source)
        self.kind = str(options.get("head") or ("l1" if files.HEAD in beside else "tokens"))
        if self.kind not in HEADS:
            raise ConfigError(f"actor.model.kwargs.head is {self.kind!r}; allowed: {', '.join(HEADS)}")
        if self.kind != "tokens" and cfg.attn_implementation == "flash_attention_2":
            raise ConfigError(
                f"actor.model.attn_implementation: with head {self.kind} attention goes both ways past what is padded, which "
                "flash_attention_2 does not do here: take sdpa"
            )
        felt = bool(options.get("proprio", files.PROJECTOR in beside))
        self.numbers = numbers_in(space) if felt and "state" in boxes_of(space) else 0
        if felt and not self.numbers:
            raise ConfigError(
                f"actor.model.kwargs.proprio: the model takes `state`, which the observations lack: {space}"
            )
        self.state_scaling = None
        self._scale(options)
        self.action_head, self.proprio_projector = files.load_beside(
            beside, width, self.dim if self.kind == "l1" else 0, self.numbers
        )
        if self.kind == "l1":
            self.head = GaussianHead(self.dim, cfg.log_std_init, self.chunk)
        self.tokens = ActionTokens(int(config.text_config.vocab_size) - int(config.pad_to_multiple_of))
        self.eye = files.eye_of(config, settings, space, bool(options.get("center_crop")))
        blank = self.tokenizer.convert_tokens_to_ids(
            "▁"
        )  # Llama's, which was there in training before the first action
        end = [] if blank is None or blank == self.tokenizer.unk_token_id else [int(blank)]
        self.inputs = VlmInputs(
            space, self.tokenizer, self.eye, -1, self.vlm.vision_backbone.patches, str(options.get("prompt") or PROMPT),
            more=int(self.numbers > 0), end=end, lower=True,
        )  # fmt: skip

    def _scale(self, options: dict[str, Any]) -> None:
        """Takes the statistics of `kwargs`, or those of the model; the bounds of the action space stay for `bounds`, and for a
        model that comes from no folder.

        Raises:
            ConfigError: A folder has none: its actions would be scaled otherwise than in its demonstrations.
        """
        where = str(options.get("statistics") or self.source)
        self.statistics = files.find_statistics(options, self.source, {"norm_stats": self.vlm.config.norm_stats})
        gripper = options.get("gripper")
        if gripper not in (None, "rlds"):
            raise ConfigError(f"actor.model.kwargs.gripper is {gripper!r}; allowed: rlds, or none")
        self.scaling.gripper = gripper == "rlds"
        if not self.statistics:
            if options.get("unnorm_key"):
                raise ConfigError(f"actor.model.kwargs.unnorm_key: {where} has no statistics")
            return
        key, normalisation = options.get("unnorm_key"), str(options.get("normalisation") or "q99")
        found = scaling(self.statistics, key, "action", self.dim, normalisation, where)
        assert found is not None  # or it would have said so
        found.gripper, self.scaling = self.scaling.gripper, found
        if self.numbers:
            self.state_scaling = scaling(self.statistics, key, "proprio", self.numbers, normalisation, where)

    def recompute_activations(self) -> bool:
        """See `Policy.recompute_activations`: of the language model."""
        self.vlm.language_model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return True

    # -- the passes -----------------------------------------------------------------------------------------------

    def _embedded(self, obs: Any) -> tuple[Tensor, Tensor]:
        """Pictures, state and prompt as embeddings `[B, L, width]`, and their mask."""
        ids, mask, pixels = self.inputs(obs)
        seen = self.vlm.see(pixels)
        if self.proprio_projector is not None:
            state = obs["state"].reshape(len(ids), -1).float()
            state = state if self.state_scaling is None else self.state_scaling.scaled(state)
            seen = torch.cat([seen, self.proprio_projector(state)[:, None].to(seen.dtype)], 1)
        return self.vlm.embed(ids, seen), mask

    def _read(self, obs: PolicyObs, said: Tensor | None = None, cache: bool = False) -> Any:
        embedded, mask = self._embedded(obs)
        if said is not None:
            embedded = torch.cat([embedded, self.vlm.get_input_embeddings()(said)], 1)
            mask = torch.cat([mask, torch.ones_like(said)], 1)
        out = self._go_on(inputs_embeds=embedded, attention_mask=mask, position_ids=positions(mask), use_cache=cache)
        return out, mask

    def _go_on(self, **given: Any) -> Any:
        return self.vlm.language_model.model(**given)

    def _logits(self, hidden: Tensor) -> Tensor:
        found: Tensor = self.vlm.language_model.lm_head(hidden)
        return found

    def _states(self, obs: PolicyObs, tokens: Tensor | None) -> Tensor:
        if self.kind == "tokens":
            return super()._states(obs, tokens)
        embedded, mask = self._embedded(obs)
        rows, places = len(mask), self.chunk * self.dim
        stop = mask.new_full((rows, 1), int(self.vlm.config.text_config.eos_token_id))
        empty = embedded.new_zeros(rows, places, embedded.shape[-1])
        embedded = torch.cat([embedded, empty, self.vlm.get_input_embeddings()(stop)], 1)
        mask = torch.cat([mask, mask.new_ones(rows, places + 1)], 1)
        hidden_ones = torch.finfo(embedded.dtype).min * (1 - mask)[:, None, None, :].to(embedded.dtype)
        both_ways = hidden_ones.expand(-1, -1, mask.shape[1], -1)
        out = self._go_on(
            inputs_embeds=embedded, attention_mask=both_ways, position_ids=positions(mask), use_cache=False
        )
        # As in a text that is written, what stands before a place predicts it.
        hidden: Tensor = out.last_hidden_state[:, -places - 2 : -2]
        return hidden

    def _say(self, obs: PolicyObs, noise: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        if self.kind == "tokens":
            return super()._say(obs, noise)
        hidden = self._states(obs, None)
        return *self._choose(hidden, noise), hidden[:, 0]

    def features(self, obs: Any, policy: bool, value: bool) -> tuple[Tensor | None, Tensor | None]:
        """See `Policy.features`: of `l1`, the actions between −1 and 1."""
        if self.action_head is None or not policy:
            return super().features(obs, policy, value)
        hidden = self._states(obs, None)
        return self.action_head(hidden).flatten(1), self._values(hidden[:, 0]) if value else None

    def default_forward(self, inputs: dict[str, Any], *asked: bool, **wanted: bool) -> dict[str, Tensor]:
        """See `Policy.default_forward`; of `l1`, `inputs` may have the actions between −1 and 1, `scaled`."""
        if self.action_head is None:
            return super().default_forward(inputs, *asked, **wanted)
        actions = inputs["scaled"] if "scaled" in inputs else self._scaled(inputs["actions"])
        given = {"obs": inputs["obs"], "actions": actions}
        return Policy.default_forward(self, given, *asked, **wanted)

    def predict_action_batch(
        self, obs: PolicyObs, mode: str = "train", noise: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Any]]:
        """Actions for a batch of observations (`Policy.predict_action_batch`)."""
        if self.action_head is None:
            return super().predict_action_batch(obs, mode, noise)
        actions, extras = Policy.predict_action_batch(self, obs, mode, noise)
        return self.scaling.unscaled(actions), {**extras, "inputs": {"scaled": actions}}

    def sample_noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """See `Policy.sample_noise`."""
        return (
            super().sample_noise(shape, generator)
            if self.action_head is None
            else self.head.sample_noise(shape, generator)
        )

    def bc_loss(self, inputs: dict[str, Any]) -> Tensor:
        """See `Policy.bc_loss`; of `l1`, the mean distance of the actions."""
        if self.action_head is None:
            return super().bc_loss(inputs)
        found = self.action_head(self._states(inputs["obs"], None))
        return (found - self._scaled(inputs["actions"])).abs().mean((1, 2))

    def release(self, folder: Any, step: int) -> None:
        """Writes the policy as its family is released (`openvla_files.release`)."""
        files.release(self, folder, step)
