"""Translation tables of RLinf's embodied runs: environments, policies, PPO and GRPO."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rlhpc.cli.foreign import rlinf_defaults
from rlhpc.cli.foreign.rlinf_environments import (
    ENVIRONMENTS,
    has_rollout_parts,
    is_embodied,
    is_grpo,
    is_mlp,
    is_registered,
    model_type_of,
    rollout_epochs,
)
from rlhpc.cli.foreign.rlinf_openpi import openpi_options
from rlhpc.cli.foreign.rlinf_precision import computation_dtype, computation_dtype_key, dtype_name
from rlhpc.cli.foreign.rlinf_unsupported_embodied import PPO_OPTIONAL, embodied_keys
from rlhpc.cli.foreign.rules import UNSET, ForeignConfig, Requirement, Rows, Rule, RunKind, allow_only, is_null

LOSSES = {"actor_critic": "ppo", "actor": "ppo", "decoupled_actor_critic": "decoupled_ppo"}
ADVANTAGES = {"gae": "gae", "grpo": "grpo", "raw": "raw", "reinpp": "reinforce++"}


def optimizer_rows(group: str) -> Rows:
    """Returns the rows of a group's optimizer settings, which have the same names in both projects."""
    names = ("lr", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad")
    return [(key, key) for key in (f"{group}.optim.{name}" for name in names)]


def adapter_rows() -> Rows:
    """Returns the rows of new LoRA adapters, whose scale is 1: RLinf sets `lora_alpha` to the rank (models/__init__.py)."""
    return [("actor.lora.rank", _adapter_rank), ("actor.lora.alpha", _adapter_rank)]


def _adapter_rank(config: ForeignConfig) -> Any:
    return config.integer("actor.model.lora_rank", 32) if config.flag("actor.model.is_lora") else UNSET


def _adapter_path(config: ForeignConfig) -> Any:
    if not config.flag("actor.model.is_lora"):
        return config.omit("actor.model.lora_path", "RLinf reads it with is_lora", False)
    return config("actor.model.lora_path", UNSET)


def _new_adapters_rule(rule: Rule) -> Rule:
    """Returns the rule restricted to adapters that do not come from a folder, which has its own alpha and layers."""
    path = "actor.model.lora_path"
    return lambda config: (
        UNSET if _adapter_rank(config) is UNSET or not is_null(config.leaves.get(path)) else rule(config)
    )


#: Layers on which RLinf puts new adapters.
_ADAPTED_LAYERS = (
    "proj", "qkv", "fc1", "fc2", "q", "kv", "fc3", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj",
    "down_proj", "lm_head",
)  # fmt: skip


def choice(key: str, values_by_name: Mapping[str, Any]) -> Rule:
    """Returns a rule that translates the value of `key` by `values_by_name`.

    The rule returns an unknown value unchanged, because a plugin may register a component under this name.
    """

    def rule(config: ForeignConfig) -> Any:
        value = config(key)
        if value is None:
            return UNSET
        if str(value).lower() not in values_by_name:
            missing_feature = rf"^name {re.escape(str(value))}$"
            config.omit(
                key,
                f"rlhpc has no {value}; register one of that name, or choose another",
                missing_feature=missing_feature,
            )
            return value
        return values_by_name[str(value).lower()]

    return rule


#: RLinf model type → action head of rlhpc's `openvla`.
_OPENVLA = {"openvla": "tokens", "openvla_oft": "parallel"}

# -- PPO and GRPO -------------------------------------------------------------------------------------------------------


def _embodied_normalization(config: ForeignConfig) -> str:
    if is_grpo(config):
        config.omit("algorithm.normalize_advantages", "group estimators divide by the group's spread in both", False)
        return "none"
    if config.flag("runner.use_training_pipeline") and not config.flag("algorithm.normalize_advantages"):
        return "none"
    key = "algorithm.normalize_advantages"
    if not config.flag(key):
        config.omit(key, "RLinf's embodied GAE normalizes whatever it says", False)
    if not _has_one_actor(config):
        config.omit(
            key if key in config.configured_keys else "algorithm.adv_type",
            "each of RLinf's actors normalizes over its own part of a rollout; rlhpc over all ranks",
        )
    return "batch"


def _has_one_actor(config: ForeignConfig) -> bool:
    ranks = [
        str(value)
        for names, value in config.section("cluster.component_placement").items()
        if "actor" in [name.strip() for name in names.split(",")]
    ]
    return bool(ranks) and re.fullmatch(r"(\d+)(-\1)?", ranks[-1]) is not None


def _gamma(config: ForeignConfig) -> Any:
    """Returns the discount, which RLinf's group estimators do not use: they take an episode's sum of rewards."""
    if not is_grpo(config):
        return config("algorithm.gamma")
    config.omit("algorithm.gamma", "RLinf's group estimators do not discount", False)
    return UNSET if config.leaves.get("algorithm.adv_type") == "grpo" else 1.0


def _decoupled_rule(key: str) -> Rule:
    def rule(config: ForeignConfig) -> Any:
        if config.leaves.get("algorithm.loss_type") != "decoupled_actor_critic":
            return UNSET
        return config.integer(key)

    return rule


def _of_critic(key: str) -> Rule:
    """Returns the rule of a key that RLinf reads with a critic."""
    return lambda config: UNSET if is_grpo(config) else config(key, UNSET)


def _group_size(config: ForeignConfig) -> int:
    """Returns the size of the groups that RLinf's estimator compares; with a critic, the size of the environment's groups."""
    resets, compared = config.integer("env.train.group_size"), config.integer("algorithm.group_size", 1)
    if not is_grpo(config):
        return max(1, resets or compared)
    if resets not in (0, compared):
        config.omit(
            "env.train.group_size",
            f"RLinf compares {compared} slots, of which {resets} share a reset; in rlhpc all slots of a group share it",
        )
    return max(1, compared)


def _omit_unused(config: ForeignConfig) -> Any:
    """Omits keys that have no effect in this configuration but may have an effect in another one."""
    if config.leaves.get("actor.optim.value_lr") == config.leaves.get("actor.optim.lr"):
        config.omit("actor.optim.value_lr", "policy and critic have the same learning rate", False)
    precision = config.leaves.get("rollout.model.precision")
    if str(precision) != str(config.leaves.get("actor.model.precision")):
        config.omit("rollout.model.precision", "acting computes in actor.model.dtype, as training does")
    if is_grpo(config):
        for key in _CRITIC_KEYS:
            config.omit(key, "for a critic, which group estimators do without", False)
    if not config.leaves.get("algorithm.filter_rewards"):
        for key in ("algorithm.rewards_lower_bound", "algorithm.rewards_upper_bound"):
            config.omit(key, "RLinf reads it with filter_rewards", False)
    if _is_pi(config):
        config.omit("algorithm.entropy_type", "RLinf averages the entropy of π0 over steps and components", False)
    elif config.leaves.get("algorithm.entropy_type") != config.leaves.get("algorithm.logprob_type"):
        config.omit(
            "algorithm.entropy_type",
            "rlhpc averages the entropy over the units of logprob_type: scale algorithm.entropy_coef",
            bool(config.leaves.get("algorithm.entropy_bonus")),
        )
    return UNSET


def _entropy_coef(config: ForeignConfig) -> Any:
    """Returns the coefficient of the entropy, which RLinf averages over the components of π0's actions."""
    bonus = config("algorithm.entropy_bonus", UNSET)
    if bonus is UNSET or config.leaves.get("actor.model.openpi.noise_method") != "flow_noise":
        return bonus
    chunk, dim = (
        config.integer("actor.model.num_action_chunks", 1),
        config.integer("actor.model.openpi.action_env_dim", 7),
    )
    level = config.text("algorithm.logprob_type", "chunk_level")
    units = {"chunk_level": chunk * dim, "action_level": dim}.get(level, 1)
    return float(bonus) / units


#: Keys of a critic.
_CRITIC_KEYS = (
    "actor.optim.value_lr", "algorithm.huber_delta", "actor.optim.critic_warmup_steps", "actor.model.value_type",
    "actor.model.vh_mode", "actor.model.openpi.value_after_vlm", "actor.model.openpi.value_vlm_mode",
    "actor.model.openpi.detach_critic_input",
)  # fmt: skip


#: RLinf's schedules (hybrid_engines/fsdp/utils.py, get_lr_scheduler) → rlhpc's. The last two begin their warm-up at
#: lr / (steps + 1), as rlhpc does, and end at `min_lr`.
_SCHEDULES = {
    "constant": "constant", "torch_constant": "constant", "cosine": "cosine", "torch_cosine": "cosine",
    "openpi_cosine": "cosine", "ref_warmup_cosine": "cosine",
}  # fmt: skip


def _rlinf_schedule(config: ForeignConfig) -> str:
    return config.text("actor.optim.lr_scheduler", "constant")


def _schedule(config: ForeignConfig) -> Any:
    """Returns the schedule of the learning rate."""
    name = _rlinf_schedule(config)
    if name not in _SCHEDULES:
        return config.omit(
            "actor.optim.lr_scheduler", f"rlhpc has no schedule {name}", missing_feature=rf"takes {re.escape(name)}$"
        )
    return UNSET if _SCHEDULES[name] == "constant" else _SCHEDULES[name]


def _decay_steps(config: ForeignConfig) -> Any:
    length = config.integer("actor.optim.total_training_steps")
    return length if _SCHEDULES.get(_rlinf_schedule(config)) == "cosine" and length > 0 else UNSET


def _warmup_steps(config: ForeignConfig) -> Any:
    """Returns the steps of the warm-up; RLinf's torch schedules have none."""
    name, steps = _rlinf_schedule(config), config.integer("actor.optim.lr_warmup_steps", -1)
    if steps < 0:  # a negative number stands for a share of the schedule
        share = config.number("actor.optim.lr_warmup_steps_ratio")
        steps = int(share * config.integer("actor.optim.total_training_steps"))
    if name.startswith("torch_") or steps <= 0:
        return UNSET
    if name in ("constant", "cosine"):
        config.omit("actor.optim.lr_warmup_steps", "RLinf begins at 0, rlhpc at lr / (steps + 1)", False)
    return steps


#: Learning rate by which RLinf's schedule `cosine` divides `min_lr`: the default of torch's optimizers.
_TORCH_LR = 1e-3


def _min_lr(config: ForeignConfig) -> Any:
    name, key = _rlinf_schedule(config), "actor.optim.min_lr"
    if _SCHEDULES.get(name) != "cosine":
        return UNSET
    rate = config("actor.optim.min_lr_rate")
    if rate is None and name != "cosine":
        return config.number(key) or UNSET
    share = config.number(key) / _TORCH_LR if rate is None else config.number("actor.optim.min_lr_rate")
    return config.number("actor.optim.lr") * share or UNSET


#: Rows of the schedule, of which RLinf counts the steps of a run with environments, and the updates of a supervised one.
SCHEDULE: Rows = [
    ("actor.optim.lr_scheduler", _schedule),
    ("actor.optim.min_lr", _min_lr),
    ("actor.optim.lr_decay_steps", _decay_steps),
    ("actor.optim.lr_warmup_steps", _warmup_steps),
]


_LOSS_AGG = "algorithm.loss_agg_func"


def _plays_single_episodes(config: ForeignConfig) -> bool:
    """Returns whether a slot plays one episode of its own length, after which RLinf masks the loss."""
    return not config.flag("env.train.auto_reset") and not config.flag("env.train.ignore_terminations")


def _loss_agg(config: ForeignConfig) -> str:
    """Returns the average of RLinf's losses of policy and values, which do not read `loss_agg_func` (algorithms/losses.py): an
    episode of its own length has the weight of any other (`masked_mean_ratio`), and rows without a mask are averaged.
    """
    if _plays_single_episodes(config):
        chunk, in_chunks = config.integer("actor.model.num_action_chunks", 1), config.text("algorithm.reward_type")
        config.omit(
            _LOSS_AGG,
            "RLinf's embodied losses give each episode the same weight, whatever it says"
            if chunk == 1 or in_chunks != "chunk_level"
            else _PARTS_OF_CHUNKS,
            chunk > 1 and in_chunks == "chunk_level",
        )
        return "seq-mean-token-mean"
    if config.flag("algorithm.filter_rewards"):
        config.omit(
            _LOSS_AGG, "RLinf averages each micro-batch over the groups that train; rlhpc averages over the minibatch"
        )
    else:
        config.omit(_LOSS_AGG, "RLinf's embodied losses are averaged over all rows, whatever it says", False)
    return "token-mean"


_PARTS_OF_CHUNKS = (
    "RLinf divides an episode's loss by its steps, rlhpc by its decisions: an episode that ends within a chunk weighs more in "
    "RLinf, by less than a chunk's share of its steps"
)


def _counts_filtered_groups(config: ForeignConfig) -> Any:
    return True if config.flag("algorithm.filter_rewards") and _plays_single_episodes(config) else UNSET


def _behave_weight_threshold(config: ForeignConfig) -> Any:
    key = "algorithm.behave_weight_threshold"
    if config.leaves.get("algorithm.loss_type") != "decoupled_actor_critic":
        return config.omit(key, "RLinf reads it with decoupled_actor_critic", False)
    if (threshold := config(key)) is None:
        return UNSET
    if _loss_agg(config) == "token-mean":
        config.omit(key, "RLinf averages over the tokens that it keeps, rlhpc over all of the minibatch")
    return float(threshold)


def _is_asynchronous(config: ForeignConfig) -> bool:
    return bool(config("algorithm.loss_type") == "decoupled_actor_critic")


def _dual_clip(config: ForeignConfig) -> Any:
    """Returns dual clip's constant, which RLinf's asynchronous PPO alone passes to its loss (async_ppo_fsdp_worker.py)."""
    key = "algorithm.clip_ratio_c"
    if not _is_asynchronous(config) or (key in config.configured_keys and is_null(config.leaves[key])):
        return UNSET
    return config.number(key, 3.0)


_PPO: Rows = [
    ("", _omit_unused),
    ("algorithm.adv_type", choice("algorithm.adv_type", ADVANTAGES)),
    ("algorithm.loss_type", choice("algorithm.loss_type", LOSSES)),
    ("algorithm.gamma", _gamma),
    ("algorithm.gae_lambda", _of_critic("algorithm.gae_lambda")),
    ("algorithm.normalize_advantages", _embodied_normalization),
    ("algorithm.clip_ratio_low", "algorithm.clip_ratio_low"),
    ("algorithm.clip_ratio_high", "algorithm.clip_ratio_high"),
    ("algorithm.value_clip", _of_critic("algorithm.value_clip")),
    ("algorithm.value_coef", lambda config: 0.0 if config("algorithm.loss_type") == "actor" else 1.0),
    ("algorithm.loss_agg", _loss_agg),
    ("algorithm.count_filtered_groups", _counts_filtered_groups),
    ("algorithm.entropy_coef", _entropy_coef),
    ("algorithm.update_epochs", lambda config: config.integer("algorithm.update_epoch")),
    ("algorithm.logprob_type", "algorithm.logprob_type"),
    ("algorithm.reward_type", "algorithm.reward_type"),
    ("algorithm.clip_ratio_c", _dual_clip),
    ("algorithm.behave_weight_threshold", _behave_weight_threshold),
    # RLinf's asynchronous PPO does not recompute log-probs (async_ppo_embodied_runner.py).
    ("algorithm.proximal_policy", lambda config: "interpolated" if _is_asynchronous(config) else UNSET),
    ("algorithm.max_staleness", _decoupled_rule("algorithm.staleness_threshold")),
    ("algorithm.rollout_parts", lambda config: rollout_epochs(config) if has_rollout_parts(config) else UNSET),
    ("env.train.group_size", _group_size),
    ("actor.micro_batch_size", lambda config: config("actor.micro_batch_size", UNSET)),
    ("actor.optim.name", lambda config: "adamw" if config("actor.optim.weight_decay") else "adam"),
    *optimizer_rows("actor"),
    ("actor.optim.weight_decay", "actor.optim.weight_decay"),
    *SCHEDULE,
]


# -- policies -----------------------------------------------------------------------------------------------------------


def _is_pi(config: ForeignConfig) -> bool:
    return model_type_of(config.leaves) == "openpi"


_MODELS = "rlhpc.embodied.models.registry:MODELS"


def _model_type(config: ForeignConfig) -> str:
    """Returns the model type of a policy that acts, is cloned or is trained by PPO. A model of RLinf's that rlhpc does not
    have keeps its name.
    """
    name = str(config("actor.model.model_type", "mlp_policy"))
    if name == "mlp_policy":
        return "mlp"
    if name == "cnn_policy":
        return "resnet10"
    if name == "openpi":
        config.omit(
            "actor.model.model_path",
            "π0 and π0.5 are LeRobot's here: name your folder, in LeRobot's layout or in openpi's",
            missing_feature=r"^name openpi$",
        )
        return "lerobot"
    if name in _OPENVLA:
        return "openvla"
    if not is_registered(_MODELS, name):
        reason = f"rlhpc has no such policy: register yours as {name} (docs/how-to/add-model.md)"
        config.omit("actor.model.model_type", reason, missing_feature=rf"^name {re.escape(name)}$")
    return name


#: Policies that start from random weights.
_RANDOM_START_POLICIES = ("mlp_policy", "cnn_policy", "flow_policy")


def _vla_rule(rule: str | Rule) -> Rule:
    """Returns the rule restricted to policies that start from a pretrained model."""

    def rule_for_vla(config: ForeignConfig) -> Any:
        if model_type_of(config.leaves) in _RANDOM_START_POLICIES:
            return UNSET
        return config(rule, UNSET) if isinstance(rule, str) else rule(config)

    return rule_for_vla


def _backend(config: ForeignConfig) -> str:
    """Returns the training backend: `local` replicates the weights as RLinf's `no_shard` does; pretrained models are sharded,
    which computes the same and needs less memory.
    """
    name = config("actor.training_backend", "fsdp")
    strategy = config.text("actor.fsdp_config.sharding_strategy", "full_shard")
    if name != "fsdp":
        config.omit(
            "actor.training_backend", f"rlhpc has no {name}", False, missing_feature=rf"^name {re.escape(str(name))}$"
        )
    if _is_pi(config):
        return "local"  # the only backend for LeRobot's policies
    if model_type_of(config.leaves) in _RANDOM_START_POLICIES:
        return "local" if strategy == "no_shard" else "fsdp"
    return "fsdp"


def _fsdp_rule(key: str) -> Rule:
    return lambda config: UNSET if _backend(config) != "fsdp" else config(key, UNSET)


def _policy_dtype(config: ForeignConfig) -> Any:
    """Returns the precision of a policy's computation; small networks and LeRobot's policies compute in float32."""
    if not _is_pi(config) and model_type_of(config.leaves) not in _RANDOM_START_POLICIES:
        return computation_dtype("actor", "32")(config)
    key = computation_dtype_key(config, "actor")
    if _is_pi(config):
        is_same = config.leaves.get(key) is not None and dtype_name(config, key, "32") == "float32"
        return config.omit(key, "LeRobot's policies compute in float32", not is_same)
    if dtype_name(config, key, "32") != "float32":
        config.omit(key, "the policy computes in float32")
    return UNSET


def _policy_options(config: ForeignConfig) -> Any:
    name = model_type_of(config.leaves)
    if name == "mlp_policy":
        return {"actor_gain": 0.01414}
    if name in _OPENVLA:
        return _openvla_options(config, _OPENVLA[name])
    if name == "cnn_policy":  # RLinf freezes its encoder
        weights = config("actor.model.encoder_config.ckpt_name")
        return {"weights": f"{config('actor.model.model_path')}/{weights}", "freeze": True} if weights else UNSET
    if name != "openpi":
        return UNSET
    return openpi_options(config, learns_by_rl=str(config.leaves.get("algorithm.loss_type")) in LOSSES)


def _openvla_options(config: ForeignConfig, head: str) -> dict[str, Any]:
    if config.leaves.get("actor.model.use_film"):
        config.omit("actor.model.use_film", "rlhpc's openvla has no FiLM", missing_feature=r"\buse_film\b|\bFiLM\b")
    options: dict[str, Any] = {"head": head, "proprio": config.flag("actor.model.use_proprio"), **_sampling(config)}
    if head == "parallel" and config("actor.model.implement_version", "rlinf") == "rlinf":
        options["stop_token"] = False
    if options["proprio"] and config.flag("actor.model.is_lora"):
        options["proprio_adapters"] = True  # `fc1` and `fc2` are among the adapted layers
    if config.flag("actor.model.add_value_head"):
        options["value_hidden"] = [512, 128]
    if (key := config("actor.model.unnorm_key")) is not None:
        options["unnorm_key"] = key
    if config.leaves.get("env.train.env_type") == "libero":
        options["gripper"] = "rlds"
    return options


def _sampling(config: ForeignConfig) -> dict[str, Any]:
    """Returns the options of sampling action tokens, by the names of rlhpc; RLinf's 0 or -1 turns an option off."""
    options: dict[str, Any] = {}
    if not config.flag("rollout.sampling_params.do_sample", True):
        config.omit("rollout.sampling_params.do_sample", "training samples action tokens")
    for name, neutral in (("temperature_train", 1.0), ("temperature_eval", 0.0), ("top_k", -1)):
        key = f"rollout.sampling_params.{name}"
        value = max(config.number(key, neutral), 0.0)
        if name == "top_k":
            value = int(value) or neutral
        options[name] = value
    return options


def _attention(config: ForeignConfig) -> Any:
    implementation = config("actor.model.attn_implementation", UNSET)
    return "sdpa" if model_type_of(config.leaves) == "openvla_oft" else implementation


def _value_per_action(config: ForeignConfig) -> Any:
    if model_type_of(config.leaves) == "openvla_oft" and not is_grpo(config):
        # RLinf's value head has as many outputs as value_type says.
        per_action = config("actor.model.value_type", "chunk_level") != "chunk_level"
        return True if per_action and config.integer("actor.model.num_action_chunks", 1) > 1 else UNSET
    has_action_values = (
        not is_grpo(config)
        and config.leaves.get("algorithm.reward_type") == "action_level"
        and config.integer("actor.model.num_action_chunks", 1) > 1
    )
    return True if has_action_values else UNSET


def _checkpoints_gradients(config: ForeignConfig) -> Any:
    keys = ("actor.fsdp_config.gradient_checkpointing", "actor.model.gradient_checkpointing")
    if model_type_of(config.leaves) not in _OPENVLA:  # the others have nothing to recompute
        return UNSET
    return any(config.flag(key) for key in keys)


def _offload(group: str) -> Rule:
    """Returns the rule for `enable_offload`, which is kept if actor and rollout are colocated."""

    def rule(config: ForeignConfig) -> Any:
        components = config.section("cluster.component_placement")
        is_colocated = any({"actor", "rollout"} <= {name.strip() for name in names.split(",")} for names in components)
        if not config.flag(f"{group}.enable_offload") or not is_colocated:
            return UNSET
        if config.leaves.get("algorithm.loss_type") == "decoupled_actor_critic":
            return config.omit(f"{group}.enable_offload", "acting and training overlap; it saves memory", False)
        return True

    return rule


POLICY: Rows = [
    ("actor.model.model_type", _model_type),
    ("actor.model.hidden_sizes", lambda config: [256, 256, 256] if is_mlp(config) else UNSET),
    ("actor.model.log_std_init", lambda config: -0.5 if is_mlp(config) else UNSET),
    ("actor.model.num_action_chunks", "actor.model.num_action_chunks"),
    ("actor.model.kwargs", _policy_options),
    ("actor.training_backend", _backend),
    ("actor.fsdp.cpu_offload", _fsdp_rule("actor.fsdp_config.cpu_offload")),
    ("actor.fsdp.reshard_after_forward", _fsdp_rule("actor.fsdp_config.reshard_after_forward")),
    ("actor.fsdp.enable_gradient_accumulation", _fsdp_rule("actor.fsdp_config.enable_gradient_accumulation")),
    ("actor.model.add_value_head", _vla_rule("actor.model.add_value_head")),
    ("actor.model.model_path", _vla_rule("actor.model.model_path")),
    ("actor.model.dtype", _policy_dtype),
    ("actor.model.gradient_checkpointing", _checkpoints_gradients),
    ("actor.model.attn_implementation", _vla_rule(_attention)),
    ("actor.lora.rank", _vla_rule(_adapter_rank)),
    ("actor.lora.path", _vla_rule(_adapter_path)),
    ("actor.lora.alpha", _vla_rule(_new_adapters_rule(_adapter_rank))),
    ("actor.lora.init", _vla_rule(_new_adapters_rule(lambda config: "gaussian"))),
    ("actor.lora.target_modules", _vla_rule(_new_adapters_rule(lambda config: list(_ADAPTED_LAYERS)))),
]
#: Additional keys of PPO and GRPO.
_ON_POLICY: Rows = [
    ("env.train.auto_reset", lambda config: config.flag("env.train.auto_reset")),
    ("actor.model.value_per_action", _value_per_action),
    ("actor.enable_offload", _offload("actor")),
    ("rollout.enable_offload", _offload("rollout")),
]


# -- kinds --------------------------------------------------------------------------------------------------------------

#: Losses of embodied runs without a counterpart: name → (its description, pattern of the capability).
_OTHER_LOSSES = {
    "embodied_nft": ("rlhpc has no NFT (negative-aware fine-tuning of flow policies)", r"\bNFT\b"),
    "opd": (
        "rlhpc distils language models, but has no distillation into a policy that acts",
        r"^(embodied|off_policy|bc) .*(teacher|distil)",
    ),
    "rlt_ac": ("rlhpc has no RLT (actor-critic on a VLA's tokens)", r"\bRLT\b"),
    "rlt_td3": ("rlhpc has no RLT (TD3 on a VLA's tokens)", r"\bRLT\b"),
}


def _missing_loss(loss: str) -> Requirement:
    missing, missing_feature = _OTHER_LOSSES[loss]
    return Requirement(
        "algorithm.loss_type",
        lambda leaves: missing if leaves.get("algorithm.loss_type") == loss else "",
        missing_feature,
    )


#: Conditions of all runs with environments. Each names one thing that rlhpc lacks.
REQUIREMENTS: Sequence[Requirement] = (
    *(_missing_loss(loss) for loss in _OTHER_LOSSES),
    Requirement(
        "runner.task_type",
        lambda leaves: (
            "the file collects demonstrations; rlhpc record does that (docs/how-to/demonstrations.md)"
            if is_embodied(leaves) and not any(key.startswith("algorithm.") for key in leaves)
            else ""
        ),
    ),
    Requirement(
        "runner.only_eval",
        lambda leaves: (
            "the file evaluates a policy; rlhpc eval does that with the configuration of the run that trained it"
            if leaves.get("runner.only_eval") is True
            else ""
        ),
    ),
    Requirement(
        "reward.model.model_type",
        lambda leaves: (
            "rlhpc has no reward from a vision-language model in a run with environments"
            if leaves.get("reward.use_reward_model") is True
            and is_embodied(leaves)
            and leaves.get("reward.model.model_type", "resnet") != "resnet"
            else ""
        ),
        r"^(embodied|off_policy) .*reward.*(vision-language|\bVLM\b)",
    ),
    Requirement(
        "reward.use_reward_model",
        lambda leaves: (
            "the classifier sees pictures and the policy sees numbers; in rlhpc both have the same observation"
            if leaves.get("reward.use_reward_model") is True
            and is_embodied(leaves)
            and model_type_of(leaves) == "mlp_policy"
            else ""
        ),
        r"reward_(obs|model_obs|camera)",
    ),
    allow_only("reward.reward_mode", ("per_step",), "rlhpc's reward model judges each step", r"reward_mode.*terminal"),
)
#: Conditions of policies that learn by PPO or GRPO.
_PPO_REQUIREMENTS = (
    allow_only(
        "actor.model.openpi.noise_method",
        ("flow_sde", "flow_noise"),
        "LeRobot's π0 and π0.5 draw their noise by flow_sde or flow_noise in rlhpc",
        r"^option (lerobot|pi0)\S* .*(flow_cps|reinflow)",
    ),
)


def _ppo_title(leaves: Mapping[str, Any]) -> str:
    names = [str(leaves[key]) for key in ("algorithm.adv_type", "algorithm.loss_type") if key in leaves]
    return f"embodied ({', '.join(names)})" if names else f"task_type embodied with loss_type {', '.join(LOSSES)}"


KINDS: Sequence[RunKind] = (
    RunKind(
        _ppo_title,
        "embodied",
        lambda leaves: is_embodied(leaves) and str(leaves.get("algorithm.loss_type")) in LOSSES,
        lambda leaves: [*ENVIRONMENTS, *_PPO, *POLICY, *_ON_POLICY],
        embodied_keys,
        lambda leaves: rlinf_defaults.EMBODIED,
        _PPO_REQUIREMENTS,
        PPO_OPTIONAL,
    ),
)
