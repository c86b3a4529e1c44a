"""Access to the optional transformers package and to the configurations of its models."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.plugins import require_package
from rlhpc.runtime.text import first_line


def transformers() -> Any:
    """Returns the transformers package.

    Raises:
        ConfigError: The package is not installed.
    """
    return require_package("transformers", "language models need transformers")


@contextmanager
def no_progress_bar() -> Iterator[None]:
    """Suppresses the progress bars of transformers, which would also be written to log files."""
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()


def load_model_config(model_path: str, trust_remote_code: bool) -> Any:
    """Loads the configuration of a model.

    Raises:
        ConfigError: The model does not exist.
    """
    try:
        return transformers().AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"actor.model.model_path is {model_path!r}, where no model can be loaded from: {first_line(error)}; a folder with "
            "config.json and weights, or the name of a model in the hub's cache, is allowed"
        ) from None


def count_embeddings(model_path: str) -> int | None:
    """Returns the number of tokens that a model has embeddings for, by its configuration; None if there is none."""
    if not Path(model_path, "config.json").is_file():
        return None
    num_embeddings: int | None = None
    with suppress(ConfigError):  # a tokenizer's folder may hold no model
        num_embeddings = getattr(load_model_config(model_path, False).get_text_config(), "vocab_size", None)
    return num_embeddings


def missing_embedding_error(token_id: int, tokenizer: Any, num_embeddings: int) -> ConfigError:
    """Builds the error of a text with a token that the model has no embedding for.

    Args:
        token_id: The token.
        tokenizer: The tokenizer that made it.
        num_embeddings: See `count_embeddings`.
    """
    return ConfigError(
        f"a text has the token {token_id} ({tokenizer.decode([token_id])!r}), and the model in {tokenizer.name_or_path} has "
        f"embeddings for {num_embeddings} (vocab_size in config.json): put the model's own tokenizer there, or give it "
        "more embeddings (resize_token_embeddings)"
    )


def splits_attention_heads(model_type: str) -> bool:
    """Returns whether transformers divides a model type's attention heads over tensor-parallel ranks.

    The result is False where the package is not installed, or does not know the type.
    """
    if importlib.util.find_spec("transformers") is None:
        return False
    config_classes = transformers().CONFIG_MAPPING
    plan = config_classes[model_type].base_model_tp_plan if model_type in config_classes else None
    return "layers.*.self_attn.k_proj" in (plan or {})


def explain_loading_error(error: Exception, key: str) -> str:
    """Returns why transformers cannot load a model; where it lacks the attention, with the key that selects another.

    Args:
        error: The error of transformers.
        key: Configuration key of the model's path, such as `actor.model.model_path`.
    """
    text = first_line(error)
    if "attention implementation" in text or "FlashAttention" in text:
        return (
            f"transformers has no such attention for it ({text.partition('. ')[0]}): set "
            f"{key.rpartition('.')[0]}.attn_implementation=eager"
        )
    return text


#: Keys of the number of experts in the configurations of models.
EXPERT_COUNTS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")
