"""Import of RLinf's runs that learn from demonstrations: DAgger, fine-tuning of policies, success classifiers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhpc import cli
from rlhpc.runtime.errors import ConfigError
from tests.unit.cli.foreign.rlinf_configs import CUBE, MLP, PPO, flat, imported, merged, put, translation

DAGGER = {
    "runner": {"expert_ckpt_path": "runs/expert", "max_epochs": 7, "max_steps": -1},
    "algorithm": {
        "loss_type": "embodied_dagger",
        "update_epoch": 4,
        "dagger": {"init_beta": 1.0, "beta_schedule": "exponential"},
        "replay_buffer": {"cache_size": 20},
    },
    "actor": {"model": {"add_value_head": False}},
}
OPENPI = {
    "model_type": "openpi", "model_path": "/models/pi0", "num_action_chunks": 4, "is_lora": False, "precision": None,
    "openpi": {"config_name": "pi0_libero", "num_images_in_input": 2, "noise_method": "flow_sde", "num_steps": 4},
}  # fmt: skip
FINE_TUNING: dict[str, Any] = {
    "cluster": {"num_nodes": 1, "component_placement": {"actor,env,rollout": "0-3"}},
    "runner": {"task_type": "sft", "max_epochs": 3, "max_steps": -1, "save_interval": 2, "val_check_interval": -1},
    "data": {"train_data_paths": "data/libero", "num_workers": 4},
    "actor": {
        "training_backend": "fsdp", "global_batch_size": 64, "micro_batch_size": 8, "seed": 5, "model": OPENPI,
        "optim": {"lr": 2e-5, "adam_beta1": 0.9, "adam_beta2": 0.95, "clip_grad": 1.0, "lr_warmup_steps": 10},
    },
}  # fmt: skip
CLASSIFIER = merged(
    FINE_TUNING,
    {
        "runner": {"early_stop": {"enabled": True, "patience": 5, "min_delta": 0.001}},
        "data": {"train_data_paths": "train.pt", "val_data_paths": "val.pt"},
        "actor": {"model": None},
    },
)
CLASSIFIER["actor"]["model"] = {"model_type": "resnet", "arch": "resnet18", "hidden_dim": 128, "pretrained": True}


def leaves_of(tree: Any) -> dict[str, Any]:
    return flat({key: value for key, value in tree.items() if key not in ("defaults", "hydra")})


def embodied(above: Any) -> dict[str, Any]:
    return leaves_of(merged(merged({"env": {"train": CUBE, "eval": CUBE}, "actor": {"model": MLP}}, PPO), above))


def test_dagger_becomes_rounds_of_cloning(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cfg, _, report = imported(put(project, "push.yaml", merged(PPO, DAGGER)), capsys)
    assert (cfg.runner.task_type, cfg.actor.model.model_type, cfg.algorithm.bc_loss) == ("bc", "mlp", "mse")
    assert (cfg.workflow.demos_expert, cfg.demos.path) == ("runs/expert", "demos/dagger.h5")
    assert (cfg.runner.max_steps, cfg.algorithm.update_epochs) == (4, 1)
    assert (cfg.env.train.env_id, cfg.actor.optim.lr, cfg.cluster.component_placement) == (
        "PushCube-v1", 3e-4, {"actor": "0-1"}
    )  # fmt: skip
    left = report.split("training will differ")[1].split("training is the same")[0]
    assert "rlhpc dagger FILE --expert EXPERT" in left and "algorithm.dagger.init_beta: 1.0" in left
    assert "embodied losses" not in left and "algorithm.clip_ratio_low" not in left


@pytest.mark.parametrize(
    ("key", "value", "differs"),
    [
        ("algorithm.dagger.only_save_expert", False, False),
        ("algorithm.dagger.only_save_expert", True, True),
        ("algorithm.dagger.online_lerobot.only_success", True, True),
        ("algorithm.dagger.online_lerobot.rolling_lerobot_window_size", 50, True),
        ("algorithm.dagger.online_lerobot.fps", 10, False),
    ],
)
def test_what_rlinfs_dagger_trains_on_is_named(key: str, value: Any, differs: bool) -> None:
    """RLinf can leave out the labels of what the clone visits, episodes without success, and old rounds."""
    assert translation({**embodied(DAGGER), key: value}).omitted[key][1] is differs


@pytest.mark.parametrize(
    ("key", "differs"), [("num_workers", False), ("prefetch_factor", False), ("tasks", True), ("sampling_mode", True)]
)
def test_a_choice_among_demonstrations_is_named(key: str, differs: bool) -> None:
    assert translation({**leaves_of(FINE_TUNING), f"data.{key}": "x"}).omitted[f"data.{key}"][1] is differs


def test_fine_tuning_of_pi0_becomes_cloning_into_lerobots() -> None:
    result = translation(leaves_of(FINE_TUNING))
    assert {key: result.ours[key] for key in ("runner.task_type", "actor.model.model_type", "demos.path")} == {
        "runner.task_type": "bc", "actor.model.model_type": "lerobot", "demos.path": "data/libero",
    }  # fmt: skip
    assert (result.ours["runner.max_steps"], result.ours["algorithm.update_epochs"]) == (3, 1)
    assert (result.ours["env.train.env_type"], result.ours["env.train.env_id"]) == ("libero", "libero_10")
    assert result.ours["cluster.component_placement"] == {"actor": "0-3"}
    assert "LeRobot" in result.omitted["actor.model.model_path"][0]
    assert result.ours["actor.optim.lr_warmup_steps"] == 10 and "algorithm.minibatches_per_step" not in result.ours


def test_the_loss_of_openpi_is_named_where_it_learns_from_demonstrations() -> None:
    clone = translation(leaves_of(FINE_TUNING)).omitted["actor.model.model_type"]
    dagger = translation(embodied(merged(DAGGER, {"actor": {"model": OPENPI}}))).omitted["actor.model.model_type"]
    assert clone[1] and "recolours at random" in clone[0] and "all padded components" in clone[0]
    assert dagger[1] and "recolours at random" in dagger[0] and "the executed actions" in dagger[0]


def test_updates_are_steps_of_so_many_minibatches() -> None:
    """As many as divide the run and the interval of checkpoints."""
    runner = {"max_epochs": -1, "max_steps": 30000, "save_interval": 2000, "val_check_interval": 500}
    ours = translation(leaves_of(merged(FINE_TUNING, {"runner": runner}))).ours
    steps = {name: ours[f"runner.{name}"] for name in ("max_steps", "save_interval", "val_check_interval")}
    assert steps == {"max_steps": 60, "save_interval": 4, "val_check_interval": 1}
    assert ours["algorithm.minibatches_per_step"] == 500 and "algorithm.update_epochs" not in ours
    both = translation(leaves_of(merged(FINE_TUNING, {"runner": {**runner, "max_epochs": 2}})))
    assert both.omitted["runner.max_epochs"][1]


@pytest.mark.parametrize(
    ("name", "optim", "expected"),
    [
        ("cosine", {"min_lr": 1e-4}, ("cosine", 2e-6, 300, 10)),  # RLinf divides min_lr by 1e-3
        ("openpi_cosine", {"min_lr": 2e-6}, ("cosine", 2e-6, 300, 10)),
        ("torch_cosine", {"min_lr": 2e-6}, ("cosine", 2e-6, 300, None)),  # has no warm-up
        ("constant", {"lr_warmup_steps": -1, "lr_warmup_steps_ratio": 0.1}, (None, None, None, 30)),
    ],
)
def test_schedules_count_updates_in_both(name: str, optim: dict[str, Any], expected: tuple[Any, ...]) -> None:
    change = {"lr_scheduler": name, "total_training_steps": 300, **optim}
    ours = translation(leaves_of(merged(FINE_TUNING, {"actor": {"optim": change}}))).ours
    keys = ("lr_scheduler", "min_lr", "lr_decay_steps", "lr_warmup_steps")
    assert tuple(ours.get(f"actor.optim.{key}") for key in keys) == pytest.approx(expected)


def test_an_unnamed_environment_is_asked_for() -> None:
    leaves = leaves_of(FINE_TUNING) | {"actor.model.openpi.config_name": "pi0_aloha_robotwin"}
    result = translation(leaves)
    assert "env.train.env_id" not in result.ours
    assert result.omitted["data.train_data_paths"][0].endswith(
        "set env.train.env_type and env.train.env_id to the recorded one"
    )


def test_a_success_classifier_stops_early_by_its_held_out_loss() -> None:
    ours = translation(leaves_of(CLASSIFIER)).ours
    expected = {
        "actor.model.model_type": "success", "actor.model.kwargs": {"encoder": "resnet"}, "actor.model.hidden_sizes": [128],
        "runner.patience": 5, "runner.keep_best": "train/holdout_loss", "demos.holdout": 0.1, "demos.path": "train.pt",
        "actor.training_backend": "local",
    }  # fmt: skip
    assert {key: ours[key] for key in expected} == expected
    playing = translation(leaves_of(merged(CLASSIFIER, {"runner": {"val_check_interval": 50}})))
    assert "runner.val_check_interval" not in playing.ours


def test_a_success_classifier_is_a_run_of_cloning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = put(tmp_path, "classifier.yaml", CLASSIFIER)
    words = ("env.train.env_type=gymnasium", "env.train.env_id=Pendulum-v1")
    cfg, _, report = imported(source, capsys, *words)
    assert "keys and values are right" in report and cfg.actor.model.model_type == "success"


@pytest.mark.parametrize("model", ["recap_value_model", "steam_value_model", "cfg_model"])
def test_value_models_of_offline_methods_are_refused(model: str) -> None:
    with pytest.raises(ConfigError, match=f"actor.model.model_type is '{model}': .* is a vision-language model"):
        translation(leaves_of(FINE_TUNING) | {"actor.model.model_type": model})


@pytest.mark.parametrize(
    ("above", "says"),
    [
        ({"runner": {"only_eval": True}}, "runner.only_eval is True: the file evaluates a policy"),
        ({"reward": {"use_reward_model": True, "model": {"model_type": "buffered_vlm"}}}, "vision-language model"),
        ({"reward": {"use_reward_model": True}}, "the policy sees numbers"),
        ({"algorithm": {"loss_type": "embodied_nft"}}, "algorithm.loss_type is 'embodied_nft': rlhpc has no NFT"),
        ({"algorithm": {"loss_type": "opd"}}, "no distillation into a policy that acts"),
        ({"algorithm": {"loss_type": "rlt_td3"}}, "rlhpc has no RLT"),
    ],
)
def test_a_run_of_another_kind_is_refused_by_what_is_missing(
    project: Path, capsys: pytest.CaptureFixture[str], above: Any, says: str
) -> None:
    source = put(project, "push.yaml", merged(PPO, above))
    assert cli.main(["config", "import", str(source), "-o", str(project / "ours.yaml")]) == 2
    message = capsys.readouterr().err
    assert says in message and message.count("rlhpc: error:") == 1 and not (project / "ours.yaml").exists()
    with pytest.raises(ConfigError):
        translation(embodied(above))


def test_a_file_that_collects_demonstrations_is_refused() -> None:
    leaves = {key: value for key, value in embodied({}).items() if not key.startswith("algorithm.")}
    with pytest.raises(ConfigError, match="rlhpc record does that"):
        translation(leaves)
