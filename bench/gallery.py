"""Runs of the documentation's gallery: small runs of committed configurations, and the charts of their metrics.

    python -m bench.gallery grpo sac      # or: make curve-grpo, make gallery ONLY="grpo sac"
    python -m bench.gallery               # all of them: an hour on two cores
    python -m bench.gallery --draw        # the charts again, from the committed points

A task has commands and the tasks that it needs first. A finished run in the folder `--runs` is not repeated. The points of a
chart go to docs/algorithms/curves/NAME.json, with command, machine, commit and seeds, and the chart to NAME.svg.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.machine import machine
from rlhpc.config.files import read_files
from rlhpc.metrics.charts import CHART, Line, line_chart, standalone
from rlhpc.metrics.logger import read_metrics, series
from rlhpc.runtime.errors import RlhpcError

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "configs" / "algorithms"
CURVES = ROOT / "docs" / "algorithms" / "curves"
RUNS = "runs/gallery"
#: Number of spans over which the curves of several seeds are averaged.
_SPANS = 20
_SIGNIFICANT_DIGITS = 5


@dataclass(frozen=True)
class Curve:
    """Chart of a metric of a task's runs.

    Attributes:
        metric: Name in metrics.jsonl.
        label: Label of the y axis.
        title: Title of the chart.
        x: Metric of the x axis, and its label.
        name: Name of the metric's line; "" if it is the only one.
        also: A further metric, and the name of its line, for a task with one seed.
    """

    metric: str
    label: str
    title: str
    x: tuple[str, str] = ("step", "training step")
    name: str = ""
    also: tuple[str, str] | None = None


@dataclass(frozen=True)
class Task:
    """Commands of the gallery: the runs of a configuration at some seeds, or further commands.

    Attributes:
        config: Name of the configuration in configs/algorithms; None if the task needs no configuration.
        needs: Tasks that run first.
        seeds: Seeds of the runs, which are named `NAME-SEED`; empty for one run with the configuration's own name.
        curve: Chart of the runs; None for a task that only prepares others.
        commands: Further commands, each with the file that it makes in the folder of runs. `{runs}` is that folder.
        rounds: Arguments of `rlhpc dagger`, which trains the runs instead of `rlhpc train`; "" for other tasks. A seed's
            rounds are one curve.
        num_rounds: Number of rounds of `rlhpc dagger`, after the first.
    """

    config: str | None = None
    needs: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (1,)
    curve: Curve | None = None
    commands: tuple[tuple[str, str], ...] = ()
    rounds: str = ""
    num_rounds: int = 0


_SUMS, _TWO_DIGITS = "sums of one digit", "sums of two digits"


def _make_accuracy_curve(name: str) -> Curve:
    return Curve("train/accuracy", "right answers of the step", f"{name}: {_SUMS}")


def _make_pairs_curve(name: str, held_out_metric: str = "eval/pair_accuracy") -> Curve:
    return Curve(
        "train/accuracy",
        "pairs in the right order",
        f"{name}: {_TWO_DIGITS}",
        name="of the step",
        also=(held_out_metric, "held out"),
    )


def _make_return_curve(name: str, metric: str = "rollout/episode_return") -> Curve:
    if metric.startswith("eval/"):
        return Curve(metric, "return of evaluations", name)
    return Curve(metric, "return of training episodes", name, ("rollout/env_steps", "environment steps"))


def _make_sums_task(name: str, seeds: tuple[int, ...] = (1,), needs: tuple[str, ...] = ("sums",)) -> Task:
    return Task(name, needs, seeds, _make_accuracy_curve(TITLES[name]))


#: Names of the charts of language models.
TITLES = {
    "grpo": "GRPO", "dr_grpo": "Dr. GRPO", "dapo": "DAPO", "gspo": "GSPO", "cispo": "CISPO", "rloo": "RLOO",
    "reinforce_plus_plus": "REINFORCE++", "reinforce_plus_plus_baseline": "REINFORCE++-baseline",
    "decoupled_ppo": "decoupled PPO", "language_ppo": "PPO", "distillation": "distillation",
}  # fmt: skip
TASKS: dict[str, Task] = {
    "sums_sft": Task("sums_sft", (), (), Curve("train/loss", "cross-entropy of a token", f"SFT: {_SUMS}")),
    "sums": Task(
        None, ("sums_sft",), commands=(("convert --run {runs}/sums_sft", "sums_sft/export/global_step_40/config.json"),)
    ),
    "grpo": _make_sums_task("grpo", (1, 2, 3)),
    "ppo": Task("ppo", (), (1, 2, 3), _make_return_curve("PPO: CartPole-v1")),
    "sac": Task("sac", (), (1, 2, 3), _make_return_curve("SAC: Pendulum-v1")),
    "pairs": Task(
        commands=(
            ("train configs/reasoning/demo_sft.yaml runner.run_dir={runs}", "demo_sft/gallery.json"),
            ("convert --run {runs}/demo_sft", "demo_sft/export/global_step_180/config.json"),
            ("pairs --run {runs}/demo_sft --output {runs}/pairs.jsonl data.train.size=1200", "pairs.jsonl"),
            (
                "pairs --run {runs}/demo_sft --suite held_out --output {runs}/held_out_pairs.jsonl",
                "held_out_pairs.jsonl",
            ),
        ),
    ),
    "labels": Task(
        None,
        ("pairs",),
        commands=(
            ("pairs --run {runs}/demo_sft --labels --output {runs}/labels.jsonl data.train.size=1200", "labels.jsonl"),
            (
                "pairs --run {runs}/demo_sft --labels --suite held_out --output {runs}/held_out_labels.jsonl",
                "held_out_labels.jsonl",
            ),
        ),
    ),
    "dpo": Task("dpo", ("pairs",), (1,), _make_pairs_curve("DPO")),
    "language_ppo": _make_sums_task("language_ppo"),
    **{
        name: _make_sums_task(name)
        for name in (
            "dr_grpo",
            "dapo",
            "gspo",
            "cispo",
            "rloo",
            "reinforce_plus_plus",
            "reinforce_plus_plus_baseline",
            "decoupled_ppo",
        )
    },
    "teacher": Task(
        None, ("grpo",), commands=(("convert --run {runs}/grpo-1", "grpo-1/export/global_step_50/config.json"),)
    ),
    "distillation": _make_sums_task("distillation", needs=("sums", "teacher")),
    "ipo": Task("ipo", ("pairs",), (1,), _make_pairs_curve("IPO")),
    "gigpo": Task(
        "gigpo", (), (1,), Curve("train/accuracy", "numbers found in the step", "GiGPO: one of seven numbers")
    ),
    "regression": Task(
        "regression",
        ("labels",),
        (1,),
        Curve("eval/accuracy", "pairs of answers in the order of their labels", f"Regression: {_TWO_DIGITS}, held out"),
    ),
    "reward_model": Task("reward_model", ("pairs",), (1,), _make_pairs_curve("Reward model", "eval/accuracy")),
    "td3": Task("td3", (), (1,), _make_return_curve("TD3: Pendulum-v1")),
    "crossq": Task("crossq", (), (1,), _make_return_curve("CrossQ: Pendulum-v1")),
    "iql": Task("iql", ("sac",), (1,), _make_return_curve("IQL: Pendulum-v1, offline", "eval/return_mean")),
    "pendulum": Task(
        None,
        ("sac",),
        commands=(("record --run {runs}/sac-1 --episodes 10 --output {runs}/pendulum.h5", "pendulum.h5"),),
    ),
    "bc": Task("bc", ("pendulum",), (1,), _make_return_curve("Behaviour cloning: Pendulum-v1", "eval/return_mean")),
    "dagger": Task(
        "dagger",
        ("sac",),
        (1,),
        _make_return_curve("DAgger: Pendulum-v1", "eval/return_mean"),
        rounds="demos.path=null --expert {runs}/sac-1 --episodes 3",
        num_rounds=3,
    ),
    "early_sac": Task(
        commands=(
            (
                "train configs/algorithms/sac.yaml runner.run_dir={runs} runner.name=sac-early runner.max_steps=10 "
                "runner.save_interval=10",
                "sac-early/gallery.json",
            ),
            (
                "record --run {runs}/sac-early --sample --episodes 20 --output {runs}/pendulum_early.h5",
                "pendulum_early.h5",
            ),
        ),
    ),
    "recap_critic": Task(
        "recap_critic",
        ("pendulum", "early_sac"),
        (1,),
        _make_return_curve("Behaviour cloning of good and bad episodes: Pendulum-v1", "eval/return_mean"),
    ),
    "recap": Task(
        "recap",
        ("recap_critic",),
        (1,),
        _make_return_curve("RECAP of the same episodes: Pendulum-v1", "eval/return_mean"),
    ),
    "flow_bc": Task("flow_bc", ("pendulum",), ()),
    "dsrl": Task("dsrl", ("flow_bc",), (1,), _make_return_curve("DSRL: Pendulum-v1")),
}


def run_task(name: str, runs: str, finished_tasks: set[str]) -> None:
    """Runs the tasks that a task needs, then the task, and draws its chart.

    Args:
        name: Name in `TASKS`.
        runs: Folder of the runs, relative to the repository.
        finished_tasks: Names of the tasks that this call has run; they are skipped.
    """
    if name in finished_tasks:
        return
    task = TASKS[name]
    for needed_task in task.needs:
        run_task(needed_task, runs, finished_tasks)
    for command, product in task.commands:
        _run_command(["rlhpc", *shlex.split(command.format(runs=runs))], ROOT / runs / product)
    if task.config is not None:
        for argv, run_name in build_training_commands(name, runs):
            _run_command(argv, ROOT / runs / run_name / "gallery.json")
        if task.curve is not None:
            write_points(name, runs)
            draw_chart(name)
    finished_tasks.add(name)


def build_training_commands(name: str, runs: str = RUNS) -> list[tuple[list[str], str]]:
    """Returns the commands that train a task's runs, each with the name of its run; with rounds, of the last one's."""
    task = TASKS[name]
    config = f"configs/algorithms/{task.config}.yaml"
    if task.rounds:
        argv = [
            *shlex.split(task.rounds.format(runs=runs)),
            "--rounds",
            str(task.num_rounds),
            f"runner.run_dir={runs}",
        ]
        return [
            (
                ["rlhpc", "dagger", config, *argv, f"runner.name={name}-{seed}", f"runner.seed={seed}"],
                f"{name}-{seed}-round{task.num_rounds}",
            )
            for seed in task.seeds
        ]
    command = ["rlhpc", "train", config, f"runner.run_dir={runs}"]
    if not task.seeds:
        return [(command, str(task.config))]
    return [([*command, f"runner.name={name}-{seed}", f"runner.seed={seed}"], f"{name}-{seed}") for seed in task.seeds]


def _run_command(argv: Sequence[str], product: Path) -> None:
    """Runs a command unless its product exists; the product of a training, or of rounds, is a file with its duration."""
    if product.exists():
        return
    print("+", shlex.join(argv), flush=True)
    start_time = time.perf_counter()
    resume_overrides = ["runner.resume_dir=auto"] if argv[1] == "train" else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "rlhpc.cli", *argv[1:], *resume_overrides]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(f"{shlex.join(argv)} failed:\n{result.stdout[-2000:]}\n{result.stderr[-3000:]}")
    duration_s = time.perf_counter() - start_time
    print(f"  {duration_s:.0f} s", flush=True)
    if argv[1] in ("train", "dagger"):
        product.write_text(json.dumps({"seconds": round(duration_s), "machine": machine()}))


def compute_settings_digest(name: str) -> str:
    """Returns a digest of the settings in a task's configuration and in the files that it includes, without comments."""
    files = read_files(CONFIGS / f"{TASKS[name].config}.yaml", None)
    contents = [content for _, content in files]
    return hashlib.sha256(json.dumps(contents, sort_keys=True, default=str).encode()).hexdigest()[:16]


def write_points(name: str, runs: str) -> None:
    """Writes the points of a task's chart, with their origin."""
    task = TASKS[name]
    assert task.curve is not None
    points, records = [], []
    for seed, (_, run_name) in zip(task.seeds or (1,), build_training_commands(name, runs), strict=True):
        folder = ROOT / runs / run_name
        rows = _read_rows(folder, task.num_rounds)
        for metric in (task.curve.metric, *(task.curve.also or ())[:1]):
            x, y = series(rows, metric, task.curve.x[0])
            if not x:
                raise SystemExit(f"{folder / 'metrics.jsonl'}: no row has {metric} and {task.curve.x[0]}")
            values = [float(f"{value:.{_SIGNIFICANT_DIGITS}g}") for value in y]
            points.append({"seed": seed, "metric": metric, "x": x, "y": values})
        records.append(json.loads((folder / "gallery.json").read_text()))
    content = {
        "command": f"make curve-{name}",
        "trained": [shlex.join(argv) for argv, _ in build_training_commands(name)],
        "settings": compute_settings_digest(name),
        "machine": records[-1]["machine"],
        "seconds": [record["seconds"] for record in records],
        "points": points,
    }
    CURVES.mkdir(parents=True, exist_ok=True)
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in content.items() if key != "points"]
    point_lines = ",\n".join(f"    {json.dumps(row)}" for row in points)
    (CURVES / f"{name}.json").write_text("{\n" + ",\n".join(lines) + ',\n  "points": [\n' + point_lines + "\n  ]\n}\n")


def _read_rows(folder: Path, num_rounds: int) -> list[dict[str, Any]]:
    """Returns the metrics of a run; with rounds, of all of them, whose steps are counted on."""
    rows: list[dict[str, Any]] = []
    for number in range(num_rounds + 1):
        round_folder = folder.with_name(folder.name.replace(f"-round{num_rounds}", f"-round{number}"))
        round_rows = read_metrics(round_folder / "metrics.jsonl")
        last_step = rows[-1]["step"] if rows else 0
        rows += [{**row, "step": last_step + row["step"]} for row in round_rows]
    return rows


def read_points(name: str) -> dict[str, Any]:
    """Reads the committed points of a chart."""
    content: dict[str, Any] = json.loads((CURVES / f"{name}.json").read_text())
    return content


def render_chart(name: str) -> str:
    """Draws a task's chart from its committed points: of one seed the points and their running mean, of several seeds mean
    and band from lowest to highest."""
    curve, points = TASKS[name].curve, read_points(name)["points"]
    assert curve is not None
    title = curve.title
    if len({row["seed"] for row in points}) == 1:
        names = (curve.name, *(curve.also or ())[1:])
        lines = [
            Line(line_name, row["x"], row["y"], color=color, smooth=True)
            for color, (line_name, row) in enumerate(zip(names, points, strict=True))
        ]
    else:
        lines = [_compute_band(points)]
        title = f"{curve.title}, {len(points)} seeds"
    return standalone(line_chart(title, curve.x[1], curve.label, lines, CHART))


def _compute_band(points: Sequence[dict[str, Any]]) -> Line:
    """Returns mean and band of several seeds, over spans of x in which each seed has a point."""
    last_x = max(max(row["x"]) for row in points)
    first_x = min(min(row["x"]) for row in points)
    num_spans = min(_SPANS, min(len(row["x"]) for row in points))
    sums: list[list[list[float]]] = [[[] for _ in points] for _ in range(num_spans)]
    for index, row in enumerate(points):
        for x, y in zip(row["x"], row["y"], strict=True):
            sums[min(int((x - first_x) / ((last_x - first_x) or 1) * num_spans), num_spans - 1)][index].append(y)
    means = {
        first_x + (span + 0.5) * (last_x - first_x) / num_spans: [statistics.fmean(values) for values in seeds]
        for span, seeds in enumerate(sums)
        if all(seeds)
    }
    return Line(
        "", list(means), [statistics.fmean(column) for column in means.values()], [min(c) for c in means.values()],
        [max(c) for c in means.values()], band=True,
    )  # fmt: skip


def draw_chart(name: str) -> None:
    """Writes a task's chart."""
    (CURVES / f"{name}.svg").write_text(render_chart(name))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs tasks, or only draws their charts; returns 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(TASKS)}; default: all")
    parser.add_argument("--runs", default=RUNS, help="folder of the runs")
    parser.add_argument("--draw", action="store_true", help="only draw the charts, from the committed points")
    options = parser.parse_args(argv)
    if unknown_names := [name for name in options.names if name not in TASKS]:
        parser.error(f"there is no {', '.join(unknown_names)}; there are {', '.join(TASKS)}")
    finished_tasks: set[str] = set()
    failed_tasks = []
    for name in options.names or TASKS:
        try:
            if options.draw:
                if TASKS[name].curve is not None:
                    draw_chart(name)
            else:
                run_task(name, options.runs, finished_tasks)
        except (SystemExit, RlhpcError, OSError) as error:
            print(f"{name}: {error}", file=sys.stderr, flush=True)
            failed_tasks.append(name)
    if failed_tasks:
        print(f"failed: {', '.join(failed_tasks)}", file=sys.stderr)
    return int(bool(failed_tasks))


if __name__ == "__main__":
    raise SystemExit(main())
