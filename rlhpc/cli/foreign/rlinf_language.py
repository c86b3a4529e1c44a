"""Translation tables of RLinf's language models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlhpc.cli.foreign.rlinf_embodied import ADVANTAGES, DTYPES, LOSSES, adapter_rows, choice, optimizer_rows
from rlhpc.cli.foreign.rules import UNSET, Reading, Rows, Rule


def _backend(read: Reading) -> str:
    if (name := read("rollout.rollout_backend", "vllm")) != "vllm":
        read.omit("rollout.rollout_backend", f"rlhpc has no {name}: vllm and hf; vllm is written", False)
    return "vllm"


def _trainer(group: str) -> Rule:
    def rule(read: Reading) -> str:
        if (name := read(f"{group}.training_backend", "fsdp")) != "fsdp":
            reason = f"rlhpc has no {name}: local, fsdp and deepspeed; fsdp is written"
            read.omit(f"{group}.training_backend", reason, False)
        return "fsdp"

    return rule


def _clip_ratio(side: str) -> Rule:
    def rule(read: Reading) -> Any:
        side_clip = read(f"algorithm.clip_ratio_{side}")
        return read("algorithm.ratio_clip_eps", UNSET) if side_clip is None else side_clip

    return rule


def _dtype(key: str, fallback: str) -> Rule:
    """Returns a rule for a dtype; `fallback` replaces float16, because rlhpc does not scale the loss."""

    def rule(read: Reading) -> Any:
        name = DTYPES.get(str(read(key, "bf16")).lower().removesuffix("-mixed"), "bfloat16")
        if name == "float16" and fallback != name:
            read.omit(key, f"rlhpc does not train in float16: {fallback} is written")
            return fallback
        return name

    return rule


def _engine_dtype(read: Reading) -> Any:
    """Returns the engine's dtype, or UNSET if it equals the actor's."""
    is_actor_dtype = read("rollout.model.precision") in (None, read.leaves.get("actor.model.precision"))
    return UNSET if is_actor_dtype else _dtype("rollout.model.precision", "float16")(read)


def _new_tokens(read: Reading) -> Any:
    max_tokens = read("algorithm.sampling_params.max_new_tokens")
    if max_tokens is None and read("runner.seq_length") and read("data.max_prompt_length"):
        max_tokens = int(read("runner.seq_length")) - int(read("data.max_prompt_length"))
    return UNSET if max_tokens is None else int(max_tokens)


def _micro_batch_tokens(read: Reading) -> Any:
    if read("runner.enable_dynamic_batch_size", False):
        return read("runner.max_tokens_per_mbs", UNSET)
    length = read("runner.seq_length")
    return int(length) * int(read("algorithm.training_batch_size_per_gpu")) if length else UNSET


def _global_batch_size(read: Reading) -> int:
    prompts, group = int(read("data.rollout_batch_size", 32)), int(read("algorithm.group_size", 8))
    return max(1, prompts * group // int(read("algorithm.n_minibatches")))


def _first_file(read: Reading, key: str) -> str | None:
    paths = read(key)
    paths = [paths] if isinstance(paths, str) else list(paths or ())
    if len(paths) > 1:
        read.omit(key, "a source is one file, folder or pattern: the first one is written")
    return str(paths[0]) if paths else None


def _source(path: str) -> str:
    return {".parquet": "parquet", ".jsonl": "jsonl", ".json": "jsonl"}.get(Path(path).suffix, "hf")


def _uses_chat_template(read: Reading) -> bool:
    return bool(read("data.apply_chat_template", False) or read("data.use_chat_template", False))


def _eval_suites(read: Reading) -> Any:
    if (path := _first_file(read, "data.val_data_paths")) is None:
        return UNSET
    suite = {
        "name": "validation",
        "source": _source(path),
        "path": path,
        "prompt_key": read("data.prompt_key"),
        "answer_key": read("data.answer_key"),
        "chat_template": _uses_chat_template(read),
        "system_prompt": read("data.system_prompt"),
    }
    return [{name: value for name, value in suite.items() if value is not None}]


def _reward_terms(read: Reading) -> Any:
    name = str(read("reward.reward_type", "math"))
    if name != "math":
        read.omit("reward.reward_type", f"rlhpc has no reward {name}: register yours (docs/how-to/add-reward.md)")
        return [{"name": name}]
    reward_bounds = [float(read(f"reward.reward_{key}")) for key in ("max_val", "min_val")]
    weight = (reward_bounds[0] - reward_bounds[1]) * float(read("reward.reward_scale"))
    return [{"name": name, "weight": weight}]  # an answer is worth 0 or 1 before its weight


def _kl_coef(read: Reading) -> float:
    return float(read("algorithm.reinpp_kl_beta") or read("algorithm.kl_beta", 0.0))


def _advantage(read: Reading) -> Any:
    if read("algorithm.use_reinpp_baseline"):
        return "reinforce++_baseline"
    return choice("algorithm.adv_type", ADVANTAGES)(read)


def _language_normalization(read: Reading) -> str:
    if read("algorithm.adv_type") == "reinpp":
        return "none"  # the estimator normalizes
    return "batch" if read("algorithm.normalize_advantages", False) else "none"


def _by_trainer(group: str, megatron: str, fsdp: str) -> Rule:
    """Returns a rule that reads the key of RLinf's trainer for the group: Megatron or FSDP."""
    megatron, fsdp = f"{group}.{megatron}", f"{group}.{fsdp}"

    def rule(read: Reading) -> Any:
        if read.leaves.get(f"{group}.training_backend") == "megatron":
            read.omit(fsdp, "RLinf's Megatron trainer does not read it", False)
            return read(megatron)
        read.omit(megatron, "RLinf's FSDP trainer does not read it", False)
        return read(fsdp)

    return rule


def _schedule(group: str) -> Rule:
    read_schedule = _by_trainer(group, "lr_sched.lr_decay_style", "optim.lr_scheduler")

    def rule(read: Reading) -> Any:
        name = str(read_schedule(read)).removeprefix("torch_")
        if name not in ("constant", "linear", "cosine"):
            for key in ("lr_sched.lr_decay_style", "optim.lr_scheduler"):
                read.omit(
                    f"{group}.{key}", f"rlhpc has no course {name}: constant, linear and cosine; constant is written"
                )
            return "constant"
        return name

    return rule


def _warmup(group: str) -> Rule:
    steps = _by_trainer(group, "lr_sched.lr_warmup_iters", "optim.lr_warmup_steps")
    return lambda read: max(0, int(steps(read) or 0))  # a negative number means no warm-up


def _offload_in_rollout(read: Reading) -> Any:
    is_colocated = any(
        {"actor", "rollout"} <= set(map(str.strip, k.split(","))) for k in read.below("cluster.component_placement")
    )
    return (
        True if is_colocated and (read("actor.enable_offload", False) or read("actor.offload_weight", False)) else UNSET
    )


def _gradient_checkpointing(group: str) -> Rule:
    keys = (f"{group}.fsdp_config.gradient_checkpointing", f"{group}.model.recompute_granularity")
    return lambda read: any(read(key, False) for key in keys)


def _optimizer(group: str) -> Rule:
    def rule(read: Reading) -> str:
        name = str(read(f"{group}.optim.optimizer", "adam"))
        return "adamw" if name == "adam" else name

    return rule


def _trained_group_rows(group: str) -> Rows:
    """Returns the rows of a trained group, `actor` or `critic`."""
    return [
        (f"{group}.training_backend", _trainer(group)),
        (f"{group}.max_tokens_per_micro_batch", _micro_batch_tokens),
        (f"{group}.enable_dp_load_balance", f"{group}.enable_dp_load_balance"),
        (f"{group}.model.dtype", _dtype(f"{group}.model.precision", "bfloat16")),
        (f"{group}.model.gradient_checkpointing", _gradient_checkpointing(group)),
        (f"{group}.fsdp.cpu_offload", f"{group}.fsdp_config.cpu_offload"),
        (f"{group}.fsdp.reshard_after_forward", f"{group}.fsdp_config.reshard_after_forward"),
        (
            f"{group}.fsdp.enable_gradient_accumulation",
            lambda read: bool(read(f"{group}.fsdp_config.enable_gradient_accumulation", False)) or UNSET,
        ),
        (
            f"{group}.kernels",
            lambda read: "liger" if read(f"{group}.fsdp_config.use_liger_kernel", False) else UNSET,
        ),
        (f"{group}.optim.name", _optimizer(group)),
        *optimizer_rows(group),
        (f"{group}.optim.weight_decay", f"{group}.optim.weight_decay"),
        (f"{group}.optim.lr_scheduler", _schedule(group)),
        (f"{group}.optim.lr_warmup_steps", _warmup(group)),
    ]


ROWS: Rows = [
    ("algorithm.adv_type", _advantage),
    ("algorithm.loss_type", choice("algorithm.loss_type", LOSSES)),
    ("algorithm.loss_agg", "algorithm.loss_agg_func"),
    ("algorithm.group_size", "algorithm.group_size"),
    ("algorithm.normalize_advantages", _language_normalization),
    ("algorithm.clip_ratio_low", _clip_ratio("low")),
    ("algorithm.clip_ratio_high", _clip_ratio("high")),
    ("algorithm.clip_ratio_c", "algorithm.clip_ratio_c"),
    ("algorithm.entropy_coef", "algorithm.entropy_bonus"),
    ("algorithm.kl_coef", _kl_coef),
    (
        "algorithm.kl_type",
        choice(
            "algorithm.kl_penalty_type",
            {"low_var_kl": "k3", "kl": "k1", "mse": "k2", "k1": "k1", "k2": "k2", "k3": "k3", "abs": "abs"},
        ),
    ),
    ("algorithm.kl_in", lambda read: "reward" if read("algorithm.reinpp_kl_beta") else UNSET),
    ("algorithm.update_epochs", lambda read: 1),
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
    ("data.max_prompt_tokens", "data.max_prompt_length"),
    ("data.overlong_prompts", lambda read: "drop" if read("data.filter_prompt_by_length") else "error"),
    ("data.prompts_per_step", "data.rollout_batch_size"),
    (
        "data.train.source",
        lambda read: _source(path) if (path := _first_file(read, "data.train_data_paths")) else UNSET,
    ),
    ("data.train.path", lambda read: _first_file(read, "data.train_data_paths") or UNSET),
    ("data.train.prompt_key", "data.prompt_key"),
    ("data.train.answer_key", "data.answer_key"),
    ("data.train.chat_template", _uses_chat_template),
    ("data.train.system_prompt", "data.system_prompt"),
    ("data.eval", _eval_suites),
    ("workflow.eval_suites", lambda read: ["validation"] if read("data.val_data_paths") else UNSET),
    ("reward.terms", _reward_terms),
    ("rollout.rollout_backend", _backend),
    ("rollout.temperature", lambda read: float(read("algorithm.sampling_params.temperature", 1.0))),
    ("rollout.top_p", "algorithm.sampling_params.top_p"),
    ("rollout.top_k", lambda read: k if 0 < (k := int(read("algorithm.sampling_params.top_k", -1))) < 100_000 else -1),
    ("rollout.max_new_tokens", _new_tokens),
    ("rollout.max_model_len", "runner.seq_length"),
    ("rollout.max_batch_size", "rollout.max_running_requests"),
    ("rollout.gpu_memory_utilization", "rollout.gpu_memory_utilization"),
    ("rollout.dtype", _engine_dtype),
    (
        "rollout.engine_kwargs",
        lambda read: {"enforce_eager": True} if read("rollout.enforce_eager", False) else UNSET,
    ),
    ("actor.global_batch_size", _global_batch_size),
    ("actor.offload_in_rollout", _offload_in_rollout),
    (
        "actor.model.model_path",
        lambda read: read("actor.model.model_path") or read("rollout.model.model_path", UNSET),
    ),
    *adapter_rows(),
    *_trained_group_rows("actor"),
]
#: Further keys of runs with a value model.
CRITIC: Rows = [
    ("algorithm.gae_lambda", "algorithm.gae_lambda"),
    ("algorithm.value_clip", "algorithm.value_cliprange"),
    ("critic.warmup_steps", "algorithm.critic_warmup_steps"),
    *_trained_group_rows("critic"),
]
