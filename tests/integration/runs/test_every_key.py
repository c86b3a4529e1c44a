"""No key without effect: each key of each kind of run is read by code that runs in such a run, or that kind does not have it.

Small runs of every kind (train, evaluate, record, plan for Slurm, Snakemake's graph) note what their processes read, with
`read_keys.py`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhpc.config.schema import element_of, fields_of
from rlhpc.runs.task_type import all_task_types, find_task_type
from tests import warm
from tests.classifiers import save_classifier
from tests.extras import need_extra

need_extra("llm")

ROOT = Path(__file__).resolve().parents[3]
HERE = Path(__file__).parent
NAMES = {"embodied": "PPO", "off_policy": "SAC", "bc": "BC", "reasoning": "GRPO", "sft": "SFT",
         "reward_model": "REWARD_MODEL", "dpo": "DPO"}  # fmt: skip
ALERTS = {"command": "true", "rules": [{"name": "own", "metrics": ["train/*"], "above": 1e9}]}
TRACE = {"steps": "1", "profile": {"groups": ["actor"], "ranks": "0", "steps": "1"}}
RUNNER = {"alerts": ALERTS, "trace": TRACE, "max_steps": -1, "max_epochs": 1, "val_check_interval": 1,
          "logger": {"logger_backends": ["tensorboard"]}}  # fmt: skip
PENDULUM = {
    "train": {"env_id": "Pendulum-v1", "max_episode_steps": 8},
    "eval": {"num_envs": 2, "num_episodes": 2, "video_episodes": 1, "simulators": 0},
}  # fmt: skip
PLAYED = {**PENDULUM, "train": {**PENDULUM["train"], "num_envs": 2, "simulators": 0}}
SHARDED = {"training_backend": "fsdp", "lora": {"rank": 2}}
POLICY = {"training_backend": "fsdp", "global_batch_size": 8}
TINY = {"model_path": "builtin:tiny", "kwargs": {"hidden": 32, "layers": 1, "heads": 2}}
SUMS = {"source": "jsonl", "path": "sums.jsonl", "split": "part=sum", "size": 3}
JUDGED = {"source": "jsonl", "path": "sums.jsonl", "split": "part=sum", "size": 3, "margin_key": "margin"}
PAIRS = {"source": "jsonl", "path": "sums.jsonl", "split": "part=sum", "size": 3}
SERVICES = [{"name": "idle", "command": ["sh", "-c", "echo here; sleep 1000"], "ready": "line: here"}]
LANGUAGE: dict[str, Any] = {
    "data": {"train": SUMS, "eval": [{**SUMS, "name": "default"}], "max_prompt_tokens": 16, "prompts_per_step": 2},
    "reward": {"terms": [{"name": "math"}]},
    "rollout": {"max_new_tokens": 4},
    "agent": {
        "kind": "python",
        "target": "outside_agents:odd_digits",
        "services": SERVICES,
    },
    "workflow": {"sft": "first.yaml"},
}
CONFIGS: dict[str, dict[str, Any]] = {
    "embodied": {
        "defaults": [f"{ROOT}/configs/base/ppo.yaml"],
        "algorithm": {
            "rollout_steps": 4, "rollout_parts": 2, "update_epochs": 1, "loss_type": "decoupled_ppo", "tis_cap": 2.0,
            "anneal_lr": False,
        },
        "env": PLAYED,
        "actor": POLICY,
    },
    "off_policy": {
        "defaults": [f"{ROOT}/configs/base/sac.yaml"],
        "algorithm": {
            "rollout_steps": 16, "replay_buffer": {"size": 256, "min_buffer_size": 16},
            "demo_buffer": {"load_path": "pendulum.h5"},
        },
        "env": PLAYED,
        "actor": {"global_batch_size": 16, "model": {"hidden_sizes": [16]}},
        "workflow": {"demos_expert": "read_keys:expert"},
    },
    "bc": {
        "cluster": {"component_placement": {"actor": 0}},
        "algorithm": {"update_epochs": 1, "bc_value_coef": 0.1},
        "env": PENDULUM,
        "actor": POLICY,
        "demos": {"path": "pendulum.h5"},
        "workflow": {"demos_expert": "read_keys:expert"},
    },
    "reasoning": {
        "defaults": [f"{ROOT}/configs/base/grpo.yaml"], **LANGUAGE,
        "algorithm": {
            "group_size": 2, "kl_coef": 0.1, "recompute_logprobs": True, "tis_cap": 2.0, "filter_groups": True,
            "max_refills": 1, "name": "distillation", "distillation": {"mode": "topk", "task_reward_coef": 1.0},
            "adv_type": "gae",
        },
        "actor": {**SHARDED, "model": {**TINY, "value_head": True}, "global_batch_size": 4},
        "teacher": {"model": TINY},
    },
    "sft": {
        "defaults": [f"{ROOT}/configs/base/language.yaml"], **LANGUAGE,
        "data": {**LANGUAGE["data"], "holdout": {"split": "label=3"}},
        "agent": {"kind": "mcp", "servers": [{"shell": True}], "sandbox": "none", "services": SERVICES},
        "cluster": {"component_placement": {"actor": 0}},
        "actor": {**SHARDED, "model": TINY},
    },
    "dpo": {
        "defaults": [f"{ROOT}/configs/base/dpo.yaml"], **LANGUAGE,
        "data": {**LANGUAGE["data"], "train": PAIRS, "holdout": {"split": "label=3"}},
        "agent": {"kind": "mcp", "servers": [{"shell": True}], "sandbox": "none", "services": SERVICES},
        "actor": {**SHARDED, "model": TINY},
    },
    "reward_model": {
        "cluster": {"component_placement": {"actor": 0}, "accelerators_per_node": 0},
        "data": {
            "train": JUDGED, "eval": [{**JUDGED, "name": "default"}],
            "max_prompt_tokens": 16, "prompts_per_step": 2,
        },
        "actor": {**SHARDED, "model": TINY},
        "workflow": {"sft": "first.yaml"},
    },
}  # fmt: skip
#: So that the plan has components of their own options, and accelerators.
SLURM = [
    "cluster.num_nodes=2", "cluster.accelerators_per_node=1",
    "cluster.node_groups=[{label: here, node_ranks: '0'}, {label: there, node_ranks: '1', partition: cpu}]",
]  # fmt: skip

#: Only where ranks come and go.
_PLAYERS = ["algorithm.max_staleness=1", "cluster.elastic=[{group: env, max: 2, partition: preempt}]"]
ELASTIC = {
    "reasoning": ["cluster.elastic=[{group: rollout, max: 2, partition: preempt}]"],
    "embodied": _PLAYERS,
    "off_policy": _PLAYERS,
}


#: A second run with language models, with every group that one can have.
GROUPS = [
    "runner.name=groups", "agent={kind: mcp, target: null, servers: [{shell: true}], sandbox: none}",
    "actor.model.value_head=false", "runner.val_check_interval=-1", "algorithm.adv_type=gae",
    "algorithm.name=own_groups:Taught",
    "cluster.component_placement={actor: 0, rollout: 0, critic: 0, reference: 0, teacher: 0, reward: 0, judge: 0, mine: 0, "
    "steps: 0}",
    "teacher.model.model_path=builtin:tiny", "teacher.model.kwargs={hidden: 32, layers: 1, heads: 1}",
    "teacher.rollout_backend=vllm",
    "judge.model.model_path=builtin:tiny", "judge.model.kwargs={hidden: 32, layers: 1, heads: 2, context: 1024}",
    "judge.max_new_tokens=4", "reward.max_failed_steps=100", "reward.model.model_path=classifier",
    "reward.terms=[{name: math}, {name: reward}, {name: judge}, {name: mine}]",
    "reward.process_terms=[{name: steps}]",
    "groups=[{name: steps, scorer: process, model: {model_path: classifier}}, {name: mine, scorer: classifier, model: "
    "{model_path: classifier}}, {name: idle, scorer: logprobs, model: "
    "{model_path: 'builtin:tiny', kwargs: {hidden: 32, layers: 1, heads: 2}}}]",
    "critic.training_backend=fsdp",
    "critic.lora.rank=2",
    "algorithm.distillation.mode=sampled",
]  # fmt: skip


#: Only where a loss is scaled.
_HALF = ["actor.model.dtype=float16", "runner.val_check_interval=-1"]
#: Further runs of this kind, by other algorithms: overrides.
ANOTHER: dict[str, list[list[str]]] = {
    "embodied": [
        [
            "runner.name=filtered", "actor.training_backend=local", "algorithm.adv_type=grpo",
            "algorithm.value_coef=0", "algorithm.filter_rewards=true", "algorithm.rewards_lower_bound=-1e9",
            "algorithm.rewards_upper_bound=1e9", "env.train.auto_reset=false", "env.train.group_size=2",
            "algorithm.rollout_parts=1", "runner.val_check_interval=-1",
        ],
        [
            "runner.name=led", "env.train.intervene.source=read_keys:Marks", "env.train.num_envs=1",
            "actor.training_backend=local", "actor.global_batch_size=4", "algorithm.rollout_parts=1",
            "runner.val_check_interval=-1",
        ],
    ],
    "reasoning": [
        [
            "runner.name=half", "actor.model.dtype=float16", "critic.model.dtype=float16", "algorithm.name=policy_gradient",
            "actor.model.value_head=false", "cluster.component_placement={actor: 0, rollout: 0, critic: 0}",
            "algorithm.tis_cap=null", "algorithm.corrections=[{name: token_tis, kwargs: {cap: 2.0}}]",
            "runner.val_check_interval=-1",
        ],
        [
            "runner.name=taught", "data.train.level_key=part", "runner.val_check_interval=-1",
            "teacher.by_task=[{name: sums, tasks: [sum], model: {model_path: 'builtin:tiny', kwargs: {hidden: 32, layers: 1, "
            "heads: 2}}}]",
        ],
    ],
    "sft": [["runner.name=half-sft", *_HALF]],
    "dpo": [["runner.name=half-dpo", *_HALF]],
    "reward_model": [["runner.name=half-reward_model", *_HALF]],
    "off_policy": [
        ["runner.name=annealed", "algorithm.anneal_lr=true", "runner.val_check_interval=-1"],
        ["runner.name=td3", "algorithm.name=td3", "actor.model.model_type=td3", "runner.val_check_interval=-1"],
        [
            "runner.name=iql", "algorithm.name=iql", "actor.model.model_type=iql", "runner.val_check_interval=-1",
            "algorithm.offline_steps=1", "algorithm.offline_updates=1", "workflow.demos_expert=null",
        ],
        [
            "runner.name=judged", "env.train.intervene.source=read_keys:Marks", "env.train.num_envs=1",
            "algorithm.success_classifier={train: true, min_marks: 1, updates: 1}", "runner.val_check_interval=-1",
        ],
    ],
    "bc": [
        [
            "runner.name=cloned", "actor.model.model_type=td3", "runner.val_check_interval=-1", "algorithm.bc_value_coef=0",
            "actor.training_backend=local",
        ],
        [
            "runner.name=told", "actor.model.model_type=conditioned", "actor.model.kwargs.of=mlp",
            "algorithm.value_model=runs/cloned",
        ],
    ],
}  # fmt: skip


#: Further evaluations of this kind: overrides.
_ANSWERED = [
    "agent={kind: inline, target: null, servers: [], services: [], sandbox: null}", "rollout.agent=tools",
    "rollout.max_turns=2",
]  # fmt: skip
ANSWERED = {"reasoning": _ANSWERED, "sft": _ANSWERED, "dpo": _ANSWERED}


def keys_of(cls: type, prefix: str = "") -> Iterator[str]:
    """Every key, dotted; those of a list's elements under `name[]`."""
    for name, kind in fields_of(cls).items():
        below = element_of(kind)
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            yield from keys_of(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"
            yield from keys_of(below, f"{prefix}{name}[].") if below else ()


class Reads:
    """A folder with a configuration of every kind, and what was read in the runs there."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.out = folder, folder / "reads.tsv"
        for kind, content in CONFIGS.items():
            runner: dict[str, Any] = {**RUNNER, "name": kind, "task_type": f"read_keys:{NAMES[kind]}"}
            (folder / f"{kind}.yaml").write_text(yaml.safe_dump({**content, "runner": runner}))
        first = {**CONFIGS["sft"], "workflow": {}, "runner": {"name": "first", "task_type": "sft"}}
        (folder / "first.yaml").write_text(yaml.safe_dump(first))
        rows = [
            {
                "prompt": f"{n}+1=", "answer": str(n + 1), "response": str(n + 1), "part": "sum", "chosen": str(n + 1),
                "rejected": str(n), "margin": 0.5, "label": n,
            }
            for n in range(4)
        ]  # fmt: skip
        (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        beside = [HERE, HERE.parent / "embodied", HERE.parent / "language", HERE.parent, ROOT]
        self.environment = {
            **os.environ, "PYTHONPATH": os.pathsep.join(map(str, beside)), "RLHPC_MODELS": str(folder / "models"),
            "HF_HUB_OFFLINE": "1", "RLHPC_TEST_READS": str(self.out),
        }  # fmt: skip

    def start(self, kind: str, *command: str) -> None:
        done = warm.run(
            [sys.executable, *command], env={**self.environment, "RLHPC_TEST_KIND": kind}, cwd=self.folder,
            capture_output=True, text=True, timeout=280,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr

    def rlhpc(self, kind: str, command: str, *words: str) -> None:
        config = ["--config", f"{kind}.yaml"] if command == "record" else [f"{kind}.yaml"]
        self.start(kind, "-m", "rlhpc.cli", command, *config, *words)

    def snakemake(self, kind: str) -> None:
        """The graph alone."""
        self.start(
            kind, "-m", "snakemake", "-n", "--quiet", "all", "--profile", str(ROOT / "profiles" / "local"), "--snakefile",
            str(ROOT / "workflow" / "Snakefile"), "--directory", str(self.folder), "--config", f"run={kind}.yaml",
        )  # fmt: skip

    def of(self, kind: str) -> dict[str, str]:
        """Key → where it was first read."""
        lines = [line.split("\t") for line in self.out.read_text().splitlines()]
        return {re.sub(r"\[\d+\]", "[]", key): reader for name, key, reader in lines if name == kind}


@pytest.fixture(scope="module")
def reads(tmp_path_factory: pytest.TempPathFactory) -> Reads:
    """With demonstrations for the kinds that want some."""
    found = Reads(tmp_path_factory.mktemp("keys"))
    found.rlhpc("off_policy", "record", "--expert", "read_keys:expert", "--episodes", "2", "--output", "pendulum.h5")
    return found


def test_every_kind_is_looked_at() -> None:
    assert {kind.name for kind in all_task_types()} == {*NAMES}


@pytest.mark.long
@pytest.mark.parametrize("kind", NAMES)
def test_every_key_is_read(kind: str, reads: Reads, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "reasoning":
        need_extra("vllm")
        monkeypatch.setenv("RLHPC_MODELS", reads.environment["RLHPC_MODELS"])
        save_classifier(reads.folder / "classifier", TINY["kwargs"])
        reads.rlhpc(kind, "train", *GROUPS)
    for overrides in ANOTHER.get(kind, []):
        reads.rlhpc(kind, "train", *overrides)
    reads.start(kind, "-m", "read_keys", f"{kind}.yaml", *SLURM, *ELASTIC.get(kind, []))
    reads.rlhpc(kind, "submit", "--executor", "local")
    evaluate = ["-m", "rlhpc.cli", "eval", "--run", f"runs/{kind}", "--step", "latest", "--trust-checkpoint-code"]
    reads.start(kind, *evaluate)
    if kind in ANSWERED:
        reads.start(kind, *evaluate, "--suite", "default", "--output", "answered.json", *ANSWERED[kind])
    reads.snakemake(kind)
    read = reads.of(kind)
    assert {key for key in keys_of(find_task_type(kind).config) if key not in read} == set()
