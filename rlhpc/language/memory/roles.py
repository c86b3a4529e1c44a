"""The accounts of a language model's run, one for each of its groups."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rlhpc.config.parallel import Sizes
from rlhpc.config.sections import RunConfig
from rlhpc.config.typed import plain, select, typed
from rlhpc.language.config import GrpoConfig, SftConfig, TrainedLanguageConfig, responses_per_step
from rlhpc.language.memory.advice import largest_context, largest_micro_batch, nearest, wider_engines
from rlhpc.language.memory.head import scoring_chunk
from rlhpc.language.memory.layers import Layers
from rlhpc.language.memory.model import ModelSize, NotKnown, size_of
from rlhpc.language.memory.process import process
from rlhpc.language.memory.serving import PART, PARTS, Serving
from rlhpc.language.memory.training import Training
from rlhpc.language.model_config import LanguageActorConfig, PretrainedConfig, ServingConfig
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
from rlhpc.runs.memory.account import Account, Moment, Ranks, Term, terms

_BACKENDS = ("local", "fsdp", "deepspeed")
#: Names of the engines that an account can be made of.
_ENGINES = ("hf", "vllm")
_HALF = ("bfloat16", "float16")
#: Terms of an optimizer step that are gone when weights are sent.
FREED_BY_A_STEP = ("gradients", "optimizer temporaries")


def accounts(
    cfg: TrainedLanguageConfig, ranks: Mapping[str, Ranks], *, build: bool = True, measure: bool = False
) -> list[Account]:
    """What each group of a run holds (`rlhpc.runs.memory.plan.Accounting`).

    Args:
        cfg: The configuration.
        ranks: The groups.
        build: Whether models of unknown families may be built on the meta device.
        measure: Makes no difference: what takes longer is done by `Account.measured`.
    """
    del measure
    return [_account(cfg, name, found, build) for name, found in ranks.items() if name != AGENT]


def _account(cfg: TrainedLanguageConfig, name: str, ranks: Ranks, build: bool) -> Account:
    try:
        if name == "actor":
            return _trained(cfg, name, cfg.actor, ranks, build)
        if name == "rollout":
            return _rollout(_engines_config(cfg), ranks, build)
        if name == CRITIC:
            return _trained(cfg, name, typed(GrpoConfig, cfg).critic, ranks, build)
        return _scoring(typed(GrpoConfig, cfg), name, ranks, build)
    except NotKnown as error:
        return Account(name, unknown=str(error))


def _engines_config(cfg: TrainedLanguageConfig) -> GrpoConfig:
    """Returns the configuration by which the engines of a run answer."""
    if select(cfg, "rollout.parallel") is not None:
        return typed(GrpoConfig, cfg)
    from rlhpc.language.roles.evaluation import answering_config

    return answering_config(typed(SftConfig, cfg))


def itemsize(dtype: str, accelerated: bool) -> int:
    """Bytes of a number of a `dtype`, as it is on such a device."""
    return 2 if dtype in _HALF or (dtype == "auto" and accelerated) else 4


def sizes_of(section: LanguageActorConfig, ranks: int) -> Sizes:
    """How a group's ranks divide its model."""
    if section.training_backend.lower() != "fsdp":
        return Sizes(replicate=ranks)
    parallel: Any = select(section, "parallel")
    return Sizes(shard=ranks) if parallel is None else Sizes.of(parallel, ranks)


def longest(cfg: RunConfig) -> tuple[int, int]:
    """Most tokens of a prompt, and of a response."""
    prompt = int(select(cfg, "data.max_prompt_tokens") or 0)
    response = int(select(cfg, "rollout.max_new_tokens") or 0) * int(select(cfg, "rollout.max_turns") or 1)
    return (prompt, response) if _writes(cfg) else (prompt, 0)


def _measured(training: Training, section: LanguageActorConfig) -> str:
    from rlhpc.language.memory.measure import measure

    return measure(training, section.model.model_path, plain(section.model.kwargs)).words()


def _writes(cfg: RunConfig) -> bool:
    """Whether the run trains on what the model writes."""
    return select(cfg, "algorithm.group_size") is not None


# -- who trains -------------------------------------------------------------------------------------------------------


def training_of(
    cfg: TrainedLanguageConfig, name: str, section: LanguageActorConfig, ranks: Ranks, *, build: bool = True
) -> Training:
    """How a group trains.

    Raises:
        NotKnown: The model or the backend is not known here.
    """
    backend = section.training_backend.lower()
    if backend not in _BACKENDS:
        raise NotKnown(f"{name}.training_backend is {section.training_backend}, of which nothing is known here")
    size = size_of(section.model.model_path, plain(section.model.kwargs), build=build)
    sizes = sizes_of(section, ranks.number)
    prompt, response = longest(cfg)
    grpo = typed(GrpoConfig, cfg) if _writes(cfg) else None
    roles = group_roles(grpo) if grpo is not None else {}
    compares = grpo is not None and grpo.algorithm.kl_coef > 0 and REFERENCE not in roles
    reference = name == "actor" and (compares or cfg.runner.task_type.lower() == "dpo")
    eager = section.model.attn_implementation == "eager"
    causal = name == "actor" and cfg.runner.task_type.lower() != "reward_model"
    return Training(
        size, backend, sizes, _tokens(cfg, section, sizes, prompt + response),
        itemsize(section.model.dtype, ranks.accelerated), ranks.accelerated,
        lora=section.lora.rank, targets=plain(section.lora.target_modules),
        checkpointing=section.model.gradient_checkpointing,
        offload=section.fsdp.cpu_offload if backend == "fsdp" else section.deepspeed.cpu_offload,
        reshard=section.fsdp.reshard_after_forward, stage=section.deepspeed.zero_stage, reference=reference,
        beside=_beside(grpo, ranks, build) if grpo is not None and name == "actor" else 0.0,
        logits=causal, head=causal, edges_apart=select(section, "parallel") is not None,
        policies=_policies(cfg) if name == "actor" else 1,
        eager=prompt + response if eager else 0,
    )  # fmt: skip


def _policies(cfg: object) -> int:
    """How many policies there are (`agent.policies`)."""
    return max(1, len({*plain(select(cfg, "agent.policies") or {}).values()}))


def _tokens(cfg: RunConfig, section: LanguageActorConfig, sizes: Sizes, length: int) -> int:
    """Tokens of the largest micro-batch: what may be in one, or less where an optimizer step has less for a rank."""
    if not _writes(cfg):  # nobody says how long the rows are
        return section.max_tokens_per_micro_batch
    step = int(select(section, "global_batch_size") or responses_per_step(typed(GrpoConfig, cfg)))
    whole = length * math.ceil(step / sizes.data)
    return max(min(section.max_tokens_per_micro_batch, whole), min(length, whole))


def _beside(cfg: GrpoConfig, ranks: Ranks, build: bool) -> float:
    """Bytes of a teacher on the actor's ranks."""
    if not distils(cfg) or TEACHER in group_roles(cfg):
        return 0.0
    size = size_of(cfg.teacher.model.model_path, plain(cfg.teacher.model.kwargs), build=build)
    return float(itemsize(cfg.teacher.model.dtype, ranks.accelerated) * size.parameters)


def _trained(cfg: TrainedLanguageConfig, name: str, section: LanguageActorConfig, ranks: Ranks, build: bool) -> Account:
    training = training_of(cfg, name, section, ranks, build=build)
    turns = bool(select(cfg, "actor.offload_in_rollout"))
    moments = training.moments()
    if sends := name == "actor" and _writes(cfg):
        moments = (*moments, _sending(training, moments))
    pinned = terms(
        weights_gradients_optimizer=training.offloaded(),
        weights_and_optimizer_while_others_compute=training.host_copy()
        if turns and ranks.accelerated and not training.offload
        else 0.0,
    )
    copies = training.host_copy() if cfg.runner.async_save else 0.0
    shared = _shared(typed(GrpoConfig, cfg), training, turns) if sends else ()
    return Account(
        name,
        about=_about(training, section),
        moments=moments,
        pinned=pinned,
        spare=terms(copies_for_saving=copies),
        host=_loading(training, ranks),
        shared=shared,
        turns=turns and ranks.accelerated,
        measured=lambda: _measured(training, section),
        changes=lambda room: nearest(name, training, section, room),
        most=lambda room: largest_micro_batch(name, training, room),
    )


def _sending(training: Training, moments: Sequence[Moment]) -> Moment:
    """While weights are sent: what is there between steps, one weight in full, and the part that it is written to."""
    held = [term for term in moments[-1].terms if term.name not in FREED_BY_A_STEP]
    whole = 4.0 * training.size.largest if training.backend != "local" else 0.0
    return Moment("weights are sent", (*held, *terms(a_weight_in_full=whole, part_of_an_update=float(PART))))


def _shared(cfg: GrpoConfig, training: Training, turns: bool) -> tuple[Term, ...]:
    """What an update takes of /dev/shm: a few parts or, where engines come for it later, all of it; and what is kept."""
    whole = float(training.itemsize * training.size.parameters)
    if cfg.rollout.weight_delta == "elements":
        return terms(weights_and_their_changes=2.0 * whole)
    adapted = sum(math.prod(shape) for shape in training.size.adapted(training.targets).values()) * training.itemsize
    frozen = whole - adapted if training.lora and cfg.rollout.weight_delta == "frozen" else 0.0
    moving = (whole - frozen) * training.policies
    return terms(weights_under_way=moving if turns else min(moving, float(PARTS * PART)), frozen_weights=frozen)


def _loading(training: Training, ranks: Ranks) -> tuple[Term, ...]:
    """What reading the model takes of the host where the rank computes elsewhere."""
    if not ranks.accelerated or (training.backend == "deepspeed" and training.stage == 3):
        return ()
    each = 1.0 if training.backend != "fsdp" else training.part()
    itemsize = training.itemsize if training.lora else 4
    return terms(model_while_it_is_read=itemsize * training.size.parameters * each)


def _about(training: Training, section: LanguageActorConfig) -> str:
    s, size = training.sizes, training.size
    how = training.backend
    if training.backend == "fsdp":
        named = {
            "replicate": s.replicate,
            "shard": s.shard,
            "context": s.context,
            "tensor": s.tensor,
            "expert": s.expert,
        }
        how += " (" + ", ".join(f"{key} {value}" for key, value in named.items() if value > 1 or key == "shard") + ")"
    elif training.backend == "deepspeed":
        how += f" (ZeRO-{training.stage})"
    if training.offload:
        how += ", offloaded to the host"
    what = f"LoRA of rank {training.lora}: {counted(training.trained)} trained" if training.lora else ""
    kept = "activations recomputed" if training.checkpointing else "all activations kept"
    precision = "bfloat16" if training.mixed else "float32"
    return ", ".join(
        filter(None, (f"{section.model.model_path}: {counted(size.parameters)} parameters", what, how, precision, kept,
                      f"micro-batches of {training.tokens} tokens"))
    )  # fmt: skip


def counted(parameters: int) -> str:
    """`7.62 B`, `135 M`."""
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e9 else f"{parameters / 1e6:.3g} M"


# -- who writes -------------------------------------------------------------------------------------------------------


def _rollout(cfg: GrpoConfig, ranks: Ranks, build: bool) -> Account:
    prompt, response = longest(cfg)
    step = responses_per_step(cfg)
    return _serving(
        cfg, "rollout", cfg.actor.model, cfg.rollout, cfg.rollout.rollout_backend, ranks, prompt, response, step, build
    )


def _serving(
    cfg: GrpoConfig, name: str, model: Any, section: ServingConfig, engine: str, ranks: Ranks, prompt: int, response: int,
    step: int, build: bool,
) -> Account:  # fmt: skip
    if engine.lower() not in _ENGINES:
        raise NotKnown(f"{name}.rollout_backend is {engine}, of which nothing is known here")
    tensor = int(select(section, "parallel.tensor") or 1)
    serving = Serving(
        size_of(model.model_path, plain(model.kwargs), build=build),
        engine.lower(),
        itemsize(model.dtype if section.dtype == "auto" else section.dtype, ranks.accelerated),
        ranks.accelerated,
        ranks.room,
        prompt,
        response,
        math.ceil(step / max(1, ranks.number // tensor)),
        tensor=tensor,
        expert=bool(select(section, "parallel.expert")),
        utilization=section.gpu_memory_utilization,
        at_once=section.max_batch_size,
        longest=section.max_model_len,
        copies=_policies(cfg) if name == "rollout" and engine.lower() == "hf" else 1,
        section=name,
    )
    turns = bool(cfg.actor.offload_in_rollout) and name == "rollout"
    part = min(float(serving.itemsize * serving.size.parameters), float(PARTS * PART))
    how = f"{engine} engines" + (f" of {tensor} ranks" if tensor > 1 else "")
    about = (
        f"{model.model_path}: {counted(serving.size.parameters)} parameters, {how}, up to {serving.sequences} sequences of "
        f"{serving.length} tokens"
    )
    remarks = []
    if serving.engine == "vllm":
        remarks.append(
            f"the KV cache has room for {serving.cache_words()}; {serving.sequences} are asked for at a time"
        )
    return Account(
        name, about=about, moments=serving.moments(), shared=terms(weights_under_way=part) if name == "rollout" else (),
        turns=turns and ranks.accelerated, remarks=tuple(remarks), refusals=serving.refusals(),
        most=lambda room: largest_context(name, serving, room), changes=lambda room: wider_engines(name, serving, room),
    )  # fmt: skip


# -- who scores -------------------------------------------------------------------------------------------------------


def _scoring(cfg: GrpoConfig, name: str, ranks: Ranks, build: bool) -> Account:
    if name == JUDGE:
        step = responses_per_step(cfg)
        judge = cfg.judge
        return _serving(
            cfg, name, judge.model, judge, judge.rollout_backend, ranks, judge.max_prompt_tokens, judge.max_new_tokens,
            step, build,
        )  # fmt: skip
    group = scoring_groups(cfg).get(name)
    if group is None or not group.model.model_path:
        raise NotKnown(f"{name} has no model that the configuration names")
    if group.scorer == ENGINE:
        prompt, response = longest(cfg)
        step = responses_per_step(cfg)
        return _serving(cfg, name, group.model, cfg.teacher, "vllm", ranks, prompt, response, step, build)
    return frozen_account(
        cfg, name, group.model, group.max_tokens, ranks, logits="logprobs" in group.scorer, build=build
    )


def frozen_account(
    cfg: GrpoConfig, name: str, model: PretrainedConfig, max_tokens: int, ranks: Ranks, *, logits: bool, build: bool
) -> Account:
    """A rank with a model that is not trained, and reads what others have written."""
    size: ModelSize = size_of(model.model_path, plain(select(model, "kwargs")), build=build)
    b = itemsize(model.dtype, ranks.accelerated)
    step = sum(longest(cfg)) * math.ceil(responses_per_step(cfg) / ranks.number)

    def moment(tokens: int) -> Moment:
        layers = Layers(size, b, not ranks.accelerated)
        chunk = scoring_chunk(layers, tokens) if logits else 0.0
        held = terms(weights=float(b * size.parameters), activations=tokens * layers.passing(), logits=chunk)
        return Moment("scoring", (*held, process(ranks.accelerated)))

    tokens = max(min(max_tokens, step), 1)
    return Account(
        name,
        about=f"{model.model_path}: {counted(size.parameters)} parameters, passes over {tokens} tokens",
        moments=(moment(tokens),),
    )
