"""Policies of OpenVLA (Kim et al. 2024) and OpenVLA-OFT (Kim et al. 2025), over the network of
`rlhpc.embodied.models.prismatic`.

OpenVLA generates its actions token by token. OFT uses bidirectional attention and predicts all components of a chunk at
once, at empty positions between the prompt and the end of the text: as tokens, or as numbers from an action head. The head
was trained by L1 regression; reinforcement learning adds a Gaussian around its outputs.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rlhpc.checkpoint.state import load_tensors
from rlhpc.config.sections import PolicyAdapterConfig
from rlhpc.embodied.config import ModelConfig
from rlhpc.embodied.config.model_options import OpenVlaOptions, model_options
from rlhpc.embodied.envs.observations import boxes_of
from rlhpc.embodied.models.action_heads import GaussianHead
from rlhpc.embodied.models.action_tokens import ActionTokens, TokenPolicy
from rlhpc.embodied.models.base import Obs, Policy
from rlhpc.embodied.models.normalization import BOUNDS, Scaling, read_statistics, scaling
from rlhpc.embodied.models.vlm import (
    PROMPT,
    DeepValueHead,
    ImagePreprocessing,
    VlmInputs,
    load_vlm,
    position_ids,
    read_config,
    require_weights,
    state_width,
)
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.files import expand_home
from rlhpc.training.lora import ADAPTER, adapter_weights, full_weights, inject_lora, is_lora

if TYPE_CHECKING:
    from rlhpc.embodied.models.prismatic import ActionHead, OpenVLAConfig, ProprioProjector


class OpenVLAPolicy(TokenPolicy):
    """Policy that predicts action chunks from images, an instruction, and the robot's state if the model takes it.

    `actor.model`: `model_path` (a released folder, or `builtin:tiny`), `dtype`, `add_value_head`, `log_std_init`
    (`l1`); `actor.lora`; `kwargs` are `OpenVlaOptions`.
    """

    options_type = OpenVlaOptions
    options: OpenVlaOptions
    state_scaling: Scaling | None
    statistics: dict[str, Any]

    def __init__(self, cfg: ModelConfig, observation_space: Any, action_space: Any) -> None:
        from rlhpc.embodied.models.prismatic import ViT

        super().__init__(cfg, observation_space, action_space)
        for submodule in self.vlm.modules():
            if isinstance(submodule, ViT):
                submodule.freeze_unused()
        if self.value_head is not None and self.options.value_hidden:
            width = int(self.vlm.config.text_config.hidden_size)
            self.value_head = DeepValueHead(width, self.value_width, self.options.value_hidden, F.gelu)
        if self.action_head is not None:  # an action head generates no tokens
            self.vlm.language_model.lm_head.requires_grad_(False)
        if self.options.proprio_adapters:
            self._adapt_projector()
        _load_extra_weights(self, self.source)

    def _adapt_projector(self) -> None:
        """Freezes the projector of the state and adds new adapters to it."""
        if not self.options.lora or self.proprio_projector is None:
            missing_key = "actor.model.kwargs.proprio: true" if self.options.lora else "actor.lora.rank of 1 or more"
            raise ConfigError(f"actor.model.kwargs.proprio_adapters is true, which needs {missing_key}")
        adapters = {**self.options.lora, "target_modules": "all-linear", "path": None}
        inject_lora(self.proprio_projector, PolicyAdapterConfig(**adapters))

    def load(self, cfg: ModelConfig) -> None:
        """Loads the network, its heads, and the statistics (`TokenPolicy.load`).

        Raises:
            ConfigError: An option does not fit the model's head or the observations.
        """
        space, options = self.observation_space, self.options
        self.vlm, self.tokenizer, settings = load_vlm(cfg, "openvla", self.chunk, self.dim, 0)
        config, self.source = self.vlm.config, folder_of(cfg)
        width, components = int(config.text_config.hidden_size), _find_components(self.source)
        self.head_type = options.head or ("l1" if HEAD in components else "tokens")
        if self.head_type != "tokens" and cfg.attn_implementation == "flash_attention_2":
            raise ConfigError(
                f"actor.model.attn_implementation: with head {self.head_type} attention goes both ways past what is padded, "
                "which flash_attention_2 does not do here: take sdpa"
            )
        has_proprio = _PROJECTOR in components if options.proprio is None else options.proprio
        self.state_width = state_width(space) if has_proprio and "state" in boxes_of(space) else 0
        if has_proprio and not self.state_width:
            raise ConfigError(
                f"actor.model.kwargs.proprio: the model takes `state`, which the observations lack: {space}"
            )
        self.state_scaling = None
        self._set_scaling(options)
        self.action_head, self.proprio_projector = _load_components(
            components, width, self.dim if self.head_type == "l1" else 0, self.state_width
        )
        if self.head_type == "l1":
            if options.temperature_train != 1 or options.temperature_eval or options.top_k != -1:
                raise ConfigError(
                    "actor.model.kwargs: temperature_train, temperature_eval and top_k are of action tokens, which head l1 "
                    "does not generate; leave them out, or choose head tokens or parallel"
                )
            self.head = GaussianHead(self.dim, cfg.log_std_init, self.chunk)
        self.tokens = ActionTokens(int(config.text_config.vocab_size) - int(config.pad_to_multiple_of))
        self.preprocessing = _build_image_preprocessing(config, settings, space, options.center_crop)
        # In training, Llama's blank token preceded the first action.
        blank_token = self.tokenizer.convert_tokens_to_ids("▁")
        suffix_ids = [] if blank_token is None or blank_token == self.tokenizer.unk_token_id else [int(blank_token)]
        self.inputs = VlmInputs(
            space,
            self.tokenizer,
            self.preprocessing,
            -1,
            self.vlm.vision_backbone.patches,
            options.prompt or PROMPT,
            num_state_tokens=int(self.state_width > 0),
            suffix_ids=suffix_ids,
            lowercase=True,
        )

    def _set_scaling(self, options: OpenVlaOptions) -> None:
        """Sets the scaling from the statistics in `kwargs`, or from the model's statistics. With `bounds`, or for a
        model without a folder, the bounds of the action space stay in use.

        Raises:
            ConfigError: A folder has no statistics, so its actions would be scaled differently than in training.
        """
        statistics_source = str(options.statistics or self.source)
        self.statistics = _find_statistics(options, self.source, {"norm_stats": self.vlm.config.norm_stats})
        self.scaling = self.scaling.with_gripper(options.gripper == "rlds")
        if not self.statistics:
            if options.unnorm_key:
                raise ConfigError(f"actor.model.kwargs.unnorm_key: {statistics_source} has no statistics")
            return
        key, normalisation = options.unnorm_key, options.normalisation or "q99"
        action_scaling = scaling(self.statistics, key, "action", self.dim, normalisation, statistics_source)
        assert action_scaling is not None  # `scaling` raises an error for missing statistics of actions
        self.scaling = action_scaling.with_gripper(self.scaling.gripper)
        if self.state_width:
            self.state_scaling = scaling(
                self.statistics, key, "proprio", self.state_width, normalisation, statistics_source
            )

    def recompute_activations(self) -> bool:
        """Enables gradient checkpointing of the language model (`Policy.recompute_activations`)."""
        self.vlm.language_model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return True

    # -- passes ---------------------------------------------------------------------------------------------------

    def _embed_inputs(self, obs: Any) -> tuple[Tensor, Tensor]:
        """Returns embeddings `[B, L, width]` of images, state and prompt, and their mask."""
        ids, mask, pixels = self.inputs(obs)
        features = self.vlm.encode_images(pixels)
        if self.proprio_projector is not None:
            proprio_state = obs["state"].reshape(len(ids), -1).float()
            proprio_state = proprio_state if self.state_scaling is None else self.state_scaling.scaled(proprio_state)
            features = torch.cat([features, self.proprio_projector(proprio_state)[:, None].to(features.dtype)], 1)
        return self.vlm.embed(ids, features), mask

    def _encode(self, obs: Obs, token_ids: Tensor | None = None, use_cache: bool = False) -> Any:
        prompt_embeddings, mask = self._embed_inputs(obs)
        if token_ids is not None:
            prompt_embeddings = torch.cat([prompt_embeddings, self.vlm.get_input_embeddings()(token_ids)], 1)
            mask = torch.cat([mask, torch.ones_like(token_ids)], 1)
        outputs = self._run_body(
            inputs_embeds=prompt_embeddings, attention_mask=mask, position_ids=position_ids(mask), use_cache=use_cache
        )
        return outputs, mask

    def _run_body(self, **inputs: Any) -> Any:
        return self.vlm.language_model.model(**inputs)

    def _logits(self, hidden_states: Tensor) -> Tensor:
        return self.vlm.language_model.lm_head(hidden_states)

    def _hidden_states(self, obs: Obs, tokens: Tensor | None) -> Tensor:
        if self.head_type == "tokens":
            return super()._hidden_states(obs, tokens)
        input_embeddings, mask = self._embed_inputs(obs)
        num_rows, num_action_tokens = len(mask), self.chunk * self.dim
        stop_ids = mask.new_full((num_rows, 1), int(self.vlm.config.text_config.eos_token_id))
        action_embeddings = input_embeddings.new_zeros(num_rows, num_action_tokens, input_embeddings.shape[-1])
        num_stops = int(self.options.stop_token)
        stop_embeddings = self.vlm.get_input_embeddings()(stop_ids)[:, :num_stops]
        input_embeddings = torch.cat([input_embeddings, action_embeddings, stop_embeddings], 1)
        mask = torch.cat([mask, mask.new_ones(num_rows, num_action_tokens + num_stops)], 1)
        padding_bias = torch.finfo(input_embeddings.dtype).min * (1 - mask)[:, None, None, :].to(input_embeddings.dtype)
        bidirectional_mask = padding_bias.expand(-1, -1, mask.shape[1], -1)
        outputs = self._run_body(
            inputs_embeds=input_embeddings,
            attention_mask=bidirectional_mask,
            position_ids=position_ids(mask),
            use_cache=False,
        )
        # As in generated text, the hidden state before a position predicts the token at the position.
        first_action = mask.shape[1] - num_stops - num_action_tokens - 1
        return outputs.last_hidden_state[:, first_action : first_action + num_action_tokens]

    def _sample_tokens(self, obs: Obs, noise: Tensor | None, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        if self.head_type == "tokens":
            return super()._sample_tokens(obs, noise, temperature)
        hidden_states = self._hidden_states(obs, None)
        return *self._choose_bins(hidden_states, noise, temperature), hidden_states[:, 0]

    @property
    def start_shape(self) -> tuple[int, ...]:
        """Shape of the noise from which an evaluation samples tokens (`TokenPolicy.start_shape`); () for `l1`."""
        return super().start_shape if self.action_head is None else ()

    def features(self, obs: Any, policy: bool, value: bool) -> tuple[Tensor | None, Tensor | None]:
        """Returns the head's input and the values (`Policy.features`); for `l1` the input is the actions in [−1, 1]."""
        if self.action_head is None or not policy:
            return super().features(obs, policy, value)
        hidden_states = self._hidden_states(obs, None)
        return self.action_head(hidden_states).flatten(1), self._values(hidden_states[:, 0]) if value else None

    def default_forward(self, inputs: dict[str, Any], *args: bool, **kwargs: bool) -> dict[str, Tensor]:
        """Runs the training pass (`Policy.default_forward`); for `l1`, `inputs["scaled"]` may hold the actions in
        [−1, 1].
        """
        if self.action_head is None:
            return super().default_forward(inputs, *args, **kwargs)
        actions = inputs["scaled"] if "scaled" in inputs else self._scale_actions(inputs["actions"])
        return Policy.default_forward(self, {"obs": inputs["obs"], "actions": actions}, *args, **kwargs)

    def predict_action_batch(
        self, obs: Obs, mode: str = "train", noise: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Any]]:
        """Chooses actions for a batch of observations (`Policy.predict_action_batch`)."""
        if self.action_head is None:
            return super().predict_action_batch(obs, mode, noise)
        actions, action_extras = Policy.predict_action_batch(self, obs, mode, noise)
        return self.scaling.unscaled(actions), {**action_extras, "inputs": {"scaled": actions}}

    def sample_noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Draws noise for the tokens or for the Gaussian (`Policy.sample_noise`)."""
        return (
            super().sample_noise(shape, generator)
            if self.action_head is None
            else self.head.sample_noise(shape, generator)
        )

    def bc_loss(self, inputs: dict[str, Any]) -> Tensor:
        """Returns the loss of behaviour cloning (`Policy.bc_loss`); for `l1`, the mean absolute error of the actions."""
        if self.action_head is None:
            return super().bc_loss(inputs)
        return (
            (self.action_head(self._hidden_states(inputs["obs"], None)) - self._scale_actions(inputs["actions"]))
            .abs()
            .mean((1, 2))
        )

    def release(self, folder: Path, step: int) -> None:
        """Writes the policy in the layout of OpenVLA's folders, with merged adapters, and the adapters separately.

        Args:
            folder: Existing folder.
            step: Step in the names of files.
        """
        from safetensors.torch import save_file

        if self.source is not None:
            # Copies the tokenizer, the image processor, and the code that the model's configuration names.
            for file in self.source.iterdir():
                if file.suffix in (".json", ".model", ".py", ".txt") and ".index." not in file.name:
                    shutil.copyfile(file, folder / file.name)
        else:
            self.tokenizer.save_pretrained(folder)
            _write_json(
                folder / "preprocessor_config.json", _build_processor_config(self.preprocessing, self.vlm.config)
            )
        vlm = self.vlm
        weights = dict(full_weights(vlm, lambda tensor: tensor))
        vlm.config.norm_stats = self.statistics or None
        vlm.save_pretrained(folder, state_dict=weights)
        if self.statistics:
            _write_json(folder / _STATISTICS, self.statistics)
        for name, module in ((HEAD, self.action_head), (_PROJECTOR, self.proprio_projector)):
            if module is not None:
                torch.save(dict(full_weights(module, lambda tensor: tensor)), folder / f"{name}--{step}_checkpoint.pt")
        if is_lora(vlm):
            adapter = folder / "lora_adapter"
            vlm.peft_config[ADAPTER].save_pretrained(str(adapter))
            adapter_state = adapter_weights(vlm, lambda tensor: tensor)
            save_file(
                {f"base_model.model.{name}": weight for name, weight in adapter_state.items()},
                adapter / "adapter_model.safetensors",
            )
        extra_weights = {name: weight for name, weight in self.state_dict().items() if name.startswith(_EXTRA_PREFIXES)}
        if extra_weights:
            save_file(extra_weights, folder / _EXTRA_WEIGHTS)


HEAD, _PROJECTOR = "action_head", "proprio_projector"
_STATISTICS, _EXTRA_WEIGHTS = "dataset_statistics.json", "rlhpc.safetensors"
_EXTRA_PREFIXES = ("value_head.", "head.")


def folder_of(cfg: ModelConfig) -> Path | None:
    """Returns the model's folder; None for a hub name or a built-in model."""
    folder = expand_home(str(cfg.model_path or ""))
    return folder if cfg.model_path and folder.is_dir() else None


def _find_components(folder: Path | None) -> dict[str, Path]:
    """Returns the files of components outside the network, by component name.

    Raises:
        ConfigError: A component has several files.
    """
    files_by_component: dict[str, Path] = {}
    for name in (HEAD, _PROJECTOR) if folder else ():
        assert folder is not None
        files = sorted(folder.glob(f"{name}--*checkpoint.pt"))
        if len(files) > 1:
            raise ConfigError(
                f"actor.model.model_path: {folder} has {len(files)} files {name}--*: "
                f"{', '.join(path.name for path in files)}; leave one"
            )
        files_by_component.update((name, file) for file in files)
    return files_by_component


def _find_statistics(options: OpenVlaOptions, folder: Path | None, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the statistics that scale actions: the statistics in `kwargs`, or the model's. The result is empty with
    `bounds`, and for a model without a folder and `norm_stats`.

    Args:
        options: `actor.model.kwargs`.
        folder: Folder of the model.
        config: Content of the model's config.json.

    Raises:
        ConfigError: A folder has no statistics, so its actions would be scaled differently than in training.
    """
    statistics_source = options.statistics
    if statistics_source == BOUNDS:
        return {}
    if statistics_source:
        return read_statistics(expand_home(str(statistics_source)))
    file = None if folder is None else folder / _STATISTICS
    statistics = read_statistics(file) if file is not None and file.is_file() else dict(config.get("norm_stats") or {})
    if not statistics and folder is not None:
        raise ConfigError(
            f"actor.model.model_path is {str(folder)!r}, whose actions are scaled by a dataset's statistics; looked for "
            f"{folder / _STATISTICS} and norm_stats in its config.json: there are none. Name a file: "
            f"actor.model.kwargs.statistics=FILE; or {BOUNDS}, for the bounds of the action space"
        )
    return statistics


def check_folder(cfg: ModelConfig) -> None:
    """Checks that a model's folder has weights and statistics.

    Raises:
        ConfigError: Files are missing; the message names them.
    """
    require_weights(cfg.model_path)
    if (folder := folder_of(cfg)) is not None:
        _find_components(folder)
        _find_statistics(model_options(OpenVlaOptions, cfg), folder, read_config(folder))


def _load_components(
    files: dict[str, Path], width: int, dim: int, state_dim: int
) -> tuple[ActionHead | None, ProprioProjector | None]:
    """Builds the action head and the projector, and loads their weights from `files`. The head is None if `dim` is 0;
    the projector is None if `state_dim` is 0.
    """
    from rlhpc.embodied.models.prismatic import ActionHead, ProprioProjector

    head = _load_weights(ActionHead(width, dim), files.get(HEAD)) if dim else None
    return head, _load_weights(ProprioProjector(state_dim, width), files.get(_PROJECTOR)) if state_dim else None


def _load_weights(module: Any, file: Path | None) -> Any:
    if file is not None:
        try:
            state_dict: dict[str, Tensor] = torch.load(file, map_location="cpu", weights_only=True)
            module.load_state_dict({name.removeprefix("module."): weight for name, weight in state_dict.items()})
        except Exception as error:
            raise ConfigError(
                f"actor.model.model_path: {file} does not fit this environment's actions and state: {error}"
            ) from error
    return module


def _load_extra_weights(policy: nn.Module, folder: Path | None) -> None:
    """Loads the value head and the log-std from a policy's folder, if their shapes fit the policy."""
    if folder is not None and (folder / _EXTRA_WEIGHTS).is_file():
        state_dict = policy.state_dict()
        weights = load_tensors(folder / _EXTRA_WEIGHTS).items()
        matching_weights = {
            name: weight for name, weight in weights if name in state_dict and state_dict[name].shape == weight.shape
        }
        policy.load_state_dict(matching_weights, strict=False)


def _build_image_preprocessing(
    config: OpenVLAConfig, settings: dict[str, Any], space: Any, has_crop: bool
) -> ImagePreprocessing:
    """Returns the model's image preprocessing.

    Args:
        config: Configuration of the model.
        settings: Settings of the model's image processor.
        space: Observation space; its images must be square unless the model stretches images.
        has_crop: True crops to the central 90 % of the area, for models trained on random crops.

    Raises:
        ConfigError: The vision transformers take different image sizes, or images would have to be cropped or padded.
    """
    image_sizes = set(config.image_sizes)
    if len(image_sizes) > 1:
        raise ConfigError(f"the model's config.json has image_sizes {config.image_sizes}; they must be equal")
    strategy = settings.get("image_resize_strategy", getattr(config, "image_resize_strategy", "resize-naive"))
    for key, box in boxes_of(space).items():
        if len(box.shape) == 3 and strategy != "resize-naive" and box.shape[0] != box.shape[1]:
            raise ConfigError(
                f"the model's image_resize_strategy is {strategy!r}, which takes square pictures here; {key or 'this'} is "
                f"{box.shape[0]} x {box.shape[1]}"
            )
    means, stds = (
        settings.get(f"{name}s") or [getattr(shape, name) for shape in config.shapes] for name in ("mean", "std")
    )
    return ImagePreprocessing(image_sizes.pop(), means, stds, bicubic=True, crop_fraction=0.9 if has_crop else 1.0)


def _build_processor_config(preprocessing: ImagePreprocessing, config: OpenVLAConfig) -> dict[str, Any]:
    """Returns the content of preprocessor_config.json."""
    num_backbones = len(preprocessing.means)
    return {
        "image_processor_type": "PrismaticImageProcessor", "image_resize_strategy": "resize-naive",
        "use_fused_vision_backbone": num_backbones > 1,
        "input_sizes": [[3, image_size, image_size] for image_size in config.image_sizes],
        "interpolations": ["bicubic"] * num_backbones, "means": [list(mean) for mean in preprocessing.means],
        "stds": [list(std) for std in preprocessing.stds],
    }  # fmt: skip


def _write_json(file: Path, json_content: dict[str, Any]) -> None:
    file.write_text(json.dumps(json_content, indent=2) + "\n")
