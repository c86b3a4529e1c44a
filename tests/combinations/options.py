"""Options of tiny runs, and the overrides that each value stands for. The first value of each option is the default."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: An option's value in a row.
Value = str | int | bool
Row = Mapping[str, Value]

_RUNNER = "runner: {{name: x, max_steps: 3, run_dir: {runs}, save_interval: 2, logger: {{logger_backends: [jsonl]}}}}\n"
_LANGUAGE = (
    """\
defaults: [{root}/configs/base/grpo.yaml]
data:
  train: {{source: arithmetic, size: 4000, eval_fraction: 0.2, kwargs: {{digits: 2, operators: "+"}}}}
  eval:
    - {{name: held_out, source: arithmetic, size: 8, eval_fraction: 0.2, kwargs: {{digits: 2, operators: "+"}}}}
  max_prompt_tokens: 24
  prompts_per_step: 4
reward: {{terms: [{{name: "tests.combinations.things:digits"}}]}}
workflow: {{eval_suites: [held_out]}}
algorithm: {{group_size: 4}}
rollout: {{max_new_tokens: 6, max_batch_size: 32}}
actor:
  global_batch_size: 8
  model: {{model_path: "builtin:tiny", kwargs: {{hidden: 64, layers: 2, heads: 2}}}}
  optim: {{lr: 1.0e-3}}
"""
    + _RUNNER
)
_PREFERENCES = (
    """\
defaults: [{root}/configs/base/dpo.yaml]
data:
  train: {{source: "tests.combinations.things:Pairs", size: 30, eval_fraction: 0.2}}
  max_prompt_tokens: 24
  prompts_per_step: 8
reward: {{terms: [{{name: exact}}]}}
actor:
  max_tokens_per_micro_batch: 256
  model: {{model_path: "builtin:tiny", kwargs: {{hidden: 64, layers: 2, heads: 2}}}}
  optim: {{lr: 1.0e-3}}
"""
    + _RUNNER
)
_PLAYED = """\
env:
  train: {{env_id: Pendulum-v1, num_envs: 8, max_episode_steps: 12}}
  eval: {{num_envs: 2, num_episodes: 2}}
"""
_PPO = (
    """\
defaults: [{root}/configs/base/ppo.yaml]
algorithm: {{rollout_steps: 16, update_epochs: 2, anneal_lr: false}}
actor: {{global_batch_size: 64, model: {{hidden_sizes: [16]}}}}
"""
    + _PLAYED
    + _RUNNER
)
_OFF_POLICY = (
    """\
defaults: [{root}/configs/base/{algorithm}.yaml]
algorithm: {{rollout_steps: 8, replay_buffer: {{size: 256, min_buffer_size: 32}}, random_steps: 0}}
actor: {{global_batch_size: 16, model: {{hidden_sizes: [16], critic_hidden_sizes: [16]}}}}
"""
    + _PLAYED
    + _RUNNER
)


@dataclass(frozen=True)
class Kind:
    """Options of a kind of run.

    Attributes:
        name: Of the kind.
        options: Option → its values.
        config: The text of a row's configuration file, with `{root}` and `{runs}`.
        overrides: What a row changes in it.
        resumes: Whether a resumed run repeats a row's metrics bit for bit.
    """

    name: str
    options: Mapping[str, Sequence[Value]]
    config: Callable[[Row], str]
    overrides: Callable[[Row], list[str]]
    resumes: Callable[[Row], bool]

    def default(self) -> dict[str, Value]:
        """The row of defaults."""
        return {name: values[0] for name, values in self.options.items()}

    def write(self, row: Row, folder: Path) -> Path:
        """Writes a row's configuration file; its runs go to the same folder."""
        path = folder / f"{self.name}.yaml"
        path.write_text(self.config(row).format(root=ROOT, runs=folder, algorithm=row.get("algorithm", "")))
        return path


def _ranks(count: Value) -> str:
    return f"0:0-{int(count) - 1}" if int(count) > 1 else "0"


def _places(places: Mapping[str, str]) -> str:
    return "cluster.component_placement={" + ", ".join(f"{name}: '{at}'" for name, at in places.items()) + "}"


def _backend(section: str, name: Value) -> list[str]:
    if not str(name).startswith("zero"):
        return [] if name == "local" else [f"{section}.training_backend={name}"]
    return [f"{section}.training_backend=deepspeed", f"{section}.deepspeed.zero_stage={str(name)[4:]}"]


#: Language models. Option → value → overrides, where these do not depend on other options.
_WORDS: dict[str, dict[Value, list[str]]] = {
    "engine": {"hf": [], "vllm": ["rollout.rollout_backend=vllm"]},
    "loss": {
        "ppo": [],
        "gspo": ["algorithm.loss_type=gspo"],
        "cispo": ["algorithm.loss_type=cispo"],
        "decoupled_ppo": ["algorithm.loss_type=decoupled_ppo", "algorithm.recompute_logprobs=true"],
    },
    "loss_agg": {
        name: [f"algorithm.loss_agg={name}"]
        for name in ("token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
    },
    "lora": {
        "off": [],
        "merged": ["actor.lora.rank=4"],
        "apart": ["actor.lora.rank=4", "rollout.merge_adapters=false"],
    },
    "staleness": {0: [], 1: ["algorithm.max_staleness=1"], 2: ["algorithm.max_staleness=2"]},
    "offload": {False: [], True: ["actor.offload_in_rollout=true"]},
    "filter": {False: [], True: ["algorithm.filter_groups=true", "algorithm.max_refills=1"]},
    "overlong": {"off": [], "buffer": ["algorithm.overlong_buffer=3"], "filter": ["algorithm.overlong_filter=true"]},
    "batches": {
        "two": [],
        "one": ["actor.global_batch_size=16"],
        "four": ["actor.global_batch_size=4", "actor.max_tokens_per_micro_batch=64"],
        "epochs": ["algorithm.update_epochs=2"],
        "tight": ["actor.max_tokens_per_micro_batch=40"],
    },
    "checkpointing": {False: [], True: ["actor.model.gradient_checkpointing=true"]},
    "divided": {
        "no": [],
        "replicate": ["actor.parallel.replicate=2"],
        "context": ["actor.parallel.context=2"],
        "offload": ["actor.fsdp.cpu_offload=true"],
        "kept": ["actor.fsdp.reshard_after_forward=false"],
    },
    "evaluation": {False: [], True: ["runner.val_check_interval=1"]},
    "weight_sync": {name: [f"rollout.weight_sync={name}"] for name in ("auto", "broadcast", "shards", "host", "gloo")},
    "weight_delta": {name: [f"rollout.weight_delta={name}"] for name in ("frozen", "elements", "off")},
    "dtype": {name: [f"actor.model.dtype={name}"] for name in ("float32", "bfloat16")},
    "nonfinite": {"stop": [], "skip": ["runner.on_nonfinite=skip"]},
    "async_save": {True: [], False: ["runner.async_save=false"]},
    "recompute": {
        "no": [],
        "yes": ["algorithm.recompute_logprobs=true"],
        "capped": ["algorithm.recompute_logprobs=true", "algorithm.tis_cap=2.0"],
        "corrected": [
            "algorithm.recompute_logprobs=true",
            "algorithm.corrections=[{name: icepop}, {name: k3, kwargs: {over: max}}]",
        ],
    },
    "padding": {
        "removed": [],
        "kept": ["actor.use_remove_padding=false"],
        "eager": ["actor.model.attn_implementation=eager"],
    },
    "balance": {True: [], False: ["actor.enable_dp_load_balance=false"]},
    "schedule": {
        "constant": [],
        "cosine": ["actor.optim.lr_warmup_steps=2", "actor.optim.lr_scheduler=cosine"],
        "anneal": ["algorithm.anneal_lr=true"],
    },
    "normalize": {name: [f"algorithm.normalize_advantages={name}"] for name in ("auto", "batch", "none")},
    "probe": {10: [], 0: ["rollout.probe_interval=0"]},
    "keep_cache": {False: [], True: ["rollout.keep_cache_on_update=true"]},
}
_LANGUAGE_OPTIONS: dict[str, Sequence[Value]] = {
    **{name: tuple(values) for name, values in _WORDS.items()},
    "backend": ("local", "fsdp", "zero1", "zero2", "zero3"),
    "actors": (1, 2),
    "rollouts": (1, 2),
    "advantage": (
        "grpo", "dr_grpo", "rloo", "reinforce++", "reinforce++_baseline", "raw", "critic", "head", "sampled", "topk", "full",
        "teacher",
    ),
    "kl": ("off", "loss-k3", "loss-k2", "loss-abs", "reward-k3", "reward-k1"),
    "reference": ("actor", "own", "follows", "follows-slowly"),
    "critic_backend": ("local", "fsdp", "zero2"),
    "agent": ("inline", "python", "environment", "tools"),
}  # fmt: skip
_GUESS = "{name: guess, high: 15, turns: 3, symbols: abcdefghijklmno, question: '?'}"
_AGENTS = {
    "inline": [],
    "python": [
        "agent.kind=python", "agent.target=tests.combinations.things:agent", "agent.timeout_s=60", "data.max_prompt_tokens=64",
    ],
    "tools": ["rollout.agent=tools", "rollout.max_turns=2", "data.max_prompt_tokens=64"],
    "environment": [
        "agent.kind=environment", "agent.target=guess", "reward.terms=[{name: agent}]", "data.max_prompt_tokens=64",
        f"data.train={{source: environment, size: 4096, eval_fraction: 0, kwargs: {_GUESS}}}",
        f"data.eval=[{{name: held_out, source: environment, size: 4, eval_fraction: 0, kwargs: {_GUESS}}}]",
    ],
}  # fmt: skip
_LETTERS = "abcdefghijklmno+-?"


def _language_overrides(row: Row) -> list[str]:
    words = [word for name, values in _WORDS.items() for word in values[row[name]]]
    places = {"actor": _ranks(row["actors"]), "rollout": _ranks(row["rollouts"])}
    words += _backend("actor", row["backend"]) + _AGENTS[str(row["agent"])]
    letters = f", vocabulary: '{_LETTERS}'" if row["agent"] == "environment" else ""
    if letters:
        words += [f"actor.model.kwargs={{hidden: 64, layers: 2, heads: 2{letters}}}", "rollout.max_new_tokens=4"]
    advantage = str(row["advantage"])
    if advantage in ("sampled", "topk", "full", "teacher"):
        mode = "topk" if advantage == "teacher" else advantage
        words += ["algorithm.name=distillation", "teacher.model.model_path=builtin:tiny",
                  f"teacher.model.kwargs={{hidden: 64, layers: 3, heads: 2{letters}}}",
                  f"algorithm.distillation.mode={mode}"]  # fmt: skip
        words += ["algorithm.distillation.topk=4"] if mode == "topk" else []
        words += ["algorithm.distillation.task_reward_coef=1.0"] if mode != "full" else []
        places |= {"teacher": "0"} if advantage == "teacher" else {}
    elif advantage == "critic":
        words += ["algorithm.adv_type=gae", *_backend("critic", row["critic_backend"])]
        places["critic"] = places["actor"]
    elif advantage == "head":
        words += ["algorithm.adv_type=gae", "actor.model.value_head=true"]
    else:
        words.append(f"algorithm.adv_type={advantage}")
    if row["kl"] != "off":
        where, _, kind = str(row["kl"]).partition("-")
        words += ["algorithm.kl_coef=0.1", f"algorithm.kl_in={where}", f"algorithm.kl_type={kind}"]
        places |= {"reference": "0"} if row["reference"] != "actor" else {}
        interval = {"follows": 1, "follows-slowly": 2}.get(str(row["reference"]), 0)
        words += [f"reference.update_interval={interval}"] if interval else []
    return [*words, _places(places)]


#: What trains a language model alike on answers and on pairs.
_TRAINED = (
    "checkpointing", "divided", "evaluation", "dtype", "nonfinite", "async_save", "padding", "balance", "schedule",
)  # fmt: skip
_PREFERENCE_WORDS: dict[str, dict[Value, list[str]]] = {
    "loss": {
        "sigmoid": [],
        "smoothed": ["algorithm.label_smoothing=0.1"],
        "ipo": ["algorithm.loss_type=ipo"],
    },
    "lora": {"off": [], "on": ["actor.lora.rank=4"]},
    "batches": {"whole": [], "tight": ["actor.max_tokens_per_micro_batch=48"]},
    **{name: _WORDS[name] for name in _TRAINED},
}
_PREFERENCE_OPTIONS: dict[str, Sequence[Value]] = {
    **{name: tuple(values) for name, values in _PREFERENCE_WORDS.items()},
    "backend": ("local", "fsdp", "zero1", "zero2", "zero3"),
    "actors": (1, 2),
}


def _preference_overrides(row: Row) -> list[str]:
    words = [word for name, values in _PREFERENCE_WORDS.items() for word in values[row[name]]]
    return [*words, *_backend("actor", row["backend"]), _places({"actor": _ranks(row["actors"])})]


_PLAYED_WORDS: dict[str, dict[Value, list[str]]] = {
    "env": {"Pendulum-v1": [], "CartPole-v1": ["env.train.env_id=CartPole-v1"]},
    "stages": {1: [], 2: ["rollout.pipeline_stage_num=2"]},
    "decoupled_mode": {False: [], True: ["runner.enable_decoupled_mode=true"]},
    "chunks": {1: [], 2: ["actor.model.num_action_chunks=2"]},
    "wrappers": {
        "none": [],
        "normalize": ["env.train.wrappers=[statistics, normalize, normalize_reward]"],
        "frame_stack": ["env.train.wrappers=[{frame_stack: {stack_size: 2}}, flatten]"],
    },
    "staleness": {0: [], 1: ["algorithm.max_staleness=1"], 2: ["algorithm.max_staleness=2"]},
    "evaluation": {False: [], True: ["runner.val_check_interval=1"]},
    "terminations": {True: [], False: ["env.train.ignore_terminations=true"]},
    "simulators": {0: [], 1: ["env.train.simulators=1"], 2: ["env.train.simulators=2"]},
    "fixed": {False: [], True: ["env.train.use_fixed_reset_state_ids=true"]},
    "relative": {False: [], True: ["env.train.use_rel_reward=true"]},
    "nonfinite": {"stop": [], "skip": ["runner.on_nonfinite=skip"]},
    "async_save": {True: [], False: ["runner.async_save=false"]},
    "weight_sync": {name: [f"rollout.weight_sync={name}"] for name in ("auto", "broadcast", "host", "gloo")},
    "weight_delta": {name: [f"rollout.weight_delta={name}"] for name in ("frozen", "elements", "off")},
    "anneal": {False: [], True: ["algorithm.anneal_lr=true"]},
}
#: Of PPO and its like alone.
_PPO_WORDS: dict[str, dict[Value, list[str]]] = {
    "pipeline": {False: [], True: ["runner.use_training_pipeline=true"]},
    "parts": {1: [], 2: ["algorithm.rollout_parts=2"]},
    "offload": {
        "no": [],
        "rollout": ["rollout.enable_offload=true"],
        "actor": ["actor.enable_offload=true"],
        "both": ["rollout.enable_offload=true", "actor.enable_offload=true"],
    },
    "batches": {
        "two": [],
        "four": ["actor.global_batch_size=32"],
        "micro": ["actor.micro_batch_size=8"],
        "one": ["actor.global_batch_size=128"],
    },
    "auto_reset": {True: [], False: ["env.train.auto_reset=false"]},
    "level": {
        "chunk": [],
        "action": ["algorithm.logprob_type=action_level"],
        "token": ["algorithm.logprob_type=token_level"],
        "values": [
            "algorithm.logprob_type=action_level", "algorithm.reward_type=action_level", "actor.model.value_per_action=true",
        ],
    },
    "normalize": {name: [f"algorithm.normalize_advantages={name}"] for name in ("minibatch", "batch", "none")},
    "loss": {
        "ppo": [],
        "gspo": ["algorithm.loss_type=gspo"],
        "cispo": ["algorithm.loss_type=cispo"],
        "decoupled_ppo": ["algorithm.loss_type=decoupled_ppo"],
        "capped": ["algorithm.loss_type=decoupled_ppo", "algorithm.tis_cap=2.0"],
    },
    "bounds": {"value_clip": [], "none": ["algorithm.value_clip=null"], "target_kl": ["algorithm.target_kl=0.01"]},
}  # fmt: skip
#: Of off-policy algorithms alone.
_OFF_POLICY_WORDS: dict[str, dict[Value, list[str]]] = {
    "update_to_data": {1: [], "quarter": ["algorithm.update_to_data=0.25"], 2: ["algorithm.update_to_data=2"]},
    "critics": {
        "plain": [],
        "normed": ["actor.model.critic_layer_norm=true"],
        "twice": ["algorithm.critic_actor_ratio=2"],
    },
    "temperature": {"learned": [], "fixed": ["algorithm.auto_entropy_tuning=false"]},
    "replay": {"all": [], "small": ["algorithm.replay_buffer={size: 64, min_buffer_size: 16}"]},
    "random_steps": {0: [], 24: ["algorithm.random_steps=24"], "buffer": ["algorithm.random_steps=null"]},
}
_EMBODIED_OPTIONS: dict[str, Sequence[Value]] = {
    "algorithm": ("gae", "grpo", "rloo", "reinforce++", "raw", "sac", "td3", "crossq"),
    "envs": (1, 2),
    "rollouts": (1, 2),
    "actors": (1, 2),
    "backend": ("local", "fsdp", "zero1", "zero2", "zero3"),
    **{
        name: tuple(values)
        for words in (_PLAYED_WORDS, _PPO_WORDS, _OFF_POLICY_WORDS)
        for name, values in words.items()
    },
}
_OFF = ("sac", "td3", "crossq")


def _embodied_overrides(row: Row) -> list[str]:
    algorithm = str(row["algorithm"])
    tables = [_PLAYED_WORDS, _OFF_POLICY_WORDS if algorithm in _OFF else _PPO_WORDS]
    words = [word for table in tables for name, values in table.items() for word in values[row[name]]]
    if algorithm not in _OFF:
        words += [f"algorithm.adv_type={algorithm}", *_backend("actor", row["backend"])]
        words += ["env.train.group_size=2"] if algorithm in ("grpo", "rloo") else []
    places = {name: _ranks(row[f"{name}s"]) for name in ("actor", "rollout", "env")}
    return [*words, _places(places)]


def _embodied_config(row: Row) -> str:
    return _OFF_POLICY if row["algorithm"] in _OFF else _PPO


def _always(row: Row) -> bool:
    del row
    return True


KINDS = {
    kind.name: kind
    for kind in (
        Kind(
            "language", _LANGUAGE_OPTIONS, lambda row: _LANGUAGE, _language_overrides,
            lambda row: row["staleness"] == 0,  # otherwise what was under way is made anew
        ),
        Kind("preferences", _PREFERENCE_OPTIONS, lambda row: _PREFERENCES, _preference_overrides, _always),
        Kind("embodied", _EMBODIED_OPTIONS, _embodied_config, _embodied_overrides, _always),
    )
}  # fmt: skip
