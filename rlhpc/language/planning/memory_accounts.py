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
from rlhpc.language.config.models import FrozenModelConfig, PretrainedConfig
from rlhpc.language.config.run import GrpoConfig, SftConfig, TrainedLanguageConfig, responses_per_step
from rlhpc.language.config.training import SHORTEST_PREFIX, LanguageActorConfig
from rlhpc.language.planning.memory_model import (
    NUM_CHUNKS,
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
    group_worker_classes,
    scoring_groups,
    teachers_of,
)
from rlhpc.runs.memory.account import SPARE, Account, GroupRanks, MemoryTerm, Moment, SuggestedChange, process, terms
from rlhpc.weights.device_sharing import (
    CHUNK_BYTES,
    STAY_ON_ACCELERATORS,
    spare_bytes,
    update_bytes,
)

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
    return max(memory_moment.nbytes for memory_moment in training.moments())


def _find_largest_micro_batch(name: str, training: Training, capacity: float) -> Mapping[str, str]:
    """Returns the configuration key and size of the largest micro-batch that fits; {} if no micro-batch fits."""
    tokens = largest_tokens(training, capacity)
    return {f"{name}.max_tokens_per_micro_batch": f"{tokens} tokens"} if tokens else {}


def largest_tokens(training: Training, capacity: float) -> int:
    """Returns the number of tokens of the largest micro-batch that fits; 0 if no micro-batch fits."""
    candidates = range(_TOKEN_STEP, _MAX_TOKENS + _TOKEN_STEP, _TOKEN_STEP)
    return _TOKEN_STEP * bisect.bisect_right(
        candidates, capacity, key=lambda tokens: peak_bytes(dataclasses.replace(training, tokens=tokens))
    )


def _find_largest_context(name: str, serving: Serving) -> Mapping[str, str]:
    """Returns the configuration key and length of the longest sequence that fits into the KV cache."""
    if serving.engine != "vllm" or not serving.accelerated or serving.capacity is None:
        return {}
    num_tokens = min(serving.longest_within(serving.cache_budget()), serving.size.context or 1 << 62)
    return {f"{name}.max_model_len": f"{num_tokens} tokens"} if num_tokens > 0 else {}


def _find_wider_engines(name: str, serving: Serving, capacity: float) -> Sequence[SuggestedChange]:
    """Returns the smallest engine with more ranks that fits; () for groups with engines of one rank."""
    if serving.engine != "vllm" or name != "rollout":
        return ()
    for tensor in _list_powers(serving.size.heads):
        wider_serving = dataclasses.replace(serving, tensor=tensor)
        peak_bytes = max(memory_moment.nbytes for memory_moment in wider_serving.moments())
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
        (change_distance, SuggestedChange(overrides, neighbour_nbytes))
        for change_distance, overrides, neighbour in _iter_neighbours(
            name, training, divides=select(section, "parallel") is not None
        )
        if overrides and (neighbour_nbytes := peak_bytes(neighbour)) <= capacity
    ]
    smallest_changes: list[SuggestedChange] = []
    for _, fitting_change in sorted(fitting_changes, key=lambda candidate: (candidate[0], candidate[1].nbytes)):
        if not any(
            set(smaller_change.overrides) <= set(fitting_change.overrides) for smaller_change in smallest_changes
        ):
            smallest_changes.append(fitting_change)
    return smallest_changes[:_MAX_SUGGESTIONS]


def _iter_neighbours(
    name: str, training: Training, *, divides: bool
) -> Iterator[tuple[float, tuple[str, ...], Training]]:
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
                    division, **{key: key_value for key_option in options for key, key_value in key_option[2].items()}
                ),
            )


def _iter_divisions(
    name: str, training: Training, *, divides: bool
) -> Iterator[tuple[float, tuple[str, ...], Training]]:
    """Yields the configured division of the model, and other divisions over the same or a larger number of ranks."""
    yield 0.0, (), training
    ranks, mesh_sizes = training.ranks, training.sizes
    if training.backend != "fsdp" and ranks > 1:
        yield (
            1.0,
            (f"{name}.training_backend=fsdp",),
            dataclasses.replace(training, backend="fsdp", sizes=MeshSizes(shard=ranks), offload=False),
        )
    if training.backend == "deepspeed" and training.stage < 3:
        yield 1.2, (f"{name}.deepspeed.zero_stage=3",), dataclasses.replace(training, stage=3)
    if training.backend == "fsdp" and divides:
        for change_distance, division in divisions(training):
            if change_distance:
                yield change_distance, _overrides(name, mesh_sizes, division.sizes), division
    for rank_factor in (2, 4, 8):  # more ranks
        if training.backend == "fsdp":
            wider_sizes = dataclasses.replace(mesh_sizes, shard=mesh_sizes.shard * rank_factor)
            yield (
                3.0 + math.log2(rank_factor),
                (f"{rank_factor * ranks} ranks for {name}",),
                dataclasses.replace(training, sizes=wider_sizes),
            )
        elif training.backend == "local":
            sharded_training = dataclasses.replace(
                training, backend="fsdp", sizes=MeshSizes(shard=ranks * rank_factor), offload=False
            )
            yield (
                4.0 + math.log2(rank_factor),
                (f"{name}.training_backend=fsdp", f"{rank_factor * ranks} ranks for {name}"),
                sharded_training,
            )


def divisions(training: Training) -> Iterator[tuple[float, Training]]:
    """Yields FSDP divisions of a model over the same ranks, each with its distance from the configured division.

    Sizes are powers of two. No division has more replicas than the configured division.
    """
    ranks, experts = training.ranks, training.ranks if training.size.experts else 1
    for replicate, context, tensor, expert in itertools.product(*map(_list_powers, (ranks, ranks, ranks, experts))):
        if ranks % (replicate * context * tensor) or replicate > training.sizes.replicate:
            continue
        mesh_sizes = MeshSizes(replicate, ranks // (replicate * context * tensor), context, tensor, expert)
        if _can_divide(training, mesh_sizes):
            yield _measure_distance(training.sizes, mesh_sizes), dataclasses.replace(training, sizes=mesh_sizes)


def _list_powers(max_power: int) -> list[int]:
    return [1 << exponent for exponent in range(max_power.bit_length()) if 1 << exponent <= max_power]


def _can_divide(training: Training, mesh_sizes: MeshSizes) -> bool:
    """Returns whether the model can be divided by these sizes."""
    model_size = training.size
    ranks_per_copy = mesh_sizes.shard * mesh_sizes.context * mesh_sizes.tensor
    return (
        model_size.kv_heads % mesh_sizes.tensor == 0
        and model_size.vocabulary % mesh_sizes.tensor == 0
        and (model_size.heads // mesh_sizes.tensor) % mesh_sizes.context == 0
        and (
            mesh_sizes.expert == 1
            or (model_size.experts % mesh_sizes.expert == 0 and ranks_per_copy % mesh_sizes.expert == 0)
        )
        and not (
            mesh_sizes.expert > 1 and mesh_sizes.expert % mesh_sizes.tensor and mesh_sizes.tensor % mesh_sizes.expert
        )
        and not (model_size.experts and mesh_sizes.tensor > 1 and mesh_sizes.expert < mesh_sizes.tensor)
    )


def _measure_distance(old_sizes: MeshSizes, new_sizes: MeshSizes) -> float:
    """Returns the distance between two divisions: the weighted sum of the sizes' ratios in powers of two."""
    return sum(w * abs(math.log2(getattr(new_sizes, key) / getattr(old_sizes, key))) for key, w in _DISTANCES.items())


def _overrides(name: str, old_sizes: MeshSizes, new_sizes: MeshSizes) -> tuple[str, ...]:
    return tuple(
        f"{name}.parallel.{key}={getattr(new_sizes, key)}"
        for key in _DISTANCES
        if getattr(new_sizes, key) != getattr(old_sizes, key)
    )


_BACKENDS = ("local", "fsdp", "deepspeed")
#: Names of the engines with a memory account.
_ENGINES = ("hf", "vllm")
_HALF_PRECISION = ("bfloat16", "float16")
#: Terms of an optimizer step that are freed before weights are sent.
FREED_BY_A_STEP = ("gradients", "optimizer temporaries")
#: Terms of a weight update on the trainer.
_UPDATE_TERMS = ("a weight in full", "buffers of the update")


def accounts(
    cfg: TrainedLanguageConfig,
    ranks: Mapping[str, GroupRanks],
    *,
    build: bool = True,
    measure: bool = False,
) -> list[Account]:
    """Returns the memory account of each group of a run (`rlhpc.runs.memory.plan.Accounting`).

    Args:
        cfg: Configuration of the run.
        ranks: Ranks of the groups.
        build: Whether models of unknown families may be built on the meta device.
        measure: Ignored, because `Account.measured` runs the slow measurement.
    """
    del measure
    engines = ranks.get("rollout")
    return [
        _compute_account(cfg, name, group_ranks, build, engines) for name, group_ranks in ranks.items() if name != AGENT
    ]


def _compute_account(
    cfg: TrainedLanguageConfig, name: str, ranks: GroupRanks, builds_model: bool, engines: GroupRanks | None
) -> Account:
    """Returns the memory account of a group; for unknown models an account with the reason. `engines`: ranks of `rollout`."""
    try:
        if name == "actor":
            return _compute_training_account(cfg, name, cfg.actor, ranks, builds_model, engines)
        if name == "rollout":
            return _compute_serving_account(
                _find_engines_config(cfg), name, _find_rollout_serving(cfg, ranks, builds_model), ranks
            )
        if name == CRITIC:
            return _compute_training_account(cfg, name, typed(GrpoConfig, cfg).critic, ranks, builds_model)
        return _compute_scoring_account(typed(GrpoConfig, cfg), name, ranks, builds_model)
    except UnknownModelError as error:
        return Account(name, unknown=str(error))


def _find_engines_config(cfg: TrainedLanguageConfig) -> GrpoConfig:
    """Returns the configuration of a run's engines."""
    if select(cfg, "rollout.parallel") is not None:
        return typed(GrpoConfig, cfg)
    from rlhpc.language.config.run import answering_config

    return answering_config(typed(SftConfig, cfg))


def itemsize(dtype: str, is_on_accelerator: bool) -> int:
    """Returns the bytes of an element of a configured `dtype` on the device."""
    return 2 if dtype in _HALF_PRECISION or (dtype == "auto" and is_on_accelerator) else 4


def max_lengths(cfg: RunConfig) -> tuple[int, int]:
    """Returns the maximum numbers of tokens of a prompt and of a response."""
    response = int(select(cfg, "rollout.max_new_tokens") or 0) * int(select(cfg, "rollout.max_turns") or 1)
    return int(select(cfg, "data.max_prompt_tokens") or 0), response if _generates_training_responses(cfg) else 0


def _measure_training(training: Training, section: LanguageActorConfig) -> str:
    from rlhpc.language.planning.measured_memory import measure_memory

    return measure_memory(training, section.model.model_path, plain(section.model.kwargs)).describe()


def _generates_training_responses(cfg: RunConfig) -> bool:
    """Returns whether the run trains on responses that the model generates."""
    return select(cfg, "algorithm.group_size") is not None


# -- training groups---------------------------------------------------------------------------------------------------


def training_of(
    cfg: TrainedLanguageConfig, name: str, section: LanguageActorConfig, ranks: GroupRanks, *, builds_model: bool = True
) -> Training:
    """Returns the training of a group.

    Raises:
        UnknownModelError: The model or the backend is unknown.
    """
    backend = section.training_backend
    if backend not in _BACKENDS:
        raise UnknownModelError(
            f"{name}.training_backend is {section.training_backend}, of which nothing is known here"
        )
    model_size = size_of(section.model.model_path, plain(section.model.kwargs), builds_model=builds_model)
    parallel_config = select(section, "parallel")
    if backend != "fsdp":
        mesh_sizes = MeshSizes(replicate=ranks.number)
    elif parallel_config is None:
        mesh_sizes = MeshSizes(shard=ranks.number)
    else:
        mesh_sizes = MeshSizes.from_config(parallel_config, ranks.number)
    prompt, response = max_lengths(cfg)
    grpo = typed(GrpoConfig, cfg) if _generates_training_responses(cfg) else None
    worker_classes = group_worker_classes(grpo) if grpo is not None else {}
    has_reference_loss = grpo is not None and grpo.algorithm.kl_coef > 0 and REFERENCE not in worker_classes
    is_causal = name == "actor" and cfg.runner.task_type != "reward_model"
    number_bytes = itemsize(section.model.dtype, ranks.accelerated)
    shares_prompts = (
        section.share_prefixes
        and section.use_remove_padding
        and section.model.attn_implementation == "sdpa"
        and section.compile == "off"
        and mesh_sizes.context == 1
        and all(math.isinf(window) for window in model_size.windows)
        and not (ranks.accelerated and number_bytes == 4)
    )
    return Training(
        model_size,
        backend,
        mesh_sizes,
        _count_micro_batch_tokens(cfg, section, mesh_sizes, shares_prompts=shares_prompts),
        number_bytes,
        ranks.accelerated,
        lora=section.lora.rank,
        targets=plain(section.lora.target_modules),
        checkpointing=section.model.gradient_checkpointing,
        offload=section.fsdp.cpu_offload if backend == "fsdp" else section.deepspeed.cpu_offload,
        reshard=section.fsdp.reshard_after_forward,
        stage=section.deepspeed.zero_stage,
        reference=name == "actor" and (has_reference_loss or cfg.runner.task_type == "dpo"),
        other_models_bytes=_compute_teacher_bytes(grpo, ranks, builds_model)
        if grpo is not None and name == "actor"
        else 0.0,
        uses_logits=is_causal,
        has_head=is_causal,
        separate_embeddings=parallel_config is not None,
        policies=_count_policies(cfg) if name == "actor" else 1,
        eager=prompt + response if section.model.attn_implementation == "eager" else 0,
        capacity=ranks.capacity,
    )


def _count_policies(cfg: object) -> int:
    """Returns the number of policies (`agent.policies`)."""
    return max(1, len({*plain(select(cfg, "agent.policies") or {}).values()}))


def _count_micro_batch_tokens(
    cfg: RunConfig, section: LanguageActorConfig, mesh_sizes: MeshSizes, *, shares_prompts: bool
) -> int:
    """Returns the number of tokens of the largest micro-batch.

    The number is the configured maximum: smaller if an optimizer step has fewer tokens per rank, and larger if a single
    sequence has more.

    Args:
        cfg, section, mesh_sizes: See `training_of`.
        shares_prompts: Whether the model reads the prompt of a group's responses once. Minibatches divide groups, so only a
            step with one minibatch has complete groups.
    """
    if not _generates_training_responses(cfg):  # the length of rows is unknown
        return section.max_tokens_per_micro_batch
    grpo, (prompt, response) = typed(GrpoConfig, cfg), max_lengths(cfg)
    length, step = prompt + response, int(select(section, "global_batch_size") or responses_per_step(grpo))
    num_responses = math.ceil(step / mesh_sizes.data)
    num_prompt_tokens = prompt * num_responses
    if shares_prompts and step == responses_per_step(grpo):
        num_prompts = math.ceil(num_responses / grpo.algorithm.group_size)
        num_prompt_tokens = max(prompt * num_prompts, min(prompt, SHORTEST_PREFIX - 1) * num_responses)
    step_tokens = num_prompt_tokens + response * num_responses
    return max(min(section.max_tokens_per_micro_batch, step_tokens), min(length, step_tokens))


def _compute_teacher_bytes(cfg: GrpoConfig, ranks: GroupRanks, builds_model: bool) -> float:
    """Returns the bytes of all teachers on the actor's ranks; 0 if there are none."""
    if not distils(cfg) or TEACHER in group_worker_classes(cfg):
        return 0.0
    return sum(_compute_weight_bytes(model, ranks, builds_model) for model in teachers_of(cfg).values())


def _compute_weight_bytes(model: FrozenModelConfig, ranks: GroupRanks, builds_model: bool) -> float:
    """Returns the bytes of a frozen model's weights."""
    model_size = size_of(model.model_path, plain(model.kwargs), builds_model=builds_model)
    return float(itemsize(model.dtype, ranks.accelerated) * model_size.parameters)


def _compute_training_account(
    cfg: TrainedLanguageConfig,
    name: str,
    section: LanguageActorConfig,
    ranks: GroupRanks,
    builds_model: bool,
    engines: GroupRanks | None = None,
) -> Account:
    """Returns the account of a rank that trains a model; `engines`: ranks of `rollout`, for a group that sends weights."""
    training = training_of(cfg, name, section, ranks, builds_model=builds_model)
    is_colocated = bool(select(cfg, "actor.offload_in_rollout"))
    memory_moments = training.moments()
    account_remarks: tuple[str, ...] = ()
    if sends_weights := name == "actor" and _generates_training_responses(cfg):
        update = _compute_weight_sync_moment(training, memory_moments, ranks)
        if is_colocated and ranks.accelerated and engines is not None and engines.accelerated:
            update, account_remarks = _with_engine(
                cfg, update, _find_rollout_serving(cfg, engines, builds_model), ranks
            )
        memory_moments = (*memory_moments, update)
    pinned_terms = terms(
        weights_gradients_optimizer=training.offloaded_bytes(),
        weights_and_optimizer_while_others_compute=training.host_copy_bytes()
        if is_colocated and ranks.accelerated and not training.offload
        else 0.0,
    )
    return Account(
        name,
        description=_format_description(training, section),
        moments=memory_moments,
        pinned=pinned_terms,
        optional=terms(copies_for_saving=training.host_copy_bytes() * cfg.runner.async_save),
        host=_compute_loading_memory(training, ranks),
        shm=_compute_shared_memory(typed(GrpoConfig, cfg), training, is_colocated) if sends_weights else (),
        colocated=is_colocated and ranks.accelerated,
        remarks=account_remarks,
        measured=lambda: _measure_training(training, section),
        changes=lambda capacity: nearest(name, training, section, capacity),
        max_fitting=lambda capacity: _find_largest_micro_batch(name, training, capacity),
    )


def _compute_weight_sync_moment(training: Training, memory_moments: Sequence[Moment], ranks: GroupRanks) -> Moment:
    """Returns the memory terms of weight sync: the terms between steps, and those of the update."""
    largest_weight = 4.0 * training.size.largest if training.backend != "local" else 0.0
    resident_terms = (term for term in memory_moments[-1].terms if term.name not in FREED_BY_A_STEP)
    model_bytes = float(training.itemsize * training.size.parameters)
    buffers = update_bytes(model_bytes, ranks.accelerated, ranks.capacity)
    update_terms = terms(a_weight_in_full=largest_weight, buffers_of_the_update=buffers)
    return Moment("weights are sent", (*resident_terms, *update_terms))


def _with_engine(
    cfg: TrainedLanguageConfig, update: Moment, serving: Serving, ranks: GroupRanks
) -> tuple[Moment, tuple[str, ...]]:
    """Returns the memory of a colocated weight update, during which engine and trainer share the accelerator, and a remark.

    If the accelerator has too little memory for both, the run offloads the trainer first and sends the update through the
    host. The run decides by the free memory (`device_sharing.spare_bytes`).
    """
    stays_on_accelerator = str(select(cfg, "rollout.weight_sync")) in STAY_ON_ACCELERATORS and serving.engine == "vllm"
    if not stays_on_accelerator or ranks.capacity is None:
        return update, ()
    engine_term = MemoryTerm("engine beside it, without its cache", serving.beside_trainer())
    resident_bytes = math.fsum(term.nbytes for term in update.terms if term.name not in _UPDATE_TERMS)
    spare_memory = spare_bytes(float(serving.itemsize * serving.size.largest), ranks.capacity)
    shared_moment = Moment(update.name, (*update.terms, engine_term))
    if max(resident_bytes + engine_term.nbytes + spare_memory, shared_moment.nbytes) > (1.0 - SPARE) * ranks.capacity:
        return update, ("updates may go through the host: there is little room for the engine beside the trainer",)
    return shared_moment, ()


def _compute_shared_memory(cfg: GrpoConfig, training: Training, is_colocated: bool) -> tuple[MemoryTerm, ...]:
    """Returns the memory of a weight update in /dev/shm, and of retained weights.

    An update needs a few buckets, or its full size if colocated engines receive it later.
    """
    model_bytes = float(training.itemsize * training.size.parameters)
    if cfg.rollout.weight_delta == "elements":
        return terms(weights_and_their_changes=2.0 * model_bytes)
    adapted_bytes = (
        sum(math.prod(shape) for shape in training.size.adapted_layers(training.targets).values()) * training.itemsize
    )
    frozen_bytes = model_bytes - adapted_bytes if training.lora and cfg.rollout.weight_delta == "frozen" else 0.0
    sent_bytes = (model_bytes - frozen_bytes) * training.policies
    return terms(
        weights_under_way=sent_bytes if is_colocated else min(sent_bytes, float(NUM_CHUNKS * CHUNK_BYTES)),
        frozen_weights=frozen_bytes,
    )


def _compute_loading_memory(training: Training, ranks: GroupRanks) -> tuple[MemoryTerm, ...]:
    """Returns the host memory for loading the model on a rank with an accelerator."""
    if not ranks.accelerated or (training.backend == "deepspeed" and training.stage == 3):
        return ()
    fraction = training.rank_fraction() if training.backend == "fsdp" else 1.0
    element_bytes = training.itemsize if training.lora else 4
    return terms(model_while_it_is_read=element_bytes * training.size.parameters * fraction)


def _format_description(training: Training, section: LanguageActorConfig) -> str:
    division = {"fsdp": f" ({format_sizes(training.sizes)})", "deepspeed": f" (ZeRO-{training.stage})"}
    description_facts = (
        f"{section.model.model_path}: {format_count(training.size.parameters)} parameters",
        f"LoRA of rank {training.lora}: {format_count(training.num_trained)} trained" if training.lora else "",
        training.backend + division.get(training.backend, ""),
        "offloaded to the host" if training.offload else "",
        _computation_dtype(training, section),
        "activations recomputed" if training.checkpointing else "all activations kept",
        f"micro-batches of {training.tokens} tokens",
    )
    return ", ".join(filter(None, description_facts))


def _computation_dtype(training: Training, section: LanguageActorConfig) -> str:
    """Returns the name of the dtype that a trainer computes in."""
    if not training.mixed_precision:
        return "float32"
    return section.model.dtype if section.model.dtype in _HALF_PRECISION else _HALF_PRECISION[0]


def format_sizes(mesh_sizes: MeshSizes) -> str:
    """Formats the sizes of a division: `shard 8, tensor 2`."""
    return ", ".join(f"{key} {ways}" for key, ways in dataclasses.asdict(mesh_sizes).items() if ways > 1) or "shard 1"


def format_count(num_parameters: int) -> str:
    """Formats a number of parameters: `7.62 B`, `135 M`."""
    return f"{num_parameters / 1e9:.2f} B" if num_parameters >= 1e9 else f"{num_parameters / 1e6:.3g} M"


# -- generating groups---------------------------------------------------------------------------------------------------


def _find_rollout_serving(cfg: TrainedLanguageConfig, ranks: GroupRanks, builds_model: bool) -> Serving:
    """Returns the serving of a rank of `rollout`."""
    grpo = _find_engines_config(cfg)
    section = grpo.rollout
    return _find_serving(
        grpo, "rollout", grpo.actor.model, section, section.rollout_backend, ranks, max_lengths(grpo), builds_model
    )


def _find_serving(
    cfg: GrpoConfig,
    name: str,
    model: Any,
    section: ServingConfig,
    engine: str,
    ranks: GroupRanks,
    max_tokens: tuple[int, int],
    builds_model: bool,
) -> Serving:
    """Returns the serving of a rank with an engine; `max_tokens` has the maximum tokens of a prompt and of a response.

    Raises:
        UnknownModelError: The model or the engine is unknown.
    """
    if engine not in _ENGINES:
        raise UnknownModelError(f"{name}.rollout_backend is {engine}, of which nothing is known here")
    tensor = int(select(section, "parallel.tensor") or 1)
    return Serving(
        size_of(model.model_path, plain(model.kwargs), builds_model=builds_model),
        engine,
        itemsize(model.dtype if section.dtype == "auto" else section.dtype, ranks.accelerated),
        ranks.accelerated,
        ranks.capacity,
        *max_tokens,
        math.ceil(responses_per_step(cfg) / max(1, ranks.number // tensor)),
        quantized=select(section, "quantization") is not None,
        tensor=tensor,
        expert=bool(select(section, "parallel.expert")),
        utilization=section.gpu_memory_utilization,
        max_batch_size=section.max_batch_size,
        max_model_len=section.max_model_len,
        copies=_count_policies(cfg) if name == "rollout" and engine == "hf" else 1,
        section=name,
        model_path=str(model.model_path),
    )


def _compute_serving_account(cfg: GrpoConfig, name: str, serving: Serving, ranks: GroupRanks) -> Account:
    """Returns the account of a rank with an engine."""
    update_bytes = min(float(serving.itemsize * serving.size.parameters), float(NUM_CHUNKS * CHUNK_BYTES))
    engine_text = f"{serving.engine} engines" + (f" of {serving.tensor} ranks" if serving.tensor > 1 else "")
    description = (
        f"{serving.model_path}: {format_count(serving.size.parameters)} parameters, {engine_text}, "
        f"up to {serving.sequences} sequences of {serving.length} tokens"
    )
    cache_note = f"the KV cache has room for {serving.describe_cache()}; {serving.sequences} are asked for at a time"
    return Account(
        name,
        description=description,
        moments=serving.moments(),
        shm=terms(weights_under_way=update_bytes) if name == "rollout" else (),
        colocated=bool(cfg.actor.offload_in_rollout) and name == "rollout" and ranks.accelerated,
        remarks=(cache_note,) if serving.engine == "vllm" else (),
        refusals=serving.refusals(),
        max_fitting=lambda capacity: _find_largest_context(name, serving),
        changes=lambda capacity: _find_wider_engines(name, serving, capacity),
    )


# -- scoring groups ------------------------------------------------------------------------------------------------------


def _compute_scoring_account(cfg: GrpoConfig, name: str, ranks: GroupRanks, builds_model: bool) -> Account:
    if name == JUDGE:
        judge = cfg.judge
        max_tokens = (judge.max_prompt_tokens, judge.max_new_tokens)
        serving = _find_serving(cfg, name, judge.model, judge, judge.rollout_backend, ranks, max_tokens, builds_model)
        return _compute_serving_account(cfg, name, serving, ranks)
    group = scoring_groups(cfg).get(name)
    if group is None or not group.model.model_path:
        raise UnknownModelError(f"{name} has no model that the configuration names")
    if group.scorer == ENGINE:
        serving = _find_serving(cfg, name, group.model, cfg.teacher, "vllm", ranks, max_lengths(cfg), builds_model)
        return _compute_serving_account(cfg, name, serving, ranks)
    return _compute_frozen_account(
        cfg,
        name,
        group.model,
        group.max_tokens,
        ranks,
        computes_logits="logprobs" in group.scorer,
        builds_model=builds_model,
        other_models=[teacher.model for teacher in cfg.teacher.by_task] if name == TEACHER else (),
    )


def _compute_frozen_account(
    cfg: GrpoConfig,
    name: str,
    model: PretrainedConfig,
    max_tokens: int,
    ranks: GroupRanks,
    *,
    computes_logits: bool,
    builds_model: bool,
    other_models: Sequence[FrozenModelConfig] = (),
) -> Account:
    """Returns the account of a rank with one or several frozen models that score samples, one after the other."""
    model_size: ModelSize = size_of(model.model_path, plain(select(model, "kwargs")), builds_model=builds_model)
    bytes_per_element = itemsize(model.dtype, ranks.accelerated)
    num_step_tokens = sum(max_lengths(cfg)) * math.ceil(responses_per_step(cfg) / ranks.number)
    num_tokens = max(min(max_tokens, num_step_tokens), 1)
    layers_by_model = [
        LayerMemory(
            size_of(m.model_path, plain(select(m, "kwargs")), builds_model=builds_model),
            itemsize(m.dtype, ranks.accelerated),
            not ranks.accelerated,
            capacity=ranks.capacity,
        )
        for m in (model, *other_models)
    ]
    memory_terms = terms(
        weights=bytes_per_element * model_size.parameters
        + sum(_compute_weight_bytes(other_model, ranks, builds_model) for other_model in other_models),
        activations=num_tokens * max(layers.layer_peak() for layers in layers_by_model),
        logits=max(scoring_chunk(layers, num_tokens) for layers in layers_by_model) if computes_logits else 0.0,
    )
    return Account(
        name,
        description=f"{model.model_path}: {format_count(model_size.parameters)} parameters, passes over {num_tokens} tokens",
        moments=(Moment("scoring", (*memory_terms, process(ranks.accelerated))),),
    )
