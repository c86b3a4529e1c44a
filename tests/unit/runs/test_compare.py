"""The page that compares runs: whose curves are one, what their mean and spread are, and what the table says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rlhpc import cli
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
    # Two seeds: mean 11, from 10 to 12; 100 episodes, all of them successes, and Wilson's interval of that.
    assert "11.0 (10.0 … 12.0)" in html and "100.0% (96.3% … 100.0%)" in html
    assert (
        html.count("<svg") == 6 and html.count("<polygon") == 6
    )  # success and return, evaluated and trained, by two axes
    titles = re.findall(r'aria-label="([^"]*)"', html)
    assert len(set(titles)) == len(titles)
    assert "http" not in html.replace("http://www.w3.org/2000/svg", "")


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
