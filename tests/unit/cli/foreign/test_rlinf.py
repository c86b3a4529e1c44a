"""`rlhpc config import`: RLinf's configurations become ours, and no key goes without a word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from rlhpc import cli
from rlhpc.cli.foreign import rlinf, rlinf_embodied, rlinf_language
from rlhpc.cli.foreign.output import format_config
from rlhpc.config.schema import Schema
from rlhpc.runs.configuration import load_config
from rlhpc.runs.task_type import find_task_type
from tests.unit.cli.foreign.rlinf_configs import CUBE, KINDS, MLP, PPO, _kinds, flat, imported, merged, put, translation

_kinds()


def keys_of(tree: Any, prefix: str = "") -> list[str]:
    if not (isinstance(tree, dict) and tree):
        return [prefix[:-1]]
    return [key for name, below in tree.items() for key in keys_of(below, f"{prefix}{name}.")]


@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        ("embodied", [*rlinf_embodied.PPO, *rlinf_embodied.VLA]),
        ("off_policy", rlinf_embodied.SAC),
        ("reasoning", [*rlinf_language.ROWS, *rlinf_language.CRITIC]),
    ],
)
def test_what_is_written_are_keys_of_that_kind(kind: str, rows: Any) -> None:
    common = [] if kind == "reasoning" else [*rlinf_embodied.ENVIRONMENTS, *rlinf_embodied.POLICY]
    keys = Schema(find_task_type(kind).config, kind).keys
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
    shared = [*rlinf.RUN, *rlinf_embodied.ENVIRONMENTS, *rlinf_embodied.POLICY]
    rows = {
        "embodied": [*shared, *rlinf_embodied.PPO, *rlinf_embodied.VLA],
        "off_policy": [*shared, *rlinf_embodied.SAC],
        "fsdp": [*rlinf.RUN, *rlinf_language.ROWS],
        "critic": [*rlinf.RUN, *rlinf_language.ROWS, *rlinf_language.CRITIC],
    }
    extra = {"off_policy": {"algorithm.gamma"}, "critic": {"algorithm.clip_ratio_c"}}  # needed by that trainer alone
    for kind, table in rows.items():
        theirs = {rule for _, rule in table if isinstance(rule, str)}
        assert theirs - needed - extra.get(kind, set()) <= set(KINDS[kind][1]), kind


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
