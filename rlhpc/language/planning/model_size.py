"""Sizes of language models: shapes of all parameters, and the sizes that determine activations.

For the families in `FAMILIES` the configuration determines the shapes. Models of other families are built on the meta device,
which takes a few seconds and no memory. A test checks that both ways give the same result.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rlhpc.language.models.builtin import PREFIX
from rlhpc.language.models.tiny import SPECIAL, VOCABULARY
from rlhpc.runs.preflight import cached_config
from rlhpc.runtime.errors import RlhpcError
from rlhpc.runtime.files import expand_home
from rlhpc.runtime.text import first_line
from rlhpc.training.targets import is_all_linear, is_target

_QWEN2 = {"model_type": "qwen2", "vocab_size": 152064, "max_position_embeddings": 32768}
_QWEN2_SMALL = {**_QWEN2, "vocab_size": 151936, "tie_word_embeddings": True}
_QWEN3 = {"model_type": "qwen3", "vocab_size": 151936, "max_position_embeddings": 40960, "head_dim": 128}
_QWEN3_MOE = {**_QWEN3, "model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8}
_LLAMA3 = {"model_type": "llama", "vocab_size": 128256, "max_position_embeddings": 131072}


def _sizes(
    base: Mapping[str, Any],
    hidden_size: int,
    inner_size: int,
    num_layers: int,
    num_heads: int,
    kv: int,
    **other_keys: Any,
) -> Any:
    return {
        **base,
        "hidden_size": hidden_size,
        "intermediate_size": inner_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": kv,
        **other_keys,
    }


_TIED = {"tie_word_embeddings": True}
#: Configurations by hub name in lower case, without suffixes of fine-tuned variants.
HUB_CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "qwen/qwen2.5-0.5b": _sizes(_QWEN2_SMALL, 896, 4864, 24, 14, 2),
    "qwen/qwen2.5-1.5b": _sizes(_QWEN2_SMALL, 1536, 8960, 28, 12, 2),
    "qwen/qwen2.5-3b": _sizes(_QWEN2_SMALL, 2048, 11008, 36, 16, 2),
    "qwen/qwen2.5-7b": _sizes(_QWEN2, 3584, 18944, 28, 28, 4),
    "qwen/qwen2.5-14b": _sizes(_QWEN2, 5120, 13824, 48, 40, 8),
    "qwen/qwen2.5-32b": _sizes(_QWEN2, 5120, 27648, 64, 40, 8),
    "qwen/qwen2.5-72b": _sizes(_QWEN2, 8192, 29568, 80, 64, 8),
    "qwen/qwen3-0.6b": _sizes(_QWEN3, 1024, 3072, 28, 16, 8, **_TIED),
    "qwen/qwen3-1.7b": _sizes(_QWEN3, 2048, 6144, 28, 16, 8, **_TIED),
    "qwen/qwen3-4b": _sizes(_QWEN3, 2560, 9728, 36, 32, 8, **_TIED),
    "qwen/qwen3-8b": _sizes(_QWEN3, 4096, 12288, 36, 32, 8),
    "qwen/qwen3-14b": _sizes(_QWEN3, 5120, 17408, 40, 40, 8),
    "qwen/qwen3-32b": _sizes(_QWEN3, 5120, 25600, 64, 64, 8),
    "qwen/qwen3-30b-a3b": _sizes(_QWEN3_MOE, 2048, 6144, 48, 32, 4, moe_intermediate_size=768),
    "qwen/qwen3-235b-a22b": _sizes(_QWEN3_MOE, 4096, 12288, 94, 64, 4, moe_intermediate_size=1536),
    "meta-llama/llama-3.1-8b": _sizes(_LLAMA3, 4096, 14336, 32, 32, 8),
    "meta-llama/llama-3.1-70b": _sizes(_LLAMA3, 8192, 28672, 80, 64, 8),
    "meta-llama/llama-3.3-70b": _sizes(_LLAMA3, 8192, 28672, 80, 64, 8),
    "huggingfacetb/smollm2-135m": _sizes(
        {"model_type": "llama", "vocab_size": 49152, "max_position_embeddings": 8192, **_TIED}, 576, 1536, 30, 9, 3
    ),
}
#: Suffixes of fine-tuned variants, which have the same sizes.
_TUNING_SUFFIXES = ("-instruct", "-base", "-chat", "-2507", "-thinking", "-math")


def hub_config(name: str) -> Mapping[str, Any] | None:
    """Returns the configuration of a hub model or its fine-tuned variant; None if it is not in `HUB_CONFIGS`."""
    name = name.lower()
    while name not in HUB_CONFIGS:
        suffix = next((tuned_suffix for tuned_suffix in _TUNING_SUFFIXES if name.endswith(tuned_suffix)), None)
        if suffix is None:
            return None
        name = name.removesuffix(suffix)
    return HUB_CONFIGS[name]


#: Families with shapes that the configuration determines: decoder layers of attention and a gated MLP or experts.
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral")
_MIXTURES = ("qwen3_moe", "mixtral")
#: Configuration keys of models that scale or bound the logits.
_LOGIT_SCALING_KEYS = ("final_logit_softcapping", "logit_scale", "logits_scaling")
#: Configuration keys of the KV cache; config.json may omit them.
_CACHE_KEYS = (
    "layer_types", "sliding_window", "attention_chunk_size", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim",
    "v_head_dim",
)  # fmt: skip
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_ATTENTION = frozenset({"q_proj", "k_proj", "v_proj", "o_proj"})
#: Names of the linear layers that get adapters with `all-linear`.
LINEAR = _ATTENTION | {"gate_proj", "up_proj", "down_proj"}


class UnknownModelError(RlhpcError):
    """Error for a model of unknown size; the message gives the reason."""


@dataclass(frozen=True)
class ModelSize:
    """Sizes of a causal language model. Counts are of elements.

    Attributes:
        shapes: Shapes of all parameters, by name; tied parameters once.
        windows: Attention window of each layer with a KV cache, in tokens.
        latent: Cached numbers per token and layer in latent attention (MLA), from which heads are recomputed; 0 without MLA.
        latent_heads: Cached numbers per token and head in latent attention if an engine caches heads.
        linear: Names of the layers that get adapters with `all-linear` (`training.lora.linear_layers`).
        hidden, layers, heads, kv_heads, head_dim, intermediate, vocabulary: Sizes with their usual names.
        experts, experts_per_token, expert_width: Experts per layer, experts per token, and inner width of an expert.
        qk_norm: Whether queries and keys are normalized.
        context: Maximum length of prompt and response together.
        computes_all_logits: Whether the model transforms its logits, so that all logits are computed at once.
    """

    shapes: Mapping[str, tuple[int, ...]]
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    experts: int = 0
    experts_per_token: int = 0
    expert_width: int = 0
    qk_norm: bool = False
    context: int | None = None
    computes_all_logits: bool = False
    linear: frozenset[str] = frozenset()
    windows: tuple[float, ...] = ()
    latent: int = 0
    latent_heads: int = 0

    @functools.cached_property
    def parameters(self) -> int:
        """Number of all parameters."""
        return sum(map(math.prod, self.shapes.values()))

    @functools.cached_property
    def layer_parameters(self) -> tuple[int, int]:
        """Numbers of parameters in the largest decoder layer: expert parameters, and other parameters."""
        numels_by_layer: dict[str, list[int]] = {}
        for name, shape in self.shapes.items():
            if layer_match := _LAYER.search(name):
                numels_by_layer.setdefault(layer_match[1], [0, 0])[".experts." not in name] += math.prod(shape)
        expert_parameters, dense_parameters = max(numels_by_layer.values(), key=sum, default=[0, 0])
        return expert_parameters, dense_parameters

    @functools.cached_property
    def root_parameters(self) -> int:
        """Number of parameters outside of decoder layers: embeddings, head and the last norm."""
        return sum(math.prod(shape) for name, shape in self.shapes.items() if not _LAYER.search(name))

    @property
    def embedding(self) -> int:
        """Number of elements of the embedding; the LM head has the same number."""
        return self.vocabulary * self.hidden

    @property
    def tied(self) -> bool:
        """True if the head and the embedding share their weights."""
        return self.root_parameters < 2 * self.embedding

    @functools.cached_property
    def largest(self) -> int:
        """Number of elements of the largest parameter."""
        return max(map(math.prod, self.shapes.values()), default=0)

    def adapted_layers(self, targets: Any) -> dict[str, tuple[int, int]]:
        """Returns the numbers of outputs and inputs of the linear layers that get an adapter, by name.

        Args:
            targets: `actor.lora.target_modules`.
        """
        adapts_all_linear = is_all_linear(targets)
        shapes_of_adapted: dict[str, tuple[int, int]] = {}
        for name, shape in self.shapes.items():
            module = name.removesuffix(".weight")
            if (
                module != name
                and len(shape) == 2
                and (module in self.linear if adapts_all_linear else is_target(module, targets))
            ):
                shapes_of_adapted[module] = (shape[0], shape[1])
        return shapes_of_adapted

    def key_value_bytes(self, itemsize: int, num_tokens: float, tensor: int = 1, *, is_compact: bool = False) -> float:
        """Returns the bytes of the keys and values of a sequence on a rank, over all layers.

        Args:
            itemsize: Bytes of a number.
            num_tokens: Length of the sequence.
            tensor: Number of ranks that share the heads.
            is_compact: Whether the engine caches only tokens within a layer's window, and only latent vectors in MLA.
        """
        elements_per_token = 2.0 * max(self.kv_heads / tensor, 1) * self.head_dim
        if self.latent:
            elements_per_token = float(self.latent) if is_compact else self.latent_heads * max(self.heads / tensor, 1)
        num_cached_tokens = sum(min(num_tokens, window) if is_compact else num_tokens for window in self.windows)
        return itemsize * elements_per_token * num_cached_tokens


def size_of(
    path: str | None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    builds_model: bool = True,
    config: Mapping[str, Any] | None = None,
) -> ModelSize:
    """Returns the sizes of a model.

    Args:
        path: A folder, a hub name, or a built-in model (`model_path`).
        kwargs: Arguments of a built-in model.
        config: Contents of its config.json, if known.
        builds_model: Whether a family that is not in `FAMILIES` may be built on the meta device.

    Raises:
        UnknownModelError: The sizes are not available on this machine.
    """
    config = config_of(path, kwargs) if config is None else config
    text_config = {**config, **(config.get("text_config") or {})}
    if text_config.get("model_type") in FAMILIES:
        shapes = dict(_iter_shapes(text_config))
        # For mixtures, peft treats all linear layers except attention as experts.
        last_parts = _ATTENTION if _count_experts(text_config) else LINEAR
        layers = (name.removesuffix(".weight") for name in shapes)
        return _build_size(
            text_config, shapes, frozenset(name for name in layers if name.rpartition(".")[2] in last_parts)
        )
    if not builds_model:
        raise UnknownModelError(
            f"{path}: models of type {text_config.get('model_type')} are looked at by rlhpc plan alone"
        )
    defaults, shapes, linear_names = _build_on_meta(path, config)
    return _build_size({**text_config, **defaults}, shapes, linear_names)


def config_of(path: str | None, kwargs: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
    """Returns the contents of a model's config.json.

    Raises:
        UnknownModelError: The file is not on this machine, and the model is not in `HUB_CONFIGS`.
    """
    if not path:
        raise UnknownModelError("no model is named")
    if path == f"{PREFIX}tiny":
        try:
            return _make_tiny_config(**{str(key): key_value for key, key_value in (kwargs or {}).items()})
        except TypeError as error:  # the message names the accepted arguments
            raise UnknownModelError(f"{path} with {dict(kwargs or {})}: {error}") from None
    if path.startswith(PREFIX):
        path = {"builtin:smollm2": "HuggingFaceTB/SmolLM2-135M"}.get(path.lower(), path)
    file = expand_home(path) / "config.json"
    for config_file in (file, cached_config(path)):
        if config_file is not None and config_file.is_file():
            try:
                return dict(json.loads(config_file.read_text()))
            except (OSError, ValueError) as error:
                raise UnknownModelError(f"{config_file} cannot be read ({error})") from error
    if (known_config := hub_config(path)) is not None:
        return known_config
    raise UnknownModelError(
        f"{path}: no folder, nothing of it in the hub's cache here, and none of the models known by name; give a folder with "
        "its config.json (weights are not needed to plan)"
    )


def _make_tiny_config(
    vocabulary: str = VOCABULARY, hidden: int = 128, layers: int = 4, heads: int = 4, context: int = 64, seed: int = 0
) -> dict[str, Any]:
    """Returns the configuration of a built-in tiny model, as written by `make_tiny_model`."""
    del seed
    return {
        "model_type": "llama",
        "vocab_size": len(dict.fromkeys(vocabulary)) + len(SPECIAL),
        "hidden_size": hidden,
        "intermediate_size": -(-hidden * 8 // 3 // 8) * 8,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": context,
    }


def _build_size(
    config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], linear_names: frozenset[str]
) -> ModelSize:
    """Builds a `ModelSize` from config.json and the shapes of the parameters."""
    num_heads = int(config.get("num_attention_heads") or config.get("n_head") or 1)
    hidden_size = int(config.get("hidden_size") or config.get("n_embd") or 0)
    experts = _count_experts(config)
    intermediate_size = int(config.get("intermediate_size") or config.get("n_inner") or 4 * hidden_size)
    context_length = config.get("max_position_embeddings") or config.get("n_positions")
    latent_size = int(config.get("kv_lora_rank") or 0)
    return ModelSize(
        shapes=shapes,
        linear=linear_names,
        windows=tuple(_iter_windows(config)),
        latent=latent_size + int(config.get("qk_rope_head_dim") or 0) if latent_size else 0,
        latent_heads=sum(int(config.get(f"{projection}_head_dim") or 0) for projection in ("qk_nope", "qk_rope", "v"))
        if latent_size
        else 0,
        hidden=hidden_size,
        layers=int(config.get("num_hidden_layers") or config.get("n_layer") or 0),
        heads=num_heads,
        kv_heads=int(config.get("num_key_value_heads") or num_heads),
        head_dim=int(config.get("head_dim") or hidden_size // num_heads),
        intermediate=intermediate_size,
        vocabulary=int(config["vocab_size"]),
        experts=experts,
        experts_per_token=int(config.get("num_experts_per_tok") or 0) if experts else 0,
        expert_width=_find_expert_width({"intermediate_size": intermediate_size, **config}) if experts else 0,
        qk_norm=any(name.endswith("q_norm.weight") for name in shapes),
        context=None if context_length is None else int(context_length),
        computes_all_logits=any(config.get(key) not in (None, 1, 1.0) for key in _LOGIT_SCALING_KEYS),
    )


def _iter_windows(config: Mapping[str, Any]) -> Iterator[float]:
    """Yields the attention window of each layer with a KV cache, in tokens."""
    num_layers = int(config.get("num_hidden_layers") or config.get("n_layer") or 0)
    window = float(config.get("sliding_window") or math.inf)
    layer_types = config.get("layer_types")
    if not layer_types:  # all layers have the same type, except the first layers of Qwen
        first_sliding = (
            num_layers if config.get("use_sliding_window") is False else int(config.get("max_window_layers") or 0)
        )
        layer_types = [
            "sliding_attention" if layer >= first_sliding else "full_attention" for layer in range(num_layers)
        ]
    for layer_type in layer_types:
        if layer_type == "chunked_attention":
            yield float(config.get("attention_chunk_size") or math.inf)
        elif "attention" in layer_type and "linear" not in layer_type:
            yield window if layer_type == "sliding_attention" else math.inf


def _iter_shapes(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields names and shapes of the parameters of a family in `FAMILIES`, with the names and order of transformers."""
    family, hidden_size, num_heads = (
        config["model_type"],
        int(config["hidden_size"]),
        int(config["num_attention_heads"]),
    )
    width = int(config.get("head_dim") or hidden_size // num_heads)
    query_size, kv_size = num_heads * width, int(config.get("num_key_value_heads") or num_heads) * width
    has_bias = family == "qwen2" or bool(config.get("attention_bias"))
    yield "model.embed_tokens.weight", (int(config["vocab_size"]), hidden_size)
    for layer in range(int(config["num_hidden_layers"])):
        prefix = f"model.layers.{layer}"
        for name, shape in (
            ("q", (query_size, hidden_size)),
            ("k", (kv_size, hidden_size)),
            ("v", (kv_size, hidden_size)),
            ("o", (hidden_size, query_size)),
        ):
            yield f"{prefix}.self_attn.{name}_proj.weight", shape
            if has_bias and (name != "o" or family != "qwen2"):
                yield f"{prefix}.self_attn.{name}_proj.bias", shape[:1]
        if family in ("qwen3", "qwen3_moe"):
            yield f"{prefix}.self_attn.q_norm.weight", (width,)
            yield f"{prefix}.self_attn.k_norm.weight", (width,)
        yield from _feed_forward(config, layer, f"{prefix}.mlp")
        yield f"{prefix}.input_layernorm.weight", (hidden_size,)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden_size,)
    yield "model.norm.weight", (hidden_size,)
    if not config.get("tie_word_embeddings"):
        yield "lm_head.weight", (int(config["vocab_size"]), hidden_size)


def _count_experts(config: Mapping[str, Any]) -> int:
    """Returns the number of experts per layer; 0 for families without experts, for any contents of the configuration."""
    if config.get("model_type") in FAMILIES and config["model_type"] not in _MIXTURES:
        return 0
    return int(config.get("num_experts") or config.get("num_local_experts") or config.get("n_routed_experts") or 0)


def _find_expert_width(config: Mapping[str, Any]) -> int:
    """Returns the inner width of an expert."""
    expert_width = None if config.get("model_type") == "mixtral" else config.get("moe_intermediate_size")
    return int(expert_width or config["intermediate_size"])


def _feed_forward(config: Mapping[str, Any], layer_number: int, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields names and shapes of the parameters of a layer's MLP or experts."""
    hidden_size, experts = int(config["hidden_size"]), _count_experts(config)
    step = int(config.get("decoder_sparse_step") or 1)
    is_dense = not experts or layer_number in (config.get("mlp_only_layers") or ()) or (layer_number + 1) % step != 0
    if is_dense:
        inner_size = int(config["intermediate_size"])
        for name, shape in (
            ("gate", (inner_size, hidden_size)),
            ("up", (inner_size, hidden_size)),
            ("down", (hidden_size, inner_size)),
        ):
            yield f"{prefix}.{name}_proj.weight", shape
            if config.get("mlp_bias"):
                yield f"{prefix}.{name}_proj.bias", shape[:1]
        return
    inner_size = _find_expert_width(config)
    yield f"{prefix}.gate.weight", (experts, hidden_size)
    yield f"{prefix}.experts.gate_up_proj", (experts, 2 * inner_size, hidden_size)
    yield f"{prefix}.experts.down_proj", (experts, hidden_size, inner_size)


def _build_on_meta(
    path: str | None, config: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, tuple[int, ...]], frozenset[str]]:
    """Builds a model on the meta device; returns its settings of the KV cache, the shapes of its parameters, and the names of
    its linear layers (`ModelSize.linear`).
    """
    try:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        from rlhpc.training.lora import linear_layers
    except ImportError as error:
        raise UnknownModelError(
            f"{path}: models of this type are built to be looked at, which needs {error.name}"
        ) from error
    try:
        known_keys = {key: setting_value for key, setting_value in config.items() if key != "model_type"}
        model_config = AutoConfig.for_model(str(config["model_type"]), **known_keys)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(model_config)
    except (KeyError, ValueError, ImportError, AttributeError) as error:
        raise UnknownModelError(f"{path}: this transformers cannot build it: {first_line(error)}") from error
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    text_config = model_config.get_text_config()
    cache_settings = {
        key: setting_value for key in _CACHE_KEYS if (setting_value := getattr(text_config, key, None)) is not None
    }
    return cache_settings, shapes, frozenset(linear_layers(model))
