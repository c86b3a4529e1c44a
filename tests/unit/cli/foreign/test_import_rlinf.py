"""`rlhpc config import`: RLinf's configurations become ours, and no key goes without a word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from rlhpc import cli
from rlhpc.cli.foreign import rlinf, rlinf_defaults, rlinf_embodied, rlinf_language
from rlhpc.cli.foreign.hydra import Composed
from rlhpc.cli.foreign.output import written
from rlhpc.cli.foreign.rules import Translation
from rlhpc.config.schema import Schema
from rlhpc.runs.configuration import load_config
from rlhpc.runs.task_type import find_kind

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


_kinds()


def translation(leaves: dict[str, Any]) -> Translation:
    known = {key: value for key, value in leaves.items() if "${" not in str(value)}
    return rlinf.translate(Composed(known), "rlinf.yaml")


def put(folder: Path, name: str, content: Any) -> Path:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(yaml.safe_dump(content, sort_keys=False))
    return folder / name


@pytest.fixture
def project(tmp_path: Path) -> Path:
    put(tmp_path, "env/cube.yaml", CUBE)
    put(tmp_path, "model/mlp.yaml", MLP)
    return tmp_path


def imported(source: Path, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[Any, str, str]:
    """(the configuration, its text, the report)."""
    target = source.parent / "ours.yaml"
    assert cli.main(["config", "import", str(source), "-o", str(target), *words]) == 0
    report = capsys.readouterr().err
    cfg = load_config(target, site="") if "keys and values are right" in report else None
    return cfg, target.read_text(), report


def keys_of(tree: Any, prefix: str = "") -> list[str]:
    if not (isinstance(tree, dict) and tree):
        return [prefix[:-1]]
    return [key for name, below in tree.items() for key in keys_of(below, f"{prefix}{name}.")]


@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        ("embodied", [*rlinf_embodied.PPO, *rlinf_embodied.SEEING]),
        ("off_policy", rlinf_embodied.SAC),
        ("reasoning", [*rlinf_language.ROWS, *rlinf_language.CRITIC]),
    ],
)
def test_what_is_written_are_keys_of_that_kind(kind: str, rows: Any) -> None:
    common = [] if kind == "reasoning" else [*rlinf_embodied.PLAYED, *rlinf_embodied.POLICY]
    keys = Schema(find_kind(kind).config, kind).keys
    assert not [ours for ours, _ in [*rlinf.RUN, *common, *rows] if ours and ours not in keys]


@pytest.mark.parametrize("kind", KINDS)
def test_a_key_left_out_means_what_rlinf_takes_for_it(kind: str) -> None:
    leaves, defaults = flat(KINDS[kind][0]), KINDS[kind][1]
    for key, value in defaults.items():
        without = {name: below for name, below in leaves.items() if name != key}
        assert translation(without).ours == translation({**without, key: value}).ours, key
        assert not any(key in origins for origins in translation(without).origin.values()), key


@pytest.mark.parametrize("kind", KINDS)
def test_rlinfs_defaults_reach_the_run(kind: str, tmp_path: Path) -> None:
    leaves, defaults = flat(KINDS[kind][0]), KINDS[kind][1]
    made = translation({key: value for key, value in leaves.items() if key not in defaults})
    (tmp_path / "ours.yaml").write_text(text := written(made, "rlinf.yaml", "RLinf"))
    cfg = load_config(tmp_path / "ours.yaml", [], site="", check=False)
    assert "adam_eps: 1.0e-08  # RLinf's default of actor.optim.adam_eps\n" in text
    converted = {"algorithm.normalize_advantages", "actor.optim.lr_warmup_steps"}  # true is batch, and -1 is 0
    as_they_are = {key for key in made.ours if key in defaults} - converted
    assert {key: OmegaConf.select(cfg, key) for key in as_they_are} == {key: defaults[key] for key in as_they_are}
    adamw = {"actor.optim.name": "adamw", "actor.optim.weight_decay": 0.01, "actor.optim.adam_eps": 1e-8}
    answers = {"algorithm.gamma": 1.0, **adamw}
    wanted: dict[str, Any] = {
        "embodied": {
            "algorithm.gamma": 1.0, "algorithm.gae_lambda": 1.0, "algorithm.normalize_advantages": "batch",
            "algorithm.update_epochs": 1, **adamw,
        },
        "off_policy": {
            "algorithm.initial_alpha": 0.01, "algorithm.auto_entropy_tuning": True, "algorithm.backup_entropy": True,
            "actor.optim.name": "adam", "actor.optim.weight_decay": 0.0, "actor.optim.adam_eps": 1e-8,
        },
        "megatron": {"algorithm.clip_ratio_c": None, "actor.optim.lr_warmup_steps": 0, **answers},
        "fsdp": {"algorithm.clip_ratio_c": 3.0, "actor.optim.lr_scheduler": "constant", **answers},
        "critic": {
            "algorithm.gae_lambda": 1.0, "critic.optim.weight_decay": 0.01, "critic.optim.adam_eps": 1e-8,
            "critic.warmup_steps": 0, **answers,
        },
    }[kind]  # fmt: skip
    assert {key: OmegaConf.select(cfg, key) for key in wanted} == wanted


def test_a_key_that_is_taken_as_it_is_has_rlinfs_default_or_is_needed_there() -> None:
    """RLinf stops without a key of `needed`: none of its files leaves it out for another value's sake."""
    needed = {
        "actor.seed", "cluster.num_nodes", "env.train.max_episode_steps", "env.train.seed", "env.eval.max_episode_steps",
        "env.eval.total_num_envs", "env.eval.video_cfg.fps", "rollout.pipeline_stage_num", "actor.global_batch_size",
        "runner.save_interval", "algorithm.clip_ratio_low", "algorithm.clip_ratio_high", "algorithm.entropy_bonus",
        "algorithm.logprob_type", "algorithm.reward_type", "algorithm.loss_agg_func", "algorithm.group_size",
        "algorithm.tau", "algorithm.value_cliprange", "algorithm.entropy_tuning.optim.lr", "actor.model.num_action_chunks",
        "algorithm.entropy_tuning.target_entropy",  # left out: minus the number of the action's components, in both
        "actor.critic_optim.lr", "algorithm.sampling_params.top_p", "data.max_prompt_length", "data.rollout_batch_size",
        "data.prompt_key", "data.answer_key", "data.system_prompt", "runner.seq_length", "rollout.max_running_requests",
        "rollout.gpu_memory_utilization",
    }  # fmt: skip
    for name in ("lr", "adam_beta1", "adam_beta2", "clip_grad"):
        needed |= {f"actor.optim.{name}", f"critic.optim.{name}"}
    shared = [*rlinf.RUN, *rlinf_embodied.PLAYED, *rlinf_embodied.POLICY]
    rows = {
        "embodied": [*shared, *rlinf_embodied.PPO, *rlinf_embodied.SEEING],
        "off_policy": [*shared, *rlinf_embodied.SAC],
        "fsdp": [*rlinf.RUN, *rlinf_language.ROWS],
        "critic": [*rlinf.RUN, *rlinf_language.ROWS, *rlinf_language.CRITIC],
    }
    extra = {"off_policy": {"algorithm.gamma"}, "critic": {"algorithm.clip_ratio_c"}}  # needed by that trainer alone
    for kind, table in rows.items():
        theirs = {rule for _, rule in table if isinstance(rule, str)}
        assert theirs - needed - extra.get(kind, set()) <= set(KINDS[kind][1]), kind


def test_a_value_model_is_imported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = merged(LANGUAGE, CRITIC)
    del source["cluster"]["component_placement"]["actor,rollout,reward"]
    cfg, _, report = imported(put(tmp_path, "values.yaml", source), capsys)
    assert report.endswith("rlhpc plan also looks at the files that they name\n")
    wanted = {
        "cluster.component_placement": {"actor,critic,rollout": "0-15"}, "algorithm.adv_type": "gae",
        "algorithm.gae_lambda": 0.9, "algorithm.gamma": 1.0, "algorithm.value_clip": 0.5, "critic.training_backend": "fsdp",
        "critic.optim.lr": 1e-5, "critic.optim.clip_grad": 1.0, "critic.optim.lr_scheduler": "linear",
        "critic.model.dtype": "bfloat16", "critic.model.model_path": "models/one", "critic.warmup_steps": 0,
    }  # fmt: skip
    assert {key: OmegaConf.select(cfg, key) for key in wanted} == wanted
    assert (
        cfg.reward.terms[0].weight == 10.0
    )  # RLinf's answers are worth -5 or 5, which the clip of values is relative to
    assert "there is no critic" not in report


def test_ppo_becomes_a_run_of_ours(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cfg, text, report = imported(put(project, "push.yaml", PPO), capsys, "runner.keep_checkpoints=5")
    assert report.endswith("rlhpc plan also looks at the files that they name\n")
    wanted = {
        "runner.task_type": "embodied", "runner.name": "push_a_cube", "runner.seed": 7, "runner.max_steps": 60,
        "runner.keep_checkpoints": 5, "cluster.accelerators_per_node": 2, "algorithm.loss_type": "ppo",
        "algorithm.normalize_advantages": "batch", "algorithm.clip_ratio_low": 0.1, "algorithm.clip_ratio_high": 0.3,
        "algorithm.value_coef": 1.0, "algorithm.entropy_coef": 0.01, "algorithm.update_epochs": 8,
        "algorithm.rollout_steps": 40, "algorithm.rollout_parts": 2,
        "env.train.num_envs": 64, "env.train.env_id": "PushCube-v1", "env.train.max_episode_steps": 40,
        "env.eval.num_envs": 16, "env.eval.num_episodes": 32, "env.eval.video_episodes": 4,
        "rollout.pipeline_stage_num": 2, "actor.model.model_type": "mlp", "actor.optim.name": "adamw", "actor.optim.lr": 3e-4,
        "actor.optim.adam_eps": 1e-8, "actor.global_batch_size": 1280,
    }  # fmt: skip
    assert {key: OmegaConf.select(cfg, key) for key in wanted} == wanted
    assert list(cfg.actor.model.hidden_sizes) == [256, 256, 256]
    assert cfg.env.train.kwargs == {
        "obs_mode": "state", "sim_config": {"control_freq": 20}, "control_mode": "pd_ee_delta_pos"
    }  # fmt: skip
    assert cfg.algorithm.clip_ratio_c is None  # RLinf's embodied losses do not get it
    assert "update_epochs: 8  # algorithm.update_epoch\n" in text
    assert "algorithm.huber_delta: 10.0 (the value loss" in text and "actor.optim.value_lr" in text


def test_every_key_is_used_or_named_with_a_reason(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = merged({"env": {"train": CUBE, "eval": CUBE}, "actor": {"model": MLP}}, PPO)
    _, _, report = imported(put(project, "push.yaml", PPO), capsys)
    keys = [key for key in keys_of(whole) if key.partition(".")[0] != "defaults"]
    assert len(keys) > 80 and not [key for key in keys if key not in " ".join(report.split())]
    left = report.split("training will differ")[1]
    assert "the importer does not know this key\n    algorithm.of_a_later_version.deep: 1" in left
    assert "its reference cannot be followed" in left and "actor.model.obs_dim: ${env.nothing.here}" in left
    assert "RLinf's embodied loss uses it with GR00T" in left and "algorithm.clip_ratio_c: 3.0" in left


def test_environment_variables_are_not_read(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_FOLDER", "/home/somebody")
    _, text, report = imported(put(project, "push.yaml", PPO), capsys)
    assert "/home/somebody" not in text + report and "${oc.env:SECRET_FOLDER}/weights" in report


def test_rounds_without_auto_reset_become_parts(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = {
        "algorithm": {"adv_type": "grpo", "loss_type": "actor", "group_size": 8},
        "env": {"train": {"auto_reset": False, "group_size": 8, "use_fixed_reset_state_ids": True}},
    }
    cfg, _, report = imported(put(project, "push.yaml", merged(PPO, own)), capsys)
    assert (cfg.env.train.num_envs, cfg.algorithm.rollout_steps, cfg.env.train.group_size) == (64, 40, 8)
    assert cfg.algorithm.rollout_parts == 2
    assert (cfg.algorithm.normalize_advantages, cfg.algorithm.value_coef) == ("none", 0.0)
    assert not cfg.env.train.use_fixed_reset_state_ids  # ours is for the whole run, theirs for a rollout
    own["algorithm"] = {"loss_type": "decoupled_actor_critic", "staleness_threshold": 1}
    cfg, _, report = imported(put(project, "push.yaml", merged(PPO, own)), capsys)
    assert (cfg.env.train.num_envs, cfg.algorithm.rollout_steps, cfg.algorithm.rollout_parts) == (128, 20, 1)
    assert "2 rounds of 64 slots became 128 slots" in " ".join(report.split())


def test_sac_counts_updates_by_transitions(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cfg, _, report = imported(put(project, "push.yaml", merged(PPO, SAC)), capsys)
    assert report.endswith("rlhpc plan also looks at the files that they name\n")
    assert (cfg.runner.task_type, cfg.actor.model.model_type) == ("off_policy", "sac")
    assert (cfg.algorithm.update_to_data, cfg.algorithm.rollout_steps) == (
        0.25,
        2,
    )  # 32 updates for 64 slots of 2 decisions
    assert (cfg.algorithm.auto_entropy_tuning, cfg.algorithm.initial_alpha, cfg.algorithm.random_steps) == (
        False,
        0.02,
        0,
    )
    assert (cfg.actor.optim.value_lr, cfg.algorithm.alpha_lr) == (2e-4, 1e-4)
    assert "RLinf counts trajectories, rlhpc counts transitions" in report


def test_adapters_are_not_scaled_as_in_rlinf() -> None:
    lora = {"actor.model.is_lora": True, "actor.model.lora_rank": 24}
    for kind, model in (("fsdp", {}), ("embodied", {"actor.model.model_type": "openvla_oft"})):
        ours = translation({**flat(KINDS[kind][0]), **model, **lora}).ours
        assert (ours["actor.lora.rank"], ours["actor.lora.alpha"]) == (24, 24), kind
        assert "actor.lora.rank" not in translation({**flat(KINDS[kind][0]), **model}).ours


@pytest.mark.parametrize("slots", [7, 49, 64, 3_000_000])
def test_sac_makes_as_many_updates_as_rlinf(slots: int) -> None:
    leaves = flat(KINDS["off_policy"][0]) | {"env.train.total_num_envs": slots, "algorithm.update_epoch": 3}
    ours = translation(leaves).ours
    transitions = slots * ours["algorithm.rollout_steps"]
    assert [int(ours["algorithm.update_to_data"] * step * transitions + 1e-6) for step in (1, 10, 100)] == [3, 30, 300]


def test_a_language_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cfg, _, report = imported(put(tmp_path, "sums.yaml", LANGUAGE), capsys)
    assert report.endswith("rlhpc plan also looks at the files that they name\n")
    wanted = {
        "runner.task_type": "reasoning", "runner.name": "sums", "runner.max_steps": 100, "cluster.accelerators_per_node": 8,
        "cluster.component_placement": {"actor,rollout": "0-15"}, "algorithm.clip_ratio_low": 0.2,
        "algorithm.clip_ratio_high": 0.28, "algorithm.kl_coef": 0.001, "algorithm.kl_type": "k3",
        "actor.global_batch_size": 256, "actor.max_tokens_per_micro_batch": 4096, "rollout.max_new_tokens": 1024,
        "rollout.top_k": -1, "rollout.temperature": 0.9, "rollout.rollout_backend": "vllm", "actor.training_backend": "fsdp",
        "actor.model.model_path": "models/one", "actor.model.dtype": "bfloat16", "actor.optim.lr_scheduler": "cosine",
        "actor.optim.lr_warmup_steps": 5, "data.train.path": "a.jsonl", "data.train.source": "jsonl",
    }  # fmt: skip
    assert {key: OmegaConf.select(cfg, key) for key in wanted} == wanted
    assert (cfg.data["eval"][0].source, cfg.data["eval"][0].prompt_key) == ("parquet", "problem")
    said = " ".join(report.split())
    assert "rlhpc has no sglang: vllm and hf; vllm is written rollout.rollout_backend: sglang" in said
    assert "rlhpc has no megatron" in said and "actor.megatron.distributed_backend: nccl" in said
    assert "an engine runs on one accelerator rollout.tensor_parallel_size: 2" in said


def test_openvla_oft_becomes_openvla(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = {
        "model_type": "openvla_oft", "model_path": "/models/oft", "num_action_chunks": 8, "use_proprio": True,
        "use_film": True, "unnorm_key": "libero_10_no_noops", "center_crop": True, "attn_implementation": "flash_attention_2",
    }  # fmt: skip
    batches = {"global_batch_size": 256, "micro_batch_size": 64}
    cfg, _, report = imported(put(project, "push.yaml", merged(PPO, {"actor": {**batches, "model": model}})), capsys)
    found = cfg.actor.model
    assert (found.model_type, found.model_path, found.attn_implementation) == ("openvla", "/models/oft", "sdpa")
    assert found.kwargs == {
        "head": "parallel", "proprio": True, "unnorm_key": "libero_10_no_noops", "center_crop": True,
    }  # fmt: skip
    assert "rlhpc's openvla has no FiLM" in " ".join(report.split())


def test_a_part_that_is_not_here_stays_by_its_name(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_FOLDER", "/weights")
    own = {"actor": {"model": {"model_type": "some_vla", "is_lora": False}}}
    _, text, report = imported(put(project, "push.yaml", merged(PPO, own)), capsys)
    assert "model_type: some_vla" in text
    verdict = report.splitlines()[-1]
    assert verdict.startswith("rlhpc plan does not accept it yet: ") and "model_type is 'some_vla'" in verdict


def test_it_goes_to_standard_output(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "import", str(put(project, "push.yaml", PPO))]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["runner"]["name"] == "push_a_cube"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"runner": {"name": "x"}, "algorithm": {"gamma": 1}}, "not the configuration of an RLinf run"),
        (CUBE, "not the configuration of an RLinf run"),
        (merged(PPO, {"algorithm": {"loss_type": "embodied_dagger"}}), "embodied_dagger has no counterpart"),
        (merged(PPO, {"defaults": ["env/none@env.train"]}), "there is no file env/none.yaml"),
        (merged(PPO, {"defaults": ["push"]}), "round in a circle: push.yaml → push.yaml"),
        (merged(PPO, {"defaults": "env/cube"}), "defaults is 'env/cube'"),
        ("just text", "at the top"),
    ],
    ids=["another project", "a piece", "another kind", "no file", "circle", "no list", "text"],
)
def test_mistakes_are_one_message(project: Path, capsys: pytest.CaptureFixture[str], content: Any, says: str) -> None:
    source = put(project, "push.yaml", content)
    assert cli.main(["config", "import", str(source), "-o", str(project / "ours.yaml")]) == 2
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1 and str(source) in said
    assert not (project / "ours.yaml").exists()


def test_the_file_itself_is_not_overwritten(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = put(project, "push.yaml", PPO)
    before = source.read_text()
    assert cli.main(["config", "import", str(source), "-o", str(source)]) == 2
    assert "choose another" in capsys.readouterr().err and source.read_text() == before
