"""A sweep as runs: each with its own checked configuration, in folders of their own, and preparations made once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from rlhpc import cli
from rlhpc.jobs.paths import RunPaths, SweepPaths
from rlhpc.runs.configuration import load_config
from rlhpc.runs.sweep import Sweep, check_begun, load_sweep, read_sweep, rule_prefixes, runs_of
from rlhpc.runtime.errors import ConfigError, RlhpcError

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(sweep: object, *, base: str = "quickstart.yaml", **runner: object) -> str:
    content = {"defaults": [str(ROOT / "configs" / base)], "runner": {"name": "lr", **runner}, "sweep": sweep}
    if base.startswith("reasoning"):
        content["workflow"] = {"sft": str(ROOT / "configs/reasoning/demo_sft.yaml")}
    Path("lr.yaml").write_text(yaml.safe_dump(content))
    return "lr.yaml"


def load(*args: object, **options: object) -> Sweep:
    found = load_sweep(write(*args, **options))
    assert found is not None
    return found


def test_each_run_has_a_configuration_of_its_own() -> None:
    sweep = load({"grid": {"actor.optim.lr": [1e-4, 3e-4]}, "seeds": [1, 2]})
    assert sweep.paths.root == Path.cwd() / "runs/lr"
    assert [run.paths.root.name for run in sweep.runs] == [
        "lr_0.0001-s1",
        "lr_0.0001-s2",
        "lr_0.0003-s1",
        "lr_0.0003-s2",
    ]
    assert [run.cfg.runner.seed for run in sweep.runs] == [1, 2, 1, 2]
    again = load_config("lr.yaml", sweep.runs[2].overrides)
    assert again == sweep.runs[2].cfg and again.actor.optim.lr == 3e-4  # type: ignore[attr-defined]
    assert not Path("runs").exists()


@pytest.mark.parametrize("file", sorted((ROOT / "configs/sweeps").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_examples_are_sweeps(file: Path) -> None:
    sweep = load_sweep(file)
    assert sweep is not None and sweep.name == file.stem and len(sweep.runs) > 1


def test_other_commands_say_that_it_is_a_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    write({"seeds": [1]})
    for command in ("train", "submit"):
        assert cli.main([command, "lr.yaml"]) == 2
        assert "lr.yaml: it is a sweep of several runs" in capsys.readouterr().err
    assert load_config("lr.yaml", ["sweep=null"]).runner.name == "lr"
    assert load_sweep("lr.yaml", ["sweep=null"]) is None


@pytest.mark.parametrize(
    ("sweep", "said"),
    [
        ({"grid": {"actor.optim.lrr": [1e-4]}}, "run lrr_0.0001 (actor.optim.lrr=0.0001): "),
        ({"grid": {"actor.optim.lr": [1e-4, 50]}}, "run lr_50 (actor.optim.lr=50): "),
        ({"list": [{"actor.global_batch_size": 256}, {"actor.global_batch_size": 7}]}, "run global_batch_size_7 ("),
    ],
)
def test_a_value_that_cannot_be_is_one_message_that_names_it(
    sweep: object, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (["plan"], ["run"]):
        assert cli.main([*command, write(sweep)]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"rlhpc: error: {Path('lr.yaml')}: sweep: {said}") and error.count("rlhpc: error") == 1
    assert not Path("runs").exists()


def test_a_mistake_that_is_not_the_sweeps_is_not_blamed_on_it() -> None:
    with pytest.raises(ConfigError) as refused:
        load({"seeds": [1]}, segments=0)
    assert "sweep" not in str(refused.value).removeprefix("lr.yaml")


def test_a_folder_that_cannot_be_written_is_named_and_no_override_that_nobody_typed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("taken").touch()
    for command in (["plan"], ["run"]):
        assert cli.main([*command, write({"seeds": [1, 2]}), "runner.run_dir=taken"]) == 2
        error = capsys.readouterr().err
        assert f"{Path('taken').absolute()} is a file, not a folder; choose another with runner.run_dir=…" in error
        assert "override" not in error and error.count("rlhpc: error") == 1


def test_names_that_are_taken() -> None:
    sweep = load({"seeds": [1]})
    folder = RunPaths(sweep.paths.root)
    folder.root.mkdir(parents=True)
    folder.config.write_text("runner: {name: lr}\n")
    with pytest.raises(ConfigError, match="is the folder of a run; give the sweep a name of its own"):
        load({"seeds": [1]})
    folder.config.unlink()
    sweep.begin()
    with pytest.raises(ConfigError, match="is the folder of a sweep"):
        load_config("lr.yaml", ["sweep=null"])


def test_a_run_that_has_begun_otherwise_is_refused_before_any_starts() -> None:
    sweep = load({"seeds": [1, 2]})
    paths = sweep.runs[1].paths
    paths.segments.mkdir(parents=True)
    paths.segment_done(0).write_text("{}")
    paths.config.write_text(yaml.safe_dump({"runner": {"seed": 2}, "actor": {"optim": {"lr": 0.5}}}))
    with pytest.raises(ConfigError, match=r"run .*/s2 has another configuration(.|\n)*actor.optim.lr: 0.5 → 0.001"):
        check_begun(sweep)
    check_begun(sweep, resume_with=True)


def test_what_the_folder_says(capsys: pytest.CaptureFixture[str]) -> None:
    sweep = load({"grid": {"actor.optim.lr": [1e-4]}, "seeds": [1, 2]})
    assert cli.main(["status", "lr.yaml"]) == 2
    assert "has not begun; start it: rlhpc run lr.yaml" in capsys.readouterr().err
    sweep.paths.root.mkdir(parents=True)
    sweep.paths.cancel_mark.touch()
    sweep.begin()
    assert not sweep.paths.cancel_mark.exists()
    assert [run["label"] for run in read_sweep(sweep.paths)["runs"]] == ["lr=0.0001"] * 2
    assert [paths.root.name for paths in runs_of(sweep.paths)] == ["lr_0.0001-s1", "lr_0.0001-s2"]
    assert SweepPaths.from_run(sweep.runs[0].paths) == sweep.paths
    for word in ("lr.yaml", "runs/lr"):
        assert cli.main(["status", word]) == 0
        said = capsys.readouterr().out.splitlines()
        assert said[0] == "sweep lr: 2 runs" and said[2].split() == ["lr_0.0001-s1", "not", "started"]
    sweep.paths.record.write_text(json.dumps({"runs": [{"name": "../elsewhere"}]}))
    with pytest.raises(RlhpcError, match="cannot be read as a sweep's"):
        read_sweep(sweep.paths)


def test_rules_of_different_runs_never_have_one_name() -> None:
    found = rule_prefixes(["a.b", "a-b", "a_b", "a_b_c"])
    assert len(set(found.values())) == 4 and found["a.b"] == "run_a_b_"


def test_a_plan_says_how_much_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    write({"grid": {"actor.optim.lr": [1e-4, 3e-4]}, "seeds": [1, 2, 3], "max_queued": 4})
    assert cli.main(["plan", "lr.yaml", "--launcher", "slurm", "cluster.time=02:00:00", "cluster.gres=gpu:2"]) == 0
    said = capsys.readouterr().out
    assert "sweep lr: 6 runs (2 configurations, 3 seeds), at most 4 training jobs queued or running at once" in said
    assert "18 training, 18 evaluation, 6 export" in said and "36 node hours" in said and "lr_0.0003-s3" in said


# -- preparations -----------------------------------------------------------------------------------------------------


def test_a_run_on_demonstrations_is_made_once_for_those_that_need_the_same() -> None:
    """The demo's is named after the run and takes its seed: one for each seed, whatever the learning rate."""
    sweep = load({"grid": {"actor.optim.lr": [1e-4, 3e-4]}, "seeds": [1, 2]}, base="reasoning/demo.yaml")
    folders = [str(run.cfg.actor.model.model_path) for run in sweep.runs]  # type: ignore[attr-defined]
    assert folders[0] == folders[2] != folders[1] == folders[3]
    assert all(folder.startswith("runs/lr/sft-") and folder.endswith("/export/chosen") for folder in folders)
    assert [sorted(run.prepares) for run in sweep.runs] == [["sft"], ["sft"], [], []]
    more = load({"grid": {"actor.optim.lr": [1e-3, 3e-4]}, "seeds": [3, 1]}, base="reasoning/demo.yaml")
    assert str(more.runs[3].cfg.actor.model.model_path) == folders[0]  # type: ignore[attr-defined]


def test_a_run_on_demonstrations_with_a_name_of_its_own_stays_there() -> None:
    words = ["runner.name=warm", "runner.seed=7"]
    file = write({"grid": {"actor.optim.lr": [1e-4, 3e-4]}}, base="reasoning/demo.yaml")
    sweep = load_sweep(file, [f"workflow.sft_overrides={json.dumps(words)}", "actor.model.model_path=runs/warm/export"])
    assert sweep is not None and [sorted(run.prepares) for run in sweep.runs] == [["sft"], []]
    assert {str(run.cfg.actor.model.model_path) for run in sweep.runs} == {"runs/warm/export"}  # type: ignore[attr-defined]
    words[1] = "runner.seed=${runner.seed}"
    with pytest.raises(
        ConfigError, match=r"runs lr_0.0001-s1 and lr_0.0001-s2 both prepare .*/runs/warm, and differently"
    ):
        load_sweep(file, [f"workflow.sft_overrides={json.dumps(words)}", "sweep.seeds=[1, 2]"])


def test_demonstrations_are_recorded_once() -> None:
    base = "embodied/push_cube_bc.yaml"
    sweep = load({"grid": {"actor.optim.lr": [1e-4, 3e-4]}, "seeds": [1, 2]}, base=base)
    assert [sorted(run.prepares) for run in sweep.runs] == [["demos"], [], [], []]
    file = write({"grid": {"actor.optim.lr": [1e-4, 3e-4]}, "seeds": [1, 2]}, base=base)
    own = load_sweep(file, ["demos.path=demos/${runner.name}.h5"])
    assert own is not None
    paths = [str(run.cfg.demos.path) for run in own.runs]  # type: ignore[attr-defined]
    assert paths[0] == paths[2] != paths[1] == paths[3] and paths[0].startswith("runs/lr/demos-")
    with pytest.raises(ConfigError, match="both prepare"):
        load({"grid": {"env.eval.max_episode_steps": [10, 20]}}, base=base)
