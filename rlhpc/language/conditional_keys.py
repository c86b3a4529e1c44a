"""Conditional keys of language runs: keys that a run reads only under a condition (`ConfigChecks.conditions`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlhpc.config.conditional_keys import Condition
from rlhpc.config.typed import select
from rlhpc.language.algorithms.registry import ALGORITHMS
from rlhpc.language.data.registry import PROCEDURAL
from rlhpc.language.scoring.checks import judges
from rlhpc.language.scoring.groups import CRITIC, REFERENCE, TEACHER, distils, needs_values, placed_groups, raters
from rlhpc.runs.conditional_keys import CLIPPED, COMMON, estimator_conditions, trainer_conditions


def _for_built_in(rule: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Restricts a rule to built-in algorithms; any other algorithm may read all keys of its section."""
    return lambda cfg: cfg.algorithm.name not in ALGORITHMS.built_in or rule(cfg)


def _has_reward(cfg: Any) -> bool:
    """Returns whether advantages are computed from the reward."""
    return not distils(cfg) or cfg.algorithm.distillation.task_reward_coef > 0


def _has_agent(cfg: Any) -> bool:
    return str(cfg.agent.kind) != "inline"


def _min_lr_condition(section: str) -> Condition:
    """Returns the condition of the end of a section's learning rate schedule."""
    return Condition(
        (f"{section}.optim.min_lr", f"{section}.optim.lr_decay_steps"),
        lambda cfg: cfg.algorithm.anneal_lr or select(cfg, f"{section}.optim.lr_scheduler") != "constant",
        f"with {section}.optim.lr_scheduler=linear or cosine, or algorithm.anneal_lr",
    )


def _loss_scale_condition(section: str) -> Condition:
    """Returns the condition of the loss scale of a section's trainer."""
    key = f"{section}.model.dtype"
    return Condition(
        (f"{section}.grad_scaler.*",), lambda cfg: select(cfg, key) == "float16", f"in half precision: {key}=float16"
    )


#: Conditions of the trained model and its trainer.
TRAINED = (
    *COMMON,
    *trainer_conditions("actor"),
    _min_lr_condition("actor"),
    _loss_scale_condition("actor"),
    Condition(
        ("workflow.sft_overrides",), lambda cfg: cfg.workflow.sft is not None, "where workflow.sft names a run before this"
    ),
)  # fmt: skip
#: Conditions of supervised training, in which adapters may have dropout.
SUPERVISED = (
    *TRAINED,
    Condition(
        ("actor.lora.dropout",), lambda cfg: cfg.actor.lora.rank > 0, "with adapters: actor.lora.rank of 1 or more"
    ),
)
#: Conditions of engines and agents, in training and evaluation.
ANSWERING = (
    Condition(
        ("rollout.gpu_memory_utilization",), lambda cfg: cfg.rollout.rollout_backend != "hf",
        "by engines that take a fixed part of the memory: rollout.rollout_backend=vllm",
    ),
    Condition(("rollout.max_turns",), lambda cfg: cfg.rollout.agent is not None, "with rollout.agent"),
    Condition(("agent.*",), _has_agent, "by agents: agent.kind other than inline"),
    Condition(("agent.sandbox_read",), lambda cfg: cfg.agent.sandbox == "bubblewrap", "by agent.sandbox=bubblewrap"),
    Condition(
        ("agent.memory_mb", "agent.disk_mb"), lambda cfg: cfg.agent.sandbox is not None,
        "of episodes in a sandbox: agent.sandbox",
    ),
)  # fmt: skip
#: Condition of the keys of files with problems or demonstrations.
_FILE_SOURCES = Condition(
    tuple(
        f"data.train.{name}"
        for name in ("path", "split", "prompt_key", "answer_key", "response_key", "level_key", "tools_key")
    ),
    lambda cfg: cfg.data.train.source not in PROCEDURAL,
    "of files: data.train.source jsonl, parquet, hdf5 or hf",
)  # fmt: skip
#: Condition of dropout, which training cannot use if it compares log-probs of a network at two times.
_NO_DROPOUT = Condition(
    ("*.lora.dropout",),
    lambda cfg: False,
    "in supervised training (runner.task_type sft or reward_model): reinforcement learning and DPO do without dropout",
)
#: Condition of the keys of held-out rows.
_HELD_OUT = Condition(
    ("data.holdout.*",),
    lambda cfg: cfg.runner.val_check_interval > 0,
    "for a held-out loss: runner.val_check_interval of 1 or more",
)
SFT = (*SUPERVISED, *ANSWERING, _FILE_SOURCES, _HELD_OUT)
DPO = (
    *TRAINED,
    *ANSWERING,
    _HELD_OUT,
    _NO_DROPOUT,
    Condition(
        ("algorithm.label_smoothing",), lambda cfg: cfg.algorithm.loss_type == "sigmoid",
        "by algorithm.loss_type=sigmoid",
    ),
)  # fmt: skip
REASONING = (
    *TRAINED,
    *ANSWERING,
    _FILE_SOURCES,
    *trainer_conditions("critic"),
    _min_lr_condition("critic"),
    _loss_scale_condition("critic"),
    _NO_DROPOUT,
    Condition(
        ("agent.feedback_ahead",), lambda cfg: cfg.agent.feedback_timeout_s > 0,
        "where rewards come later: agent.feedback_timeout_s",
    ),
    Condition(
        ("critic.*",), lambda cfg: CRITIC in placed_groups(cfg), "by a critic: algorithm.adv_type=gae, and "
        "cluster.component_placement.critic",
    ),
    Condition(
        ("teacher.*",), _for_built_in(lambda cfg: distils(cfg) or TEACHER in placed_groups(cfg)),
        "by a teacher: algorithm.name=distillation",
    ),
    Condition(
        ("teacher.max_batch_size", "teacher.max_model_len", "teacher.dtype", "teacher.gpu_memory_utilization",
         "teacher.engine_kwargs"),
        lambda cfg: cfg.teacher.rollout_backend is not None, "by an engine: teacher.rollout_backend=vllm",
    ),
    Condition(
        ("teacher.max_tokens_per_micro_batch",), lambda cfg: cfg.teacher.rollout_backend is None,
        "by a teacher without an engine: teacher.rollout_backend=null",
    ),
    Condition(("judge.*",), lambda cfg: bool(judges(cfg)), "by a judge: a term of reward.terms that is one"),
    Condition(
        ("reward.model.*",), lambda cfg: "reward" in raters(cfg), "by the group of that model: a term reward in reward.terms"
    ),
    Condition(
        ("reference.max_tokens_per_micro_batch",), lambda cfg: REFERENCE in placed_groups(cfg),
        "by a group of its own: cluster.component_placement.reference",
    ),
    Condition(
        ("algorithm.distillation.*",), _for_built_in(distils), "by algorithm.name=distillation"
    ),
    Condition(
        ("algorithm.distillation.topk",), _for_built_in(lambda cfg: cfg.algorithm.distillation.mode == "topk"),
        "by algorithm.distillation.mode=topk",
    ),
    Condition(
        ("algorithm.adv_type", "algorithm.gamma", "algorithm.gae_lambda", "algorithm.normalize_advantages",
         "algorithm.credit", "algorithm.turn_gamma", "algorithm.turn_coef", "algorithm.early_stop_imp_ratio"),
        _for_built_in(_has_reward), "where the reward trains: algorithm.distillation.task_reward_coef greater than 0",
    ),
    Condition(
        ("algorithm.kl_coef", "algorithm.kl_in", "algorithm.kl_type"),
        _for_built_in(lambda cfg: _has_reward(cfg) or cfg.algorithm.kl_in == "loss"),
        "as a part of the loss, algorithm.kl_in=loss, or of a reward that trains: "
        "algorithm.distillation.task_reward_coef greater than 0",
    ),
    Condition(
        ("algorithm.kl_in", "algorithm.kl_type"), _for_built_in(lambda cfg: cfg.algorithm.kl_coef > 0),
        "with algorithm.kl_coef",
    ),
    *estimator_conditions(lambda cfg: cfg.algorithm.name in ALGORITHMS.built_in),
    Condition(
        ("algorithm.value_clip", "algorithm.huber_delta"), _for_built_in(needs_values),
        "where values are learned: algorithm.adv_type=gae",
    ),
    Condition(
        ("algorithm.value_coef",), _for_built_in(lambda cfg: cfg.actor.model.value_head),
        "with a head for values: actor.model.value_head=true",
    ),
    CLIPPED,
    Condition(
        ("algorithm.turn_gamma",), _for_built_in(lambda cfg: cfg.algorithm.credit != "episode"),
        "where turns are compared: algorithm.credit turn, all_turns or state",
    ),
    Condition(
        ("algorithm.turn_coef",), _for_built_in(lambda cfg: cfg.algorithm.credit == "state"), "by algorithm.credit=state"
    ),
    Condition(
        ("algorithm.turn_gamma",), _for_built_in(lambda cfg: _has_agent(cfg) or cfg.rollout.agent is not None),
        "where episodes have several turns: agent.kind other than inline, or rollout.agent",
    ),
    Condition(
        ("algorithm.credit",),
        _for_built_in(
            lambda cfg: (
                cfg.algorithm.credit not in ("turn", "all_turns") or _has_agent(cfg) or cfg.rollout.agent is not None
            )
        ),
        "where episodes have several turns: agent.kind other than inline, or rollout.agent",
    ),
    Condition(
        ("rollout.keep_cache_on_update",), lambda cfg: cfg.algorithm.max_staleness > 0,
        "where sequences go on under newer weights: algorithm.max_staleness of 1 or more",
    ),
)  # fmt: skip
