"""The page that compares runs: whose curves are one, what their mean and spread are, and what the table says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rlhpc import cli
from rlhpc.jobs.paths import RunPaths
from rlhpc.runs.compare import label_of, spread


def run(folder: Path, offset: float, *, evaluated: bool = True) -> str:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("env: {train: {env_id: Task-v1}}\n")
    rows = [
        {"step": i, "rollout/env_steps": 100 * i, "time/wall_s": 2.0 * i, "train/episode_return": i + offset}
        for i in range(1, 11)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for step in (5, 10) if evaluated else ():
        place = folder / f"eval/global_step_{step}"
        place.mkdir(parents=True)
        result = {
            "suite": "default",
            "global_step": step,
            "return_mean": step + offset,
            "episodes": 50,
            "success_once": 0.1 * step,
        }
        (place / "default.json").write_text(json.dumps(result))
    return str(folder)


def test_seeds_of_one_thing_are_one_curve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [run(tmp_path / "push-s1", 0), run(tmp_path / "push-s2", 2), run(tmp_path / "scratch", 1, evaluated=False)]
    output = tmp_path / "page.html"
    assert cli.main(["compare", *runs[:2], f"from scratch={runs[2]}", "--output", str(output)]) == 0
    assert capsys.readouterr().out.strip() == str(output)
    html = output.read_text()
    assert "Comparison of push · from scratch" in html
    # Two seeds: mean 11, from 10 to 12; both always succeed, of which no interval over seeds follows.
    assert "11.0 (10.0 … 12.0)" in html and "100.0%" in html and "100.0% (" not in html
    assert (
        html.count("<svg") == 6 and html.count("<polygon") == 6
    )  # success and return, evaluated and trained, by two axes
    titles = re.findall(r'aria-label="([^"]*)"', html)
    assert len(set(titles)) == len(titles)
    assert "http" not in html.replace("http://www.w3.org/2000/svg", "")


def test_a_run_that_was_resumed_with_another_configuration_is_no_seed_of_one_that_had_it_always(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [run(tmp_path / f"push-s{seed}", seed) for seed in (1, 2)]
    changes = {"segments": [{}, {"resumed": {"step": 4, "changes": ["actor.optim.lr: 0.1 → 0.2 <b>"]}}]}
    RunPaths(tmp_path / "push-s1").provenance.write_text(json.dumps(changes))
    assert cli.main(["compare", *runs, "--output", str(tmp_path / "page.html")]) == 0
    html = (tmp_path / "page.html").read_text()
    assert "Comparison of push-s1 · push-s2" in html
    assert "from step 4 on: actor.optim.lr: 0.1 → 0.2 &lt;b&gt;" in html
    capsys.readouterr()
    assert cli.main(["compare", *(f"a={path}" for path in runs), "--output", str(tmp_path / "page.html")]) == 2
    assert "runs of label 'a' differ in what a resume at step 4 changed (actor.optim.lr" in capsys.readouterr().err
    RunPaths(tmp_path / "push-s2").provenance.write_text(json.dumps(changes))
    assert cli.main(["compare", *runs, "--output", str(tmp_path / "page.html")]) == 0
    assert "Comparison of push<" in (tmp_path / "page.html").read_text(), "both were resumed so"


def test_mean_and_ends_over_seeds() -> None:
    x, mean, low, high = spread([([0, 10], [0, 10]), ([2, 12], [4, 14])])
    assert (x[0], x[-1]) == (2, 10)
    assert mean == pytest.approx([value + 1 for value in x])
    assert low == pytest.approx(x) and high == pytest.approx([value + 2 for value in x])
    assert spread([([1], [3]), ([2], [5])]) == ([1.5], [4], [3], [5])


@pytest.mark.parametrize("name", ["push-s3", "push_seed12", "push3", "push.7", "push"])
def test_the_seed_is_not_part_of_the_label(name: str) -> None:
    assert label_of(name) == "push"


def test_a_folder_without_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compare", str(tmp_path / "none"), "--output", str(tmp_path / "page.html")]) == 2
    assert "no such run folder" in capsys.readouterr().err


def config_of(folder: str, text: str) -> str:
    (Path(folder) / "config.yaml").write_text(text)
    return folder


@pytest.mark.parametrize(
    ("names", "values"),
    [(("kl0.01", "kl0.05"), ("0.01", "0.05")), (("group4", "group8"), ("4", "8")), (("ppo_v1", "ppo_v2"), ("1", "2")),
     (("tokens_4096", "tokens_8192"), ("4096", "8192")), (("qwen3-8", "qwen3-14"), ("8", "14"))],
)  # fmt: skip
def test_runs_whose_names_end_with_a_number_are_no_seeds_if_more_than_the_seed_differs(
    tmp_path: Path, names: tuple[str, str], values: tuple[str, str]
) -> None:
    text = "env: {train: {env_id: Task-v1}}\nalgorithm: {gamma: %s}\nrunner: {seed: %d}\n"
    folders = [
        config_of(run(tmp_path / name, 0), text % (value, seed))
        for seed, (name, value) in enumerate(zip(names, values, strict=True))
    ]
    page = tmp_path / "page.html"
    assert cli.main(["compare", *folders, "--output", str(page)]) == 0
    assert f"Comparison of {names[0]} · {names[1]}" in page.read_text()
    for folder in folders:  # of one configuration they are
        config_of(folder, text % ("0.9", len(folder)))
    assert cli.main(["compare", *folders, "--output", str(page)]) == 0
    assert f"Comparison of {label_of(names[0])}</h1>" in page.read_text()


def test_one_label_for_unlike_runs_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "env: {train: {env_id: Task-v1}}\nactor: {optim: {lr: %s}}\n"
    first, second = (config_of(run(tmp_path / name, 0), text % lr) for name, lr in (("a", "0.1"), ("b", "0.2")))
    assert cli.main(["compare", f"mine={first}", f"mine={second}", "--output", str(tmp_path / "page.html")]) == 2
    assert "label 'mine' differ in actor.optim.lr" in capsys.readouterr().err


def test_sweeps_that_vary_the_same_keys_are_told_apart(tmp_path: Path) -> None:
    words = []
    for name, task in (("ppo_lr", "Task-v1"), ("sac_lr", "Other-v1")):
        runs = []
        for seed in (1, 2):
            config_of(run(tmp_path / name / f"lr-s{seed}", seed), f"env: {{train: {{env_id: {task}}}}}\n")
            runs.append({"name": f"lr-s{seed}", "label": "lr=0.001", "seed": seed, "values": {}})
        (tmp_path / name / "sweep.json").write_text(json.dumps({"name": name, "runs": runs}))
        words.append(str(tmp_path / name))
    page = tmp_path / "page.html"
    assert cli.main(["compare", *words, "--output", str(page)]) == 0
    assert "Comparison of ppo_lr: lr=0.001 · sac_lr: lr=0.001" in page.read_text()


@pytest.mark.parametrize("seeds", [1, 2])
def test_runs_of_language_models_are_shown_by_their_accuracy(
    tmp_path: Path, seeds: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of one run with the interval that its evaluation gave, of several over seeds; and nothing of episodes."""
    folders = []
    for seed in range(seeds):
        folder = Path(run(tmp_path / f"math-s{seed}", 0.0, evaluated=False))
        (folder / "config.yaml").write_text(f"runner: {{task_type: reasoning, seed: {seed}}}\n")
        place = folder / "eval/global_step_10"
        place.mkdir(parents=True)
        result = {
            "suite": "default",
            "global_step": 10,
            "accuracy": 0.5 + 0.1 * seed,
            "accuracy_ci95": [0.41, 0.59],
            "n": 60,
        }
        (place / "default.json").write_text(json.dumps(result))
        folders.append(str(folder))
    assert cli.main(["compare", *folders, "--output", str(tmp_path / "page.html")]) == 0, capsys.readouterr().err
    html = (tmp_path / "page.html").read_text()
    assert ">accuracy<" in html and ">problems<" in html and f">{60 * seeds}<" in html
    assert ("50.0% (41.0% … 59.0%)" in html) == (seeds == 1) and ("55.0% (" in html) == (seeds == 2)
    assert "success once" not in html and "evaluated return" not in html
