"""`rlhpc config import`: RLinf's configurations become ours, and no key goes without a word."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from rlhpc import cli
from rlhpc.cli.foreign import rlinf
from rlhpc.cli.foreign.hydra import ComposedConfig
from rlhpc.cli.foreign.output import format_config
from rlhpc.runs.configuration import load_config
from rlhpc.runs.task_type import find_task_type
from rlhpc.runtime.errors import ConfigError
from tests.unit.cli.foreign.rlinf_configs import CUBE, KINDS, MLP, PPO, _kinds, flat, imported, merged, put, translation

_kinds()


def keys_of(tree: Any, prefix: str = "") -> list[str]:
    if not (isinstance(tree, dict) and tree):
        return [prefix[:-1]]
    return [key for name, below in tree.items() for key in keys_of(below, f"{prefix}{name}.")]


def test_rows_are_of_keys_that_a_task_type_has() -> None:
    schemas = {kind.task_type: find_task_type(kind.task_type).schema.keys for kind in rlinf.KINDS}
    for kind in rlinf.KINDS:
        written = [ours for ours, _ in [*rlinf.RUN, *kind.rows({})] if ours]
        assert "runner.name" in [key for key in written if key in schemas[kind.task_type]]
        assert [key for key in written if not any(key in keys for keys in schemas.values())] == []


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
    (tmp_path / "ours.yaml").write_text(text := format_config(made, "rlinf.yaml", "RLinf"))
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
    needed_by_megatron = {"algorithm.clip_ratio_c"}
    extra = {"off_policy": {"algorithm.gamma"}, "critic": needed_by_megatron, "megatron": needed_by_megatron}
    for kind in KINDS:
        leaves = flat(KINDS[kind][0])
        table = next(one.rows(leaves) for one in rlinf.KINDS if one.applies(leaves))
        theirs = {rule for _, rule in [*rlinf.RUN, *table] if isinstance(rule, str)}
        assert theirs - needed - extra.get(kind, set()) <= set(KINDS[kind][1]), kind


def test_every_key_is_used_or_named_with_a_reason(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = merged({"env": {"train": CUBE, "eval": CUBE}, "actor": {"model": MLP}}, PPO)
    _, _, report = imported(put(project, "push.yaml", PPO), capsys)
    keys = [key for key in keys_of(whole) if key.partition(".")[0] != "defaults"]
    assert len(keys) > 80 and not [key for key in keys if key not in " ".join(report.split())]
    left = report.split("training will differ")[1]
    assert "the importer does not know this key\n    algorithm.of_a_later_version.deep: 1" in left
    assert "its reference cannot be followed" in left and "actor.model.obs_dim: ${env.nothing.here}" in left
    assert "RLinf's synchronous embodied loss uses it with GR00T" in left and "algorithm.clip_ratio_c: 3.0" in left


def test_environment_variables_are_not_read(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_FOLDER", "/home/somebody")
    _, text, report = imported(put(project, "push.yaml", PPO), capsys)
    assert "/home/somebody" not in text + report and "${oc.env:SECRET_FOLDER}/weights" in report


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
    assert cli.main(["config", "import", str(put(project, "push.yaml", PPO)), "--ignore-unknown"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["runner"]["name"] == "push_a_cube"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"runner": {"name": "x"}, "algorithm": {"gamma": 1}}, "not the configuration of an RLinf run"),
        (CUBE, "not the configuration of an RLinf run"),
        (merged(PPO, {"algorithm": {"loss_type": "embodied_later"}}), "embodied_later has no counterpart"),
        (PPO, "the importer does not know algorithm.of_a_later_version.deep, which a later version of RLinf may read"),
        (
            merged(PPO, {"algorithm": {f"new_{n}": n for n in range(9)}}),
            "new_3 and 5 more, which a later version of RLinf",
        ),
        (merged(PPO, {"defaults": ["env/none@env.train"]}), "there is no file env/none.yaml"),
        (merged(PPO, {"defaults": ["push"]}), "round in a circle: push.yaml → push.yaml"),
        (merged(PPO, {"defaults": "env/cube"}), "defaults is 'env/cube'"),
        ("just text", "at the top"),
    ],
    ids=["another project", "a piece", "another kind", "newer", "much newer", "no file", "circle", "no list", "text"],
)
def test_mistakes_are_one_message(project: Path, capsys: pytest.CaptureFixture[str], content: Any, says: str) -> None:
    source = put(project, "push.yaml", content)
    assert cli.main(["config", "import", str(source), "-o", str(project / "ours.yaml")]) == 2
    said = capsys.readouterr().err
    assert says in said and said.count("rlhpc: error:") == 1 and str(source) in said
    assert not (project / "ours.yaml").exists()


def test_the_file_itself_is_not_overwritten(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = put(project, "push.yaml", PPO)
    before = source.read_text()
    assert cli.main(["config", "import", str(source), "-o", str(source)]) == 2
    assert "choose another" in capsys.readouterr().err and source.read_text() == before


def _mutated(leaves: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Drops, renames or retypes keys of a configuration."""
    broken: Any = (None, "abc", -1, 0, 1.5, True, [], ["a"], [1, 2], {"x": 1}, float("nan"), 10**30, "1-2", "")
    leaves = dict(leaves)
    for _ in range(rng.choice((1, 1, 2, 4))):
        key, change = rng.choice(list(leaves)), rng.choice(("drop", "rename", "retype", "retype"))
        value = leaves.pop(key)
        if change != "drop":
            leaves[f"{key}_of_a_later_version" if change == "rename" else key] = (
                value if change == "rename" else rng.choice(broken)
            )
    return leaves


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", KINDS)
def test_a_broken_file_is_one_message_and_a_half_known_one_leaves_no_key_unnamed(kind: str, seed: int) -> None:
    rng = random.Random(f"{kind} {seed}")
    for _ in range(8):
        leaves = {key: value for key, value in _mutated(flat(KINDS[kind][0]), rng).items() if "${" not in str(value)}
        try:
            result = rlinf.translate(ComposedConfig(leaves), "rlinf.yaml")
        except ConfigError as error:
            assert str(error).startswith("rlinf.yaml: ") and "\n" not in str(error)
            continue
        assert yaml.safe_load(format_config(result, "rlinf.yaml", "RLinf"))
        assert set(leaves) <= {*result.used, *result.omitted}
        for key in (key for key in leaves if key.endswith("_of_a_later_version")):
            assert key in result.omitted or key in result.used


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"algorithm": {"gamma": "abc"}}, "algorithm.gamma"),
        ({"algorithm": {"update_epoch": "many"}}, "algorithm.update_epoch is 'many'; it must be a number"),
        ({"algorithm": {"loss_type": ["actor"]}}, "has no counterpart"),
        ({"env": {"train": {"total_num_envs": 1.5}}}, "env.train.total_num_envs is 1.5; it must be an integer"),
        ({"env": {"train": {"auto_reset": "maybe"}}}, "env.train.auto_reset is 'maybe'; it must be true or false"),
        ({"actor": {"optim": {"lr": [1]}}}, "actor.optim.lr"),
    ],
)
def test_a_value_of_a_wrong_type_is_one_message_and_writes_no_file(
    project: Path, capsys: pytest.CaptureFixture[str], change: Any, says: str
) -> None:
    source = put(project, "push.yaml", merged(PPO, change))
    code = cli.main(["config", "import", str(source), "-o", str(project / "ours.yaml"), "--ignore-unknown"])
    message = capsys.readouterr().err
    assert code == 2 and says in message and message.count("rlhpc: error:") == 1 and str(source) in message
    assert not (project / "ours.yaml").exists()


def test_labelled_nodes_are_translated_and_robots_are_counted_by_their_nodes(project: Path) -> None:
    leaves = flat(KINDS["embodied"][0])
    cameras = [{"node_ranks": "1-1", "python_interpreter_path": "/p", "env_vars": [{"A": 1}, {"B": "x"}]}]
    groups = [
        {"label": "gpus", "node_ranks": 0},
        {"label": "arm", "node_ranks": "1-1", "env_configs": cameras,
         "hardware": {"type": "Franka", "configs": [{"robot_ip": "10.0.0.7", "node_rank": 1}]}},
    ]  # fmt: skip
    result = translation({**leaves, "cluster.num_nodes": 2, "cluster.node_groups": groups})
    assert result.ours["cluster.node_groups"] == [
        {"label": "gpus", "node_ranks": 0},
        {"label": "arm", "node_ranks": "1-1", "env_vars": {"A": "1", "B": "x"}, "python_interpreter": "/p",
         "accelerator_kind": "cpu"},
    ]  # fmt: skip
    assert result.omitted["cluster.node_groups"] == (
        "arm: a robot's address is an option of its class here (docs/how-to/real-robot.md)", True
    )  # fmt: skip
    placed = {key: value for key, value in leaves.items() if not key.startswith("cluster.component_placement")}
    by_group = {
        "actor,rollout.node_group": "4090",
        "actor,rollout.placement": "0-3",
        "env.node_group": "arm",
        "env.placement": 0,
    }
    placed |= {f"cluster.component_placement.{key}": value for key, value in by_group.items()}
    assert translation({**placed, "cluster.num_nodes": 2}).ours["cluster.accelerators_per_node"] == 2, "4090 is a label"
    alone = translation({**leaves, "cluster.node_groups": groups[:1]})
    assert "cluster.node_groups" not in alone.omitted
    two = [*groups[1]["hardware"]["configs"]] * 2
    shared = {**groups[1], "hardware": {"type": "Franka", "configs": two}}
    reason, _ = translation({**leaves, "cluster.node_groups": [shared]}).omitted["cluster.node_groups"]
    assert reason.endswith("and several robots of a node are not counted")
    for broken in ([1], [{"node_ranks": 1, "hardware": {"configs": [3]}}], "arm"):
        with pytest.raises(ConfigError, match=r"cluster\.node_groups"):
            translation({**leaves, "cluster.node_groups": broken})
