"""What the numbers of language models' configurations may be."""

from __future__ import annotations

from rlhpc.config.constraints import (
    ANY,
    COUNT,
    ELASTIC_RANGES,
    FRACTION,
    INTERVAL,
    INTERVAL_OR_0,
    NOT_NEGATIVE,
    PART,
    POSITIVE,
    Range,
)
from rlhpc.config.constraints import RANGES as COMMON_RANGES
from rlhpc.language.group_config import GROUP_RANGES

#: What each number may be, of all kinds of run.
TRAINED_RANGES: dict[str, Range] = {
    "runner.val_check_interval": INTERVAL,
    "actor.optim.lr_warmup_steps": NOT_NEGATIVE,
    "actor.max_tokens_per_micro_batch": COUNT,
    "actor.model.router_aux_loss_coef": NOT_NEGATIVE,
    **{
        f"data.{part}.{name}": allowed
        for part in ("train", "eval[]")
        for name, allowed in {"size": COUNT, "seed": NOT_NEGATIVE, "eval_fraction": FRACTION}.items()
    },
    "data.max_prompt_tokens": COUNT,
    "data.prompts_per_step": COUNT,
}
#: And of those whose models answer.
RANGES: dict[str, Range] = {
    **TRAINED_RANGES,
    **ELASTIC_RANGES,
    "algorithm.beta": POSITIVE,
    "algorithm.label_smoothing": Range(0, 0.5, below=True),
    "algorithm.gamma": FRACTION,
    "algorithm.gae_lambda": FRACTION,
    "algorithm.turn_gamma": FRACTION,
    "algorithm.turn_coef": NOT_NEGATIVE,
    "algorithm.value_clip": POSITIVE,
    "algorithm.value_coef": NOT_NEGATIVE,
    "algorithm.clip_ratio_low": PART,
    "algorithm.clip_ratio_high": NOT_NEGATIVE,
    "algorithm.clip_ratio_c": Range(1, above=True),
    "algorithm.entropy_coef": NOT_NEGATIVE,
    "algorithm.update_epochs": COUNT,
    "algorithm.group_size": COUNT,
    "algorithm.kl_coef": NOT_NEGATIVE,
    "algorithm.tis_cap": POSITIVE,
    "algorithm.max_refills": NOT_NEGATIVE,
    "algorithm.overlong_buffer": NOT_NEGATIVE,
    "algorithm.max_staleness": NOT_NEGATIVE,
    "algorithm.distillation.topk": COUNT,
    "algorithm.distillation.beta": FRACTION,
    "algorithm.distillation.coef": POSITIVE,
    "algorithm.distillation.task_reward_coef": NOT_NEGATIVE,
    "rollout.max_new_tokens": COUNT,
    "rollout.temperature": NOT_NEGATIVE,
    "rollout.probe_interval": INTERVAL_OR_0,
    "rollout.probe_tolerance": POSITIVE,
    "rollout.top_p": Range(0, 1, above=True),
    "rollout.top_k": Range(1, also=(-1, "off")),
    "rollout.max_batch_size": COUNT,
    "rollout.parallel.tensor": COUNT,
    "rollout.max_model_len": COUNT,
    "rollout.gpu_memory_utilization": Range(0, 1, above=True),
    "rollout.max_turns": COUNT,
    "agent.episodes_per_rank": COUNT,
    "agent.timeout_s": POSITIVE,
    "agent.memory_mb": COUNT,
    "agent.disk_mb": COUNT,
    "agent.feedback_timeout_s": NOT_NEGATIVE,
    "agent.feedback_ahead": NOT_NEGATIVE,
    "agent.max_turns": COUNT,
    "agent.services[].timeout_s": POSITIVE,
    "agent.max_tokens": COUNT,
    "actor.global_batch_size": COUNT,
    "critic.model.router_aux_loss_coef": NOT_NEGATIVE,
    "data.eval[].samples": COUNT,
    "data.eval[].temperature": NOT_NEGATIVE,
    "reward.terms[].weight": ANY,
    "reward.process_terms[].weight": ANY,
    "reward.timeout_s": POSITIVE,
    "reward.failed": ANY,
    "reward.max_failed_steps": NOT_NEGATIVE,
    "reward.processes": COUNT,
    **GROUP_RANGES,
    **{f"critic.{key[6:]}": allowed for key, allowed in COMMON_RANGES.items() if key.startswith("actor.")},
}
