"""Value head: a linear head in float32 on a causal model's trunk, which computes one number per token.

The weights have the names of Hugging Face's `…ForSequenceClassification` with one label, and are loaded from and saved to such
folders. A reward model uses the value of a sample's last token (`last_values`), a critic the values of all tokens.
"""

from __future__ import annotations

import contextlib
import logging
import types
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rlhpc.language.hugging_face import transformers
from rlhpc.language.models.context_parallel import RowShare
from rlhpc.language.models.loading import linear_of, load_with_auto_class, prepare_for_training, pretrained_in
from rlhpc.language.models.packing import packs
from rlhpc.language.models.token_batch import TokenBatch
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.torch_adapter import replace_forward

if TYPE_CHECKING:
    from rlhpc.language.config.models import PretrainedConfig

#: Name of a sequence classifier's head, as in transformers and vLLM.
HEAD = "score"
#: Name of the value head of a causal model that also keeps its LM head.
VALUE_HEAD = "value_head"
_CLASSIFIER = "ForSequenceClassification"


class LinearValueHead(nn.Linear):
    """Linear head that computes in float32 for any dtype of the trunk, to keep small differences between its outputs."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Computes values `[..., 1]`, float32, from hidden states `[..., H]`."""
        bias = None if self.bias is None else self.bias.float()
        return nn.functional.linear(input.float(), self.weight.float(), bias)


def load_scalar_model(
    model: PretrainedConfig,
    *,
    dtype: torch.dtype = torch.float32,
    recompute_activations: bool = False,
    empty: bool = False,
    seed: int = 0,
    key: str = "actor.model.model_path",
) -> Any:
    """Loads the model of a section such as `actor.model` on the host, with a value head in place of the LM head.

    Calls of the module with `TokenBatch.inputs` return `[N, W]` or `[1, T]` float32, the value after each token is read.

    Args:
        model: The section; uses model_path (a sequence classifier with one label, or a causal model, which gets a new head),
            attn_implementation and trust_remote_code.
        dtype: Dtype of the weights.
        recompute_activations: Whether to turn on activation checkpointing.
        empty: Whether to create the model on the meta device without reading weights.
        seed: Seed of a new head's weights; equal seeds give equal weights.
        key: Name of model_path in messages.

    Raises:
        ConfigError: The model does not exist, lacks weights, has several labels, or is not a decoder with a linear head.
    """
    classifier = is_classifier(model, key)
    config_changes = {} if classifier else {"num_labels": 1}
    load_options = {} if empty else {"output_loading_info": True}
    with _suppress_missing_head_warning():
        load_result = load_with_auto_class(
            "AutoModelForSequenceClassification",
            model,
            dtype=dtype,
            is_empty=empty,
            key=key,
            options=load_options,
            **config_changes,
        )
    module, missing_names = (load_result, []) if empty else (load_result[0], sorted(load_result[1]["missing_keys"]))
    head = getattr(module, HEAD, None)
    if not isinstance(head, nn.Linear) or getattr(module, str(module.base_model_prefix), None) is None:
        raise ConfigError(
            f"{key}={model.model_path}: {type(module).__name__} has no linear head {HEAD!r} over a decoder's tokens; "
            "name a causal language model, or a sequence classifier made of one"
        )
    if head.out_features != 1:
        raise ConfigError(
            f"{key}={model.model_path}: the sequence classifier has {head.out_features} labels; one that gives a value has 1"
        )
    head_weights = {f"{HEAD}.{name}" for name, _ in head.named_parameters()}
    if unexpected_missing := [name for name in missing_names if classifier or name not in head_weights]:
        raise ConfigError(f"{key}={model.model_path}: the folder has no weights for {unexpected_missing[0]}")
    if not classifier and not empty:
        _initialize(head, _initial_std(module.config), seed)
    setattr(module, HEAD, linear_of(LinearValueHead, head))
    replace_forward(module, types.MethodType(_forward_values, module))
    module.config.architectures = [type(module).__name__]
    module.config.pad_token_id = _padding_token(model, module.config)
    module.config.problem_type = "regression"  # vLLM then returns the value itself, rather than its sigmoid
    return prepare_for_training(module, recompute_activations)


def add_value_head(module: Any, seed: int) -> Any:
    """Adds a value head to a causal model that keeps its LM head.

    Calls of the model then return a dict of `logits`, and `token_values` `[N, W]` float32, the value after each token is read.

    Args:
        module: Module from `load_causal_lm`, changed in place; the head is created on the same device, also on meta.
        seed: Seed of the head's weights; equal seeds give equal weights.

    Returns:
        The module.

    Raises:
        ConfigError: The model does not declare an LM head.
    """
    lm_head = module.get_output_embeddings()
    if lm_head is None:
        raise ConfigError(f"actor.model.value_head: {type(module).__name__} has no head for tokens to put it beside")
    lm_head_weight = lm_head.weight
    head = LinearValueHead(
        lm_head_weight.shape[1], 1, bias=False, device=lm_head_weight.device, dtype=lm_head_weight.dtype
    )
    if not lm_head_weight.is_meta:
        _initialize(head, _initial_std(module.config), seed)
    module.add_module(VALUE_HEAD, head)
    hidden_states = list[torch.Tensor]()
    # The hook stores the LM head's input; `output_hidden_states` would keep the hidden states of all layers.
    lm_head.register_forward_pre_hook(lambda _, inputs: hidden_states.append(inputs[0]))

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        hidden_states.clear()
        logits = type(self).forward(self, *args, **kwargs).logits
        return {"logits": logits, "token_values": getattr(self, VALUE_HEAD)(hidden_states.pop()).squeeze(-1)}

    replace_forward(module, types.MethodType(forward, module))
    return module


def is_classifier(model: PretrainedConfig, key: str = "actor.model.model_path") -> bool:
    """Returns whether the model at `model_path` is a sequence classifier.

    Raises:
        ConfigError: The path is not set.
    """
    if not model.model_path:
        raise ConfigError(f"{key} is not set; give a Hugging Face folder or hub name")
    try:
        config = transformers().AutoConfig.from_pretrained(
            str(model.model_path), trust_remote_code=model.trust_remote_code
        )
    except (OSError, ValueError, ImportError):
        return False  # loading the model later raises an error with the reason
    return any(str(name).endswith(_CLASSIFIER) for name in config.architectures or ())


def _forward_values(module: Any, input_ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
    """Computes the values of all tokens; replaces transformers' `forward`, which returns only the last token's value."""
    trunk = getattr(module, module.base_model_prefix)
    trunk_outputs = trunk(input_ids=input_ids, **{**inputs, "use_cache": False})
    values_by_token: torch.Tensor = getattr(module, HEAD)(trunk_outputs.last_hidden_state)
    return values_by_token.squeeze(-1)


def new_head(module: nn.Module, name: str, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the initial weights of a new head, with their names in the module.

    Args:
        module: Model with a head of that name, with or without adapters, on any device.
        name: Name of the head, `HEAD` or `VALUE_HEAD`.
        seed: Seed of the weights.
    """
    for path, submodule in module.named_modules():
        if isinstance(submodule, LinearValueHead) and path.rpartition(".")[2] == name:
            yield f"{path}.weight", _sample_weights(submodule, _initial_std(pretrained_in(module).config), seed)
            if submodule.bias is not None:
                yield f"{path}.bias", torch.zeros(submodule.bias.shape)


def _sample_weights(head: nn.Linear, std: float, seed: int) -> torch.Tensor:
    return torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(seed)) * std


def _initial_std(config: Any) -> float:
    return float(getattr(config, "initializer_range", None) or 0.02)


def _initialize(head: nn.Linear, std: float, seed: int) -> None:
    with torch.no_grad():
        head.weight.copy_(_sample_weights(head, std, seed))
        if head.bias is not None:
            head.bias.zero_()


def _padding_token(model: PretrainedConfig, config: Any) -> int | None:
    """Returns the padding token of the tokenizer, or else of the model's configuration, or None."""
    from rlhpc.language.data.tokenizer import load_tokenizer

    with contextlib.suppress(ConfigError):
        tokenizer = load_tokenizer(str(model.model_path), model.trust_remote_code)
        if tokenizer.pad_token_id is not None:
            return int(tokenizer.pad_token_id)
    return None if config.pad_token_id is None else int(config.pad_token_id)


@contextlib.contextmanager
def _suppress_missing_head_warning() -> Iterator[None]:
    """Suppresses transformers' warning that a causal model lacks a classifier head, because a new head is added."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def token_values(
    model: nn.Module, batch: TokenBatch, *, per_input: bool = False, share: RowShare | None = None
) -> torch.Tensor:
    """Computes the values of a batch's tokens by one forward pass of a model from `load_scalar_model`.

    As in `token_scores`, the model reads one packed row of all samples if it supports packing, otherwise a rectangle.

    Args:
        model: Model that takes `TokenBatch.inputs` and returns `[1, T]` or `[N, W]`.
        batch: The samples.
        per_input: Whether a token gets the value of the state before the token, as in a critic; a sample's first token then
            gets 0.
        share: This rank's part of each row in context parallelism.

    Returns:
        `[T]` float32.
    """
    batch = batch.read_by(packs(model))
    outputs = model(**batch.inputs()) if share is None else share.gather(model(**share.inputs(batch)), batch)
    values = batch.of_tokens(outputs)
    return batch.before(values) if per_input else values


def last_values(values: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """Returns a reward model's score of each sample: the value at its last token that differs from the padding token.

    Hugging Face's sequence classifiers use the same token. If the end token is also the padding token, the score is the value
    at the token before the end token.

    Args:
        values: Values of the tokens, `[T]`.
        batch: Batch of N samples; `pad_id` is the padding token.

    Returns:
        `[N]`; 0 for a sample without tokens.
    """
    device = values.device
    sample = torch.repeat_interleave(torch.arange(len(batch)), batch.lengths).to(device)
    token_index = torch.arange(batch.tokens, device=device)
    first_tokens = batch.cu_seqlens[:-1].to(device)
    unpadded_index = torch.where(batch.ids != batch.pad_id, token_index, -1)
    last_tokens = first_tokens.scatter_reduce(0, sample, unpadded_index, "amax", include_self=True)
    has_tokens = batch.lengths.to(device) > 0
    scores = values.new_zeros(len(batch))
    return scores.masked_scatter(has_tokens, values[last_tokens[has_tokens]])
