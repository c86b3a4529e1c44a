"""Translation tables of RLinf's language models: GRPO, REINFORCE++ and PPO on texts and pictures."""

from __future__ import annotations

import math
from typing import Any

from rlhpc.algorithms.registry import ADVANTAGES as ESTIMATORS
from rlhpc.cli.foreign.rlinf_defaults import has_critic
from rlhpc.cli.foreign.rlinf_embodied import ADVANTAGES, LOSSES, adapter_rows, choice, optimizer_rows
from rlhpc.cli.foreign.rlinf_precision import computation_dtype, computation_dtype_key, dtype_name
from rlhpc.cli.foreign.rlinf_problems import PROBLEMS, failed_reward, has_pictures, reward_terms
from rlhpc.cli.foreign.rules import UNSET, ForeignConfig, Rows, Rule
from rlhpc.runtime.errors import ConfigError

#: RLinf's estimator of episodes of several turns.
_DYNAMIC = "grpo_dynamic"
#: Steps over which Megatron's schedules extend if `lr_decay_iters` is null (config.py, validate_megatron_cfg).
_MEGATRON_STEPS = 100_000


# -- engines and trainers -----------------------------------------------------------------------------------------------


def _engine_backend(config: ForeignConfig) -> str:
    """Writes the engine vllm, which runs the models of both of RLinf's engines."""
    if (name := config("rollout.rollout_backend", "sglang")) != "vllm":
        config.omit(
            "rollout.rollout_backend", f"rlhpc has no {name}: vllm and hf; vllm is written", False, rf"^name {name}$"
        )
    return "vllm"


def _trainer(group: str) -> Rule:
    def rule(config: ForeignConfig) -> str:
        name = config(f"{group}.training_backend", "fsdp")
        if config(f"{group}.fsdp_config.sharding_strategy") == "no_shard":
            return "local"
        if name != "fsdp":
            reason = f"rlhpc has no {name}: local, fsdp and deepspeed; fsdp is written"
            config.omit(f"{group}.training_backend", reason, False, rf"^name {name}$")
        return "fsdp"

    return rule


def _is_megatron(config: ForeignConfig, group: str = "actor") -> bool:
    return bool(config.leaves.get(f"{group}.training_backend") == "megatron")


def _grad_scaler(group: str, name: str) -> Rule:
    """Returns the rule for a key of FSDP's gradient scaler, which only float16 needs."""

    def rule(config: ForeignConfig) -> Any:
        value = config(f"{group}.fsdp_config.grad_scaler.{name}")
        scales_loss = (
            not _is_megatron(config, group)
            and dtype_name(config, computation_dtype_key(config, group), "bf16") == "float16"
        )
        return value if scales_loss and value is not None else UNSET

    return rule


def _engine_dtype(config: ForeignConfig) -> Any:
    """Returns the engine's dtype, or UNSET if it equals the actor's."""
    precision = config("rollout.model.precision")
    if precision in (None, config.leaves.get("actor.model.precision")):
        return UNSET
    return dtype_name(config, "rollout.model.precision", "bf16")


def mesh_size(config: ForeignConfig, group: str, key: str) -> int:
    """Returns a size of a trainer's mesh: 1 for RLinf's FSDP trainer, and for models with pictures, which are only sharded."""
    if not _is_megatron(config, group) or has_pictures(config):
        return 1
    return config.peek(f"{group}.model.{key}", 1) or 1


def _parallel(group: str, key: str) -> Rule:
    name = f"{group}.model.{key}"

    def rule(config: ForeignConfig) -> Any:
        if not _is_megatron(config, group):
            return config.omit(name, "RLinf's FSDP trainer does not read it", False)
        if has_pictures(config):
            return config.omit(name, "models with pictures are sharded over all ranks: only speed and memory", False)
        config(name)
        size = mesh_size(config, group, key)
        return size if size > 1 else UNSET

    return rule


def _is_colocated(config: ForeignConfig) -> bool:
    """Returns whether actor and rollout share their accelerators; otherwise RLinf trains on responses as they arrive."""
    places: dict[str, dict[str, str]] = {}
    for names, ranks in config.section("cluster.component_placement").items():
        listed, _, part = names.partition(".")
        for name in listed.split(","):
            places.setdefault(name.strip(), {})[part] = str(ranks)
    return "actor" in places and places["actor"] == places.get("rollout")


def _offload_in_rollout(config: ForeignConfig) -> Any:
    offloads = config("actor.enable_offload", False) or config("actor.offload_weight", False)
    return True if _is_colocated(config) and offloads else UNSET


def _gradient_checkpointing(group: str) -> Rule:
    keys = (f"{group}.fsdp_config.gradient_checkpointing", f"{group}.model.recompute_granularity")
    return lambda config: any(config(key, False) for key in keys)


def _optimizer(group: str) -> Rule:
    def rule(config: ForeignConfig) -> str:
        name = str(config(f"{group}.optim.optimizer", "adam"))
        return "adamw" if name == "adam" else name

    return rule


# -- learning rates -----------------------------------------------------------------------------------------------------


def _trainer_rule(group: str, megatron: str, fsdp: str) -> Rule:
    """Returns a rule that reads the key of RLinf's trainer for the group: Megatron or FSDP."""
    megatron, fsdp = f"{group}.{megatron}", f"{group}.{fsdp}"

    def rule(config: ForeignConfig) -> Any:
        if _is_megatron(config, group):
            config.omit(fsdp, "RLinf's Megatron trainer does not read it", False)
            return config(megatron)
        config.omit(megatron, "RLinf's FSDP trainer does not read it", False)
        return config(fsdp)

    return rule


def _schedule(group: str) -> Rule:
    read_schedule = _trainer_rule(group, "lr_sched.lr_decay_style", "optim.lr_scheduler")
    schedule_keys = [f"{group}.{key}" for key in ("lr_sched.lr_decay_style", "optim.lr_scheduler")]
    end_keys = [f"{group}.{key}" for key in ("optim.min_lr", "optim.min_lr_rate", "lr_sched.min_lr")]
    length_keys = [f"{group}.{key}" for key in ("lr_sched.lr_decay_iters", "optim.total_training_steps")]

    def rule(config: ForeignConfig) -> Any:
        name = str(read_schedule(config)).removeprefix("torch_")
        if name not in ("constant", "linear", "cosine"):
            for key in schedule_keys:
                config.omit(
                    key,
                    f"rlhpc has no course {name}: constant, linear and cosine; constant is written",
                    missing_feature=rf"takes {name}$",
                )
            name = "constant"
        for key in end_keys:
            if name == "constant":
                config.omit(key, "a constant learning rate has no end value", False)
            else:
                config.omit(key, "RLinf's trainer does not read it with this schedule", False)
        for key in length_keys if name == "constant" else ():
            config.omit(key, "a constant learning rate has no end", False)
        return name

    return rule


#: Learning rate by which the schedule `cosine` of RLinf's FSDP trainer divides `min_lr`: the default of torch's optimizers.
_TORCH_LR = 1e-3


def _min_lr(group: str) -> Rule:
    """Returns the rule for the learning rate at the end of a schedule (hybrid_engines/fsdp/utils.py, get_lr_scheduler)."""

    def rule(config: ForeignConfig) -> Any:
        if _is_megatron(config, group):
            if config.text(f"{group}.lr_sched.lr_decay_style") not in ("linear", "cosine"):
                return UNSET
            return config.number(f"{group}.lr_sched.min_lr") or UNSET
        schedule, key = config.text(f"{group}.optim.lr_scheduler"), f"{group}.optim.min_lr"
        if schedule != "cosine":
            return (config.number(key) or UNSET) if schedule == "torch_cosine" else UNSET
        rate = config(f"{group}.optim.min_lr_rate")
        share = config.number(key) / _TORCH_LR if rate is None else config.number(f"{group}.optim.min_lr_rate")
        return config.number(f"{group}.optim.lr") * share or UNSET

    return rule


def _decay_steps(group: str) -> Rule:
    """Returns the rule for the length of a schedule, which RLinf counts in optimizer steps, and rlhpc in steps of the run."""
    read_steps = _trainer_rule(group, "lr_sched.lr_decay_iters", "optim.total_training_steps")
    read_schedule = _trainer_rule(group, "lr_sched.lr_decay_style", "optim.lr_scheduler")

    def rule(config: ForeignConfig) -> Any:
        steps, name = int(read_steps(config) or 0), str(read_schedule(config)).removeprefix("torch_")
        return math.ceil(steps / _minibatches(config)) if steps > 0 and name in ("linear", "cosine") else UNSET

    return rule


def _warmup(group: str) -> Rule:
    """Returns the rule for the warm-up, which RLinf counts in optimizer steps, and rlhpc in steps of the run."""
    read_steps = _trainer_rule(group, "lr_sched.lr_warmup_iters", "optim.lr_warmup_steps")
    fraction, length = f"{group}.lr_sched.lr_warmup_fraction", f"{group}.lr_sched.lr_decay_iters"
    ratio, total = f"{group}.optim.lr_warmup_steps_ratio", f"{group}.optim.total_training_steps"

    def rule(config: ForeignConfig) -> int:
        steps = float(read_steps(config) or 0)
        if _is_megatron(config, group):
            if (share := config(fraction)) is not None:
                steps = float(share) * int(config(length, _MEGATRON_STEPS))
            if steps > 0:
                key = f"{fraction} {group}.lr_sched.lr_warmup_iters"
                config.omit(key, "RLinf begins at 0: its first update changes no weight", False)
        else:
            config.omit(fraction, "RLinf's FSDP trainer does not read it", False)
            if steps < 0:  # a negative number stands for a share of the schedule
                steps = float(config(ratio, 0.0)) * int(config(total, 0))
        if steps < 1:
            return 0
        return math.ceil(steps / _minibatches(config))

    return rule


def _minibatches(config: ForeignConfig) -> int:
    key = "algorithm.n_minibatches"
    if (count := config.integer(key, 1)) < 1:
        raise ConfigError(f"{key} is {count}; it must be at least 1")
    return count


# -- batches and losses -------------------------------------------------------------------------------------------------


def _clip_ratio(side: str) -> Rule:
    def rule(config: ForeignConfig) -> Any:
        side_clip = config(f"algorithm.clip_ratio_{side}")
        if side_clip is not None:
            config.omit("algorithm.ratio_clip_eps", "clip_ratio_low and clip_ratio_high say it", False)
        return config("algorithm.ratio_clip_eps", UNSET) if side_clip is None else side_clip

    return rule


def _new_tokens(config: ForeignConfig) -> Any:
    max_tokens = config("algorithm.sampling_params.max_new_tokens")
    if max_tokens is None and config("runner.seq_length") and config("data.max_prompt_length"):
        max_tokens = config.integer("runner.seq_length") - config.integer("data.max_prompt_length")
    return UNSET if max_tokens is None else int(max_tokens)


def _micro_batch_tokens(config: ForeignConfig) -> Any:
    """Returns the tokens of a micro-batch: those of RLinf's, and at least those of the longest sequence."""
    length = config("runner.seq_length")
    if config("runner.enable_dynamic_batch_size", False):
        tokens = config("runner.max_tokens_per_mbs")
        return UNSET if tokens is None else max(int(tokens), int(length or 0))
    return int(length) * config.integer("algorithm.training_batch_size_per_gpu") if length else UNSET


def _global_batch_size(config: ForeignConfig) -> int:
    prompts, group = config.integer("data.rollout_batch_size", 32), config.integer("algorithm.group_size", 8)
    return max(1, prompts * group // _minibatches(config))


_PER_MICRO_BATCH = (
    "RLinf averages the micro-batches, whatever their numbers of tokens; rlhpc averages over the whole minibatch, so that the "
    "result does not depend on micro-batches"
)


def _loss_agg(config: ForeignConfig) -> Any:
    """Returns the aggregation that RLinf computes, which depends on its micro-batches (`training_step` of its actors)."""
    key = "algorithm.loss_agg_func"
    if str(config.leaves.get("algorithm.adv_type")).lower() == _DYNAMIC:
        return _episode_loss(config)
    name, dynamic = config(key, "token-mean"), bool(config("runner.enable_dynamic_batch_size", False))
    micro_batch = config.integer("algorithm.training_batch_size_per_gpu")
    scaled = bool(config("algorithm.use_valid_token_scale", False))
    if scaled and not _is_megatron(config):
        config.omit("algorithm.use_valid_token_scale", "RLinf's FSDP trainer does not read it", False)
        scaled = False
    if name == "token-mean" and scaled:
        if _is_colocated(config):
            return "token-mean"
        if _gradient_factor(config) is None:
            config.omit(
                "algorithm.use_valid_token_scale",
                "with actor and rollout apart RLinf divides by the longest response, and multiplies by the number of "
                "data-parallel ranks, which is left out: actor.optim.clip_grad sees smaller gradients",
            )
        return "seq-mean-token-sum-norm"
    if not dynamic and micro_batch == 1:
        if name == "token-mean":
            config.omit(key, "RLinf averages each micro-batch by itself, and each has one response", False)
            return "seq-mean-token-mean"
    elif dynamic or name == "token-mean":
        config.omit(key, _PER_MICRO_BATCH)
    return name


def _gradient_factor(config: ForeignConfig) -> int | None:
    """Returns the factor by which RLinf scales its gradients and rlhpc does not: the number of data-parallel ranks if
    `use_valid_token_scale` is set and actor and rollout are not colocated, otherwise 1. Returns None if the configuration
    does not determine that number.
    """
    scaled = (
        config("algorithm.use_valid_token_scale", False)
        and config("algorithm.loss_agg_func", "token-mean") == "token-mean"
    )
    if not scaled or not _is_megatron(config) or _is_colocated(config):
        return 1
    ranks = [
        str(value)
        for names, value in config.section("cluster.component_placement").items()
        if "actor" in [name.strip() for name in names.split(",")]
    ]
    bounds = ranks[-1].split("-") if ranks else []
    if config("cluster.auto_scheduler", False) or not bounds or not all(bound.isdigit() for bound in bounds):
        return None
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    per_replica = math.prod(config.peek(f"actor.model.{name}", 1) or 1 for name in sizes)
    return max(1, (int(bounds[-1]) - int(bounds[0]) + 1) // per_replica)


def _smaller_gradients_rule(key: str) -> Rule:
    """Returns the rule for an optimizer key that is compared with gradients: the value is divided by `_gradient_factor`."""

    def rule(config: ForeignConfig) -> Any:
        value = config(key, UNSET)
        factor = _gradient_factor(config) or 1
        return value if value is UNSET or factor == 1 else float(value) / factor

    return rule


def _episode_loss(config: ForeignConfig) -> str:
    """Returns the aggregation over the turns of episodes (algorithms/loss_scales.py): for a single agent, all three scales
    give each episode the same weight.
    """
    scales = list(config("algorithm.loss_scales", []))
    config("algorithm.loss_agg_func")
    if scales == ["group_level", "agent_level", "turn_level"]:
        if "agentloop.max_planner_turns" in config.leaves:
            config.omit(
                "algorithm.loss_scales",
                "an episode's roles have the same weight, whatever the number of their agents; RLinf weighs each agent",
            )
    elif scales == ["group_level"] and config("actor.pack_traj", True):
        config.omit("algorithm.loss_scales", "RLinf multiplies the loss by the mean number of turns")
    else:
        config.omit(
            "algorithm.loss_agg_func",
            "RLinf takes each turn for a response, so that an episode weighs more with each turn; here it is one sequence",
        )
    return "seq-mean-token-mean"


def _shuffle_rollout(config: ForeignConfig) -> Any:
    """Explains that rlhpc deals responses to minibatches at random, which matters if there are several."""
    reason = "responses are dealt to minibatches at random"
    config.omit(
        "algorithm.shuffle_rollout",
        reason,
        _minibatches(config) > 1 and not config.leaves.get("algorithm.shuffle_rollout", True),
    )
    return UNSET


def _entropy_coef(config: ForeignConfig) -> Any:
    coefficient = config("algorithm.entropy_bonus", 0.0)
    return coefficient if config("algorithm.calculate_entropy", False) else 0.0


def _early_stop(config: ForeignConfig) -> Any:
    key = "algorithm.early_stop_imp_ratio"
    if not _is_megatron(config):
        return config.omit(key, "RLinf's FSDP trainer does not read it", False)
    if config(key) is None or (ratio := config.number(key)) >= 1e9:  # stands for none
        return UNSET
    config.omit(key, "RLinf leaves out a micro-batch beyond it, rlhpc the minibatch's optimizer step")
    return ratio


def _kl_coef(config: ForeignConfig) -> float:
    in_reward, in_loss = config.number("algorithm.reinpp_kl_beta"), config.number("algorithm.kl_beta", 0.0)
    if in_reward and in_loss:
        config.omit(
            "algorithm.kl_beta", "a run has one penalty, in the loss or in the reward: that of the reward is written"
        )
    return in_reward or in_loss


def _advantage(config: ForeignConfig) -> Any:
    if config("algorithm.use_reinpp_baseline"):
        return "reinforce++_baseline"
    name = str(config("algorithm.adv_type")).lower()
    if name == "gae" and not has_critic(config.leaves):
        config.omit(
            "algorithm.adv_type", "without a critic RLinf's gae gives each token the reward, as raw does", False
        )
        return "raw"
    if name == _DYNAMIC and name not in ESTIMATORS.names():
        return "grpo"
    return name if name in ESTIMATORS.names() else choice("algorithm.adv_type", ADVANTAGES)(config)


def _credit(config: ForeignConfig) -> Any:
    """Returns the credit of turns: RLinf's `turn` compares all turns of a problem's episodes with each other, so that long
    episodes count more, and `trajectory` the episodes, as GRPO does.
    """
    if str(config("algorithm.adv_type")).lower() != _DYNAMIC or _DYNAMIC in ESTIMATORS.names():
        return UNSET
    return "episode" if config("algorithm.advantage_mode", "turn") == "trajectory" else "all_turns"


def _gamma(config: ForeignConfig) -> Any:
    """Returns the discount, which RLinf uses with a critic only (algorithms/advantages.py)."""
    if has_critic(config.leaves):
        return config("algorithm.gamma")
    config.omit("algorithm.gamma", "RLinf discounts with a critic only", False)
    return 1.0


def _normalization(config: ForeignConfig) -> str:
    if str(config("algorithm.adv_type")).lower() == "reinpp":
        config.omit("algorithm.normalize_advantages", "the estimator normalizes", False)
        return "none"
    if not config("algorithm.normalize_advantages", False):
        return "none"
    if _minibatches(config) > 1 and not _is_colocated(config):
        config.omit(
            "algorithm.normalize_advantages",
            "with actor and rollout apart RLinf normalizes each minibatch by itself; rlhpc all responses of a step",
        )
    return "batch"


# -- tables -------------------------------------------------------------------------------------------------------------


def trained_group_rows(group: str) -> Rows:
    """Returns the rows of a trained group, `actor` or `critic`."""
    return [
        (f"{group}.training_backend", _trainer(group)),
        (f"{group}.max_tokens_per_micro_batch", _micro_batch_tokens),
        (f"{group}.enable_dp_load_balance", f"{group}.enable_dp_load_balance"),
        (f"{group}.model.dtype", computation_dtype(group, "bf16")),
        (f"{group}.grad_scaler.init_scale", _grad_scaler(group, "init_scale")),
        (f"{group}.grad_scaler.growth_interval", _grad_scaler(group, "growth_interval")),
        (f"{group}.model.gradient_checkpointing", _gradient_checkpointing(group)),
        (f"{group}.model.router_aux_loss_coef", _router_loss(group)),
        (f"{group}.parallel.tensor", _parallel(group, "tensor_model_parallel_size")),
        (f"{group}.parallel.context", _parallel(group, "context_parallel_size")),
        (f"{group}.parallel.expert", _parallel(group, "expert_model_parallel_size")),
        (f"{group}.fsdp.cpu_offload", f"{group}.fsdp_config.cpu_offload"),
        (f"{group}.fsdp.reshard_after_forward", _reshard(group)),
        (
            f"{group}.fsdp.enable_gradient_accumulation",
            lambda config: bool(config(f"{group}.fsdp_config.enable_gradient_accumulation", False)) or UNSET,
        ),
        (
            f"{group}.kernels",
            lambda config: "liger" if config(f"{group}.fsdp_config.use_liger_kernel", False) else UNSET,
        ),
        (f"{group}.optim.name", _optimizer(group)),
        *optimizer_rows(group),
        (f"{group}.optim.weight_decay", _weight_decay(group)),
        (f"{group}.optim.lr_scheduler", _schedule(group)),
        (f"{group}.optim.min_lr", _min_lr(group)),
        (f"{group}.optim.lr_warmup_steps", _warmup(group)),
        (f"{group}.optim.lr_decay_steps", _decay_steps(group)),
    ]


def _weight_decay(group: str) -> Rule:
    key = f"{group}.optim.weight_decay"

    def rule(config: ForeignConfig) -> Any:
        decay = config.number(key)
        if decay and _is_megatron(config, group):
            config.omit(
                f"{key} {group}.optim.lr",
                "Megatron decays neither biases nor the weights of norms; rlhpc decays all weights",
            )
        return decay

    return rule


def _router_loss(group: str) -> Rule:
    key = f"{group}.model.moe_aux_loss_coeff"

    def rule(config: ForeignConfig) -> Any:
        coefficient = float(config(key, 0.0))
        if not coefficient:
            return UNSET
        config.omit(key, "Megatron adds the losses of the layers up; transformers takes one over all layers")
        return coefficient

    return rule


def _reshard(group: str) -> Rule:
    def rule(config: ForeignConfig) -> bool:
        if config(f"{group}.fsdp_config.sharding_strategy") == "shard_grad_op":
            return False
        return bool(config(f"{group}.fsdp_config.reshard_after_forward"))

    return rule


def _expert_engine(config: ForeignConfig) -> Any:
    """Returns whether the ranks of an engine hold whole experts; an engine of one rank holds all of them."""
    divides_experts = config("rollout.sglang.enable_ep_moe", False)
    return True if divides_experts and config.integer("rollout.tensor_parallel_size", 1) > 1 else UNSET


ENGINE: Rows = [
    ("rollout.rollout_backend", _engine_backend),
    (
        "rollout.parallel.tensor",
        lambda config: n if (n := config.integer("rollout.tensor_parallel_size", 1)) > 1 else UNSET,
    ),
    ("rollout.parallel.expert", _expert_engine),
    ("rollout.top_p", "algorithm.sampling_params.top_p"),
    (
        "rollout.top_k",
        lambda config: k if 0 < (k := config.integer("algorithm.sampling_params.top_k", -1)) < 100_000 else -1,
    ),
    ("rollout.max_new_tokens", _new_tokens),
    ("rollout.max_model_len", "runner.seq_length"),
    ("rollout.max_batch_size", "rollout.max_running_requests"),
    ("rollout.gpu_memory_utilization", "rollout.gpu_memory_utilization"),
    ("rollout.dtype", _engine_dtype),
    (
        "rollout.engine_kwargs",
        lambda config: {"enforce_eager": True} if config("rollout.enforce_eager", False) else UNSET,
    ),
]
_TRAINING: Rows = [
    ("", _shuffle_rollout),
    ("algorithm.adv_type", _advantage),
    ("algorithm.credit", _credit),
    ("algorithm.gamma", _gamma),
    ("algorithm.loss_type", choice("algorithm.loss_type", LOSSES)),
    ("algorithm.loss_agg", _loss_agg),
    ("algorithm.group_size", "algorithm.group_size"),
    ("algorithm.normalize_advantages", _normalization),
    ("algorithm.clip_ratio_low", _clip_ratio("low")),
    ("algorithm.clip_ratio_high", _clip_ratio("high")),
    ("algorithm.clip_ratio_c", "algorithm.clip_ratio_c"),
    ("algorithm.early_stop_imp_ratio", _early_stop),
    ("algorithm.entropy_coef", _entropy_coef),
    ("algorithm.kl_coef", _kl_coef),
    (
        "algorithm.kl_type",
        choice(
            "algorithm.kl_penalty_type",
            {"low_var_kl": "k3", "kl": "k1", "mse": "k2", "k1": "k1", "k2": "k2", "k3": "k3", "abs": "abs"},
        ),
    ),
    ("algorithm.kl_in", lambda config: "reward" if config("algorithm.reinpp_kl_beta") else UNSET),
    ("algorithm.update_epochs", lambda config: 1),
    (
        "algorithm.recompute_logprobs",
        lambda r: bool(r("algorithm.recompute_logprobs", False) or r("algorithm.importance_sampling_fix")),
    ),
    (
        "algorithm.tis_cap",
        lambda r: (
            float(r("algorithm.importance_sampling_clip", 2.0)) if r("algorithm.importance_sampling_fix") else UNSET
        ),
    ),
    ("rollout.temperature", lambda config: config.number("algorithm.sampling_params.temperature", 1.0)),
    ("data.prompts_per_step", "data.rollout_batch_size"),
    ("reward.terms", reward_terms),
    ("reward.failed", failed_reward),
    ("actor.global_batch_size", _global_batch_size),
    ("actor.offload_in_rollout", _offload_in_rollout),
    (
        "actor.model.model_path",
        lambda config: config("actor.model.model_path") or config("rollout.model.model_path", UNSET),
    ),
    *adapter_rows(),
    *trained_group_rows("actor"),
    *((key, _smaller_gradients_rule(key)) for key in ("actor.optim.clip_grad", "actor.optim.adam_eps")),
]
ROWS: Rows = [*PROBLEMS, *ENGINE, *_TRAINING]
#: Further keys of runs with a value model.
CRITIC: Rows = [
    ("algorithm.gae_lambda", "algorithm.gae_lambda"),
    ("algorithm.value_clip", "algorithm.value_cliprange"),
    ("critic.warmup_steps", "algorithm.critic_warmup_steps"),
    *trained_group_rows("critic"),
]
