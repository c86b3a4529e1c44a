"""Memory accounts of the worker groups of a language run."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlhpc.config.parallel import MeshSizes
from rlhpc.config.sections import RunConfig
from rlhpc.config.typed import plain, select, typed
from rlhpc.language.config.engines import ServingConfig
from rlhpc.language.config.models import PretrainedConfig
from rlhpc.language.config.run import GrpoConfig, SftConfig, TrainedLanguageConfig, responses_per_step
from rlhpc.language.config.training import LanguageActorConfig
from rlhpc.language.planning.memory_model import (
    BUCKET_BYTES,
    NUM_BUCKETS,
    LayerMemory,
    Serving,
    Training,
    scoring_chunk,
)
from rlhpc.language.planning.model_size import ModelSize, UnknownModelError, size_of
from rlhpc.language.scoring.groups import (
    AGENT,
    CRITIC,
    ENGINE,
    JUDGE,
    REFERENCE,
    TEACHER,
    distils,
    group_roles,
    scoring_groups,
)
from rlhpc.runs.memory.account import Account, GroupRanks, MemoryTerm, Moment, SuggestedChange, process, terms

#: Maximum number of tokens in the search for the largest micro-batch, and the step of the search.
_MAX_TOKENS, _TOKEN_STEP = 1 << 22, 256
#: Maximum number of suggested configurations.
_MAX_SUGGESTIONS = 3
#: Distances of changes that cost time; the unit is a doubling of the ranks that share a model's matrices.
_RECOMPUTING, _OFFLOADING, _HALVING = 0.4, 2.5, 0.3
#: Distances of a doubled size of `parallel`: replicas cost least, then experts, context, and tensor.
_DISTANCES = {"replicate": 0.5, "context": 0.8, "tensor": 1.0, "expert": 0.6}
#: Change of a configuration: its distance, overrides, and changed fields of `Training`.
_Option = tuple[float, tuple[str, ...], dict[str, Any]]


def peak_bytes(training: Training) -> float:
    """Returns the peak bytes of a rank."""
    return max(moment.nbytes for moment in training.moments())


def _largest_micro_batch(name: str, training: Training, capacity: float) -> Mapping[str, str]:
    """Returns the configuration key and size of the largest micro-batch that fits; {} if no micro-batch fits."""
    tokens = largest_tokens(training, capacity)
    return {f"{name}.max_tokens_per_micro_batch": f"{tokens} tokens"} if tokens else {}


def largest_tokens(training: Training, capacity: float) -> int:
    """Returns the number of tokens of the largest micro-batch that fits; 0 if no micro-batch fits."""
    candidates = range(_TOKEN_STEP, _MAX_TOKENS + _TOKEN_STEP, _TOKEN_STEP)
    return _TOKEN_STEP * bisect.bisect_right(
        candidates, capacity, key=lambda tokens: peak_bytes(dataclasses.replace(training, tokens=tokens))
    )


def _largest_context(name: str, serving: Serving) -> Mapping[str, str]:
    """Returns the configuration key and length of the longest sequence that fits into the KV cache."""
    if serving.engine != "vllm" or not serving.accelerated or serving.capacity is None:
        return {}
    tokens = min(serving.longest_within(serving.cache_budget()), serving.size.context or 1 << 62)
    return {f"{name}.max_model_len": f"{tokens} tokens"} if tokens > 0 else {}


def _wider_engines(name: str, serving: Serving, capacity: float) -> Sequence[SuggestedChange]:
    """Returns the smallest engine with more ranks that fits; () for groups with engines of one rank."""
    if serving.engine != "vllm" or name != "rollout":
        return ()
    for tensor in _powers(serving.size.heads):
        wider_serving = dataclasses.replace(serving, tensor=tensor)
        peak_bytes = max(moment.nbytes for moment in wider_serving.moments())
        if (
            tensor > serving.tensor
            and serving.size.heads % tensor == 0
            and not wider_serving.refusals()
            and peak_bytes <= capacity
        ):
            return (SuggestedChange((f"{name}.parallel.tensor={tensor}",), peak_bytes),)
    return ()


def nearest(name: str, training: Training, section: LanguageActorConfig, capacity: float) -> Sequence[SuggestedChange]:
    """Returns changes of the configuration that make it fit, in order of their distance from the configuration.

    Args:
        name: Name of the group.
        training: Configured training.
        section: Section of the group.
        capacity: Memory of a rank, in bytes.
    """
    fitting_changes = [
        (distance, SuggestedChange(overrides, nbytes))
        for distance, overrides, neighbour in _neighbours(
            name, training, divides=select(section, "parallel") is not None
        )
        if overrides and (nbytes := peak_bytes(neighbour)) <= capacity
    ]
    smallest_changes: list[SuggestedChange] = []
    for _, change in sorted(fitting_changes, key=lambda candidate: (candidate[0], candidate[1].nbytes)):
        if not any(set(smaller_change.overrides) <= set(change.overrides) for smaller_change in smallest_changes):
            smallest_changes.append(change)
    return smallest_changes[:_MAX_SUGGESTIONS]


def _neighbours(name: str, training: Training, *, divides: bool) -> Iterator[tuple[float, tuple[str, ...], Training]]:
    """Yields all neighbouring configurations as distance, overrides, and training."""
    no_change: list[_Option] = [(0.0, (), {})]
    checkpointing_options, micro_batch_options = list(no_change), list(no_change)
    if not training.checkpointing:
        checkpointing_options.append(
            (_RECOMPUTING, (f"{name}.model.gradient_checkpointing=true",), {"checkpointing": True})
        )
    for num_halvings in (1, 2):
        tokens = training.tokens >> num_halvings
        override = f"{name}.max_tokens_per_micro_batch={tokens}"
        micro_batch_options.append((_HALVING * num_halvings, (override,), {"tokens": tokens}))
    for cost, overrides, division in _iter_divisions(name, training, divides=divides):
        offload_options = list(no_change)
        if training.accelerated and division.backend != "local" and not division.offload:
            override = f"{name}.{division.backend}.cpu_offload=true"
            offload_options.append((_OFFLOADING, (override,), {"offload": True}))
        for options in itertools.product(checkpointing_options, offload_options, micro_batch_options):
            yield (
                cost + math.fsum(option_cost for option_cost, _, _ in options),
                overrides
                + tuple(itertools.chain.from_iterable(option_overrides for _, option_overrides, _ in options)),
                dataclasses.replace(
                    division, **{key: change for option in options for key, change in option[2].items()}
                ),
            )


def _iter_divisions(
    name: str, training: Training, *, divides: bool
) -> Iterator[tuple[float, tuple[str, ...], Training]]:
    """Yields the configured division of the model, and other divisions over the same or a larger number of ranks."""
    yield 0.0, (), training
    ranks, sizes = training.ranks, training.sizes
    if training.backend != "fsdp" and ranks > 1:
        yield (
            1.0,
            (f"{name}.training_backend=fsdp",),
            dataclasses.replace(training, backend="fsdp", sizes=MeshSizes(shard=ranks), offload=False),
        )
    if training.backend == "deepspeed" and training.stage < 3:
        yield 1.2, (f"{name}.deepspeed.zero_stage=3",), dataclasses.replace(training, stage=3)
    if training.backend == "fsdp" and divides:
        for distance, division in divisions(training):
            if distance:
                yield distance, _overrides(name, sizes, division.sizes), division
    for factor in (2, 4, 8):  # more ranks
        if training.backend == "fsdp":
            wider_sizes = dataclasses.replace(sizes, shard=sizes.shard * factor)
            yield (
                3.0 + math.log2(factor),
                (f"{factor * ranks} ranks for {name}",),
                dataclasses.replace(training, sizes=wider_sizes),
            )
        elif training.backend == "local":
            sharded_training = dataclasses.replace(
                training, backend="fsdp", sizes=MeshSizes(shard=ranks * factor), offload=False
            )
            yield (
                4.0 + math.log2(factor),
                (f"{name}.training_backend=fsdp", f"{factor * ranks} ranks for {name}"),
                sharded_training,
            )


def divisions(training: Training) -> Iterator[tuple[float, Training]]:
    """Yields FSDP divisions of a model over the same ranks, each with its distance from the configured division.

    Sizes are powers of two. No division has more replicas than the configured division.
    """
    ranks, experts = training.ranks, training.ranks if training.size.experts else 1
    for replicate, context, tensor, expert in itertools.product(*map(_powers, (ranks, ranks, ranks, experts))):
        if ranks % (replicate * context * tensor) or replicate > training.sizes.replicate:
            continue
        sizes = MeshSizes(replicate, ranks // (replicate * context * tensor), context, tensor, expert)
        if _can_divide(training, sizes):
            yield _distance(training.sizes, sizes), dataclasses.replace(training, sizes=sizes)


def _powers(limit: int) -> list[int]:
    return [1 << exponent for exponent in range(limit.bit_length()) if 1 << exponent <= limit]


def _can_divide(training: Training, sizes: MeshSizes) -> bool:
    """Returns whether the model can be divided by these sizes."""
    size = training.size
    ranks_per_copy = sizes.shard * sizes.context * sizes.tensor
    return (
        size.kv_heads % sizes.tensor == 0
        and size.vocabulary % sizes.tensor == 0
        and (size.heads // sizes.tensor) % sizes.context == 0
        and (sizes.expert == 1 or (size.experts % sizes.expert == 0 and ranks_per_copy % sizes.expert == 0))
        and not (sizes.expert > 1 and sizes.expert % sizes.tensor and sizes.tensor % sizes.expert)
        and not (size.experts and sizes.tensor > 1 and sizes.expert < sizes.tensor)
    )


def _distance(before: MeshSizes, after: MeshSizes) -> float:
    """Returns the distance between two divisions: the weighted sum of the sizes' ratios in powers of two."""
    return sum(w * abs(math.log2(getattr(after, key) / getattr(before, key))) for key, w in _DISTANCES.items())


def _overrides(name: str, before: MeshSizes, after: MeshSizes) -> tuple[str, ...]:
    return tuple(
        f"{name}.parallel.{key}={getattr(after, key)}"
        for key in _DISTANCES
        if getattr(after, key) != getattr(before, key)
    )


_BACKENDS = ("local", "fsdp", "deepspeed")
#: Names of the engines with a memory account.
_ENGINES = ("hf", "vllm")
_HALF_PRECISION = ("bfloat16", "float16")
#: Terms of an optimizer step that are freed before weights are sent.
FREED_BY_A_STEP = ("gradients", "optimizer temporaries")


def accounts(
    cfg: TrainedLanguageConfig, ranks: Mapping[str, GroupRanks], *, build: bool = True, measure: bool = False
) -> list[Account]:
    """Returns the memory account of each group of a run (`rlhpc.runs.memory.plan.Accounting`).

    Args:
        cfg: Configuration of the run.
        ranks: Ranks of the groups.
        build: Whether models of unknown families may be built on the meta device.
        measure: Ignored, because `Account.measured` runs the slow measurement.
    """
    del measure
    return [_account(cfg, name, group_ranks, build) for name, group_ranks in ranks.items() if name != AGENT]


def _account(cfg: TrainedLanguageConfig, name: str, ranks: GroupRanks, build: bool) -> Account:
    """Returns the memory account of a group; for unknown models an account with the reason."""
    try:
        if name == "actor":
            return _training_account(cfg, name, cfg.actor, ranks, build)
        if name == "rollout":
            grpo = _engines_config(cfg)
            return _serving_account(
                grpo,
                name,
                grpo.actor.model,
                grpo.rollout,
                grpo.rollout.rollout_backend,
                ranks,
                max_lengths(grpo),
                build,
            )
        if name == CRITIC:
            return _training_account(cfg, name, typed(GrpoConfig, cfg).critic, ranks, build)
        return _scoring_account(typed(GrpoConfig, cfg), name, ranks, build)
    except UnknownModelError as error:
        return Account(name, unknown=str(error))


def _engines_config(cfg: TrainedLanguageConfig) -> GrpoConfig:
    """Returns the configuration of a run's engines."""
    if select(cfg, "rollout.parallel") is not None:
        return typed(GrpoConfig, cfg)
    from rlhpc.language.config.evaluation import answering_config

    return answering_config(typed(SftConfig, cfg))


def itemsize(dtype: str, accelerated: bool) -> int:
    """Returns the bytes of an element of a configured `dtype` on the device."""
    return 2 if dtype in _HALF_PRECISION or (dtype == "auto" and accelerated) else 4


def max_lengths(cfg: RunConfig) -> tuple[int, int]:
    """Returns the maximum numbers of tokens of a prompt and of a response."""
    response = int(select(cfg, "rollout.max_new_tokens") or 0) * int(select(cfg, "rollout.max_turns") or 1)
    return int(select(cfg, "data.max_prompt_tokens") or 0), response if _trains_on_responses(cfg) else 0


def _measure(training: Training, section: LanguageActorConfig) -> str:
    from rlhpc.language.planning.measured_memory import measure

    return measure(training, section.model.model_path, plain(section.model.kwargs)).describe()


def _trains_on_responses(cfg: RunConfig) -> bool:
    """Returns whether the run trains on responses that the model generates."""
    return select(cfg, "algorithm.group_size") is not None


# -- training groups---------------------------------------------------------------------------------------------------


def training_of(
    cfg: TrainedLanguageConfig, name: str, section: LanguageActorConfig, ranks: GroupRanks, *, build: bool = True
) -> Training:
    """Returns the training of a group.

    Raises:
        UnknownModelError: The model or the backend is unknown.
    """
    backend = section.training_backend.lower()
    if backend not in _BACKENDS:
        raise UnknownModelError(
            f"{name}.training_backend is {section.training_backend}, of which nothing is known here"
        )
    size = size_of(section.model.model_path, plain(section.model.kwargs), build=build)
    parallel = select(section, "parallel")
    if backend != "fsdp":
        sizes = MeshSizes(replicate=ranks.number)
    else:
        sizes = MeshSizes(shard=ranks.number) if parallel is None else MeshSizes.of(parallel, ranks.number)
    prompt, response = max_lengths(cfg)
    grpo = typed(GrpoConfig, cfg) if _trains_on_responses(cfg) else None
    roles = group_roles(grpo) if grpo is not None else {}
    has_reference_loss = grpo is not None and grpo.algorithm.kl_coef > 0 and REFERENCE not in roles
    is_causal = name == "actor" and cfg.runner.task_type.lower() != "reward_model"
    return Training(
        size,
        backend,
        sizes,
        _micro_batch_tokens(cfg, section, sizes, prompt + response),
        itemsize(section.model.dtype, ranks.accelerated),
        ranks.accelerated,
        lora=section.lora.rank,
        targets=plain(section.lora.target_modules),
        checkpointing=section.model.gradient_checkpointing,
        offload=section.fsdp.cpu_offload if backend == "fsdp" else section.deepspeed.cpu_offload,
        reshard=section.fsdp.reshard_after_forward,
        stage=section.deepspeed.zero_stage,
        reference=name == "actor" and (has_reference_loss or cfg.runner.task_type.lower() == "dpo"),
        other_models_bytes=_teacher_bytes(grpo, ranks, build) if grpo is not None and name == "actor" else 0.0,
        uses_logits=is_causal,
        has_head=is_causal,
        separate_embeddings=parallel is not None,
        policies=_num_policies(cfg) if name == "actor" else 1,
        eager=prompt + response if section.model.attn_implementation == "eager" else 0,
        capacity=ranks.capacity,
    )


def _num_policies(cfg: object) -> int:
    """Returns the number of policies (`agent.policies`)."""
    return max(1, len({*plain(select(cfg, "agent.policies") or {}).values()}))


def _micro_batch_tokens(cfg: RunConfig, section: LanguageActorConfig, sizes: MeshSizes, length: int) -> int:
    """Returns the number of tokens of the largest micro-batch.

    The number is the configured maximum, or smaller if an optimizer step has fewer tokens per rank.
    """
    if not _trains_on_responses(cfg):  # the length of rows is unknown
        return section.max_tokens_per_micro_batch
    step = int(select(section, "global_batch_size") or responses_per_step(typed(GrpoConfig, cfg)))
    step_tokens = length * math.ceil(step / sizes.data)
    return max(min(section.max_tokens_per_micro_batch, step_tokens), min(length, step_tokens))


def _teacher_bytes(cfg: GrpoConfig, ranks: GroupRanks, build: bool) -> float:
    """Returns the bytes of a teacher on the actor's ranks; 0 without such a teacher."""
    if not distils(cfg) or TEACHER in group_roles(cfg):
        return 0.0
    size = size_of(cfg.teacher.model.model_path, plain(cfg.teacher.model.kwargs), build=build)
    return float(itemsize(cfg.teacher.model.dtype, ranks.accelerated) * size.parameters)


def _training_account(
    cfg: TrainedLanguageConfig, name: str, section: LanguageActorConfig, ranks: GroupRanks, build: bool
) -> Account:
    """Returns the account of a rank that trains a model."""
    training = training_of(cfg, name, section, ranks, build=build)
    is_colocated = bool(select(cfg, "actor.offload_in_rollout"))
    moments = training.moments()
    if sends_weights := name == "actor" and _trains_on_responses(cfg):
        moments = (*moments, _weight_sync_moment(training, moments))
    pinned = terms(
        weights_gradients_optimizer=training.offloaded_bytes(),
        weights_and_optimizer_while_others_compute=training.host_copy_bytes()
        if is_colocated and ranks.accelerated and not training.offload
        else 0.0,
    )
    return Account(
        name,
        description=_description(training, section),
        moments=moments,
        pinned=pinned,
        optional=terms(copies_for_saving=training.host_copy_bytes() * cfg.runner.async_save),
        host=_loading_memory(training, ranks),
        shm=_shared_memory(typed(GrpoConfig, cfg), training, is_colocated) if sends_weights else (),
        colocated=is_colocated and ranks.accelerated,
        measured=lambda: _measure(training, section),
        changes=lambda capacity: nearest(name, training, section, capacity),
        max_fitting=lambda capacity: _largest_micro_batch(name, training, capacity),
    )


def _weight_sync_moment(training: Training, moments: Sequence[Moment]) -> Moment:
    """Returns the memory terms of weight sync: the terms between steps, one full weight, and a bucket of the update."""
    largest_weight = 4.0 * training.size.largest if training.backend != "local" else 0.0
    return Moment(
        "weights are sent",
        (
            *(term for term in moments[-1].terms if term.name not in FREED_BY_A_STEP),
            *terms(a_weight_in_full=largest_weight, part_of_an_update=float(BUCKET_BYTES)),
        ),
    )


def _shared_memory(cfg: GrpoConfig, training: Training, colocated: bool) -> tuple[MemoryTerm, ...]:
    """Returns the memory of a weight update in /dev/shm, and of retained weights.

    An update needs a few buckets, or its full size if colocated engines receive it later.
    """
    model_bytes = float(training.itemsize * training.size.parameters)
    if cfg.rollout.weight_delta == "elements":
        return terms(weights_and_their_changes=2.0 * model_bytes)
    adapted_bytes = (
        sum(math.prod(shape) for shape in training.size.adapted(training.targets).values()) * training.itemsize
    )
    frozen_bytes = model_bytes - adapted_bytes if training.lora and cfg.rollout.weight_delta == "frozen" else 0.0
    sent_bytes = (model_bytes - frozen_bytes) * training.policies
    return terms(
        weights_under_way=sent_bytes if colocated else min(sent_bytes, float(NUM_BUCKETS * BUCKET_BYTES)),
        frozen_weights=frozen_bytes,
    )


def _loading_memory(training: Training, ranks: GroupRanks) -> tuple[MemoryTerm, ...]:
    """Returns the host memory for loading the model on a rank with an accelerator."""
    if not ranks.accelerated or (training.backend == "deepspeed" and training.stage == 3):
        return ()
    fraction = training.rank_fraction() if training.backend == "fsdp" else 1.0
    element_bytes = training.itemsize if training.lora else 4
    return terms(model_while_it_is_read=element_bytes * training.size.parameters * fraction)


def _description(training: Training, section: LanguageActorConfig) -> str:
    division = {"fsdp": f" ({format_sizes(training.sizes)})", "deepspeed": f" (ZeRO-{training.stage})"}
    facts = (
        f"{section.model.model_path}: {format_count(training.size.parameters)} parameters",
        f"LoRA of rank {training.lora}: {format_count(training.num_trained)} trained" if training.lora else "",
        training.backend + division.get(training.backend, ""),
        "offloaded to the host" if training.offload else "",
        "bfloat16" if training.mixed_precision else "float32",
        "activations recomputed" if training.checkpointing else "all activations kept",
        f"micro-batches of {training.tokens} tokens",
    )
    return ", ".join(filter(None, facts))


def format_sizes(sizes: MeshSizes) -> str:
    """Formats the sizes of a division: `shard 8, tensor 2`."""
    return ", ".join(f"{key} {ways}" for key, ways in dataclasses.asdict(sizes).items() if ways > 1) or "shard 1"


def format_count(parameters: int) -> str:
    """Formats a number of parameters: `7.62 B`, `135 M`."""
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e9 else f"{parameters / 1e6:.3g} M"


# -- generating groups---------------------------------------------------------------------------------------------------


def _serving_account(
    cfg: GrpoConfig,
    name: str,
    model: Any,
    section: ServingConfig,
    engine: str,
    ranks: GroupRanks,
    max_tokens: tuple[int, int],
    build: bool,
) -> Account:
    """Returns the account of a rank with an engine; `max_tokens` has the maximum tokens of a prompt and of a response."""
    if engine.lower() not in _ENGINES:
        raise UnknownModelError(f"{name}.rollout_backend is {engine}, of which nothing is known here")
    tensor = int(select(section, "parallel.tensor") or 1)
    serving = Serving(
        size_of(model.model_path, plain(model.kwargs), build=build),
        engine.lower(),
        itemsize(model.dtype if section.dtype == "auto" else section.dtype, ranks.accelerated),
        ranks.accelerated,
        ranks.capacity,
        *max_tokens,
        math.ceil(responses_per_step(cfg) / max(1, ranks.number // tensor)),
        tensor=tensor,
        expert=bool(select(section, "parallel.expert")),
        utilization=section.gpu_memory_utilization,
        max_batch_size=section.max_batch_size,
        max_model_len=section.max_model_len,
        copies=_num_policies(cfg) if name == "rollout" and engine.lower() == "hf" else 1,
        section=name,
    )
    bucket_bytes = min(float(serving.itemsize * serving.size.parameters), float(NUM_BUCKETS * BUCKET_BYTES))
    engine_text = f"{engine} engines" + (f" of {tensor} ranks" if tensor > 1 else "")
    description = (
        f"{model.model_path}: {format_count(serving.size.parameters)} parameters, {engine_text}, "
        f"up to {serving.sequences} sequences of {serving.length} tokens"
    )
    cache_note = f"the KV cache has room for {serving.describe_cache()}; {serving.sequences} are asked for at a time"
    return Account(
        name,
        description=description,
        moments=serving.moments(),
        shm=terms(weights_under_way=bucket_bytes) if name == "rollout" else (),
        colocated=bool(cfg.actor.offload_in_rollout) and name == "rollout" and ranks.accelerated,
        remarks=(cache_note,) if serving.engine == "vllm" else (),
        refusals=serving.refusals(),
        max_fitting=lambda capacity: _largest_context(name, serving),
        changes=lambda capacity: _wider_engines(name, serving, capacity),
    )


# -- scoring groups ------------------------------------------------------------------------------------------------------


def _scoring_account(cfg: GrpoConfig, name: str, ranks: GroupRanks, build: bool) -> Account:
    if name == JUDGE:
        judge = cfg.judge
        max_tokens = (judge.max_prompt_tokens, judge.max_new_tokens)
        return _serving_account(cfg, name, judge.model, judge, judge.rollout_backend, ranks, max_tokens, build)
    group = scoring_groups(cfg).get(name)
    if group is None or not group.model.model_path:
        raise UnknownModelError(f"{name} has no model that the configuration names")
    if group.scorer == ENGINE:
        return _serving_account(cfg, name, group.model, cfg.teacher, "vllm", ranks, max_lengths(cfg), build)
    return _frozen_account(
        cfg, name, group.model, group.max_tokens, ranks, logits="logprobs" in group.scorer, build=build
    )


def _frozen_account(
    cfg: GrpoConfig,
    name: str,
    model: PretrainedConfig,
    max_tokens: int,
    ranks: GroupRanks,
    *,
    logits: bool,
    build: bool,
) -> Account:
    """Returns the account of a rank with a frozen model that scores samples."""
    size: ModelSize = size_of(model.model_path, plain(select(model, "kwargs")), build=build)
    bytes_per_element = itemsize(model.dtype, ranks.accelerated)
    step_tokens = sum(max_lengths(cfg)) * math.ceil(responses_per_step(cfg) / ranks.number)
    tokens = max(min(max_tokens, step_tokens), 1)
    layers = LayerMemory(size, bytes_per_element, not ranks.accelerated, capacity=ranks.capacity)
    memory_terms = terms(
        weights=float(bytes_per_element * size.parameters),
        activations=tokens * layers.layer_peak(),
        logits=scoring_chunk(layers, tokens) if logits else 0.0,
    )
    return Account(
        name,
        description=f"{model.model_path}: {format_count(size.parameters)} parameters, passes over {tokens} tokens",
        moments=(Moment("scoring", (*memory_terms, process(ranks.accelerated))),),
    )
