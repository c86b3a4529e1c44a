"""Defaults of RLinf for keys that a configuration omits.

The values come from RLinf's code at commit `REVISION`; the comments name the files. Keys that RLinf requires have no entry.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

REVISION = "a3816b596478dcd8a5c69a6ec1468c9519f77b5b"

#: Defaults of all task types.
_COMMON: dict[str, Any] = {
    "actor.optim.adam_eps": 1e-8,  # hybrid_engines/fsdp/fsdp_model_manager.py, build_optimizer and build_optimizers
}
_EMBODIED: dict[str, Any] = {
    "algorithm.update_epoch": 1,  # workers/actor/embodied_fsdp_actor_worker.py, fsdp_sac_policy_worker.py
    "env.train.use_rel_reward": False,  # envs/frankasim/frankasim_env.py and others
    "env.eval.ignore_terminations": False,
    "runner.enable_decoupled_mode": False,  # runners/async_embodied_runner.py
    "runner.val_check_interval": -1,  # config.py, validate_embodied_cfg
}
EMBODIED: dict[str, Any] = {
    **_COMMON,
    **_EMBODIED,
    "actor.optim.weight_decay": 0.01,  # fsdp_model_manager.py, build_optimizer: AdamW
    "algorithm.gamma": 1.0,  # embodied_fsdp_actor_worker.py, async_ppo_fsdp_worker.py
    "algorithm.gae_lambda": 1.0,
    "algorithm.normalize_advantages": True,
}
SAC: dict[str, Any] = {
    **_COMMON,
    **_EMBODIED,
    "actor.optim.adam_beta1": 0.9,  # fsdp_model_manager.py, build_optimizers: Adam without weight decay
    "actor.optim.adam_beta2": 0.999,
    "algorithm.backup_entropy": True,  # workers/actor/fsdp_sac_policy_worker.py
    "algorithm.critic_actor_ratio": 1,
    "algorithm.target_update_freq": 1,
    "algorithm.entropy_tuning.alpha_type": "softplus",
    "algorithm.entropy_tuning.initial_alpha": 0.01,
}
IQL: dict[str, Any] = {
    "actor.optim.adam_eps": 1e-8,
    "actor.optim.adam_beta1": 0.9,
    "actor.optim.adam_beta2": 0.999,
    "runner.val_check_interval": -1,
    "env.eval.ignore_terminations": False,
}
#: DAgger and supervised fine-tuning build their optimizer as PPO does.
DAGGER: dict[str, Any] = {**_COMMON, **_EMBODIED, "actor.optim.weight_decay": 0.01}
SUPERVISED: dict[str, Any] = {**_COMMON, "actor.optim.weight_decay": 0.01, "runner.val_check_interval": -1}
#: Defaults of the trained groups of a language model's run.
_TRAINED_GROUP: dict[str, Any] = {
    "optim.adam_eps": 1e-8,
    "optim.weight_decay": 0.01,  # fsdp_model_manager.py, build_optimizer; config.py, validate_megatron_cfg
    "fsdp_config.cpu_offload": False,  # config.py, validate_fsdp_cfg
    "fsdp_config.reshard_after_forward": True,
    "enable_dp_load_balance": False,  # workers/actor/fsdp_actor_worker.py, ma_megatron_actor_worker.py
}
#: Defaults of the learning rate schedules: keys that Megatron's trainer reads, and keys that FSDP's trainer reads.
_MEGATRON = {"lr_sched.lr_decay_style": "constant", "lr_sched.lr_warmup_iters": 0}  # config.py, validate_megatron_cfg
_FSDP = {"optim.lr_scheduler": "constant", "optim.lr_warmup_steps": -1}  # fsdp_model_manager.py, build_lr_scheduler
_LANGUAGE: dict[str, Any] = {
    "algorithm.gamma": 1.0,  # workers/megatron_worker.py, compute_advantages_and_returns; algorithms/advantages.py
    "algorithm.gae_lambda": 1.0,
    "algorithm.importance_sampling_fix": False,  # config.py, validate_reasoning_cfg
    "algorithm.n_minibatches": 1,
    "algorithm.training_batch_size_per_gpu": 1,
    "algorithm.reinpp_kl_beta": 0.0,  # megatron_worker.py, fsdp_actor_worker.py
    "algorithm.use_reinpp_baseline": False,
    "algorithm.critic_warmup_steps": 0,  # runners/reasoning_runner.py
    "data.filter_prompt_by_length": False,  # data/datasets/reasoning/dataset.py
    "reward.reward_scale": 1.0,  # algorithms/rewards/math/__init__.py
    "reward.reward_min_val": -1.0,
    "reward.reward_max_val": 1.0,
}


def language_defaults(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the defaults of a language model's run, which depend on the trainer and on the critic."""
    defaults = dict(_LANGUAGE)
    for group in ("actor", "critic") if has_critic(leaves) else ("actor",):
        megatron = leaves.get(f"{group}.training_backend") == "megatron"
        trained_defaults = _TRAINED_GROUP | (_MEGATRON if megatron else _FSDP)
        defaults |= {f"{group}.{key}": value for key, value in trained_defaults.items()}
    if leaves.get("actor.training_backend") != "megatron":  # Megatron requires the key
        defaults["algorithm.clip_ratio_c"] = 3.0  # workers/actor/fsdp_actor_worker.py
    return defaults


def has_critic(leaves: Mapping[str, Any]) -> bool:
    """Returns whether a language model's run has a value model (workers/critic/megatron_critic_worker.py)."""
    return bool(leaves.get("critic.use_critic_model", False))
