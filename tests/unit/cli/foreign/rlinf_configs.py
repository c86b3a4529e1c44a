"""Configurations of RLinf, and what is imported from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhpc import cli
from rlhpc.cli.foreign import rlinf, rlinf_defaults
from rlhpc.cli.foreign.hydra import ComposedConfig
from rlhpc.cli.foreign.rules import Translation
from rlhpc.runs.configuration import load_config

#: In RLinf's format, but of our own making: a piece for each group of a `defaults:` list, references, an environment variable.
CUBE = {
    "env_type": "maniskill",
    "total_num_envs": None,
    "auto_reset": False,
    "ignore_terminations": False,
    "use_rel_reward": False,
    "reward_mode": "raw",
    "seed": 0,
    "group_size": 1,
    "use_fixed_reset_state_ids": False,
    "max_episode_steps": 40,
    "max_steps_per_rollout_epoch": 40,
    "video_cfg": {"save_video": False, "video_base_dir": "${runner.logger.log_path}/video"},
    "init_params": {
        "id": "PushCube-v1",
        "obs_mode": "state",
        "control_mode": "None",
        "sim_backend": "gpu",
        "max_episode_steps": "${..max_episode_steps}",
        "sim_config": {"control_freq": 20},
    },
}
MLP = {
    "model_type": "mlp_policy",
    "policy_setup": "panda-ee-dpos",
    "obs_dim": 7,
    "num_action_chunks": 1,
    "precision": "32",
}
PPO: dict[str, Any] = {
    "defaults": ["env/cube@env.train", "env/cube@env.eval", "model/mlp@actor.model", {"override hydra/job_logging": "stdout"}],
    "hydra": {"run": {"dir": "."}, "searchpath": ["file://${oc.env:NOWHERE}/config/"]},
    "cluster": {"num_nodes": 1, "component_placement": {"actor, env, rollout": "0-1"}},
    "runner": {
        "task_type": "embodied",
        "logger": {
            "log_path": "../results", "project_name": "push", "experiment_name": "push a cube",
            "logger_backends": ["tensorboard"],
        },
        "max_epochs": 70, "max_steps": 60, "save_interval": -1, "val_check_interval": 10, "resume_dir": None,
    },
    "algorithm": {
        "update_epoch": 8, "normalize_advantages": True, "kl_beta": 0.0, "group_size": 1, "reward_type": "chunk_level",
        "logprob_type": "chunk_level", "adv_type": "gae", "loss_type": "actor_critic", "bootstrap_type": "standard",
        "entropy_bonus": 0.01, "clip_ratio_low": 0.1, "clip_ratio_high": 0.3, "clip_ratio_c": 3.0, "value_clip": 0.2,
        "huber_delta": 10.0, "gamma": 0.8, "gae_lambda": 0.9, "of_a_later_version": {"deep": 1},
    },
    "env": {
        "group_name": "EnvGroup",
        "train": {"total_num_envs": 64, "rollout_epoch": 2, "auto_reset": True, "max_steps_per_rollout_epoch": 20},
        "eval": {"total_num_envs": 16, "rollout_epoch": 2, "auto_reset": True, "video_cfg": {"save_video": True}},
    },
    "rollout": {"backend": "huggingface", "pipeline_stage_num": 2, "model": {"precision": "${actor.model.precision}"}},
    "actor": {
        "training_backend": "fsdp", "micro_batch_size": 320, "global_batch_size": 1280, "seed": 7, "enable_offload": True,
        "model": {"model_path": "${oc.env:SECRET_FOLDER}/weights", "obs_dim": "${env.nothing.here}"},
        "optim": {"lr": 3e-4, "value_lr": 1e-3, "adam_eps": 1e-8, "weight_decay": 0.01, "clip_grad": 0.5},
    },
}  # fmt: skip
SAC = {
    "algorithm": {
        "loss_type": "embodied_sac", "adv_type": "embodied_sac", "update_epoch": 32, "gamma": 0.9, "tau": 0.01,
        "entropy_tuning": {"alpha_type": "fixed_alpha", "initial_alpha": 0.02, "optim": {"lr": 1e-4}},
        "replay_buffer": {"min_buffer_size": 10, "cache_size": 100}, "agg_q": "min",
    },
    "actor": {"critic_optim": {"lr": 2e-4, "clip_grad": 10.0}},
    "env": {"train": {"rollout_epoch": 1, "max_steps_per_rollout_epoch": 2}},
}  # fmt: skip
LANGUAGE: dict[str, Any] = {
    "cluster": {"num_nodes": 2, "component_placement": {"actor,rollout,reward": "0-15"}},
    "runner": {
        "task_type": "reasoning", "experiment_name": "sums", "max_epochs": 5, "max_steps": 100, "seq_length": 2048,
        "logger": {"experiment_name": "${runner.experiment_name}", "logger_backends": ["tensorboard"]},
    },
    "algorithm": {
        "group_size": 8, "n_minibatches": 4, "training_batch_size_per_gpu": 2, "recompute_logprobs": True,
        "loss_type": "actor", "loss_agg_func": "token-mean", "kl_beta": 0.001, "kl_penalty_type": "low_var_kl",
        "ratio_clip_eps": 0.2, "clip_ratio_low": None, "clip_ratio_high": 0.28, "adv_type": "grpo",
        "normalize_advantages": False, "sampling_params": {"temperature": 0.9, "top_k": 1000000, "top_p": 1.0,
                            "max_new_tokens": "${subtract:${runner.seq_length}, ${data.max_prompt_length}}"},
    },
    "rollout": {"rollout_backend": "sglang", "tensor_parallel_size": 2,
                "return_logprobs": "${not:${algorithm.recompute_logprobs}}",
                "model": {"model_path": "models/one", "precision": "bf16"}},
    "data": {"type": "math", "max_prompt_length": 1024, "rollout_batch_size": 128, "prompt_key": "problem",
             "answer_key": "solution", "train_data_paths": ["a.jsonl", "b.jsonl"], "val_data_paths": ["c.parquet"]},
    "actor": {"training_backend": "megatron", "seed": 3, "model": {"precision": "fp16", "tensor_model_parallel_size": 2},
              "optim": {"optimizer": "adam", "lr": 2e-6}, "lr_sched": {"lr_decay_style": "cosine", "lr_warmup_iters": 5},
              "megatron": {"distributed_backend": "nccl"}},
    "reward": {"reward_type": "math", "reward_scale": 5.0},
}  # fmt: skip


#: What a value model adds to a language model's run.
CRITIC: dict[str, Any] = {
    "cluster": {"component_placement": {"actor,rollout,reward": None, "actor,critic,rollout,reward": "0-15"}},
    "algorithm": {"adv_type": "gae", "group_size": 1, "normalize_advantages": True, "value_cliprange": 0.5, "gae_lambda": 0.9},
    "critic": {
        "use_critic_model": True, "training_backend": "megatron", "seed": 3, "model": {"precision": "bf16"},
        "optim": {"optimizer": "adam", "lr": 1e-5, "clip_grad": 1.0}, "lr_sched": {"lr_decay_style": "linear"},
    },
}  # fmt: skip
FSDP: dict[str, Any] = {"actor": {"training_backend": "fsdp", "optim": {"adam_beta1": 0.8, "adam_beta2": 0.7}}}


def merged(below: Any, above: Any) -> Any:
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    return {**below, **{key: merged(below.get(key), value) for key, value in above.items()}}


KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}  # name → (a configuration, RLinf's defaults)


def _kinds() -> None:
    embodied = merged({"env": {"train": CUBE, "eval": CUBE}, "actor": {"model": MLP}}, PPO)
    embodied = {key: value for key, value in embodied.items() if key not in ("defaults", "hydra")}
    KINDS["embodied"] = embodied, rlinf_defaults.EMBODIED
    KINDS["off_policy"] = merged(embodied, SAC), rlinf_defaults.SAC
    for name, above in {"megatron": {}, "fsdp": FSDP, "critic": CRITIC}.items():
        tree = merged(LANGUAGE, above)
        KINDS[name] = tree, rlinf_defaults.language_defaults(flat(tree))


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix[:-1]: tree}
    return {key: value for name, below in tree.items() for key, value in flat(below, f"{prefix}{name}.").items()}


def translation(leaves: dict[str, Any]) -> Translation:
    known = {key: value for key, value in leaves.items() if "${" not in str(value)}
    return rlinf.translate(ComposedConfig(known), "rlinf.yaml")


def put(folder: Path, name: str, content: Any) -> Path:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(yaml.safe_dump(content, sort_keys=False))
    return folder / name


def imported(source: Path, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[Any, str, str]:
    """(the configuration, its text, the report)."""
    target = source.parent / "ours.yaml"
    assert cli.main(["config", "import", str(source), "-o", str(target), "--ignore-unknown", *words]) == 0
    report = capsys.readouterr().err
    cfg = load_config(target, site="") if "keys and values are right" in report else None
    return cfg, target.read_text(), report
