"""RLinf's configurations of language models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlhpc.cli.foreign.rlinf_names import ADVANTAGES, DTYPES, LOSSES, OPTIM, choice
from rlhpc.cli.foreign.rules import NOTHING, Reading, Rows, Rule


def _unless(key: str, usual: Any) -> Rule:
    """Taken where it is not the usual value."""
    return lambda read: NOTHING if read(key, usual) == usual else read(key)


def _backend(read: Reading) -> str:
    if (name := read("rollout.rollout_backend", "vllm")) != "vllm":
        read.leave("rollout.rollout_backend", f"rlhpc has no {name}: vllm and hf; vllm is written", False)
    return "vllm"


def _trainer(read: Reading) -> str:
    if (name := read("actor.training_backend", "fsdp")) != "fsdp":
        read.leave("actor.training_backend", f"rlhpc has no {name}: local, fsdp and deepspeed; fsdp is written", False)
    return "fsdp"


def _clip(side: str) -> Rule:
    def rule(read: Reading) -> Any:
        own = read(f"algorithm.clip_ratio_{side}")
        return read("algorithm.ratio_clip_eps", NOTHING) if own is None else own

    return rule


def _dtype(key: str, fallback: str) -> Rule:
    """A precision; `fallback` takes the place of float16, which trains with a loss scale that rlhpc does not have."""

    def rule(read: Reading) -> Any:
        name = DTYPES.get(str(read(key, "bf16")).lower().removesuffix("-mixed"), "bfloat16")
        if name == "float16" and fallback != name:
            read.leave(key, f"rlhpc does not train in float16: {fallback} is written")
            return fallback
        return name

    return rule


def _engine_dtype(read: Reading) -> Any:
    """The engine's precision, if it is not the actor's."""
    same = read("rollout.model.precision") in (None, read.leaves.get("actor.model.precision"))
    return NOTHING if same else _dtype("rollout.model.precision", "float16")(read)


def _new_tokens(read: Reading) -> Any:
    most = read("algorithm.sampling_params.max_new_tokens")
    if most is None and read("runner.seq_length") and read("data.max_prompt_length"):
        most = int(read("runner.seq_length")) - int(read("data.max_prompt_length"))
    return NOTHING if most is None else int(most)


def _pass_tokens(read: Reading) -> Any:
    if read("runner.enable_dynamic_batch_size", False):
        return read("runner.max_tokens_per_mbs", NOTHING)
    length = read("runner.seq_length")
    return int(length) * int(read("algorithm.training_batch_size_per_gpu", 1)) if length else NOTHING


def _responses(read: Reading) -> int:
    prompts, group = int(read("data.rollout_batch_size", 32)), int(read("algorithm.group_size", 8))
    return max(1, prompts * group // int(read("algorithm.n_minibatches", 1)))


def _file(read: Reading, key: str) -> str | None:
    paths = read(key)
    paths = [paths] if isinstance(paths, str) else list(paths or ())
    if len(paths) > 1:
        read.leave(key, "a source is one file, folder or pattern: the first one is written")
    return str(paths[0]) if paths else None


def _source(path: str) -> str:
    return {".parquet": "parquet", ".jsonl": "jsonl", ".json": "jsonl"}.get(Path(path).suffix, "hf")


def _template(read: Reading) -> bool:
    return bool(read("data.apply_chat_template", False) or read("data.use_chat_template", False))


def _suites(read: Reading) -> Any:
    if (path := _file(read, "data.val_data_paths")) is None:
        return NOTHING
    suite = {
        "name": "validation",
        "source": _source(path),
        "path": path,
        "prompt_key": read("data.prompt_key"),
        "answer_key": read("data.answer_key"),
        "chat_template": _template(read),
        "system_prompt": read("data.system_prompt"),
    }
    return [{name: value for name, value in suite.items() if value is not None}]


def _terms(read: Reading) -> Any:
    name = str(read("reward.reward_type", "math"))
    if name != "math":
        read.leave("reward.reward_type", f"rlhpc has no reward {name}: register yours (docs/how-to/add-reward.md)")
    return [{"name": name}]


def _kl(read: Reading) -> float:
    return float(read("algorithm.reinpp_kl_beta", 0.0) or read("algorithm.kl_beta", 0.0))


def _advantage(read: Reading) -> Any:
    if read("algorithm.use_reinpp_baseline", False):
        return "reinforce++_baseline"
    return choice("algorithm.adv_type", ADVANTAGES)(read)


def _language_normalization(read: Reading) -> str:
    if read("algorithm.adv_type") == "reinpp":
        return "none"  # the estimator does
    return "batch" if read("algorithm.normalize_advantages", False) else "none"


def _schedule(key: str, usual: Any) -> Rule:
    def rule(read: Reading) -> Any:
        if read.leaves.get("actor.training_backend") == "megatron":
            return read(key, usual)
        return read.leave(key, "RLinf's FSDP trainer does not read it", False)

    return rule


def _offloaded(read: Reading) -> Any:
    together = any(
        {"actor", "rollout"} <= set(map(str.strip, k.split(","))) for k in read.below("cluster.component_placement")
    )
    return (
        True if together and (read("actor.enable_offload", False) or read("actor.offload_weight", False)) else NOTHING
    )


ROWS: Rows = [
    ("algorithm.adv_type", _advantage),
    ("algorithm.loss_type", choice("algorithm.loss_type", LOSSES)),
    ("algorithm.loss_agg", "algorithm.loss_agg_func"),
    ("algorithm.group_size", "algorithm.group_size"),
    ("algorithm.normalize_advantages", _language_normalization),
    ("algorithm.clip_ratio_low", _clip("low")),
    ("algorithm.clip_ratio_high", _clip("high")),
    ("algorithm.clip_ratio_c", _unless("algorithm.clip_ratio_c", None)),
    ("algorithm.entropy_coef", "algorithm.entropy_bonus"),
    ("algorithm.kl_coef", _kl),
    (
        "algorithm.kl_type",
        choice(
            "algorithm.kl_penalty_type",
            {"low_var_kl": "k3", "kl": "k1", "mse": "k2", "k1": "k1", "k2": "k2", "k3": "k3", "abs": "abs"},
        ),
    ),
    ("algorithm.kl_in", lambda read: "reward" if read("algorithm.reinpp_kl_beta", 0.0) else NOTHING),
    ("algorithm.update_epochs", lambda read: 1),
    (
        "algorithm.recompute_logprobs",
        lambda r: bool(r("algorithm.recompute_logprobs", False) or r("algorithm.importance_sampling_fix", False)),
    ),
    (
        "algorithm.tis_cap",
        lambda r: (
            float(r("algorithm.importance_sampling_clip", 2.0))
            if r("algorithm.importance_sampling_fix", False)
            else NOTHING
        ),
    ),
    ("data.max_prompt_tokens", "data.max_prompt_length"),
    ("data.overlong_prompts", lambda read: "drop" if read("data.filter_prompt_by_length", False) else "error"),
    ("data.prompts_per_step", "data.rollout_batch_size"),
    ("data.train.source", lambda read: _source(path) if (path := _file(read, "data.train_data_paths")) else NOTHING),
    ("data.train.path", lambda read: _file(read, "data.train_data_paths") or NOTHING),
    ("data.train.prompt_key", "data.prompt_key"),
    ("data.train.answer_key", "data.answer_key"),
    ("data.train.chat_template", _template),
    ("data.train.system_prompt", "data.system_prompt"),
    ("data.eval", _suites),
    ("workflow.eval_suites", lambda read: ["validation"] if read("data.val_data_paths") else NOTHING),
    ("reward.terms", _terms),
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
        lambda read: {"enforce_eager": True} if read("rollout.enforce_eager", False) else NOTHING,
    ),
    ("actor.training_backend", _trainer),
    ("actor.global_batch_size", _responses),
    ("actor.max_tokens_per_micro_batch", _pass_tokens),
    ("actor.enable_dp_load_balance", "actor.enable_dp_load_balance"),
    ("actor.offload_in_rollout", _offloaded),
    (
        "actor.model.model_path",
        lambda read: read("actor.model.model_path") or read("rollout.model.model_path", NOTHING),
    ),
    ("actor.model.dtype", _dtype("actor.model.precision", "bfloat16")),
    (
        "actor.model.gradient_checkpointing",
        lambda r: bool(r("actor.fsdp_config.gradient_checkpointing", False) or r("actor.model.recompute_granularity")),
    ),
    (
        "actor.lora.rank",
        lambda read: int(read("actor.model.lora_rank", 32)) if read("actor.model.is_lora", False) else NOTHING,
    ),
    ("actor.fsdp.cpu_offload", "actor.fsdp_config.cpu_offload"),
    ("actor.fsdp.reshard_after_forward", "actor.fsdp_config.reshard_after_forward"),
    (
        "actor.optim.name",
        lambda read: "adamw" if read("actor.optim.optimizer", "adam") == "adam" else str(read("actor.optim.optimizer")),
    ),
    *OPTIM,
    ("actor.optim.weight_decay", "actor.optim.weight_decay"),
    ("actor.optim.lr_scheduler", _schedule("actor.lr_sched.lr_decay_style", "constant")),
    ("actor.optim.lr_warmup_steps", _schedule("actor.lr_sched.lr_warmup_iters", 0)),
]
