"""Configurations of the baseline runs: two steps each, on CPUs, one rank per group."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np

#: Steps of the packed run, and of the resumed one.
SAVED, RESUMED = 2, 4
#: Name of the run folder below `runs`.
RUN = "run"

Config = dict[str, Any]


@dataclass(frozen=True)
class BaselineRun:
    """A run of the baseline.

    Attributes:
        config: Content of its configuration file.
        data: Writes the files that the configuration names, in the working directory.
        earlier: Configurations of runs that are trained first, and packed as well, by name.
        suite: Evaluation suite; "" for the default one.
        convert: Options of further exports, by name of their folder.
        extras: Optional dependencies that it needs.
    """

    config: Config
    data: Callable[[Path], None] | None = None
    earlier: Mapping[str, Config] = field(default_factory=dict)
    suite: str = ""
    convert: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    extras: tuple[str, ...] = ()


def with_changes(config: Config, **changes: Any) -> Config:
    """Returns a copy of a configuration with changes: `section__key=value`; mappings are replaced as a whole."""
    result = copy.deepcopy(config)
    for key, value in changes.items():
        *sections, name = key.split("__")
        part = result
        for section in sections:
            part = part.setdefault(section, {})
        part[name] = value
    return result


def _runner(task_type: str) -> Config:
    return {
        "name": RUN, "task_type": task_type, "run_dir": "runs", "seed": 3, "max_steps": SAVED, "save_interval": SAVED,
        "logger": {"logger_backends": ["jsonl"]},
    }  # fmt: skip


# -- embodied ---------------------------------------------------------------------------------------------------------

_ENVS: Config = {
    "train": {"env_type": "gymnasium", "env_id": "Pendulum-v1", "num_envs": 4, "max_episode_steps": 12},
    "eval": {"num_envs": 2, "num_episodes": 4},
}
_PPO: Config = {
    "runner": _runner("embodied"),
    "cluster": {"num_nodes": 1, "accelerators_per_node": 0, "component_placement": {"actor,rollout,env": 0}},
    "algorithm": {"rollout_steps": 16, "update_epochs": 2, "gae_lambda": 0.9, "anneal_lr": False},
    "env": _ENVS,
    "actor": {"global_batch_size": 32, "model": {"hidden_sizes": [16]}, "optim": {"lr": 1.0e-3}},
}
_OFF_POLICY: Config = {
    "runner": _runner("off_policy"),
    "cluster": {"num_nodes": 1, "accelerators_per_node": 0, "component_placement": {"actor,rollout,env": 0}},
    "algorithm": {
        "rollout_steps": 8, "random_steps": 16, "replay_buffer": {"size": 128, "min_buffer_size": 32},
        "update_to_data": 0.25,
    },
    "env": _ENVS,
    "actor": {"global_batch_size": 16, "model": {"hidden_sizes": [16], "critic_hidden_sizes": [16]}},
}  # fmt: skip
_BC: Config = {
    "runner": _runner("bc"),
    "cluster": {"num_nodes": 1, "accelerators_per_node": 0, "component_placement": {"actor": 0}},
    "algorithm": {"update_epochs": 2},
    "env": {"train": {"env_id": "Pendulum-v1", "max_episode_steps": 12}, "eval": {"num_envs": 2, "num_episodes": 4}},
    "actor": {"global_batch_size": 16, "model": {"hidden_sizes": [16]}, "optim": {"lr": 1.0e-3}},
    "demos": {"path": "data/demos.h5", "holdout": 0.25},
}


def write_demonstrations(folder: Path) -> None:
    """Writes four short episodes of Pendulum in ManiSkill's format."""
    draw, steps = np.random.default_rng(0), 12
    folder.mkdir(exist_ok=True)
    with h5py.File(folder / "demos.h5", "w") as file:
        for number in range(4):
            angle, speed = draw.uniform(-np.pi, np.pi, steps + 1), draw.uniform(-8, 8, steps + 1)
            group = file.create_group(f"traj_{number}")
            group["obs"] = np.stack([np.cos(angle), np.sin(angle), speed], 1).astype(np.float32)
            group["actions"] = draw.uniform(-2, 2, (steps, 1)).astype(np.float32)
            group["rewards"] = draw.normal(size=steps).astype(np.float32)
            for name in ("terminated", "success"):
                group[name] = np.zeros(steps, bool)
            group["truncated"] = np.arange(steps) == steps - 1
    episodes = [{"episode_id": number, "elapsed_steps": steps} for number in range(4)]
    facts = {"env_info": {"env_id": "Pendulum-v1", "env_kwargs": {}}, "episodes": episodes}
    (folder / "demos.json").write_text(json.dumps(facts))


_EARLIER_CRITIC = with_changes(_BC, runner__name="critic", algorithm__bc_value_coef=0.5)
_EARLIER_FLOW = with_changes(_BC, runner__name="flow", actor__model={"model_type": "flow", "hidden_sizes": [16]})

_PIXELS = ["pixels", {"resize": {"shape": [32, 32]}}]

EMBODIED: dict[str, BaselineRun] = {
    "ppo": BaselineRun(_PPO),
    "ppo_discrete": BaselineRun(
        with_changes(_PPO, env__train__env_id="CartPole-v1", algorithm__loss_type="decoupled_ppo", algorithm__target_kl=0.05)
    ),
    "ppo_normalised": BaselineRun(
        with_changes(
            _PPO, actor__model__normalize_observations=True, env__train__wrappers=["statistics", "normalize_reward"],
            runner__val_check_interval=1, runner__keep_best="eval/return_mean",
        )
    ),
    "ppo_grpo": BaselineRun(with_changes(
            _PPO, algorithm__adv_type="grpo", env__train__group_size=2, env__train__auto_reset=False,
            env__train__ignore_terminations=True,
        )),
    "ppo_pixels": BaselineRun(
        with_changes(
            _PPO, env__train__kwargs={"render_mode": "rgb_array"}, env__train__wrappers=_PIXELS, algorithm__rollout_steps=4,
            algorithm__update_epochs=1, actor__global_batch_size=16, actor__model={"model_type": "cnn", "hidden_sizes": [16]},
        ),
        extras=("embodied",),
    ),
    "ppo_flow": BaselineRun(
        with_changes(_PPO, actor__model={"model_type": "flow", "hidden_sizes": [16], "num_action_chunks": 2})
    ),
    "grpo_vla_lora": BaselineRun(
        with_changes(
            _PPO, env__train__kwargs={"render_mode": "rgb_array"}, env__train__wrappers=_PIXELS, env__train__group_size=2,
            env__train__auto_reset=False, env__train__ignore_terminations=True, actor__global_batch_size=16,
            algorithm={
                "rollout_steps": 4, "update_epochs": 1, "adv_type": "grpo", "value_coef": 0.0, "logprob_type": "token_level",
            },
            actor__model={"model_type": "vla", "model_path": "builtin:tiny", "add_value_head": False},
            actor__lora={"rank": 1, "target_modules": ["q_proj", "v_proj"]},
        ),
        extras=("llm",),
    ),
    "sac": BaselineRun(_OFF_POLICY),
    "sac_async": BaselineRun(with_changes(_OFF_POLICY, algorithm__max_staleness=1)),
    "sac_demonstrations": BaselineRun(
        with_changes(_OFF_POLICY, algorithm__demo_buffer={"load_path": "data/demos.h5"}, actor__model__critic_layer_norm=True),
        data=write_demonstrations,
    ),
    "td3": BaselineRun(
        with_changes(_OFF_POLICY, algorithm__name="td3", actor__model__model_type="td3", algorithm__critic_actor_ratio=2)
    ),
    "crossq": BaselineRun(with_changes(_OFF_POLICY, algorithm__name="crossq", actor__model__model_type="crossq")),
    "iql": BaselineRun(
        with_changes(
            _OFF_POLICY, algorithm__name="iql", actor__model__model_type="iql", algorithm__offline_steps=1,
            algorithm__offline_updates=4, algorithm__demo_buffer={"load_path": "data/demos.h5"},
        ),
        data=write_demonstrations,
    ),
    "iql_offline": BaselineRun(
        with_changes(
            _OFF_POLICY, algorithm__name="iql", actor__model__model_type="iql", algorithm__offline_steps=RESUMED,
            algorithm__offline_updates=4, algorithm__demo_buffer={"load_path": "data/demos.h5"},
        ),
        data=write_demonstrations,
    ),
    "dsrl": BaselineRun(
        with_changes(
            _OFF_POLICY, actor__model__model_type="dsrl", actor__model__kwargs={"base": "runs/flow", "noise_bound": 0.8}
        ),
        data=write_demonstrations, earlier={"flow": _EARLIER_FLOW},
    ),
    "bc": BaselineRun(_BC, data=write_demonstrations),
    "bc_value": BaselineRun(
        with_changes(_BC, algorithm__bc_value_coef=0.5, algorithm__bc_loss="mse"), data=write_demonstrations
    ),
    "bc_flow": BaselineRun(
        with_changes(_BC, actor__model={"model_type": "flow", "hidden_sizes": [16], "num_action_chunks": 2}),
        data=write_demonstrations,
    ),
    "bc_sac": BaselineRun(
        with_changes(_BC, actor__model={"model_type": "sac", "hidden_sizes": [16], "activation": "relu"}),
        data=write_demonstrations,
    ),
    "bc_conditioned": BaselineRun(
        with_changes(
            _BC, algorithm__value_model="runs/critic",
            actor__model={"model_type": "conditioned", "hidden_sizes": [16], "kwargs": {"of": "mlp"}},
        ),
        data=write_demonstrations, earlier={"critic": _EARLIER_CRITIC},
    ),
}  # fmt: skip

# -- language ---------------------------------------------------------------------------------------------------------

_MODEL: Config = {"model_path": "builtin:tiny", "kwargs": {"hidden": 16, "layers": 2, "heads": 2}}
_SUMS: Config = {"source": "arithmetic", "size": 64, "eval_fraction": 0.2, "kwargs": {"digits": 1}}
_GRPO: Config = {
    "runner": _runner("reasoning"),
    "cluster": {"num_nodes": 1, "accelerators_per_node": 0, "component_placement": {"actor,rollout": 0}},
    "data": {
        "train": _SUMS,
        "eval": [{"name": "held_out", **_SUMS, "size": 6}],
        "max_prompt_tokens": 24,
        "prompts_per_step": 4,
    },
    "reward": {"terms": [{"name": "exact"}, {"name": "format", "weight": 0.5, "kwargs": {"pattern": ".*[0-9].*"}}]},
    "workflow": {"eval_suites": ["held_out"]},
    "algorithm": {"group_size": 4},
    "rollout": {"max_new_tokens": 6, "max_batch_size": 16},
    "actor": {"global_batch_size": 8, "model": _MODEL, "optim": {"lr": 1.0e-3}},
}
_SFT: Config = {
    "runner": _runner("sft"),
    "cluster": {"num_nodes": 1, "accelerators_per_node": 0, "component_placement": {"actor": 0}},
    "data": {
        "train": _SUMS,
        "eval": [{"name": "held_out", **_SUMS, "size": 6}],
        "max_prompt_tokens": 24,
        "prompts_per_step": 8,
    },
    "reward": {"terms": [{"name": "exact"}]},
    "workflow": {"eval_suites": ["held_out"]},
    "rollout": {"max_new_tokens": 6, "max_batch_size": 16},
    "actor": {"max_tokens_per_micro_batch": 256, "model": _MODEL, "optim": {"lr": 1.0e-3, "lr_warmup_steps": 3}},
}
_DPO: Config = {
    "runner": {**_runner("dpo"), "val_check_interval": 1},
    "cluster": {"num_nodes": 1, "accelerators_per_node": 0, "component_placement": {"actor": 0}},
    "data": {
        "train": {"path": "data/train.jsonl"}, "holdout": {"path": "data/held_out.jsonl"},
        "eval": [{"name": "held_out", **_SUMS, "size": 6}], "max_prompt_tokens": 24, "prompts_per_step": 8,
    },
    "reward": {"terms": [{"name": "exact"}]},
    "workflow": {"eval_suites": ["held_out"]},
    "rollout": {"max_new_tokens": 6, "max_batch_size": 16},
    "algorithm": {"beta": 0.4},
    "actor": {"max_tokens_per_micro_batch": 256, "model": _MODEL, "optim": {"lr": 1.0e-3}},
}  # fmt: skip
_REWARD_MODEL: Config = {
    "runner": {**_runner("reward_model"), "val_check_interval": 1},
    "cluster": {"num_nodes": 1, "accelerators_per_node": 0, "component_placement": {"actor": 0}},
    "data": {
        "train": {"path": "data/train.jsonl"}, "prompts_per_step": 8, "max_prompt_tokens": 24,
        "eval": [{"name": "held_out", "path": "data/held_out.jsonl", "level_key": "kind"}],
    },
    "algorithm": {"loss_kwargs": {"centering": 0.01}},
    "workflow": {"eval_suites": ["held_out"]},
    "actor": {"max_tokens_per_micro_batch": 256, "model": _MODEL, "optim": {"lr": 1.0e-3}},
}  # fmt: skip
_DISTILLATION = with_changes(
    _GRPO, algorithm__name="distillation", algorithm__distillation={"mode": "topk", "topk": 8},
    teacher={"model": {"model_path": "builtin:tiny", "kwargs": {"hidden": 16, "layers": 2, "heads": 2, "seed": 7}}},
)  # fmt: skip
_AGENT = with_changes(
    _GRPO,
    data={
        "train": {
            "source": "environment", "size": 64,
            "kwargs": {"name": "guess", "high": 15, "turns": 4, "symbols": "abcdefghijklmno", "question": "?"},
        },
        "eval": [{
            "name": "held_out", "source": "environment", "size": 6,
            "kwargs": {"name": "guess", "high": 15, "turns": 4, "symbols": "abcdefghijklmno", "question": "?"},
        }],
        "max_prompt_tokens": 64, "prompts_per_step": 4,
    },
    agent={"kind": "environment", "target": "guess", "episodes_per_rank": 16},
    reward={"terms": [{"name": "agent"}]}, rollout={"max_new_tokens": 1, "max_batch_size": 16},
    actor__model__kwargs={"vocabulary": "abcdefghijklmno+-?", "hidden": 16, "layers": 2, "heads": 2, "context": 16},
)  # fmt: skip
_POLICIES = with_changes(
    _AGENT,
    data={
        "train": {"source": "environment", "size": 64, "kwargs": {"name": "kuhn_poker"}}, "max_prompt_tokens": 64,
        "prompts_per_step": 4,
        "eval": [{"name": "held_out", "source": "environment", "size": 6, "kwargs": {"name": "kuhn_poker"}}],
    },
    agent={
        "kind": "environment", "target": "kuhn_poker", "kwargs": {"short": True}, "episodes_per_rank": 16,
        "policies": {"first": "opens", "second": "replies"},
    },
    algorithm={"adv_type": "rloo", "group_size": 4},
    actor__model__kwargs={"vocabulary": "12JQKpb", "hidden": 16, "layers": 2, "heads": 2, "context": 16},
    actor__lora={"rank": 4, "alpha": 8},
)  # fmt: skip
_PLACES = {"actor,rollout": 0}
_ADAPTER = {"adapter": ("--adapter-only",)}


def write_pairs(folder: Path) -> None:
    """Writes sums, each with a right and a wrong result, and a label for a response."""
    folder.mkdir(exist_ok=True)
    for name, first, last in (("train", 10, 24), ("held_out", 30, 33)):
        rows = [
            {
                "prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a + b + 1) + "0" * (a % 3),
                "response": str(a + b + a % 3), "label": a % 3 / 2, "kind": "even" if a % 2 else "odd",
            }
            for a in range(first, last)
            for b in range(1, 4)
        ]  # fmt: skip
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _language(config: Config, **more: Any) -> BaselineRun:
    return BaselineRun(config, suite="held_out", extras=("llm", *more.pop("extras", ())), **more)


LANGUAGE: dict[str, BaselineRun] = {
    "grpo": _language(_GRPO),
    "grpo_lora": _language(with_changes(_GRPO, actor__lora={"rank": 2}), convert=_ADAPTER),
    "grpo_async": _language(with_changes(_GRPO, algorithm__max_staleness=1)),
    "grpo_reference": _language(
        with_changes(
            _GRPO, algorithm__kl_coef=0.1, reference={"update_interval": 2},
            cluster__component_placement={**_PLACES, "reference": 0},
        )
    ),
    "grpo_fsdp": _language(with_changes(_GRPO, actor__training_backend="fsdp")),
    "grpo_deepspeed": _language(
        with_changes(_GRPO, actor__training_backend="deepspeed", actor__deepspeed={"zero_stage": 2}), extras=("deepspeed",)
    ),
    "ppo_critic": _language(
        with_changes(
            _GRPO, algorithm__adv_type="gae", algorithm__gae_lambda=0.9, critic={"optim": {"lr": 1.0e-3}},
            cluster__component_placement={**_PLACES, "critic": 0},
        ),
        convert={"critic": ("--critic",)},
    ),
    "ppo_value_head": _language(with_changes(_GRPO, algorithm__adv_type="gae", actor__model__value_head=True)),
    "distillation": _language(_DISTILLATION),
    "agent": _language(_AGENT),
    "agent_policies": _language(_POLICIES),
    "sft": _language(_SFT),
    "sft_lora": _language(with_changes(_SFT, actor__lora={"rank": 2}), convert=_ADAPTER),
    "dpo": _language(_DPO, data=write_pairs),
    "dpo_lora": _language(with_changes(_DPO, actor__lora={"rank": 2}), data=write_pairs, convert=_ADAPTER),
    "reward_model": _language(_REWARD_MODEL, data=write_pairs),
    "reward_regression": _language(
        with_changes(
            _REWARD_MODEL, algorithm={"loss_type": "regression"}, actor__lora={"rank": 2},
            data__train={"path": "data/train.jsonl", "response_key": "response", "label_key": "label"},
        ),
        data=write_pairs,
    ),
}  # fmt: skip

RUNS: dict[str, BaselineRun] = {**EMBODIED, **LANGUAGE}
