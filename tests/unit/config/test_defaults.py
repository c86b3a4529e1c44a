"""Defaults of training keys are those of a named reference, or `docs/reference/defaults.md` says why not.

The tables below are the page's: `python -m tests.unit.config.test_defaults` prints it anew. A key of training that is in no
table, and in `ALONE` neither, fails: whoever adds one looks up what the references have.
"""

from __future__ import annotations

import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from omegaconf import OmegaConf

from rlhpc.config.schema import Schema
from rlhpc.runs.task_type import find_task_type

PAGE = Path(__file__).parents[3] / "docs/reference/defaults.md"
TRL = "TRL 1.16.0"
SB3 = "Stable-Baselines3 2.9.2"
CLEANRL = "CleanRL fe8d8a0"
RLINF = "RLinf a3816b5"


class Row(NamedTuple):
    """A key, and what the reference has for it.

    Attributes:
        key: Of rlhpc.
        theirs: Key of the reference.
        value: Its default, as rlhpc writes it.
        why: Why the default here is another; empty where both are the same.
        of: The reference, where it is not the table's.
    """

    key: str
    theirs: str
    value: Any
    why: str = ""
    of: str = ""


def optimizer(lr: float, group: str = "actor") -> list[Row]:
    """The optimizer of TRL's trainers: transformers' TrainingArguments, with the trainer's own learning rate."""
    at = f"{group}.optim"
    return [
        Row(f"{at}.name", "optim", "adamw"),
        Row(f"{at}.lr", "learning_rate", lr),
        Row(f"{at}.adam_beta1", "adam_beta1", 0.9),
        Row(f"{at}.adam_beta2", "adam_beta2", 0.999),
        Row(f"{at}.adam_eps", "adam_epsilon", 1e-8),
        Row(f"{at}.weight_decay", "weight_decay", 0.0),
        Row(f"{at}.clip_grad", "max_grad_norm", 1.0),
        Row(f"{at}.lr_warmup_steps", "warmup_steps", 0),
        Row(f"{at}.lr_scheduler", "lr_scheduler_type", "linear",
            "RLinf's: the rate of a step does not depend on how long the run is to be"),
        Row(f"{at}.min_lr", "min_lr", 0.0, of=RLINF),
        Row(f"{at}.lr_decay_steps", "lr_decay_iters", None, of=RLINF),
    ]  # fmt: skip


MODEL = [
    Row("actor.model.dtype", "bf16", "auto"),
    Row("actor.model.attn_implementation", "attn_implementation", "sdpa"),
    Row("actor.model.trust_remote_code", "trust_remote_code", False),
    Row("actor.model.gradient_checkpointing", "gradient_checkpointing", True,
        "changes memory and time, not the result; `rlhpc plan` says what a rank needs"),
    Row("actor.model.router_aux_loss_coef", "router_aux_loss_coef", None,
        "the loss is the algorithm's alone until a run asks for more; TRL takes the number of the model's folder"),
    Row("actor.lora.rank", "lora_r", 16, "0 trains all weights; TRL reads its number with `use_peft` only"),
    Row("actor.lora.alpha", "lora_alpha", 32, "adapters of rank 16 are not scaled, as RLinf's, whose alpha is the rank"),
    Row("actor.lora.dropout", "lora_dropout", 0.05, "RLinf's: the same network gives old and new log-probs of a token"),
    Row("actor.lora.target_modules", "lora_target_modules", None,
        "the same layers for every architecture; TRL takes PEFT's table by architecture"),
    Row("actor.grad_scaler.init_scale", "init_scale of torch.amp.GradScaler", 65536.0, of="torch 2.13"),
    Row("actor.grad_scaler.growth_interval", "growth_interval of ShardedGradScaler", 400, of="verl 1dda039"),
]  # fmt: skip
SEED = Row("runner.seed", "seed", 42, "CleanRL's; no number is better")

REFERENCES = {
    "reasoning": f"`GRPOConfig` and `ModelConfig` of {TRL} with transformers 5.24.0",
    "sft": f"`SFTConfig` and `ModelConfig` of {TRL} with transformers 5.24.0",
    "reward_model": f"`RewardConfig` and `ModelConfig` of {TRL} with transformers 5.24.0",
    "dpo": f"`DPOConfig` and `ModelConfig` of {TRL} with transformers 5.24.0",
    "embodied": f"`PPO` of {SB3}",
    "off_policy": f"`SAC` of {SB3}",
}
TABLES: dict[str, list[Row]] = {
    "reasoning": [
        SEED,
        Row("algorithm.adv_type", "scale_rewards", "grpo"),
        Row("algorithm.group_size", "num_generations", 8),
        Row("algorithm.loss_type", "importance_sampling_level", "ppo"),
        Row("algorithm.loss_agg", "loss_type", "token-mean"),
        Row("algorithm.clip_ratio_low", "epsilon", 0.2),
        Row("algorithm.clip_ratio_high", "epsilon_high", 0.2),
        Row("algorithm.clip_ratio_c", "delta", None),
        Row("algorithm.entropy_coef", "entropy_coef", 0.0),
        Row("algorithm.kl_coef", "beta", 0.0),
        Row("algorithm.update_epochs", "num_iterations", 1),
        Row("algorithm.overlong_filter", "mask_truncated_completions", False),
        Row("algorithm.tis_cap", "vllm_importance_sampling_clip_max", 3.0,
            "the losses take the engine's own log-probs as the old ones, so the ratio has what differs between engine and "
            "trainer; set it with `algorithm.recompute_logprobs`"),
        Row("algorithm.gamma", "algorithm.gamma", 1.0, of=RLINF),
        Row("algorithm.gae_lambda", "algorithm.gae_lambda", 1.0, of=RLINF),
        Row("algorithm.anneal_lr", "lr_scheduler_type", True, "as `actor.optim.lr_scheduler`"),
        *optimizer(1e-6),
        *MODEL,
        Row("reference.update_interval", "sync_ref_model", 0),
        Row("rollout.rollout_backend", "use_vllm", "hf"),
        Row("rollout.temperature", "temperature", 1.0),
        Row("rollout.top_p", "top_p", 1.0),
        Row("rollout.top_k", "top_k", -1),
        Row("rollout.max_new_tokens", "max_completion_length", 512, "the length belongs to the task; the examples all set it"),
        Row("rollout.gpu_memory_utilization", "vllm_gpu_memory_utilization", 0.3,
            "TRL's engine shares its accelerator with the trainer all the time; here it has one, or they are colocated"),
        *(
            row._replace(of=f"{RLINF}, qwen2.5-1.5b-ppo-megatron.yaml", theirs=row.key)
            for row in [
                *optimizer(1e-5, "critic")[:5],
                Row("critic.optim.weight_decay", "", 0.01, "as the actor's, which is TRL's"),
                *optimizer(1e-5, "critic")[6:],
            ]
        ),
        Row("critic.warmup_steps", "critic_warmup_steps", 0, of=RLINF),
    ],
    "sft": [SEED, Row("algorithm.anneal_lr", "lr_scheduler_type", True, "as `actor.optim.lr_scheduler`"),
            *optimizer(2e-5), *MODEL],
    "reward_model": [
        SEED,
        Row("algorithm.loss_type", "(the only loss)", "bradley_terry"),
        Row("algorithm.anneal_lr", "lr_scheduler_type", True, "as `actor.optim.lr_scheduler`"),
        *optimizer(1e-4), *MODEL,
    ],
    "dpo": [
        SEED,
        Row("algorithm.loss_type", "loss_type", "sigmoid"),
        Row("algorithm.beta", "beta", 0.1),
        Row("algorithm.label_smoothing", "label_smoothing", 0.0),
        Row("algorithm.anneal_lr", "lr_scheduler_type", True, "as `actor.optim.lr_scheduler`"),
        *optimizer(1e-6), *MODEL,
    ],
    "embodied": [
        Row("runner.seed", "seed", 1, of=f"{CLEANRL}, ppo.py"),
        Row("algorithm.adv_type", "(GAE)", "gae"),
        Row("algorithm.loss_type", "(PPO's clip)", "ppo"),
        Row("algorithm.gamma", "gamma", 0.99),
        Row("algorithm.gae_lambda", "gae_lambda", 0.95),
        Row("algorithm.normalize_advantages", "normalize_advantage", "auto"),
        Row("algorithm.clip_ratio_low", "clip_range", 0.2),
        Row("algorithm.clip_ratio_high", "clip_range", 0.2),
        Row("algorithm.value_clip", "clip_range_vf", None),
        Row("algorithm.huber_delta", "huber_delta", None, of=RLINF),
        Row("algorithm.value_coef", "vf_coef", 0.5),
        Row("algorithm.loss_agg", "(the mean over a minibatch)", "token-mean"),
        Row("algorithm.filter_rewards", "filter_rewards", False, of=RLINF),
        Row("algorithm.count_filtered_groups", "(always)", True, "the mean is over the groups that train", of=RLINF),
        Row("algorithm.entropy_coef", "ent_coef", 0.0),
        Row("algorithm.target_kl", "target_kl", None),
        Row("algorithm.update_epochs", "n_epochs", 10, "CleanRL's ppo.py, which plays several environments, too"),
        Row("algorithm.rollout_steps", "n_steps", 2048, "CleanRL's ppo.py, which plays several environments, too"),
        Row("algorithm.anneal_lr", "learning_rate", False),
        Row("actor.global_batch_size", "batch_size", 64, "a quarter of a rollout, as CleanRL's `num_minibatches`"),
        Row("actor.model.hidden_sizes", "net_arch", [64, 64]),
        Row("actor.model.activation", "activation_fn", "tanh"),
        Row("actor.model.ortho_init", "ortho_init", True),
        Row("actor.model.log_std_init", "log_std_init", 0.0),
        Row("actor.optim.name", "optimizer_class", "adam"),
        Row("actor.optim.lr", "learning_rate", 3e-4),
        Row("actor.optim.adam_beta1", "betas (torch)", 0.9),
        Row("actor.optim.adam_beta2", "betas (torch)", 0.999),
        Row("actor.optim.adam_eps", "optimizer_kwargs", 1e-5),
        Row("actor.optim.weight_decay", "weight_decay (torch)", 0.0),
        Row("actor.optim.clip_grad", "max_grad_norm", 0.5),
        Row("actor.optim.min_lr", "min_lr", 0.0, of=RLINF),
        Row("actor.optim.lr_scheduler", "lr_scheduler", "constant", of=RLINF),
        Row("actor.optim.lr_warmup_steps", "lr_warmup_steps", 0, of=RLINF),
        Row("actor.optim.lr_decay_steps", "lr_decay_iters", None, of=RLINF),
        Row("actor.optim.value_lr", "learning_rate", None),
        Row("actor.optim.critic_warmup_steps", "critic_warmup_steps", 0, of=RLINF),
    ],
    "off_policy": [
        Row("runner.seed", "seed", 1, of=f"{CLEANRL}, sac_continuous_action.py"),
        Row("algorithm.gamma", "gamma", 0.99),
        Row("algorithm.tau", "tau", 0.005),
        Row("algorithm.auto_entropy_tuning", "ent_coef", True),
        Row("algorithm.initial_alpha", "ent_coef", 1.0),
        Row("algorithm.target_entropy", "target_entropy", None),
        Row("algorithm.alpha_lr", "learning_rate", None),
        Row("algorithm.alpha_type", "(exp of log_alpha)", "exp"),
        Row("algorithm.alpha_clip_grad", "(none)", None),
        Row("algorithm.backup_entropy", "(in the target)", True),
        Row("algorithm.bootstrap_type", "bootstrap_type", "standard", of=RLINF),
        Row("algorithm.update_to_data", "gradient_steps", 1.0),
        Row("algorithm.n_step", "n_steps", 1),
        Row("algorithm.critic_subsample_size", "(all critics)", None),
        Row("algorithm.actor_agg_q", "(the smallest)", "min"),
        Row("algorithm.random_shift", "shift of DrQ-v2", 4, of="DrQ-v2's drqv2.py"),
        Row("algorithm.replay_buffer.frame_stack", "(VecFrameStack, where it is used)", 1),
        Row("actor.model.num_q_heads", "n_critics", 2),
        Row("algorithm.critic_actor_ratio", "(one for one)", 1),
        Row("algorithm.target_update_freq", "target_update_interval", 1),
        Row("algorithm.rollout_steps", "train_freq", 1,
            "a step is what simulators and trainer do between two exchanges; `update_to_data` makes as many updates"),
        Row("algorithm.anneal_lr", "learning_rate", False),
        Row("algorithm.replay_buffer.size", "buffer_size", 1_000_000),
        Row("algorithm.replay_buffer.min_buffer_size", "learning_starts", 100,
            "CleanRL's sac_continuous_action.py: 100 transitions are less than a batch"),
        Row("algorithm.policy_noise", "target_policy_noise of TD3", 0.2),
        Row("algorithm.noise_clip", "target_noise_clip of TD3", 0.5),
        Row("actor.global_batch_size", "batch_size", 256),
        Row("actor.model.hidden_sizes", "net_arch", [256, 256]),
        Row("actor.model.critic_hidden_sizes", "net_arch", None),
        Row("actor.model.activation", "activation_fn", "relu"),
        Row("actor.model.ortho_init", "(torch's own weights)", False),
        Row("actor.model.exploration_noise", "exploration_noise", 0.1, of=f"{CLEANRL}, td3_continuous_action.py"),
        Row("actor.optim.name", "optimizer_class", "adam"),
        Row("actor.optim.lr", "learning_rate", 3e-4),
        Row("actor.optim.value_lr", "learning_rate", None),
        Row("actor.optim.adam_beta1", "betas (torch)", 0.9),
        Row("actor.optim.adam_beta2", "betas (torch)", 0.999),
        Row("actor.optim.adam_eps", "eps (torch)", 1e-8),
        Row("actor.optim.weight_decay", "weight_decay (torch)", 0.0),
        Row("actor.optim.clip_grad", "(none)", None),
        Row("actor.optim.min_lr", "min_lr", 0.0, of=RLINF),
    ],
}  # fmt: skip
#: Sections about what is trained, and keys there that no reference has, or that say which model or task it is.
TRAINED = ("algorithm", "actor.optim", "actor.model", "actor.lora", "critic.optim")
ALONE = {
    "": "actor.model.model_path actor.model.kwargs actor.model.model_type actor.model.num_action_chunks",
    "reasoning": (
        "algorithm.name algorithm.kwargs algorithm.credit algorithm.turn_* algorithm.value_* algorithm.normalize_advantages "
        "algorithm.kl_type algorithm.kl_in algorithm.recompute_logprobs algorithm.filter_groups algorithm.max_refills "
        "algorithm.overlong_buffer algorithm.max_staleness algorithm.distillation.* actor.model.freeze_vision "
        "actor.model.value_head actor.optim.value_lr actor.optim.critic_warmup_steps algorithm.huber_delta "
        "algorithm.early_stop_imp_ratio algorithm.corrections"
    ),
    "sft": "actor.model.freeze_vision",
    "reward_model": "algorithm.loss_kwargs actor.model.freeze_vision",
    "dpo": "actor.model.freeze_vision",
    "embodied": (
        "algorithm.clip_ratio_c algorithm.tis_cap algorithm.rollout_parts algorithm.*_type algorithm.max_staleness "
        "algorithm.rewards_*_bound algorithm.behave_weight_threshold algorithm.proximal_policy "
        "actor.lora.* "
        "actor.model.value_per_action actor.model.normalize_observations actor.model.add_value_head actor.model.dtype "
        "actor.model.gradient_checkpointing actor.model.attn_implementation actor.model.trust_remote_code"
    ),
    "off_policy": (
        "algorithm.name algorithm.max_staleness algorithm.offline_* algorithm.random_steps algorithm.demo_buffer.* "
        "algorithm.success_classifier.* algorithm.expectile algorithm.inverse_temperature algorithm.max_weight "
        "actor.model.critic_layer_norm"
    ),
}
HEAD = """# Defaults and their sources

A default is what the named reference has for the same key, or the last column says why not. The references' numbers were
read in their source at these versions. `tests/unit/config/test_defaults.py` holds this page against rlhpc's own defaults.

Configurations in `configs/base` set further values: those of the papers and programs that their first lines name.
"""
TITLES = {
    "reasoning": "Language models: `task_type: reasoning`", "sft": "Supervised fine-tuning: `task_type: sft`",
    "reward_model": "Reward models: `task_type: reward_model`", "dpo": "DPO: `task_type: dpo`",
    "embodied": "PPO in simulators: `task_type: embodied`",
    "off_policy": "SAC and its like: `task_type: off_policy`",
}  # fmt: skip


def default(kind: str, key: str) -> Any:
    value = OmegaConf.select(OmegaConf.structured(find_task_type(kind).config), key)
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value


def shown(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else f"{value}"


def rendered() -> str:
    parts = [HEAD]
    for kind, rows in TABLES.items():
        parts.append(f"\n## {TITLES[kind]}\n\nReference: {REFERENCES[kind]}.\n\n")
        parts.append("| key | rlhpc | reference's key | reference | why another |\n|---|---|---|---|---|\n")
        for row in rows:
            origin = f"`{row.theirs}`{f' of {row.of}' if row.of else ''}"
            parts.append(
                f"| `{row.key}` | {shown(default(kind, row.key))} | {origin} | {shown(row.value)} | {row.why} |\n"
            )
    return "".join(parts)


@pytest.mark.parametrize("kind", TABLES)
def test_a_default_is_the_references_or_a_reason_says_why_not(kind: str) -> None:
    for row in TABLES[kind]:
        assert (default(kind, row.key) == row.value) != bool(row.why), f"{row.key}: {default(kind, row.key)}, {row}"


@pytest.mark.parametrize("kind", TABLES)
def test_every_key_of_training_was_compared(kind: str) -> None:
    known = [row.key for row in TABLES[kind]]
    assert len(known) == len(set(known))
    alone = f"{ALONE['']} {ALONE[kind]}".split()
    keys = [
        key
        for key in Schema(find_task_type(kind).config, kind).keys
        if key.startswith(tuple(f"{at}." for at in TRAINED))
    ]
    missing = {key for key in keys if not any(fnmatch.fnmatchcase(key, pattern) for pattern in alone)} - set(known)
    assert not missing, f"no reference is named for {sorted(missing)}"


@pytest.mark.long
def test_the_page_has_the_tables() -> None:
    assert PAGE.read_text() == rendered(), (
        "write it anew: python -m tests.unit.config.test_defaults > docs/reference/defaults.md"
    )


if __name__ == "__main__":
    print(rendered(), end="")
