"""Bases of the policies of LeRobot's library: observations in its form, and denoising of actions."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhpc.embodied.config import ModelConfig
from rlhpc.embodied.config.model_options import LerobotFlowOptions
from rlhpc.embodied.envs.observations import count_rows, decode_text
from rlhpc.embodied.models.action_heads import sum_to_level
from rlhpc.embodied.models.base import Obs, Policy
from rlhpc.embodied.models.lerobot import checkpoint as folder
from rlhpc.embodied.models.lerobot import library, openpi_folder
from rlhpc.embodied.models.lerobot.checkpoint import FAMILIES
from rlhpc.embodied.models.vlm import ValueHead


class LerobotPolicy(Policy):
    """Policy of LeRobot's library. A subclass implements acting and the value head's input.

    `actor.model`: `model_path`, `num_action_chunks` (number of predicted actions that are executed), `add_value_head`;
    `kwargs` are `LerobotOptions`.

    Attributes:
        inner: The policy of LeRobot's library.
    """

    has_head = False
    inner: Any

    def __init__(self, cfg: ModelConfig, observation_space: Any, action_space: Any) -> None:
        super().__init__(cfg, observation_space, action_space)
        self.description = folder.describe(cfg, observation_space, action_space)
        self.dim = math.prod(action_space.shape)
        options = self.description.options
        vlm, task = (options.vlm, options.task) if isinstance(options, LerobotFlowOptions) else (None, None)
        self.inner = library.load(self.description, vlm)
        self.processors = library.Processors(self.description, self.inner.config, options.statistics, vlm)
        self._task = task or ""
        self.value_head = ValueHead(self.value_input_size(), self.value_width) if cfg.add_value_head else None

    def value_input_size(self) -> int:
        """Returns the width of the value head's input."""
        raise NotImplementedError

    @property
    def imitated_offsets(self) -> range:
        """Offsets of the actions that behaviour cloning learns (`Policy.imitated_offsets`): the offsets of all actions that
        the network predicts, beginning at its oldest observation.
        """
        return range(
            self.oldest_obs_offset,
            self.oldest_obs_offset + int(getattr(self.inner.config, FAMILIES[self.description.family])),
        )

    @property
    def oldest_obs_offset(self) -> int:
        """Offset of the policy's oldest input observation from the current one; 0 or negative."""
        return 1 - self.description.num_obs_steps

    # -- inputs ---------------------------------------------------------------------------------------------------

    def batch(self, obs: Obs, actions: Tensor | None = None, is_pad: Tensor | None = None) -> dict[str, Any]:
        """Converts observations, and actions if given, to the inputs of LeRobot's networks: normalised, by name, with
        one image per camera.

        Args:
            obs: Observations of the environment; `[B, num_obs_steps, ...]` if the network takes several steps.
            actions: `[B, offsets, dim]`, in the environment's units.
            is_pad: `[B, offsets]`, true for actions outside the episode; by default, all actions are inside.
        """
        obs_arrays = obs if isinstance(obs, dict) else {"": obs}
        batch: dict[str, Any] = {}
        for name, source_key in self.description.sources.items():
            batch[name] = (
                self._prepare_camera_images(name, obs_arrays)
                if source_key is None
                else self._state_vector(obs_arrays[source_key])
            )
        batch["task"] = self._decode_task_texts(obs_arrays, count_rows(obs))
        if actions is not None:
            batch["action"] = actions.reshape(len(actions), -1, self.dim).float()
            batch["action_is_pad"] = torch.zeros(batch["action"].shape[:2], dtype=torch.bool, device=actions.device)
            if is_pad is not None:
                batch["action_is_pad"] = is_pad
        return self.processors.preprocess(batch)

    def add_time_axis(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Returns the batch. A subclass adds a time axis to observations if its network needs the axis."""
        return batch

    def _state_vector(self, array: Tensor) -> Tensor:
        return array.flatten(1 if self.description.num_obs_steps == 1 else 2).float()

    def _prepare_camera_images(self, name: str, obs_arrays: dict[str, Tensor]) -> Tensor:
        """Returns the images of a camera input, channels first, with values from 0 to 1."""
        key, camera_index = self.description.cameras[name]
        return (
            obs_arrays[key][..., 3 * camera_index : 3 * camera_index + 3].movedim(-1, -3).float() / 255
        ).contiguous()

    def _decode_task_texts(self, obs_arrays: dict[str, Tensor], rows: int) -> list[str]:
        if "instruction" not in obs_arrays:
            return [self._task] * rows
        instructions = (
            obs_arrays["instruction"] if self.description.num_obs_steps == 1 else obs_arrays["instruction"][:, -1]
        )
        texts = [decode_text(bytes(row)) for row in instructions.cpu().numpy()]
        return [openpi_folder.clean_instruction(text) for text in texts] if self.description.is_openpi else texts

    @contextmanager
    def eval_mode(self) -> Iterator[Any]:
        """Yields LeRobot's policy without dropout and random crops, so that acting and training compute the same
        log-probs.
        """
        was_training = self.inner.training
        self.inner.eval()
        try:
            yield self.inner
        finally:
            self.inner.train(was_training)

    # -- training and export --------------------------------------------------------------------------------------

    def bc_loss(self, inputs: dict[str, Any]) -> Tensor:
        """Returns the loss of behaviour cloning (`Policy.bc_loss`): LeRobot's loss, which is a mean over the rows, repeated
        for each row.
        """
        batch = self.add_time_axis(self.batch(inputs["obs"], inputs["actions"], inputs.get("is_pad")))
        self.inner.train()
        return self.inner(batch)[0].expand(len(inputs["actions"]))

    def release(self, target: Path, step: int) -> None:
        """Writes the policy with LeRobot's `save_pretrained`, and its processors; a policy of openpi as openpi's folder."""
        del step
        if self.description.is_openpi:
            openpi_folder.write_openpi(self.inner, self.description.path, target)
            return
        self.inner.save_pretrained(target)
        self.processors.save(target)


class DenoisingPolicy(LerobotPolicy):
    """Policy that denoises actions step by step. The states form a chain `[B, K + 1, *state_shape]`. The
    log-probability of a chunk is the log-probability of the chain, restricted to the executed actions. Evaluation
    denoises deterministically.

    Attributes:
        steps: K, number of denoising steps.
    """

    steps: int

    @property
    @abstractmethod
    def state_shape(self) -> tuple[int, int]:
        """Shape of a state: number of actions that the network predicts, and width of an action, which may be padded."""

    @abstractmethod
    def encode(self, obs: Obs) -> tuple[Any, Tensor]:
        """Encodes observations once; returns the encoding for the denoising steps, and the value head's input `[B, width]`."""

    @abstractmethod
    def chain(self, encoding: Any, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the chain of states `[B, K + 1, *state_shape]` for noise of the same shape, and its log-probabilities
        (`evaluate_chain`). The denoising network runs once a step.
        """

    @abstractmethod
    def chain_logprobs(self, encoding: Any, chain: Tensor) -> Tensor:
        """Returns log-probabilities `[B, *state_shape]`, summed over all steps."""

    @abstractmethod
    def noise_entropy(self) -> float:
        """Returns the entropy of the noise of all steps, per component of a state; the entropy is constant."""

    def evaluate_chain(self, encoding: Any, chain: Tensor) -> tuple[Tensor, Tensor]:
        """Returns log-probabilities and entropies `[B, *state_shape]`, both over all steps."""
        logprobs = self.chain_logprobs(encoding, chain)
        return logprobs, torch.full_like(logprobs, self.noise_entropy())

    def chain_values(self, encoding: Any, value_input: Tensor) -> Tensor:
        """Returns the values of observations, after the steps of their chains were computed."""
        del encoding
        return self._values(value_input)

    #: True if values depend on the denoising steps.
    values_need_chain = False

    @abstractmethod
    def denoise(self, encoding: Any, x: Tensor) -> Tensor:
        """Denoises a state deterministically to normalised actions `[B, *state_shape]`."""

    def denoise_for_evaluation(self, encoding: Any, value_input: Tensor, obs: Obs, noise: Tensor | None) -> Tensor:
        """Returns the actions for evaluation, denoised from rows of `sample_start`."""
        return self.denoise(encoding, self.start_for(obs, noise, value_input.device))

    @property
    def start_shape(self) -> tuple[int, ...]:
        """Shape of a state (`Policy.start_shape`)."""
        return self.state_shape

    def features(self, obs: Any, policy: bool, value: bool) -> tuple[Tensor | None, Tensor | None]:
        """Returns None in place of the head's input, and the values (`Policy.features`)."""
        with self.eval_mode():
            return None, self._values(self.encode(obs)[1]) if value else None

    def default_forward(
        self,
        inputs: dict[str, Any],
        compute_logprobs: bool = True,
        compute_entropy: bool = False,
        compute_values: bool = False,
    ) -> dict[str, Tensor]:
        """Runs the training pass (`Policy.default_forward`); `inputs["chain"]` are the states from
        `predict_action_batch`.
        """
        outputs: dict[str, Tensor] = {}
        with self.eval_mode():
            encoding, value_input = self.encode(inputs["obs"])
            if compute_logprobs or compute_entropy or (compute_values and self.values_need_chain):
                logprobs, entropy = self.evaluate_chain(encoding, inputs["chain"])
                if compute_logprobs:
                    outputs["logprobs"] = self._sum_components(logprobs)
                if compute_entropy:
                    outputs["entropy"] = self._sum_components(entropy)
            if compute_values:
                outputs["values"] = self.chain_values(encoding, value_input)
        return outputs

    def predict_action_batch(
        self, obs: Obs, mode: str = "train", noise: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Any]]:
        """Chooses actions for a batch of observations (`Policy.predict_action_batch`); evaluations denoise
        deterministically.
        """
        with self.eval_mode():
            encoding, value_input = self.encode(obs)
            if mode == "eval":
                actions = self._executed_actions(self.denoise_for_evaluation(encoding, value_input, obs, noise), obs)
                return actions, {"prev_values": self.chain_values(encoding, value_input)}
            chain, logprobs = self.chain(encoding, self.noise_for(obs, noise, value_input.device))
            predicted_values = self.chain_values(encoding, value_input)
        return self._executed_actions(chain[:, -1], obs), {
            "prev_logprobs": self._sum_components(logprobs),
            "prev_values": predicted_values,
            "inputs": {"chain": chain},
        }

    def sample_noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Draws standard normal noise `[*shape, K + 1, *state_shape]`: the initial state, and the noise of each step."""
        return torch.randn((*shape, self.steps + 1, *self.state_shape), generator=generator, device=generator.device)

    def _executed_actions(self, actions: Tensor, obs: Obs) -> Tensor:
        """Returns the environment's actions of a prediction for observations."""
        del obs
        return self.processors.postprocess(self._select_executed(actions))

    def _sum_components(self, values: Tensor) -> Tensor:
        return sum_to_level(self._select_executed(values), self.logprob_type, self.chunk)

    def _select_executed(self, horizon_values: Tensor) -> Tensor:
        """Returns the executed actions, which begin at the current observation; the prediction begins at the oldest
        one.
        """
        return horizon_values[:, -self.oldest_obs_offset : self.chunk - self.oldest_obs_offset, : self.dim]
