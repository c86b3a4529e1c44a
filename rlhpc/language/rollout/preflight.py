"""Preflight of a language run: tokenizer, datasets and vision inputs, checked on the driver and compared on each
rank."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from rlhpc.config.typed import select, typed
from rlhpc.language.config.data import SftDataConfig
from rlhpc.language.config.run import DpoConfig, LanguageConfig, SftConfig, TrainedLanguageConfig
from rlhpc.language.data import PromptDataset, PromptTokenizer, load_tokenizer, make_dataset
from rlhpc.language.data.held_out import holdout_section
from rlhpc.language.data.images import check_looking
from rlhpc.language.data.preferences import Preferences
from rlhpc.language.data.tokenizer import FittingPrompts, context_tokens
from rlhpc.language.engines.vllm_weights import is_mixture, require_proven
from rlhpc.language.evaluation.reward_model import most_tokens
from rlhpc.language.hugging_face import load_model_config
from rlhpc.language.models.loading import compute_dtype
from rlhpc.language.rewards.registry import check_problems
from rlhpc.runs.run_folder import note
from rlhpc.runtime.errors import ConfigError
from rlhpc.training.deepspeed_config import deepspeed_config


def open_prompts(cfg: LanguageConfig, *, checked: bool = False) -> tuple[Any, PromptTokenizer, FittingPrompts]:
    """Opens the training prompts: returns the tokenizer, the encoder of prompts, and the prompts that are not too
    long.

    Args:
        cfg: The configuration.
        checked: Whether to check that the reward can score each problem (`check_problems`).

    Raises:
        ConfigError: Model, dataset or template cannot be used, a prompt is too long, or the template drops a part of one.
    """
    tokenizer = load_tokenizer(cfg.actor.model.model_path, cfg.actor.model.trust_remote_code)
    data = cfg.data
    encoder = PromptTokenizer(
        tokenizer,
        data.max_prompt_tokens,
        data.overlong_prompts,
        data.train.chat_template,
        context=context_tokens(cfg, tokenizer),
    )
    dataset = make_dataset(data.train, "train")
    if checked:
        check_problems([term.name for term in cfg.reward.terms], dataset, "data.train")
    return tokenizer, encoder, encoder.fitting(dataset)


def open_demonstrations(
    cfg: TrainedLanguageConfig, data: SftDataConfig, tokenizer: Any, *, holdout: bool = False
) -> tuple[PromptTokenizer, FittingPrompts]:
    """Opens demonstrations: returns their encoder, and those that are not too long.

    Args:
        cfg: Configuration of a run on demonstrations.
        data: Its section `data`.
        tokenizer: Tokenizer of the model.
        holdout: Whether to open the held-out demonstrations instead of the training ones.

    Raises:
        ConfigError: See `open_prompts`.
    """
    section, key = holdout_section(data.train, data.holdout) if holdout else (data.train, "data.train")
    encoder = PromptTokenizer(
        tokenizer, data.max_prompt_tokens, data.overlong_prompts, data.train.chat_template, key=key
    )
    dataset = make_dataset(section, "eval" if holdout else "train", demonstrations=True, key=key)
    max_tokens = cfg.actor.max_tokens_per_micro_batch
    return encoder, encoder.fitting(dataset, demonstrations=True, max_tokens=max_tokens)


def open_pairs(cfg: DpoConfig, tokenizer: Any, *, holdout: bool = False) -> tuple[PromptTokenizer, Preferences, int]:
    """Opens preferences: returns their encoder, those that are not too long, and the number of dropped ones.

    Args:
        cfg: Configuration of a DPO run.
        tokenizer: Tokenizer of the model.
        holdout: Whether to open the held-out pairs instead of the training ones.

    Raises:
        ConfigError: The pairs cannot be read, or one is too long and `data.overlong_prompts` is "error".
    """
    data = cfg.data
    section, key = holdout_section(data.train, data.holdout) if holdout else (data.train, "data.train")
    encoder = PromptTokenizer(tokenizer, data.max_prompt_tokens, data.overlong_prompts, section.chat_template, key=key)
    pairs = Preferences(section, "pairs", "eval" if holdout else "train", key=key)
    return encoder, pairs, pairs.fit(encoder, most_tokens(cfg.actor.max_tokens_per_micro_batch, "pairs"))


def check_dpo(cfg: DpoConfig) -> Any:
    """Refuses a model whose tokenizer cannot be used, and pairs that do not fit the model.

    Returns:
        The tokenizer.

    Raises:
        ConfigError: Names the key, or file and row.
    """
    model = cfg.actor.model
    tokenizer = load_tokenizer(model.model_path, model.trust_remote_code)
    opened = {"data.train": open_pairs(cfg, tokenizer)}
    if cfg.runner.val_check_interval > 0:
        opened["held-out rows"] = open_pairs(cfg, tokenizer, holdout=True)
    for key, (_, pairs, dropped) in opened.items():
        if dropped:
            note(f"{key}: {dropped} of {dropped + len(pairs)} pairs are dropped, because they are too long "
                 "(data.overlong_prompts=drop)")  # fmt: skip
    check_looking(cfg, load_model_config(str(model.model_path), model.trust_remote_code), False)
    if cfg.actor.training_backend.lower() == "deepspeed":
        deepspeed_config(cfg.actor, compute_dtype(model, "cpu"))
    return tokenizer


def inputs_digest(cfg: LanguageConfig, tokenizer: Any, dataset: PromptDataset) -> str:
    """Returns a digest of the model's configuration, the tokenizer and some training prompts. A rank on another node
    that reads other files under the same names gets another digest."""
    model = load_model_config(str(cfg.actor.model.model_path), cfg.actor.model.trust_remote_code).to_dict()
    count = len(dataset)
    some = [dataset[index] for index in sorted({0, count // 2, count - 1})]
    texts = [message["content"] for prompt in some for message in prompt.messages]
    digest_inputs = [
        count, [prompt.answer for prompt in some], [tokenizer.encode(text) for text in texts], tokenizer.chat_template,
        {key: value for key, value in model.items() if key != "_name_or_path"},
    ]  # fmt: skip
    return hashlib.blake2b(json.dumps(digest_inputs, sort_keys=True, default=str).encode(), digest_size=12).hexdigest()


def _is_mixture(cfg: LanguageConfig) -> bool:
    model = cfg.actor.model
    return is_mixture(load_model_config(str(model.model_path), model.trust_remote_code))


def _size(cfg: LanguageConfig) -> int:
    """Returns the number of ranks of an engine; 1 in a run without rollout ranks."""
    return int(select(cfg, "rollout.parallel.tensor") or 1)


def _check_divided(cfg: LanguageConfig, config: Any) -> None:
    """Refuses a model that an engine's ranks cannot share (`rollout.parallel`)."""
    text, size = config.get_text_config(), _size(cfg)
    heads = int(text.num_attention_heads)
    keys = int(getattr(text, "num_key_value_heads", None) or heads)
    if heads % size or max(keys, size) % min(keys, size):
        good = [n for n in range(1, heads + 1) if not heads % n and not max(keys, n) % min(keys, n)]
        raise ConfigError(
            f"rollout.parallel.tensor is {size}, and the model in {cfg.actor.model.model_path} has {heads} heads, {keys} for "
            f"keys and values, which so many ranks cannot share; allowed: {', '.join(map(str, good))}"
        )
    for number, entry in enumerate(select(cfg, "cluster.elastic") or ()):
        if entry.group == "rollout" and entry.ranks_per_job % size:
            raise ConfigError(
                f"cluster.elastic[{number}].ranks_per_job is {entry.ranks_per_job}, and {size} ranks are an engine "
                "(rollout.parallel.tensor), which come together: a multiple of that is allowed"
            )
    if select(cfg, "rollout.parallel.expert") and not (size > 1 and is_mixture(config)):
        raise ConfigError(
            "rollout.parallel.expert divides whole experts among an engine's ranks: it needs a mixture of experts, and "
            f"rollout.parallel.tensor above 1 (it is {size})"
        )


def check_model(cfg: LanguageConfig, ranks: Mapping[str, int]) -> Any:
    """Refuses a model that the engine or the trainer does not support, and training prompts that do not fit it. Reads
    its config.json, its tokenizer and the data.

    Returns:
        The tokenizer.

    Raises:
        ConfigError: Names the key.
    """
    model = cfg.actor.model
    if "rollout" in ranks and cfg.rollout.rollout_backend.lower() == "vllm":
        config = load_model_config(str(model.model_path), model.trust_remote_code)
        require_proven(config)
        _check_divided(cfg, config)
    elif "rollout" in ranks and str(select(cfg, "rollout.weight_sync")).lower() == "shards" and _is_mixture(cfg):
        raise ConfigError(
            "rollout.weight_sync is 'shards', which sends a mixture's experts one by one, and only the engine vllm takes "
            "them so: take auto, or rollout.rollout_backend=vllm"
        )
    elif "rollout" in ranks and cfg.rollout.rollout_backend.lower() == "hf" and _size(cfg) > 1:
        raise ConfigError(
            f"cluster.component_placement.rollout gives each process {_size(cfg)} accelerators, and the engine hf "
            "(rollout.rollout_backend) computes on one: give it a process an accelerator, or take vllm"
        )
    if select(cfg, "data.holdout") is None:
        tokenizer, _, dataset = open_prompts(cfg, checked=True)
    else:
        tokenizer = load_tokenizer(model.model_path, model.trust_remote_code)
        sft = typed(SftConfig, cfg)
        _, dataset = open_demonstrations(sft, sft.data, tokenizer)
        if sft.runner.val_check_interval > 0:
            held_out = open_demonstrations(sft, sft.data, tokenizer, holdout=True)[1]
            for text in held_out.notes("held-out rows"):
                note(text)
    for text in dataset.notes("data.train"):
        note(text)
    shows = bool(dataset[0].images or cfg.data.train.images_key)
    check_looking(cfg, load_model_config(str(model.model_path), model.trust_remote_code), shows)
    if cfg.actor.training_backend.lower() == "deepspeed":
        deepspeed_config(cfg.actor, compute_dtype(cfg.actor.model, "cpu"))
    return tokenizer


def check_inputs_digest(
    cfg: LanguageConfig, tokenizer: Any, dataset: PromptDataset, expected_digest: str, node: str
) -> str:
    """Checks that this rank reads the same model and data as the driver; returns their digest (`inputs_digest`).

    Args:
        cfg, tokenizer, dataset: Results of `open_prompts`.
        expected_digest: Digest on the rank that read them first; "" on that rank.
        node: Name of this node.

    Raises:
        ConfigError: The digests differ.
    """
    digest = inputs_digest(cfg, tokenizer, dataset)
    if expected_digest and digest != expected_digest:
        raise ConfigError(
            f"on {node}, the model in {cfg.actor.model.model_path} (actor.model.model_path) or the problems of data.train are "
            "others than those that the run was started with; have the same files there"
        )
    return digest
