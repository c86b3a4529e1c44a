"""A model that says one number about each token: a causal model's trunk, and a linear head in float32.

Its weights have the names of Hugging Face's `…ForSequenceClassification` with one label. It is loaded from such a folder, and
saved as one. A reward model is asked about a sample's last token (`last_values`), a critic about all.
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
from rlhpc.language.models.loading import load_by, prepared, pretrained_in
from rlhpc.language.models.packing import packs
from rlhpc.language.models.token_batch import TokenBatch
from rlhpc.runtime.errors import ConfigError

if TYPE_CHECKING:
    from rlhpc.language.config.models import PretrainedConfig

#: Name of the head, as transformers and vLLM have it for decoders.
HEAD = "score"
#: Name of the one beside a causal model's head for tokens.
VALUE_HEAD = "value_head"
_CLASSIFIER = "ForSequenceClassification"


class Head(nn.Linear):
    """Computes in float32, whatever the trunk computes in: a reward is a difference of such numbers."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """`[..., H]` to `[..., 1]` float32."""
        bias = None if self.bias is None else self.bias.float()
        return nn.functional.linear(input.float(), self.weight.float(), bias)


def load_scalar_model(
    model: PretrainedConfig,
    *,
    dtype: torch.dtype = torch.float32,
    checkpointing: bool = False,
    empty: bool = False,
    seed: int = 0,
    key: str = "actor.model.model_path",
) -> Any:
    """The model of a section such as `actor.model`, on the host, that gives values.

    `module(input_ids=[N, W])` gives `[N, W]` float32, whose column t is the value once token t is read; so does a call with
    other `TokenBatch.inputs`.

    Args:
        model: model_path, a sequence classifier with one label, or a causal model, which gets a new head;
            attn_implementation; trust_remote_code.
        dtype: Of its weights.
        checkpointing: Recomputes activations in the backward pass.
        empty: Makes it on the meta device, without reading weights.
        seed: Of a new head's weights; the same seed gives the same ones.
        key: What messages call model_path.

    Raises:
        ConfigError: There is no such model, it has several labels, or it is no decoder with a linear head.
    """
    classifier = is_classifier(model, key)
    changes = {} if classifier else {"num_labels": 1}
    loading = {} if empty else {"output_loading_info": True}
    with _unreported():
        found = load_by(
            "AutoModelForSequenceClassification", model, dtype=dtype, empty=empty, key=key, options=loading, **changes
        )
    module, missing = (found, []) if empty else (found[0], sorted(found[1]["missing_keys"]))
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
    own = {f"{HEAD}.{name}" for name, _ in head.named_parameters()}
    if left := [name for name in missing if classifier or name not in own]:
        raise ConfigError(f"{key}={model.model_path}: the folder has no weights for {left[0]}")
    if not classifier and not empty:
        _initialize(head, _spread(module.config), seed)
    head.__class__ = Head
    module.forward = types.MethodType(_values, module)
    module.config.architectures = [type(module).__name__]
    module.config.pad_token_id = _pad(model, module.config)
    module.config.problem_type = "regression"  # vLLM then gives the value itself, rather than its sigmoid
    return prepared(module, checkpointing)


def add_value_head(module: Any, seed: int) -> Any:
    """Gives a causal model a head for values beside the one for tokens. A call of it then returns `logits`, and `token_values`
    `[N, W]` float32, whose column t is the value once token t is read.

    Args:
        module: From `load_causal_lm`; changed in place. On the meta device, the head is, too.
        seed: Of the head's weights; the same seed gives the same ones.

    Raises:
        ConfigError: The model's head for tokens cannot be found.
    """
    tokens = module.get_output_embeddings()
    if tokens is None:
        raise ConfigError(f"actor.model.value_head: {type(module).__name__} has no head for tokens to put it beside")
    like = tokens.weight
    head = Head(like.shape[1], 1, bias=False, device=like.device, dtype=like.dtype)
    if not like.is_meta:
        _initialize(head, _spread(module.config), seed)
    module.add_module(VALUE_HEAD, head)
    read = list[torch.Tensor]()
    # What the head for tokens reads: to ask for hidden states would keep those of all layers.
    tokens.register_forward_pre_hook(lambda _, given: read.append(given[0]))

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        read.clear()
        logits = type(self).forward(self, *args, **kwargs).logits
        return {"logits": logits, "token_values": getattr(self, VALUE_HEAD)(read.pop()).squeeze(-1)}

    module.forward = types.MethodType(forward, module)
    return module


def is_classifier(model: PretrainedConfig, key: str = "actor.model.model_path") -> bool:
    """Whether `model_path` has a sequence classifier's head of its own.

    Raises:
        ConfigError: There is no model.
    """
    if not model.model_path:
        raise ConfigError(f"{key} is not set; give a Hugging Face folder or hub name")
    try:
        config = transformers().AutoConfig.from_pretrained(
            str(model.model_path), trust_remote_code=model.trust_remote_code
        )
    except (OSError, ValueError, ImportError):
        return False  # whoever loads it says why it cannot be
    return any(str(name).endswith(_CLASSIFIER) for name in config.architectures or ())


def _values(module: Any, input_ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
    """What a call of the model computes, in place of transformers' own `forward`, which gives the last token's value alone."""
    trunk = getattr(module, module.base_model_prefix)
    read = trunk(input_ids=input_ids, **{**inputs, "use_cache": False})
    values: torch.Tensor = getattr(module, HEAD)(read.last_hidden_state)
    return values.squeeze(-1)


def new_head(module: nn.Module, name: str, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights that a new head has, by their names in the module.

    Args:
        module: A model with a head of that name, with adapters or without, of whatever memory.
        name: `HEAD` or `VALUE_HEAD`.
        seed: Of its weights.
    """
    for path, part in module.named_modules():
        if isinstance(part, Head) and path.rpartition(".")[2] == name:
            yield f"{path}.weight", _drawn(part, _spread(pretrained_in(module).config), seed)
            if part.bias is not None:
                yield f"{path}.bias", torch.zeros(part.bias.shape)


def _drawn(head: nn.Linear, spread: float, seed: int) -> torch.Tensor:
    return torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(seed)) * spread


def _spread(config: Any) -> float:
    return float(getattr(config, "initializer_range", None) or 0.02)


def _initialize(head: nn.Linear, spread: float, seed: int) -> None:
    with torch.no_grad():
        head.weight.copy_(_drawn(head, spread, seed))
        if head.bias is not None:
            head.bias.zero_()


def _pad(model: PretrainedConfig, config: Any) -> int | None:
    """The token that padding is made of: the tokenizer's, as whoever loads the folder will use both together."""
    from rlhpc.language.data.tokenizer import load_tokenizer

    with contextlib.suppress(ConfigError):
        tokenizer = load_tokenizer(str(model.model_path), model.trust_remote_code)
        if tokenizer.pad_token_id is not None:
            return int(tokenizer.pad_token_id)
    return None if config.pad_token_id is None else int(config.pad_token_id)


@contextlib.contextmanager
def _unreported() -> Iterator[None]:
    """Without transformers' report that a causal model has no head for values, which is why it gets a new one."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def token_values(
    model: nn.Module, batch: TokenBatch, *, before: bool = False, share: RowShare | None = None
) -> torch.Tensor:
    """One forward pass of a model from `load_scalar_model`.

    As in `token_scores` the model reads one row of all samples, if it can, or a rectangle.

    Args:
        model: Takes `TokenBatch.inputs`, and gives `[1, T]` or `[N, W]`.
        batch: What is valued.
        before: Token t gets the value before it was read, which is what a critic says of the state in which it was drawn; a
            sample's first gets 0.
        share: Of rows, if several ranks share them.

    Returns:
        `[T]` float32, one after the other as in the batch.
    """
    batch = batch.read_by(packs(model))
    found = model(**batch.inputs()) if share is None else share.whole(model(**share.inputs(batch)), batch)
    values = batch.of_tokens(found)
    return batch.before(values) if before else values


def last_values(values: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """What a reward model says of each sample: the value at its last token that is no padding.

    That is the token at which Hugging Face's sequence classifiers take it: where padding is made of the end token, the one
    before the end.

    Args:
        values: `[T]`.
        batch: Of N samples; `pad_id` is the padding token.

    Returns:
        `[N]`; 0 for a sample without tokens.
    """
    device = values.device
    sample = torch.repeat_interleave(torch.arange(len(batch)), batch.lengths).to(device)
    place = torch.arange(batch.tokens, device=device)
    start = batch.cu_seqlens[:-1].to(device)
    known = torch.where(batch.ids != batch.pad_id, place, -1)
    last = start.scatter_reduce(0, sample, known, "amax", include_self=True)
    filled = batch.lengths.to(device) > 0
    found = values.new_zeros(len(batch))
    return found.masked_scatter(filled, values[last[filled]])
