"""Preflight of language runs: checks of models, agents, rewards and groups (`ConfigChecks.preflight`); and tokenizer, datasets
and vision inputs, which are checked on the driver and compared on each rank.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rlhpc.config.sections import RunConfig
from rlhpc.config.typed import select, typed
from rlhpc.language.agents.registry import (
    INLINE,
    build_external_agent,
    build_inline_environment,
    check_harness,
    check_sandbox,
    configured_agent,
)
from rlhpc.language.config.data import SftDataConfig
from rlhpc.language.config.run import DpoConfig, GrpoConfig, LanguageConfig, SftConfig, TrainedLanguageConfig
from rlhpc.language.data import PromptDataset, PromptTokenizer, load_tokenizer, make_dataset
from rlhpc.language.data.images import check_vision
from rlhpc.language.data.preferences import Preferences
from rlhpc.language.data.registry import holdout_section
from rlhpc.language.data.tokenizer import FittingPrompts, context_tokens
from rlhpc.language.engines.vllm_weights import is_mixture
from rlhpc.language.evaluation.reward_model import most_tokens
from rlhpc.language.hugging_face import load_model_config
from rlhpc.language.models.loading import compute_dtype
from rlhpc.language.multi_policy import ENVIRONMENT
from rlhpc.language.rewards.registry import check_problems
from rlhpc.language.scoring.groups import AGENT, CRITIC, group_worker_classes, scoring_groups, with_groups
from rlhpc.runs.preflight import FILES, Check, Need, Resource, merge_resources, model_resource, path_resource
from rlhpc.runs.run_folder import note
from rlhpc.runtime.errors import ConfigError
from rlhpc.training.deepspeed_config import deepspeed_config


def actor_resource(cfg: TrainedLanguageConfig) -> Resource:
    """Returns the resource that a check of the trained model with its training data needs."""
    maker_text = "the run of workflow.sft" if cfg.workflow.sft else ""
    return merge_resources(
        model_resource(cfg, cfg.actor.model.model_path, maker_text),
        data_resource(cfg, select(cfg, "data.train")),
    )


def data_resource(cfg: RunConfig, section: Any) -> Resource:
    """Returns the resource that a check of a section of `data` needs."""
    return path_resource(cfg, section.path) if section.path else FILES


def answer_checks(cfg: LanguageConfig, load_tokenizer: Callable[[], Any], resource: Resource) -> Iterator[Check]:
    """Yields the checks of agents, rewards and suites of a run with a model that answers.

    Args:
        cfg: The configuration.
        load_tokenizer: Returns the model's tokenizer; it is called after the check of the model.
        resource: Resource of the model.
    """
    yield from _check_agents(cfg, load_tokenizer, resource)
    yield from _check_rewards(cfg)
    if select(cfg, "runner.val_check_interval") > 0:
        from rlhpc.language.evaluation.evaluate import problems_of, suites_of

        for name, section in suites_of(cfg).items():

            def check(section: Any = section) -> None:
                problems_of(cfg, section, load_tokenizer())

            yield Check(
                f"data.eval[{name}] and actor.model", check, merge_resources(resource, data_resource(cfg, section))
            )


def _check_agents(cfg: LanguageConfig, load_tokenizer: Callable[[], Any], resource: Resource) -> Iterator[Check]:
    agent = cfg.agent
    if agent.kind == INLINE:
        yield Check("rollout.agent", lambda: configured_agent(cfg))
        return
    yield Check("agent and actor.model", lambda: build_external_agent(cfg, load_tokenizer()), resource)
    if agent.kind == ENVIRONMENT:
        yield Check("agent.target", lambda: build_inline_environment(cfg).environment().close())
        return
    yield Check("agent", lambda: check_harness(cfg))
    if agent.sandbox not in (None, "none"):
        usage_text = f"{agent.sandbox}, on the machine of the driver"
        yield Check("agent.sandbox", lambda: check_sandbox(cfg), Resource(Need.PROCESS, usage_text))


def _check_rewards(cfg: LanguageConfig) -> Iterator[Check]:
    from rlhpc.language.rewards.pool import build_inline, find_terms
    from rlhpc.language.scoring.reward_aggregator import RewardAggregator, terms_of_pool

    sections = terms_of_pool(cfg)
    terms = find_terms(cfg.reward, sections) if sections else []
    yield Check("reward.terms", lambda: build_inline(terms))
    if remote_terms := [term.name for term in terms if not term.inline]:
        usage = f"judges of {', '.join(remote_terms)}, with their sandboxes"
        yield Check("reward.terms", lambda: RewardAggregator(cfg).close(), Resource(Need.PROCESS, usage))


def group_checks(cfg: GrpoConfig, ranks: Mapping[str, int]) -> Iterator[Check]:
    """Yields the check of the models of the critic and of the scoring groups."""
    from rlhpc.language.scoring.checks import check_groups

    group_configs = scoring_groups(cfg)
    checked_groups = [name for name in group_worker_classes(cfg) if name in ranks and name != AGENT]
    models = [cfg.critic.model if name == CRITIC else group_configs[name].model for name in checked_groups]
    resource = merge_resources(actor_resource(cfg), *(model_resource(cfg, model.model_path) for model in models))
    yield Check("the groups' models", lambda: check_groups(cfg, ranks), resource)


def open_prompts(cfg: LanguageConfig, *, check_answers: bool = False) -> tuple[Any, PromptTokenizer, FittingPrompts]:
    """Opens the training prompts; returns the tokenizer, the encoder of prompts, and the prompts that are not too long.

    Args:
        cfg: The configuration.
        check_answers: Whether to check that the reward can score each problem (`check_problems`).

    Raises:
        ConfigError: Model, dataset or template cannot be used, a prompt is too long, or the template drops part of a prompt.
    """
    tokenizer = load_tokenizer(cfg.actor.model.model_path, cfg.actor.model.trust_remote_code)
    data_config = cfg.data
    encoder = PromptTokenizer(
        tokenizer,
        data_config.max_prompt_tokens,
        data_config.overlong_prompts,
        data_config.train.chat_template,
        context=context_tokens(cfg, tokenizer),
    )
    dataset = make_dataset(data_config.train, "train")
    if check_answers:
        check_problems([term.name for term in cfg.reward.terms], dataset, "data.train")
        if select(cfg, "teacher.by_task"):
            from rlhpc.language.scoring.checks import check_task_levels

            check_task_levels(with_groups(cfg), {dataset[index].level for index in range(len(dataset))})
    return tokenizer, encoder, encoder.fitting(dataset)


def open_demonstrations(
    cfg: TrainedLanguageConfig, data_config: SftDataConfig, tokenizer: Any, *, is_holdout: bool = False
) -> tuple[PromptTokenizer, FittingPrompts]:
    """Opens demonstrations; returns their encoder, and the demonstrations that are not too long.

    Args:
        cfg: Configuration of a run on demonstrations.
        data_config: Section `data_config` of the configuration.
        tokenizer: Tokenizer of the model.
        is_holdout: Whether to open the held-out demonstrations instead of the training demonstrations.

    Raises:
        ConfigError: See `open_prompts`.
    """
    section, key = (
        holdout_section(data_config.train, data_config.holdout) if is_holdout else (data_config.train, "data.train")
    )
    encoder = PromptTokenizer(
        tokenizer, data_config.max_prompt_tokens, data_config.overlong_prompts, data_config.train.chat_template, key=key
    )
    dataset = make_dataset(section, "eval" if is_holdout else "train", requires_demonstrations=True, key=key)
    max_tokens = cfg.actor.max_tokens_per_micro_batch
    return encoder, encoder.fitting(dataset, requires_demonstrations=True, max_tokens=max_tokens)


def open_pairs(cfg: DpoConfig, tokenizer: Any, *, is_holdout: bool = False) -> tuple[PromptTokenizer, Preferences, int]:
    """Opens preference pairs; returns their encoder, the pairs that are not too long, and the number of dropped pairs.

    Args:
        cfg: Configuration of a DPO run.
        tokenizer: Tokenizer of the model.
        is_holdout: Whether to open the held-out pairs instead of the training pairs.

    Raises:
        ConfigError: The pairs cannot be read, or a pair is too long and `data.overlong_prompts` is "error".
    """
    data_config = cfg.data
    section, key = (
        holdout_section(data_config.train, data_config.holdout) if is_holdout else (data_config.train, "data.train")
    )
    encoder = PromptTokenizer(
        tokenizer, data_config.max_prompt_tokens, data_config.overlong_prompts, section.chat_template, key=key
    )
    preferences = Preferences(section, "pairs", "eval" if is_holdout else "train", key=key)
    return encoder, preferences, preferences.fit(encoder, most_tokens(cfg.actor.max_tokens_per_micro_batch, "pairs"))


def check_dpo(cfg: DpoConfig) -> Any:
    """Refuses a model without a usable tokenizer, and pairs that do not fit the model.

    Returns:
        The tokenizer.

    Raises:
        ConfigError: Model or pairs cannot be used; the message names the key, or file and row.
    """
    model = cfg.actor.model
    tokenizer = load_tokenizer(model.model_path, model.trust_remote_code)
    datasets = {"data.train": open_pairs(cfg, tokenizer)}
    if cfg.runner.val_check_interval > 0:
        datasets["held-out rows"] = open_pairs(cfg, tokenizer, is_holdout=True)
    for key, (_, pairs, num_dropped) in datasets.items():
        if num_dropped:
            note(f"{key}: {num_dropped} of {num_dropped + len(pairs)} pairs are dropped, because they are too long "
                 "(data.overlong_prompts=drop)")  # fmt: skip
    check_vision(cfg, load_model_config(str(model.model_path), model.trust_remote_code), False)
    if cfg.actor.training_backend == "deepspeed":
        deepspeed_config(cfg.actor, compute_dtype(model, "cpu"))
    return tokenizer


def inputs_digest(cfg: LanguageConfig, tokenizer: Any, dataset: PromptDataset) -> str:
    """Returns a digest of the model's configuration, the tokenizer and some training prompts.

    A rank that reads different files under the same names on another node gets a different digest.
    """
    model_config = load_model_config(str(cfg.actor.model.model_path), cfg.actor.model.trust_remote_code).to_dict()
    num_prompts = len(dataset)
    prompts = [dataset[index] for index in sorted({0, num_prompts // 2, num_prompts - 1})]
    message_texts = [message["content"] for prompt in prompts for message in prompt.messages]
    digest_inputs = [
        num_prompts, [prompt.answer for prompt in prompts], [tokenizer.encode(message_text) for message_text in message_texts],
        tokenizer.chat_template,
        {key: setting_value for key, setting_value in model_config.items() if key != "_name_or_path"},
    ]  # fmt: skip
    return hashlib.blake2b(json.dumps(digest_inputs, sort_keys=True, default=str).encode(), digest_size=12).hexdigest()


def _is_mixture(cfg: LanguageConfig) -> bool:
    model = cfg.actor.model
    return is_mixture(load_model_config(str(model.model_path), model.trust_remote_code))


def _count_ranks_per_engine(cfg: LanguageConfig) -> int:
    """Returns the number of ranks of an engine; 1 in a run without rollout ranks."""
    return int(select(cfg, "rollout.parallel.tensor") or 1)


def _check_tensor_parallel(cfg: LanguageConfig, config: Any) -> None:
    """Refuses a model that cannot be divided among the ranks of an engine (`rollout.parallel`)."""
    text_config, ranks_per_engine = config.get_text_config(), _count_ranks_per_engine(cfg)
    num_heads = int(text_config.num_attention_heads)
    num_kv_heads = int(getattr(text_config, "num_key_value_heads", None) or num_heads)
    if num_heads % ranks_per_engine or max(num_kv_heads, ranks_per_engine) % min(num_kv_heads, ranks_per_engine):
        allowed_sizes = [
            n for n in range(1, num_heads + 1) if not num_heads % n and not max(num_kv_heads, n) % min(num_kv_heads, n)
        ]
        raise ConfigError(
            f"rollout.parallel.tensor is {ranks_per_engine}, and the model in {cfg.actor.model.model_path} has "
            f"{num_heads} heads, "
            f"{num_kv_heads} for keys and values, which so many ranks cannot share; "
            f"allowed: {', '.join(map(str, allowed_sizes))}"
        )
    for index, elastic_group in enumerate(select(cfg, "cluster.elastic") or ()):
        if elastic_group.group == "rollout" and elastic_group.ranks_per_job % ranks_per_engine:
            raise ConfigError(
                f"cluster.elastic[{index}].ranks_per_job is {elastic_group.ranks_per_job}, and {ranks_per_engine} "
                f"ranks are an engine "
                "(rollout.parallel.tensor), which come together: a multiple of that is allowed"
            )
    if select(cfg, "rollout.parallel.expert") and not (ranks_per_engine > 1 and is_mixture(config)):
        raise ConfigError(
            "rollout.parallel.expert divides whole experts among an engine's ranks: it needs a mixture of experts, and "
            f"rollout.parallel.tensor above 1 (it is {ranks_per_engine})"
        )


def check_model(cfg: LanguageConfig, ranks: Mapping[str, int]) -> Any:
    """Refuses a model that engine or trainer does not support, and training prompts that do not fit the model.

    The check reads the model's config.json, the tokenizer and the data.

    Returns:
        The tokenizer.

    Raises:
        ConfigError: Model or data cannot be used; the message names the key.
    """
    model = cfg.actor.model
    if "rollout" in ranks and cfg.rollout.rollout_backend == "vllm":
        config = load_model_config(str(model.model_path), model.trust_remote_code)
        _check_tensor_parallel(cfg, config)
    elif "rollout" in ranks and str(select(cfg, "rollout.weight_sync")) == "shards" and _is_mixture(cfg):
        raise ConfigError(
            "rollout.weight_sync is 'shards', which sends a mixture's experts one by one, and only the engine vllm takes "
            "them so: take auto, or rollout.rollout_backend=vllm"
        )
    elif "rollout" in ranks and cfg.rollout.rollout_backend == "hf" and _count_ranks_per_engine(cfg) > 1:
        raise ConfigError(
            f"cluster.component_placement.rollout gives each process {_count_ranks_per_engine(cfg)} accelerators, and "
            f"the engine hf "
            "(rollout.rollout_backend) computes on one: give it a process an accelerator, or take vllm"
        )
    if select(cfg, "data.holdout") is None:
        tokenizer, _, dataset = open_prompts(cfg, check_answers=True)
    else:
        tokenizer = load_tokenizer(model.model_path, model.trust_remote_code)
        sft = typed(SftConfig, cfg)
        _, dataset = open_demonstrations(sft, sft.data, tokenizer)
        if sft.runner.val_check_interval > 0:
            held_out_rows = open_demonstrations(sft, sft.data, tokenizer, is_holdout=True)[1]
            for note_text in held_out_rows.notes("held-out rows"):
                note(note_text)
    for note_text in dataset.notes("data.train"):
        note(note_text)
    has_images = bool(dataset[0].images or cfg.data.train.images_key)
    check_vision(cfg, load_model_config(str(model.model_path), model.trust_remote_code), has_images)
    if cfg.actor.training_backend == "deepspeed":
        deepspeed_config(cfg.actor, compute_dtype(cfg.actor.model, "cpu"))
    return tokenizer


def check_inputs_digest(
    cfg: LanguageConfig, tokenizer: Any, dataset: PromptDataset, expected_digest: str, node: str
) -> str:
    """Checks that this rank reads the same model and data as the driver; returns their digest (`inputs_digest`).

    Args:
        cfg, tokenizer, dataset: Results of `open_prompts`.
        expected_digest: Digest of the first rank; "" on the first rank.
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
