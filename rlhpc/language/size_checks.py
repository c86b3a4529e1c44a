"""Size checks before the start of a run: lengths of sequences in micro-batches, and sizes of models on their ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from rlhpc.config.constraints import Fail
from rlhpc.config.typed import select
from rlhpc.language.config.models import LanguageModelConfig
from rlhpc.language.config.run import GrpoConfig, LanguageConfig, TrainedLanguageConfig
from rlhpc.language.engines.base import context_error
from rlhpc.language.engines.common import check_quantized_dtype
from rlhpc.language.hugging_face import EXPERT_COUNTS, splits_attention_heads
from rlhpc.language.planning.model_size import UnknownModelError, config_of
from rlhpc.language.scoring.groups import CRITIC, JUDGE, TEACHER, placed_groups
from rlhpc.runtime.errors import ConfigError

#: Attention head sizes that vLLM supports on a CPU (`CPUAttentionBackend.get_supported_head_sizes`, vLLM 0.32).
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)


def check_micro_batches(cfg: GrpoConfig, fail: Fail) -> None:
    """Refuses micro-batches that are shorter than the longest sequence of a run with one turn per episode.

    Raises:
        ConfigError: Micro-batches are too small.
    """
    if cfg.agent.kind != "inline" or cfg.rollout.agent is not None:
        return
    max_tokens = cfg.data.max_prompt_tokens + cfg.rollout.max_new_tokens
    for name in ("actor", *((CRITIC,) if CRITIC in placed_groups(cfg) else ())):
        budget_tokens = int(select(cfg, f"{name}.max_tokens_per_micro_batch"))
        if budget_tokens < max_tokens:
            raise fail(
                f"{name}.max_tokens_per_micro_batch",
                f"a sequence may have data.max_prompt_tokens ({cfg.data.max_prompt_tokens}) + rollout.max_new_tokens "
                f"({cfg.rollout.max_new_tokens}) = {max_tokens} tokens, which must fit into one: set it to at least that",
            )


def check_rows(cfg: TrainedLanguageConfig, fail: Fail) -> None:
    """Refuses context parallelism without sequence packing (`use_remove_padding`) or without SDPA.

    Raises:
        ConfigError: A trainer has context parallelism and lacks one of the two.
    """
    for name in ("actor", CRITIC):
        section = select(cfg, name)
        if section is None or section.parallel.context <= 1:
            continue
        if not section.use_remove_padding:
            raise fail(
                f"{name}.use_remove_padding", f"{name}.parallel.context shares out rows without padding: set it true"
            )
        if section.model.attn_implementation != "sdpa":
            raise fail(f"{name}.model.attn_implementation", f"{name}.parallel.context needs sdpa")


def check_models(cfg: TrainedLanguageConfig, accelerators: Mapping[str, int]) -> None:
    """Refuses model sizes that trainers cannot divide over ranks, and sizes and dtypes that engines do not support on the
    devices of the placement. Models without a config.json on this machine are skipped.

    Args:
        cfg: The configuration.
        accelerators: Number of accelerators per process, by component.

    Raises:
        ConfigError: A size of a model does not fit, or its dtype.
    """
    for name in ("actor", CRITIC):
        section = select(cfg, name)
        if section is not None and section.parallel.tensor > 1 and (name == "actor" or CRITIC in placed_groups(cfg)):
            _check_tensor_parallel(
                _read_text_config(section.model), section.parallel.tensor, f"{name}.parallel", heads_only=name == CRITIC
            )
    for name in ("actor", CRITIC):
        section = select(cfg, name)
        if section is not None and (name == "actor" or CRITIC in placed_groups(cfg)):
            _check_components(section.model, _read_config(section.model), f"{name}.model")
    rollout = select(cfg, "rollout")
    for key, model in (
        ("rollout", cfg.actor.model),
        *((name, select(cfg, f"{name}.model")) for name in (TEACHER, JUDGE)),
    ):
        if key in accelerators:
            _check_context(select(cfg, key), _read_text_config(model), key)
    if select(cfg, "rollout.routing_replay"):
        _require_experts(_read_config(cfg.actor.model), "rollout.routing_replay", "false")
    if rollout is None or rollout.rollout_backend != "vllm" or accelerators.get("rollout", 1):
        return
    check_quantized_dtype(cast(LanguageConfig, cfg), "cpu")
    config_numbers = _read_text_config(cfg.actor.model)
    width = config_numbers.get("head_dim") or config_numbers.get("hidden_size", 0) // max(
        config_numbers.get("num_attention_heads") or 1, 1
    )
    if width and width not in CPU_HEAD_SIZES:
        raise ConfigError(
            f"rollout.rollout_backend=vllm without an accelerator: the model's attention heads are {width} wide, and vLLM has "
            f"{', '.join(map(str, CPU_HEAD_SIZES))} on a CPU; set rollout.rollout_backend=hf, or take another model"
        )


def _check_context(section: Any, model_numbers: Mapping[str, Any], key: str) -> None:
    """Refuses a `max_model_len` beyond the model's context for the engine `hf`."""
    context_length, max_model_len = model_numbers.get("max_position_embeddings"), select(section, "max_model_len")
    if (
        max_model_len is not None
        and context_length
        and max_model_len > context_length
        and section.rollout_backend == "hf"
    ):
        raise ConfigError(context_error(f"{key}.max_model_len", max_model_len, int(context_length)))


def _check_tensor_parallel(model_numbers: Mapping[str, Any], tensor: int, key: str, *, heads_only: bool) -> None:
    vocabulary = int(model_numbers.get("vocab_size") or 0)
    if vocabulary % tensor and not heads_only:
        raise ConfigError(f"{key}.tensor({tensor}) does not divide the vocabulary of {vocabulary} tokens")
    if not splits_attention_heads(str(model_numbers.get("model_type"))):
        return
    num_heads = int(model_numbers.get("num_attention_heads") or 0)
    for name, count in (
        ("attention heads", num_heads),
        ("heads of keys and values", int(model_numbers.get("num_key_value_heads") or num_heads)),
    ):
        if count % tensor:
            raise ConfigError(f"{key}.tensor({tensor}) does not divide the model's {count} {name}")


def _check_components(model: LanguageModelConfig, config: Mapping[str, Any], key: str) -> None:
    """Refuses settings for experts or a vision tower that the model does not have."""
    if model.router_aux_loss_coef:
        _require_experts(config, f"{key}.router_aux_loss_coef", "0")
    if model.freeze_vision and _is_complete(config) and not config.get("vision_config"):
        raise ConfigError(f"{key}.freeze_vision: the model in {key}.model_path does not look at pictures; set it false")


def _require_experts(config: Mapping[str, Any], key: str, expected_value: str) -> None:
    text_config = {**config, **(config.get("text_config") or {})}
    if _is_complete(config) and not any(text_config.get(name) for name in EXPERT_COUNTS):
        raise ConfigError(f"{key} is for a mixture of experts, which the model is not; set it {expected_value}")


def _is_complete(config: Mapping[str, Any]) -> bool:
    """Returns whether a configuration is a complete config.json, not only the sizes of a model that is known by name."""
    return "architectures" in config or config.get("model_type") == "llama"


def _read_config(model: Any) -> Mapping[str, Any]:
    """Returns the contents of config.json; {} if the file is not on this machine."""
    try:
        return config_of(str(model.model_path or ""), model.kwargs)
    except UnknownModelError:
        return {}


def _read_text_config(model: Any) -> Mapping[str, Any]:
    """Returns the settings of the language model in config.json; {} if the file is not on this machine."""
    config = _read_config(model)
    return {**config, **(config.get("text_config") or {})}
