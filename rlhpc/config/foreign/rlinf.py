"""RLinf's configurations of embodied PPO, GRPO and SAC, and of language models, as rlhpc's.

One row for each key: ours ← theirs; `rlinf_left` has those without a counterpart, and why. What RLinf's keys mean was read in
its code, where some do less than their names suggest: the reason says so.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhpc.config.foreign.hydra import Composed
from rlhpc.config.foreign.rlinf_left import EMBODIED, EVERYWHERE, LANGUAGE
from rlhpc.config.foreign.rules import NOTHING, Left, Reading, Rule, Translation, translated
from rlhpc.runtime.errors import ConfigError

Rows = list[tuple[str, str | Rule]]

_LOSSES = {"actor_critic": "ppo", "actor": "ppo", "decoupled_actor_critic": "decoupled_ppo"}
_ADVANTAGES = {"gae": "gae", "grpo": "grpo", "raw": "raw", "reinpp": "reinforce++"}
_DTYPES = {"32": "float32", "fp32": "float32", "bf16": "bfloat16", "16": "float16", "fp16": "float16"}
_MODELS = {"mlp_policy": "mlp", "cnn_policy": "resnet"}
_VISION_LANGUAGE = ("openvla", "openvla_oft", "openpi", "openpi_rlinf", "gr00t", "starvla", "evo1", "lingbotvla")
#: What RLinf commands a ManiSkill robot with, by its `policy_setup`.
_CONTROL_MODES = {
    "panda-qpos": "pd_joint_delta_pos",
    "panda-ee-dpos": "pd_ee_delta_pos",
    "panda-ee-target-dpos": "pd_ee_target_delta_pose",
}
_SIMULATORS = ("maniskill", "libero", "metaworld")


def translate(found: Composed, source: str) -> Translation:
    """Translates a composed configuration.

    Raises:
        ConfigError: It is none of RLinf's, or of a kind of run that rlhpc does not have.
    """
    leaves = found.leaves
    task, loss = str(leaves.get("runner.task_type")), str(leaves.get("algorithm.loss_type"))
    if "runner.task_type" not in leaves or not any(key.startswith(("algorithm.", "rollout.")) for key in leaves):
        raise ConfigError(
            f"{source}: this is not the configuration of an RLinf run: it has no runner.task_type with an algorithm and a "
            "rollout section; give a file of its examples/embodiment/config or examples/reasoning/config itself, not a piece "
            "in their env/ or model/"
        )
    if task == "embodied" and loss in _LOSSES:
        kind, rows, left = (
            f"embodied ({leaves.get('algorithm.adv_type')}, {loss})",
            _RUN + _PLAYED + _PPO + _POLICY,
            EMBODIED,
        )
    elif task == "embodied" and loss == "embodied_sac":
        kind, rows, left = "off_policy (SAC)", _RUN + _PLAYED + _SAC + _POLICY, EMBODIED
    elif task == "reasoning":
        kind, rows, left = f"reasoning ({leaves.get('algorithm.adv_type')})", _RUN + _LANGUAGE, LANGUAGE
    else:
        raise ConfigError(
            f"{source}: runner.task_type {task} with algorithm.loss_type {loss} has no counterpart in rlhpc; imported are "
            f"task_type embodied with loss_type {', '.join(_LOSSES)} or embodied_sac, and task_type reasoning"
        )
    unresolved = [
        Left(key.replace("[", "[[]"), f"its reference cannot be followed: {why}")
        for key, why in found.unresolved.items()
    ]
    rest = {key: value for key, value in leaves.items() if key not in found.unresolved}
    made = translated(kind, rest, rows, [*left, *EVERYWHERE])
    made.theirs = dict(leaves)
    made.left |= {entry.keys.replace("[[]", "["): (entry.why, True) for entry in unresolved}
    return made


def _is_grpo(read: Reading) -> bool:
    return read.leaves.get("algorithm.adv_type") in ("grpo", "raw", "reinpp")


def _choice(key: str, known: Mapping[str, Any], why: str = "") -> Rule:
    """A value by its name; another one stays as it is, for a part that is registered under it."""

    def rule(read: Reading) -> Any:
        value = read(key)
        if value is None:
            return NOTHING
        if str(value).lower() not in known:
            read.leave(key, why or f"rlhpc has no {value}; register one of that name, or choose another")
            return value
        return known[str(value).lower()]

    return rule


def _unless(key: str, usual: Any, ours: Any = None) -> Rule:
    """Taken where it is not the usual value."""
    return lambda read: NOTHING if read(key, usual) == usual else (ours if ours is not None else read(key))


# What all runs have.


def _name(read: Reading) -> Any:
    name = read("runner.logger.experiment_name") or read("runner.experiment_name") or "imported"
    return re.sub(r"[^A-Za-z0-9._-]+", "_", str(name)).strip("._-")[:100] or "imported"


def _loggers(read: Reading) -> Any:
    named = read("runner.logger.logger_backends", [])
    return ["jsonl", *(str(name) for name in ([named] if isinstance(named, str) else named))]


def _logger_options(read: Reading) -> Any:
    project = read("runner.logger.project_name")
    tracked = [n for n in read.leaves.get("runner.logger.logger_backends") or () if n in ("wandb", "swanlab")]
    return {name: {"project": str(project)} for name in tracked} if project and tracked else NOTHING


def _steps(read: Reading) -> Any:
    steps, epochs = int(read("runner.max_steps", -1)), int(read("runner.max_epochs", 1))
    if read.leaves["runner.task_type"] == "embodied":  # an epoch is one step there
        return epochs if steps < 0 else min(steps, epochs)
    read.leave("runner.max_epochs", "it counts passes over the data, rlhpc counts steps: set runner.max_steps yourself")
    return steps if steps >= 0 else NOTHING


def _resume(read: Reading) -> Any:
    where = read("runner.resume_dir")
    if where in (None, "auto"):
        return where if where else NOTHING
    return read.leave("runner.resume_dir", "rlhpc does not read RLinf's checkpoints")


def _placement(read: Reading) -> Any:
    """Components by the names that the kind of run has here."""
    wanted = ("actor", "rollout") if read.leaves["runner.task_type"] == "reasoning" else ("actor", "rollout", "env")
    placement: dict[str, Any] = {}
    for names, place in read.below("cluster.component_placement").items():
        components, _, part = names.partition(".")
        kept = [name.strip() for name in components.split(",") if name.strip() in wanted]
        for name in components.split(","):
            if name.strip() not in wanted:
                key = f"cluster.component_placement.{names}"
                read.leave(key, _ELSEWHERE.get(name.strip(), f"rlhpc has no component {name.strip()} in such a run"))
        if kept and part:
            placement.setdefault(",".join(kept), {})[part] = place
        elif kept:
            placement[",".join(kept)] = place
    return placement or NOTHING


_ELSEWHERE = {
    "reward": "rewards are judged by processes beside the rollout (reward.processes)",
    "inference": "the actor computes these log-probs itself",
    "critic": "language models have no critic",
}


def _accelerators(read: Reading) -> Any:
    """How many a node has, where the placement counts them."""
    ranks: list[int] = []
    for place in read.below("cluster.component_placement").values():
        for part in str(place).split(","):
            ranks += [int(n) for n in re.findall(r"\d+", part.partition(":")[0])]
    return math.ceil((max(ranks) + 1) / int(read("cluster.num_nodes", 1))) if ranks else NOTHING


_RUN: Rows = [
    ("runner.task_type", lambda read: _task(read)),
    ("runner.name", _name),
    ("runner.seed", "actor.seed"),
    ("runner.max_steps", _steps),
    ("runner.save_interval", "runner.save_interval"),
    ("runner.val_check_interval", "runner.val_check_interval"),
    ("runner.resume_dir", _resume),
    ("runner.logger.logger_backends", _loggers),
    ("runner.logger.kwargs", _logger_options),
    ("cluster.num_nodes", "cluster.num_nodes"),
    ("cluster.accelerators_per_node", _accelerators),
    ("cluster.component_placement", _placement),
    ("algorithm.gamma", "algorithm.gamma"),
]


def _task(read: Reading) -> str:
    task, loss = str(read("runner.task_type")), read("algorithm.loss_type")
    return "off_policy" if loss == "embodied_sac" else task


# What is played: environments and rollouts.


def _decisions(read: Reading) -> int:
    """Decisions of a slot in one rollout of RLinf's."""
    chunk = int(read("actor.model.num_action_chunks", 1))
    longest = int(read("env.train.max_steps_per_rollout_epoch", 0) or read("env.train.max_episode_steps", 1))
    return max(1, longest // chunk)


def _rounds(read: Reading) -> int:
    return int(read("env.train.rollout_epoch", 0) or read("algorithm.rollout_epoch", 1))


def _slots(read: Reading) -> int:
    """Slots: where each rollout plays one episode in every slot, further rounds are further slots."""
    slots, rounds = int(read("env.train.total_num_envs", 8)), 1
    if not read("env.train.auto_reset", False) and (rounds := _rounds(read)) > 1:
        read.leave(
            "env.train.rollout_epoch",
            f"a slot plays one episode a step here: {rounds} rounds of {slots} slots became {rounds * slots} slots; if that "
            "is too many, lower env.train.num_envs and actor.global_batch_size by the same factor",
        )
    return slots * rounds


def _rollout_steps(read: Reading) -> int:
    return _decisions(read) * (_rounds(read) if read("env.train.auto_reset", False) else 1)


def _env_id(side: str) -> Rule:
    def rule(read: Reading) -> Any:
        for key in ("init_params.id", "task_suite_name", "task_config.task_name", "task_name", "init_params.task_name"):
            if (value := read(f"env.{side}.{key}")) is not None:
                return str(value)
        return str(read("env.train.env_type")) if side == "train" else NOTHING

    return rule


def _env_type(read: Reading) -> Any:
    value = str(read("env.train.env_type"))
    if value not in _SIMULATORS:
        read.leave(
            "env.train.env_type", f"rlhpc has no simulator {value}: register yours (docs/how-to/add-environment.md)"
        )
    elif value == "metaworld":
        read.leave("env.train.task_suite_name", "an environment is one task of MetaWorld, such as reach-v3: name it")
    return value


def _env_arguments(side: str) -> Rule:
    def rule(read: Reading) -> Any:
        at = f"env.{side}"
        if (kind := read.leaves.get("env.train.env_type")) == "libero":
            sizes = {
                "height": read(f"{at}.init_params.camera_heights"),
                "width": read(f"{at}.init_params.camera_widths"),
            }
            return {name: size for name, size in sizes.items() if size is not None} or NOTHING
        if kind != "maniskill":
            return NOTHING
        kwargs: dict[str, Any] = {}
        for name, value in read.below(f"{at}.init_params").items():
            first, _, second = name.partition(".")
            if first in _ARGUMENTS_LEFT:
                read.looked.discard(f"{at}.init_params.{name}")
            elif second and value is not None:
                kwargs.setdefault(first, {})[second] = value
            elif value not in (None, "None"):
                kwargs[first] = value
        if (setup := read("actor.model.policy_setup")) in _CONTROL_MODES and "control_mode" not in kwargs:
            kwargs["control_mode"] = _CONTROL_MODES[setup]
        if (mode := read(f"{at}.reward_mode")) == "only_success":
            kwargs["reward_mode"] = "sparse"
        elif mode != "raw":
            read.leave(f"{at}.reward_mode", _SHAPED)
        return kwargs or NOTHING

    return rule


_SHAPED = "RLinf adds up rewards of its own for grasping here; rlhpc takes the simulator's reward"
_ARGUMENTS_LEFT = ("id", "num_envs", "max_episode_steps", "render_mode", "sim_backend")


def _fixed(side: str) -> Rule:
    def rule(read: Reading) -> Any:
        if not read(f"env.{side}.use_fixed_reset_state_ids", False):
            return NOTHING
        if read(f"env.{side}.auto_reset", False):
            return True
        return read.leave(
            f"env.{side}.use_fixed_reset_state_ids",
            "without auto_reset both draw the states anew for every rollout, the same ones for a group of slots",
            False,
        )

    return rule


def _episodes(read: Reading) -> Any:
    slots, rounds = int(read("env.eval.total_num_envs", 0)), int(read("env.eval.rollout_epoch", 1))
    steps, longest = read("env.eval.max_steps_per_rollout_epoch", 1), read("env.eval.max_episode_steps", 1)
    return slots * rounds * max(1, int(steps) // int(longest)) if slots else NOTHING


def _films(read: Reading) -> Any:
    if read("env.eval.video_cfg.save_video", False):
        read.leave("env.eval.video_cfg.save_video", "RLinf films all slots; env.eval.video_episodes is set to 4", False)
        return 4
    return NOTHING


def _ends(read: Reading) -> Any:
    if (ignored := bool(read("env.train.ignore_terminations", False))) or _is_grpo(read):
        read.leave("algorithm.bootstrap_type", "no episode ends before its limit, or nothing is bootstrapped", False)
    return ignored


def _scale(read: Reading) -> Any:
    if read.leaves.get("env.train.env_type") not in ("libero", "metaworld"):
        return read.leave("env.train.reward_coef", "RLinf uses it with LIBERO and MetaWorld only", False)
    return float(read("env.train.reward_coef", 1.0))


_PLAYED: Rows = [
    ("algorithm.rollout_steps", _rollout_steps),
    ("env.train.env_type", _env_type),
    ("env.train.env_id", _env_id("train")),
    ("env.train.num_envs", _slots),
    ("env.train.max_episode_steps", "env.train.max_episode_steps"),
    ("env.train.seed", "env.train.seed"),
    ("env.train.auto_reset", lambda read: bool(read("env.train.auto_reset", False))),
    ("env.train.ignore_terminations", _ends),
    ("env.train.use_fixed_reset_state_ids", _fixed("train")),
    ("env.train.use_rel_reward", "env.train.use_rel_reward"),
    ("env.train.reward_scale", _scale),
    ("env.train.kwargs", _env_arguments("train")),
    ("env.eval.env_id", _env_id("eval")),
    ("env.eval.num_envs", "env.eval.total_num_envs"),
    ("env.eval.num_episodes", _episodes),
    ("env.eval.max_episode_steps", "env.eval.max_episode_steps"),
    ("env.eval.ignore_terminations", "env.eval.ignore_terminations"),
    ("env.eval.use_fixed_reset_state_ids", _fixed("eval")),
    ("env.eval.kwargs", _env_arguments("eval")),
    ("env.eval.video_episodes", _films),
    ("env.eval.video_fps", "env.eval.video_cfg.fps"),
    ("rollout.pipeline_stage_num", "rollout.pipeline_stage_num"),
    ("actor.global_batch_size", "actor.global_batch_size"),
]


# PPO and GRPO.


def _embodied_normalization(read: Reading) -> str:
    if _is_grpo(read):
        read.leave("algorithm.normalize_advantages", "group estimators divide by the group's spread in both", False)
        return "none"
    return "batch" if read("algorithm.normalize_advantages", True) else "none"


def _decoupled(key: str) -> Rule:
    def rule(read: Reading) -> Any:
        if read.leaves.get("algorithm.loss_type") != "decoupled_actor_critic":
            return NOTHING
        return int(read(key, 0))

    return rule


def _value_clip(read: Reading) -> Any:
    clip = read("algorithm.value_clip")
    return NOTHING if _is_grpo(read) or clip is None else clip


def _rate(read: Reading) -> Any:
    rate = read("actor.optim.lr", NOTHING)
    if _is_grpo(read) or read.leaves.get("actor.optim.value_lr") == rate:
        read.leave("actor.optim.value_lr", "policy and critic share one learning rate, or there is no critic", False)
    if _is_grpo(read):
        read.leave("algorithm.huber_delta", "for a critic, which group estimators do without", False)
        read.leave("actor.optim.critic_warmup_steps", "for a critic, which group estimators do without", False)
    return rate


def _micro(read: Reading) -> Any:
    return read("actor.micro_batch_size", NOTHING)


_PPO: Rows = [
    ("algorithm.adv_type", _choice("algorithm.adv_type", _ADVANTAGES)),
    ("algorithm.loss_type", _choice("algorithm.loss_type", _LOSSES)),
    ("algorithm.gae_lambda", lambda read: NOTHING if _is_grpo(read) else read("algorithm.gae_lambda", 1.0)),
    ("algorithm.normalize_advantages", _embodied_normalization),
    ("algorithm.clip_ratio_low", "algorithm.clip_ratio_low"),
    ("algorithm.clip_ratio_high", "algorithm.clip_ratio_high"),
    ("algorithm.value_clip", _value_clip),
    ("algorithm.value_coef", lambda read: 0.0 if read("algorithm.loss_type") == "actor" else 1.0),
    ("algorithm.entropy_coef", "algorithm.entropy_bonus"),
    ("algorithm.update_epochs", lambda read: int(read("algorithm.update_epoch", 1))),
    ("algorithm.logprob_type", "algorithm.logprob_type"),
    ("algorithm.reward_type", "algorithm.reward_type"),
    ("algorithm.max_staleness", _decoupled("algorithm.staleness_threshold")),
    ("env.train.group_size", lambda read: int(read("env.train.group_size", 0) or read("algorithm.group_size", 1))),
    ("actor.micro_batch_size", _micro),
    ("actor.optim.name", lambda read: "adamw" if read("actor.optim.weight_decay", 0) else "adam"),
    ("actor.optim.lr", _rate),
    ("actor.optim.adam_beta1", "actor.optim.adam_beta1"),
    ("actor.optim.adam_beta2", "actor.optim.adam_beta2"),
    ("actor.optim.adam_eps", "actor.optim.adam_eps"),
    ("actor.optim.weight_decay", "actor.optim.weight_decay"),
    ("actor.optim.clip_grad", "actor.optim.clip_grad"),
]


# SAC.


def _ratio(read: Reading) -> float:
    """Updates for each transition: RLinf counts them for each step of the runner."""
    transitions = int(read("env.train.total_num_envs", 8)) * _decisions(read) * _rounds(read)
    return round(int(read("algorithm.update_epoch", 1)) / transitions, 6)


_SAC: Rows = [
    ("algorithm.loss_type", lambda read: "sac" if read("algorithm.loss_type") else NOTHING),
    ("algorithm.tau", "algorithm.tau"),
    ("algorithm.update_to_data", _ratio),
    ("algorithm.auto_entropy_tuning", lambda r: r("algorithm.entropy_tuning.alpha_type", "softplus") != "fixed_alpha"),
    ("algorithm.initial_alpha", "algorithm.entropy_tuning.initial_alpha"),
    ("algorithm.target_entropy", "algorithm.entropy_tuning.target_entropy"),
    ("algorithm.alpha_lr", "algorithm.entropy_tuning.optim.lr"),
    ("algorithm.backup_entropy", "algorithm.backup_entropy"),
    ("algorithm.critic_actor_ratio", "algorithm.critic_actor_ratio"),
    ("algorithm.target_update_freq", "algorithm.target_update_freq"),
    ("algorithm.random_steps", lambda read: 0),  # RLinf's policy acts from the first step on
    ("actor.optim.name", lambda read: "adam"),
    ("actor.optim.lr", "actor.optim.lr"),
    ("actor.optim.value_lr", "actor.critic_optim.lr"),
    ("actor.optim.adam_beta1", "actor.optim.adam_beta1"),
    ("actor.optim.adam_beta2", "actor.optim.adam_beta2"),
    ("actor.optim.adam_eps", "actor.optim.adam_eps"),
    ("actor.optim.clip_grad", "actor.optim.clip_grad"),
]


# The policy of embodied runs.


def _model_type(read: Reading) -> str:
    name = str(read("actor.model.model_type", "mlp_policy"))
    sac = read.leaves.get("algorithm.loss_type") == "embodied_sac"
    if name == "openpi" and str(read("actor.model.openpi.config_name", "pi0")).startswith("pi0_") and not sac:
        read.leave("actor.model.model_path", "rlhpc's pi0 reads folders of its own format: openpi's weights do not fit")
        return "pi0"
    if name in _MODELS and not (sac and name != "mlp_policy"):
        return "sac" if sac else _MODELS[name]
    read.leave(
        "actor.model.model_type", f"rlhpc has no such policy: register yours as {name} (docs/how-to/add-model.md)"
    )
    return name


def _is_mlp(read: Reading) -> bool:
    return read.leaves.get("actor.model.model_type", "mlp_policy") == "mlp_policy"


def _seeing(rule: str | Rule) -> Rule:
    """Only of vision-language-action models."""

    def seeing(read: Reading) -> Any:
        if read.leaves.get("actor.model.model_type") not in _VISION_LANGUAGE:
            return NOTHING
        return read(rule, NOTHING) if isinstance(rule, str) else rule(read)

    return seeing


def _policy_dtype(read: Reading) -> Any:
    if not read("actor.model.is_lora", False):
        return read.leave("actor.model.precision", "all weights are trained in float32; bfloat16 needs adapters")
    return _DTYPES.get(str(read("actor.model.precision", "32")), "float32")


def _policy_options(read: Reading) -> Any:
    if _is_mlp(read) and read.leaves.get("algorithm.loss_type") != "embodied_sac":
        return {"actor_gain": 0.01414}
    if read.leaves.get("actor.model.model_type") != "openpi":
        return NOTHING
    options = {
        "num_steps": read("actor.model.num_steps") or read("actor.model.openpi.num_steps"),
        "noise_level": read("actor.model.openpi.noise_level"),
    }
    return {name: value for name, value in options.items() if value is not None} or NOTHING


_POLICY: Rows = [
    ("actor.training_backend", lambda read: "local" if read("actor.training_backend") else NOTHING),
    ("actor.model.model_type", _model_type),
    ("actor.model.hidden_sizes", lambda read: [256, 256, 256] if _is_mlp(read) else NOTHING),
    (
        "actor.model.log_std_init",
        lambda r: -0.5 if _is_mlp(r) and r.leaves.get("algorithm.loss_type") in _LOSSES else NOTHING,
    ),
    ("actor.model.num_action_chunks", "actor.model.num_action_chunks"),
    (
        "actor.model.value_per_action",
        lambda read: (
            True
            if not _is_grpo(read)
            and read.leaves.get("algorithm.reward_type") == "action_level"
            and int(read.leaves.get("actor.model.num_action_chunks") or 1) > 1
            else NOTHING
        ),
    ),
    ("actor.model.kwargs", _policy_options),
    ("actor.model.add_value_head", _seeing("actor.model.add_value_head")),
    ("actor.model.model_path", _seeing("actor.model.model_path")),
    ("actor.model.dtype", _seeing(_policy_dtype)),
    ("actor.model.gradient_checkpointing", _seeing("actor.fsdp_config.gradient_checkpointing")),
    ("actor.model.attn_implementation", _seeing("actor.model.attn_implementation")),
    (
        "actor.lora.rank",
        _seeing(lambda read: int(read("actor.model.lora_rank", 32)) if read("actor.model.is_lora", False) else NOTHING),
    ),
]


# Language models.


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
        name = _DTYPES.get(str(read(key, "bf16")).lower().removesuffix("-mixed"), "bfloat16")
        if name == "float16" and fallback != name:
            read.leave(key, f"rlhpc does not train in float16: {fallback} is written")
            return fallback
        return name

    return rule


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


def _problems(read: Reading, key: str) -> dict[str, Any] | None:
    paths = read(key)
    paths = [paths] if isinstance(paths, str) else list(paths or ())
    if not paths:
        return None
    if len(paths) > 1:
        read.leave(key, "a source is one file, folder or pattern: the first one is written")
    suffix = Path(str(paths[0])).suffix
    problems = {
        "source": {".parquet": "parquet", ".jsonl": "jsonl", ".json": "jsonl"}.get(suffix, "hf"),
        "path": paths[0],
    }
    problems["prompt_key"], problems["answer_key"] = (
        str(read("data.prompt_key", "prompt")),
        str(read("data.answer_key", "answer")),
    )
    problems["chat_template"] = bool(read("data.apply_chat_template", False) or read("data.use_chat_template", False))
    if prompt := read("data.system_prompt"):
        problems["system_prompt"] = str(prompt)
    return problems


def _training_data(name: str) -> Rule:
    return lambda read: (_problems(read, "data.train_data_paths") or {}).get(name, NOTHING)


def _suites(read: Reading) -> Any:
    problems = _problems(read, "data.val_data_paths")
    return [{"name": "validation", **problems}] if problems else NOTHING


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
    return _choice("algorithm.adv_type", _ADVANTAGES)(read)


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


_LANGUAGE: Rows = [
    ("algorithm.adv_type", _advantage),
    ("algorithm.loss_type", _choice("algorithm.loss_type", _LOSSES)),
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
        _choice(
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
    *(
        (f"data.train.{name}", _training_data(name))
        for name in ("source", "path", "prompt_key", "answer_key", "chat_template", "system_prompt")
    ),
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
    ("rollout.dtype", _dtype("rollout.model.precision", "float16")),
    (
        "rollout.engine_kwargs",
        lambda read: {"enforce_eager": True} if read("rollout.enforce_eager", False) else NOTHING,
    ),
    ("actor.training_backend", _trainer),
    ("actor.global_batch_size", _responses),
    ("actor.max_tokens_per_micro_batch", _pass_tokens),
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
    ("actor.optim.lr", "actor.optim.lr"),
    ("actor.optim.adam_beta1", "actor.optim.adam_beta1"),
    ("actor.optim.adam_beta2", "actor.optim.adam_beta2"),
    ("actor.optim.adam_eps", "actor.optim.adam_eps"),
    ("actor.optim.weight_decay", "actor.optim.weight_decay"),
    ("actor.optim.clip_grad", "actor.optim.clip_grad"),
    ("actor.optim.lr_scheduler", _schedule("actor.lr_sched.lr_decay_style", "constant")),
    ("actor.optim.lr_warmup_steps", _schedule("actor.lr_sched.lr_warmup_iters", 0)),
]
