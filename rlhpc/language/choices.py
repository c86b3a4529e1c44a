"""Which words keys of language models' runs may have, and with which other keys a run goes on."""

from __future__ import annotations

CHOICES = {
    "algorithm.kl_type": ("k1", "k2", "k3", "abs", "kl", "mse", "low_var_kl"),
    "algorithm.kl_in": ("loss", "reward"),
    "algorithm.distillation.mode": ("sampled", "topk", "full"),
    "algorithm.credit": ("episode", "turn", "state"),
    "algorithm.normalize_advantages": ("auto", "batch", "none"),
    "algorithm.loss_agg": (
        "token-mean",
        "token-sum",
        "seq-mean-token-mean",
        "seq-mean-token-sum",
        "seq-mean-token-sum-norm",
    ),
    "actor.model.dtype": ("auto", "float32", "bfloat16"),
    "actor.model.attn_implementation": ("sdpa", "eager", "flash_attention_2"),
    "actor.optim.lr_scheduler": ("constant", "linear", "cosine"),
    "critic.model.dtype": ("auto", "float32", "bfloat16"),
    "critic.model.attn_implementation": ("sdpa", "eager", "flash_attention_2"),
    "critic.optim.name": ("adam", "adamw"),
    "critic.optim.lr_scheduler": ("constant", "linear", "cosine"),
    **{
        f"{section}.model.{key}": allowed
        for section in ("teacher", "reward", "judge")
        for key, allowed in {
            "dtype": ("auto", "float32", "bfloat16"),
            "attn_implementation": ("sdpa", "eager", "flash_attention_2"),
        }.items()
    },
    "rollout.dtype": ("auto", "float32", "bfloat16", "float16"),
    "teacher.dtype": ("auto", "float32", "bfloat16", "float16"),
    "judge.dtype": ("auto", "float32", "bfloat16", "float16"),
    "judge.mode": ("grade", "compare"),
    "data.overlong_prompts": ("error", "drop"),
    "agent.sandbox": ("bubblewrap", "unshare", "none"),
    "agent.kind": ("inline", "python", "command", "environment", "mcp", "verifiers", "openenv"),
}
DPO_CHOICES = {**CHOICES, "algorithm.loss_type": ("sigmoid", "ipo")}
#: Keys, and sections, of the machine and of how the work is cut into pieces.
FREE = (
    "runner.val_check_interval", "rollout.weight_sync", "rollout.weight_delta",
    "rollout.gpu_memory_utilization", "rollout.max_batch_size", "rollout.parallel.", "critic.max_tokens_per_micro_batch",
    "reference.", "teacher.max_tokens_per_micro_batch", "teacher.rollout_backend", "teacher.gpu_memory_utilization",
    "teacher.max_batch_size", "reward.model.max_tokens_per_micro_batch", "judge.gpu_memory_utilization",
    "judge.max_batch_size", "judge.cache_size", "critic.training_backend", "critic.fsdp.", "critic.deepspeed.",
    "critic.parallel.",
    "critic.use_remove_padding", "critic.enable_dp_load_balance", "actor.use_remove_padding", "actor.enable_dp_load_balance",
    "critic.model.gradient_checkpointing", "critic.model.attn_implementation",
    "actor.max_tokens_per_micro_batch", "actor.training_backend", "actor.fsdp.", "actor.deepspeed.", "actor.parallel.",
    "actor.offload_in_rollout", "actor.model.gradient_checkpointing", "actor.model.attn_implementation",
    "reward.timeout_s", "reward.processes", "agent.python", "agent.episodes_per_rank", "agent.timeout_s",
    "agent.sandbox_read", "agent.memory_mb", "agent.disk_mb",
    "agent.feedback_timeout_s", "agent.feedback_ahead",
)  # fmt: skip
