"""The workflow as a user meets it: lint, graph, a whole run, the same command again, and a Snakemake that is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from tests import warm
from tests.eventually import Patience
from tests.extras import need_extra
from tests.warm.commands import Commands

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")
RULES: dict[str, str] = {}
SMALL = (
    "runner.segments=2 runner.max_steps=4 runner.save_interval=-1 runner.logger.logger_backends=[jsonl] "
    "env.train.num_envs=4 env.eval.num_envs=2 env.eval.num_episodes=4 "
    "algorithm.rollout_steps=16 actor.global_batch_size=32 algorithm.update_epochs=1"
)


def command(folder: Path, *more: str, overrides: str = SMALL, config: tuple[str, ...] = ()) -> list[str]:
    """Snakemake with the local profile and a working directory of its own; `config` goes to --config."""
    return [
        sys.executable, "-m", "snakemake", "--profile", str(ROOT / "profiles" / "local"), "--directory", str(folder),
        "--config", f"overrides={overrides}", *config, *more,
    ]  # fmt: skip


def snakemake(folder: Path, *more: str, code: int = 0, **options: Any) -> str:
    """Runs it to its end; returns everything it said."""
    done = warm.run(
        command(folder, *more, **options),
        cwd=ROOT,
        env={**os.environ, **RULES},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == code, done.stdout
    return done.stdout


@pytest.fixture(scope="module", autouse=True)
def rules() -> Iterator[None]:
    """What the rules' shells call rlhpc, where nobody is killed."""
    with Commands() as commands:
        RULES.update(commands.environment)
        yield
    RULES.clear()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The working directory of a run of two segments that went through, by the short command and without a terminal."""
    folder = tmp_path_factory.mktemp("workflow")
    done = warm.run(
        [sys.executable, "-m", "rlhpc.cli", "run", QUICKSTART, *SMALL.split(), "--", "--config", "retries=0"],
        cwd=folder, env={**os.environ, **RULES}, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (folder / "said.txt").write_text(done.stdout)
    (folder / "shown.txt").write_text(done.stderr)
    yield folder


def test_the_short_command_says_what_happens_and_how_it_ended(whole: Path) -> None:
    shown, said = (whole / "shown.txt").read_text().splitlines(), (whole / "said.txt").read_text()
    assert "runs/quickstart/logs/workflow/snakemake.log" in shown[0]
    for phase in ("planning", "starting processes", "exporting the policy", "evaluating checkpoint 4"):
        assert shown.count(f"  {phase}") == 1, shown
    bar = [line for line in shown if line.startswith("quickstart: step ")]
    assert bar[-1].startswith("quickstart: step 4/4, return ") and len(shown) < 15
    result = json.loads((whole / "runs/quickstart/eval/global_step_4/default.json").read_text())
    low, high = result["return_ci95"]
    assert f"mean return {result['return_mean']:.1f} (95 % interval {low:.1f} to {high:.1f}) over 4 episodes" in said
    assert "report  runs/quickstart/report/index.html\n" in said and "rlhpc status runs/quickstart" in said
    assert '"state"' not in said + "".join(shown)


def test_lint() -> None:
    for config in (
        ["run=configs/quickstart.yaml"],
        ["checkpoint=/somewhere/checkpoints/global_step_3"],
        ["sweep={'seeds': [1]}", "overrides=runner.name=linted"],
    ):
        lint = warm.run(
            [sys.executable, "-m", "snakemake", "--lint", "--snakefile", "workflow/Snakefile", "--config", *config],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert lint.returncode == 0, lint.stdout + lint.stderr
        assert "good condition" in lint.stdout + lint.stderr


def test_graph_of_three_segments(tmp_path: Path) -> None:
    overrides = "runner.segments=3 runner.max_steps=9"
    dag = warm.run(
        command(tmp_path, "--dag", overrides=overrides), cwd=ROOT, capture_output=True, text=True, timeout=240, check=True
    ).stdout  # fmt: skip
    labels = {number: label.split("\\n") for number, label in re.findall(r'(\d+)\[label = "([^"]*)"', dag)}
    assert Counter(label[0] for label in labels.values()) == {
        "prepare": 1, "train_segment": 3, "eval": 3, "convert": 1, "report": 1, "all": 1,
    }  # fmt: skip
    edges = {("/".join(labels[a]), "/".join(labels[b])) for a, b in re.findall(r"(\d+) -> (\d+)", dag)}
    for segment, step in enumerate((3, 6, 9)):
        assert (f"train_segment/segment: {segment}", f"eval/step: {step}/suite: default") in edges
        assert (f"eval/step: {step}/suite: default", "report") in edges
    assert ("prepare", "train_segment/segment: 0") in edges
    assert ("train_segment/segment: 0", "train_segment/segment: 1") in edges
    assert ("eval/step: 9/suite: default", "convert") in edges  # the model card has the results
    assert not (tmp_path / "runs").exists()


def test_what_jobs_of_evaluation_and_export_ask_for(tmp_path: Path) -> None:
    """As Snakemake's Slurm executor will read it."""
    wanted = (
        "workflow.eval_job.gres=gpu:a100:1 workflow.eval_job.mem=64G workflow.eval_job.time='02:00:00' "
        "workflow.eval_job.cpus=8 cluster.partition=main"
    )
    said = snakemake(tmp_path, "--dry-run", "--cores", "16", overrides=f"{SMALL} runner.segments=1 {wanted}")
    [evaluation] = re.findall(r"rule eval:.*?resources: ([^\n]*)", said, re.DOTALL)
    for part in ("slurm_partition=main", "gres=gpu:a100:1", "mem_mb=65536", "runtime=120"):
        assert part in evaluation
    [export] = re.findall(r"rule convert:.*?resources: ([^\n]*)", said, re.DOTALL)
    assert "mem_mb=8192" in export and "gres" not in export


def test_a_mistake_is_one_message_and_writes_nothing(tmp_path: Path) -> None:
    said = snakemake(tmp_path, overrides="runner.max_step=4", code=1)
    assert "max_step" in said and "max_steps" in said
    assert "Traceback" not in said
    said = snakemake(tmp_path, config=("executer=slurm",), code=1)
    assert "executer" in said and "Traceback" not in said
    said = snakemake(tmp_path, overrides="runner.name='half", code=1)
    assert "rlhpc: error: overrides" in said and "No closing quotation" in said and "ValueError" not in said
    run = [sys.executable, "-m", "rlhpc.cli", "run", QUICKSTART, f"runner.run_dir={tmp_path}", "--"]
    refused = warm.run(
        [*run, "--config", "sweep=nope.yaml"], cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
    )
    assert refused.returncode == 2 and "\nrlhpc: error: " in refused.stderr and "nope.yaml" in refused.stderr
    assert "failed; log" not in refused.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("config", "shown"),
    [
        ({"overrides": "runner.name=007"}, "runs/007/"),
        ({"overrides": '["runner.name=1e5"]'}, "runs/1e5/"),
        ({"overrides": "runner.run_dir='a #b'"}, "a #b/quickstart/"),
        ({"overrides": "007"}, "override '007'"),
        ({"overrides": "true"}, "override 'true'"),
        ({"overrides": "runner={name: second}"}, "'{name:' is not valid YAML"),
        ({"run": "1e5"}, "1e5"),
        ({"run": "0x10"}, "0x10"),
        ({"site": "017"}, "017"),
        ({"checkpoint": "1_0"}, "1_0"),
    ],
)
def test_what_is_typed_is_what_is_used(config: dict[str, str], shown: str, tmp_path: Path) -> None:
    """Snakemake takes what looks like a number, a truth value or a mapping for one."""
    words = [f"{name}={value}" for name, value in {"run": QUICKSTART, **config}.items()]
    argv = [
        "snakemake",
        "--snakefile",
        str(ROOT / "workflow/Snakefile"),
        "-n",
        "--cores",
        "1",
        "--directory",
        str(tmp_path),
    ]
    done = warm.run(
        [sys.executable, "-m", *argv, "--config", *words], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, timeout=240, check=False,
    )  # fmt: skip
    assert shown in done.stdout and "Traceback" not in done.stdout, done.stdout


def test_a_whole_run(whole: Path) -> None:
    run = whole / "runs" / "quickstart"
    for step in (2, 4):
        result = json.loads((run / f"eval/global_step_{step}/default.json").read_text())
        assert result["global_step"] == step and result["episodes"] == 4
    with safe_open(run / "export/global_step_4/model.safetensors", "numpy") as policy:
        assert list(policy.keys())
    card = (run / "export/global_step_4/README.md").read_text()
    assert "| default | 4 |" in card and "model-index" in card
    json.loads((run / "export/global_step_4/config.json").read_text(), parse_constant=pytest.fail)
    alone = subprocess.run(
        [sys.executable, "-P", "export/global_step_4/policy.py"], cwd=run, capture_output=True, text=True, timeout=240,
        env={**os.environ, "PYTHONPATH": ""}, check=True,
    )  # fmt: skip
    assert alone.stdout.startswith("return ")
    assert (run / "report/index.html").is_file()
    assert {"return_vs_env_steps.svg", "evaluation.svg"} <= {p.name for p in (run / "report/curves").iterdir()}
    for segment, step in enumerate((2, 4)):
        done = json.loads((run / f"segments/{segment}.json").read_text())
        assert (done["segment"], done["global_step"]) == (segment, step)
        assert Path(done["checkpoint"]).name == f"global_step_{step}"
    logs = {path.name for path in (run / "logs/workflow").iterdir()}
    for job in ("prepare", "train_segment_0", "train_segment_1", "eval_2_default", "convert_4", "report"):
        assert {f"{job}.log", f"{job}.tsv"} <= logs


def test_again_does_nothing(whole: Path) -> None:
    assert "Nothing to be done" in snakemake(whole)


def jobs_of(said: str) -> set[str]:
    """The rules that a dry run would run."""
    return set(re.findall(r"^(?:local)?(?:rule|checkpoint) (\w+):", said, re.MULTILINE)) - {"all"}


@pytest.mark.long
def test_what_a_changed_configuration_runs_again(whole: Path) -> None:
    run = whole / "runs" / "quickstart"
    assert jobs_of(snakemake(whole, "--dry-run", overrides=f"{SMALL} cluster.time=10:00")) == set()
    assert jobs_of(snakemake(whole, "--dry-run", overrides=f"{SMALL} env.eval.num_episodes=6")) == {
        "eval",
        "convert",
        "report",
    }
    refused = snakemake(whole, overrides=f"{SMALL} actor.optim.lr=0.5", code=1)
    assert "actor.optim.lr: 0.001 → 0.5" in refused and "resume_with=true" in refused
    # the failing command's own exit code, and nothing after it
    assert "returned non-zero exit status 2" in refused and "cp: cannot stat" not in refused
    trained = (run / "metrics.jsonl").read_bytes()
    assert "finished" in snakemake(whole)
    assert (run / "metrics.jsonl").read_bytes() == trained
    snakemake(whole, overrides=f"{SMALL} env.eval.num_episodes=6")
    assert json.loads((run / "eval/global_step_4/default.json").read_text())["episodes"] == 6
    snakemake(whole)
    assert json.loads((run / "eval/global_step_4/default.json").read_text())["episodes"] == 4


def test_a_sweep_on_the_command_line(tmp_path: Path) -> None:
    """Snakemake gives the values in a mapping as text; names and values are as in a file."""
    given = "sweep={'grid': {'actor.optim.lr': [1e-3, 3e-3]}, 'seeds': [1]}"
    said = jobs_of(snakemake(tmp_path, "--dry-run", config=(given,)))
    assert {job for job in said if job.endswith("train_segment")} == {
        f"run_lr_{lr}_s1_train_segment" for lr in ("0_001", "0_003")
    }
    refused = snakemake(tmp_path, config=("sweep={'grid': {'actor.optim.lrr': [1]}}",), code=1)
    assert "run lrr_1 (actor.optim.lrr=1): " in refused and "did you mean actor.optim.lr?" in refused
    assert not (tmp_path / "runs").exists()


def test_training_alone(tmp_path: Path) -> None:
    assert jobs_of(snakemake(tmp_path, "--dry-run", "--", "train")) == {"prepare", "train_segment", "train"}


def test_a_finished_segment_is_not_trained_again(whole: Path) -> None:
    run = whole / "runs" / "quickstart"
    trained = (run / "metrics.jsonl").read_bytes()
    # what Snakemake keeps for itself may go; and even when it is told to do everything again, nothing is trained
    (run / "workflow/segment_0.json").unlink()
    assert "finished" in snakemake(whole, "--forcerun", "train_segment", "--", "train")
    assert (run / "metrics.jsonl").read_bytes() == trained
    assert sorted(p.name for p in (run / "submit").glob("*.claim.*")) == [f"segment_{k}.claim.1.json" for k in (0, 1)]
    assert "Nothing to be done" in snakemake(whole)


def test_report_has_the_curves(whole: Path) -> None:
    page = whole / "report.html"
    snakemake(whole, "--report", str(page))
    text = page.read_text()
    assert "return_vs_env_steps.svg" in text and "evaluation.svg" in text
    result = json.loads((whole / "runs/quickstart/eval/global_step_4/default.json").read_text())
    assert f"mean return {result['return_mean']:.1f} (95 % interval" in text and "rollout_steps: 32" in text
    alone = (whole / "runs/quickstart/report/curves/page.html").read_text()
    assert "Learning curves" in alone and "href=" not in alone and "src=" not in alone


def test_a_checkpoint_of_a_run_elsewhere(whole: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "elsewhere" / "global_step_2"
    checkpoint.parent.mkdir()
    (whole / "runs/quickstart/checkpoints/global_step_2").rename(checkpoint)
    try:
        suites = "suites={'short': 'env.eval.num_episodes=2'}"
        snakemake(tmp_path, overrides="", config=(f"checkpoint={checkpoint}", "suite=short", suites))
    finally:
        checkpoint.rename(whole / "runs/quickstart/checkpoints/global_step_2")
    result = json.loads((tmp_path / "offline/eval/global_step_2/short.json").read_text())
    assert (result["episodes"], result["global_step"], result["suite"]) == (2, 2, "short")
    assert (tmp_path / "offline/export/global_step_2/model.safetensors").is_file()
    assert not (tmp_path / "runs").exists()
    said = snakemake(tmp_path, "--", "eval_checkpoint", overrides="", config=("checkpoint=gone/global_step_9",), code=1)
    assert "gone/global_step_9" in said and "Traceback" not in said


def test_the_best_checkpoint_is_evaluated_exported_and_taken_by_the_commands(tmp_path: Path) -> None:
    """Of equal values the first stays: here nothing is learned, so the best step is the first that was evaluated."""
    still = "actor.optim.lr=1e-30 runner.segments=1 runner.val_check_interval=1 runner.keep_best=eval/return_mean"
    said = warm.run(
        [sys.executable, "-m", "rlhpc.cli", "run", QUICKSTART, *SMALL.split(), *still.split()],
        cwd=tmp_path, env={**os.environ, **RULES}, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    run = tmp_path / "runs" / "quickstart"
    assert said.returncode == 0, said.stdout + said.stderr
    assert (run / "checkpoints/best").readlink() == Path("global_step_1")
    assert {path.name for path in (run / "export").iterdir()} == {"global_step_1"}
    assert {path.name for path in (run / "eval").iterdir()} == {"global_step_1", "global_step_4"}
    assert "policy  runs/quickstart/export/global_step_1" in said.stdout
    assert "Nothing to be done" in snakemake(tmp_path, overrides=f"{SMALL} {still}")
    for options, step in (((), 1), (("--step", "latest"), 4)):
        words = ["convert", "--run", str(run), *options, "--output", str(tmp_path / f"export{step}")]
        done = warm.run(
            [sys.executable, "-m", "rlhpc.cli", *words], capture_output=True, text=True, timeout=240, check=False
        )
        assert done.returncode == 0, done.stderr
        assert json.loads((tmp_path / f"export{step}/config.json").read_text())["global_step"] == step


@pytest.mark.long
def test_early_stop_decides_which_steps_are_evaluated(tmp_path: Path) -> None:
    overrides = f"{SMALL} runner.max_steps=200 runner.stop_return=1.0"  # after a hundred episodes, about step 36
    snakemake(tmp_path, overrides=overrides)
    run = tmp_path / "runs" / "quickstart"
    reached = {json.loads((run / f"segments/{k}.json").read_text())["global_step"] for k in (0, 1)}
    assert max(reached) < 100
    evaluated = {int(p.parent.name.removeprefix("global_step_")) for p in (run / "eval").glob("*/default.json")}
    assert evaluated == reached
    assert "Nothing to be done" in snakemake(tmp_path, overrides=overrides)


SFT_FILE = f"""
defaults: [{ROOT}/configs/reasoning/demo_sft.yaml]
runner:
  {{name: first, max_steps: 6, save_interval: -1, val_check_interval: 1, keep_best: eval/loss, patience: 2,
   logger: {{logger_backends: [jsonl]}}}}
data: {{prompts_per_step: 4, train: {{size: 40}}}}
actor: {{optim: {{lr: 1.0e-30, lr_warmup_steps: 0}}}}
"""
RL_FILE = f"""
defaults: [{ROOT}/configs/reasoning/demo.yaml]
runner: {{name: second, max_steps: 1, segments: 1, save_interval: -1, logger: {{logger_backends: [jsonl]}}}}
data: {{prompts_per_step: 2, train: {{size: 40}}}}
algorithm: {{group_size: 2}}
rollout: {{max_new_tokens: 2}}
workflow: {{sft: first.yaml, sft_overrides: []}}
actor: {{global_batch_size: 4, model: {{model_path: runs/first/export/EXPORT}}}}
"""


@pytest.mark.long
@pytest.mark.parametrize("name", ["chosen", "global_step_6"])
def test_a_run_starts_from_the_step_that_was_chosen_of_the_run_before(name: str, tmp_path: Path) -> None:
    """The run on demonstrations learns nothing, so its best step is the first, and patience ends it after the third."""
    need_extra("llm")
    (tmp_path / "first.yaml").write_text(SFT_FILE)
    (tmp_path / "second.yaml").write_text(RL_FILE.replace("EXPORT", name))
    run = (f"run={tmp_path / 'second.yaml'}",)
    if name != "chosen":
        refused = snakemake(tmp_path, overrides="", config=run, code=1)
        assert "its runner.keep_best and runner.patience may choose another step; name" in refused
        assert "runs/first/export/chosen" in refused and not (tmp_path / "runs").exists()
        return
    snakemake(tmp_path, "--", "train", overrides="", config=run)
    export, first = tmp_path / "runs/first/export", tmp_path / "runs/first"
    assert [path.name for path in export.iterdir()] == ["chosen"]
    assert json.loads((export / "chosen/conversion.json").read_text())["global_step"] == 1
    assert json.loads((first / "segments/0.json").read_text())["global_step"] == 3
    assert (first / "checkpoints/best").readlink() == Path("global_step_1")
    trained = json.loads((tmp_path / "runs/second/segments/0.json").read_text())
    assert trained["global_step"] == 1


def start_and_kill(folder: Path, overrides: str, until: Path, rows: int) -> None:
    """Starts Snakemake and kills it once `rows` lines are in the file: what waited for it ends, the driver lives on."""
    process = subprocess.Popen(
        command(folder, overrides=overrides),
        cwd=ROOT,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_for(lambda: until.exists() and until.read_bytes().count(b"\n") >= rows, process)
    process.kill()
    process.wait()
    wait_for(lambda: not group_lives(process.pid), seconds=30)


def group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def wait_for(condition: Any, process: subprocess.Popen[bytes] | None = None, seconds: float = 120) -> None:
    patience = Patience(seconds)
    while not condition():
        assert not patience.is_over(), "it never happened"
        assert process is None or process.poll() is None, "Snakemake ended before it could be killed"
        time.sleep(0.02)


@pytest.mark.long
@pytest.mark.chaos
def test_a_killed_snakemake_finds_the_run_again(tmp_path: Path) -> None:
    overrides = f"{SMALL} runner.max_steps=240"
    run = tmp_path / "runs" / "quickstart"
    metrics, first = run / "metrics.jsonl", run / "segments/0.json"

    start_and_kill(tmp_path, overrides, metrics, rows=3)
    wait_for(first.exists)  # the driver is nobody's child: it ends its segment
    finished = (first.read_bytes(), first.stat().st_mtime_ns)

    start_and_kill(tmp_path, overrides, metrics, rows=130)
    snakemake(tmp_path, overrides=overrides)

    assert (first.read_bytes(), first.stat().st_mtime_ns) == finished
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert steps == list(range(1, 241))
    assert sorted(p.name for p in (run / "submit").glob("*.claim.*")) == [f"segment_{k}.claim.1.json" for k in (0, 1)]
    assert "Nothing to be done" in snakemake(tmp_path, overrides=overrides)


@pytest.mark.long
@pytest.mark.chaos
def test_a_cancelled_run_stays_ended(tmp_path: Path) -> None:
    """Until a person starts it again; the retries of the Snakemake that waited do not."""
    overrides = f"{SMALL} runner.segments=1 runner.max_steps=240"
    run = tmp_path / "runs" / "quickstart"
    waiting = subprocess.Popen(
        command(tmp_path, overrides=overrides), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    wait_for(lambda: (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").read_bytes().count(b"\n") >= 3)
    warm.run([sys.executable, "-m", "rlhpc.cli", "cancel", str(run)], cwd=ROOT, check=True, timeout=60)
    said, _ = waiting.communicate(timeout=240)
    assert waiting.returncode == 1 and "Trying to restart" in said and said.count("was cancelled") >= 2
    submitted = json.loads((run / "submit/segment_0.json").read_text())
    assert submitted["attempt"] == 1
    snakemake(tmp_path, overrides=overrides)
    assert json.loads((run / "submit/segment_0.json").read_text())["attempt"] == 2
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 241))


@pytest.mark.long
def test_a_robot_from_demonstrations_to_a_recording_of_its_own(tmp_path: Path) -> None:
    """An expert's demonstrations, behaviour cloning, evaluation with success, a recording of the clone, and the report."""
    need_extra("embodied")
    overrides = (
        "workflow.demos_episodes=4 workflow.record_episodes=2 workflow.record_only_success=false runner.max_steps=2 "
        "env.eval.num_envs=2 env.eval.num_episodes=4 env.eval.max_episode_steps=12 demos.path=demos.h5"
    )
    run = ("run=configs/embodied/push_cube_bc.yaml",)
    snakemake(tmp_path, overrides=overrides, config=run)
    root = tmp_path / "runs/push_cube_bc"
    result = json.loads((root / "eval/global_step_2/default.json").read_text())
    assert result["episodes"] == 4 and 0 <= result["success_at_end"] <= result["success_once"] <= 1
    assert result["success_once_ci95"][0] <= result["success_once"] <= result["success_once_ci95"][1]
    from rlhpc.embodied.data.trajectories import read_trajectories

    assert len(list(read_trajectories(tmp_path / "demos.h5"))) == 4
    assert len(list(read_trajectories(root / "demos/global_step_2.h5", require=("obs", "env_states")))) == 2
    page = (root / "report/index.html").read_text()
    assert "Imitation loss" in page and "Success (once) in evaluations" in page
    assert "Nothing to be done" in snakemake(tmp_path, overrides=overrides, config=run)


@pytest.mark.chaos
def test_a_snakemake_that_was_killed_while_it_planned(tmp_path: Path) -> None:
    """The next one makes the plan, and all that follows from it; a half plan would be all that it makes."""
    planning = {**os.environ, "BASH_FUNC_rlhpc%%": "() { echo half; sleep 100; }"}
    process = subprocess.Popen(
        command(tmp_path), cwd=ROOT, env=planning, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    end, files = time.monotonic() + 240, list[Path]()
    while not files and time.monotonic() < end:
        files = [path for path in tmp_path.glob("runs/quickstart/workflow/plan.txt*") if path.read_text()]
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert files and files[0].read_text() == "half\n"
    said = snakemake(tmp_path, "--dry-run")
    assert "rule prepare" in said and "train_segment" in said and "rule report" in said
