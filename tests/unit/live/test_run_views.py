"""What the pages show of a run: curves of several runs, samples by query, videos, logs."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from rlhpc.jobs.paths import RunPaths
from rlhpc.live import metric_table, run_views
from rlhpc.live.metric_table import SAMPLE_ROWS
from rlhpc.live.run_views import _MAX_CHART_POINTS, CurveRequest, MetricTables, SampleQuery, find_samples
from rlhpc.runtime.errors import UserError
from tests.eventually import wait_until


def run_with(folder: Path, values: list[float], lr: float = 0.1) -> RunPaths:
    folder.mkdir(parents=True)
    paths = RunPaths(folder)
    paths.config.write_text(f"runner: {{seed: {len(list(folder.parent.iterdir()))}}}\nactor: {{optim: {{lr: {lr}}}}}\n")
    rows = ({"step": s, "train/reward": v, "time/wall_s": 2.0 * s} for s, v in enumerate(values, start=1))
    paths.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return paths


def test_runs_of_one_name_with_unlike_configurations_are_no_seeds(tmp_path: Path) -> None:
    names = {"push-1": 0.1, "push-2": 0.1, "push-3": 0.2, "push-4": 0.2, "push-5": 0.3}
    runs = {name: run_with(tmp_path / name, [1.0] * 3, lr) for name, lr in names.items()}
    tables, request = MetricTables(), CurveRequest("train/reward", is_grouped=True)
    assert {line["name"]: line["runs"] for line in tables.curves(runs, {}, request)} == {
        "push (push-1, push-2)": ["push-1", "push-2"], "push (push-3, push-4)": ["push-3", "push-4"], "push-5": ["push-5"]
    }  # fmt: skip
    for name in runs:
        runs[name].config.write_text("actor: {optim: {lr: 0.5}}\n")
        os.utime(runs[name].config, ns=(1, 1))
    assert [line["name"] for line in tables.curves(runs, {}, request)] == ["push"], "after a change of the files"
    runs["push-2"].config.write_text("no: [")
    assert {line["name"] for line in tables.curves(runs, {}, request)} == {"push (push-1 … push-5)", "push-2"}


def test_a_resume_with_another_configuration_is_a_mark_on_each_axis(tmp_path: Path) -> None:
    paths = run_with(tmp_path / "run", [1.0] * 4)
    starts = [
        {}, {"resumed": {"step": 1, "changes": []}}, {"resumed": {"step": 3, "changes": ["actor.optim.lr: 0.1 → 0.2"]}},
        {"resumed": {"step": "x", "changes": 5}}, {"resumed": 3},
    ]  # fmt: skip
    paths.provenance.write_text(json.dumps({"segments": starts}))
    tables = MetricTables()
    for against, x in (("step", 3.0), ("time/wall_s", 6.0)):
        (line,) = tables.curves({"run": paths}, {}, CurveRequest("train/reward", against))
        assert line["marks"] == [{"x": x, "text": "run from step 3 on: actor.optim.lr: 0.1 → 0.2"}]


def write_samples(paths: RunPaths, samples: list[dict[str, Any]], step: int = 3) -> str:
    result = paths.eval_result(step, "held-out")
    result.parent.mkdir(parents=True)
    result.write_text(json.dumps({"global_step": step, "suite": "held-out", "accuracy": 0.5, "n": len(samples)}))
    file = result.with_name("held-out.samples.jsonl")
    file.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    return str(file.relative_to(paths.root))


def sample(number: int, **more: Any) -> dict[str, Any]:
    texts = {"prompt": f"What is {number}?", "response": f"It is {number}."}
    return {"id": number, "sample": 0, **texts, "right": number % 2 == 0, "reward": number / 10, **more}


def test_curves_of_several_runs_alone_and_as_seeds(tmp_path: Path) -> None:
    runs = {f"push-s{s}": run_with(tmp_path / f"push-s{s}", [float(s)] * 4) for s in (1, 3)}
    runs["other"] = run_with(tmp_path / "other", [5.0] * 4)
    tables = MetricTables()
    assert tables.names(runs) == {"names": ["time/wall_s", "train/reward"], "first": ["train/reward"]}
    request = CurveRequest("train/reward", "time/wall_s")
    lines = tables.curves(runs, {}, request)
    assert [(line["name"], line["x"], set(line["y"])) for line in lines] == [
        ("push-s1", [2, 4, 6, 8], {1}), ("push-s3", [2, 4, 6, 8], {3}), ("other", [2, 4, 6, 8], {5})
    ]  # fmt: skip
    [push, other] = tables.curves(runs, {}, CurveRequest("train/reward", is_grouped=True))
    assert (push["name"], push["runs"], set(push["y"]), set(push["low"]), set(push["high"])) == (
        "push", ["push-s1", "push-s3"], {2}, {-10.7062}, {14.7062}
    )  # fmt: skip
    assert "low" not in other
    labels = {"push-s1": "sweep: a", "other": "sweep: a"}
    assert [line["name"] for line in tables.curves(runs, labels, CurveRequest("train/reward", is_grouped=True))] == [
        "sweep: a", "push"
    ]  # fmt: skip
    assert tables.curves(runs, {}, CurveRequest("train/reward", low=3, high=3))[0]["x"] == [2, 3, 4]
    assert tables.curves(runs, {}, CurveRequest("nothing"))[0]["x"] == []


def test_fifty_long_runs_are_sampled_first_and_read_in_full_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first answers take the same work and the same bytes for runs of any length; a spike comes with the full answer."""
    values = [0.001 * step for step in range(2000)]
    values[1003] = 9.0
    runs = {f"push-{number}": run_with(tmp_path / f"push-{number}", values, number) for number in range(50)}
    num_rows = 0
    parse = metric_table.rows_in

    def counted(content: bytes) -> list[dict[str, Any]]:
        nonlocal num_rows
        rows = parse(content)
        num_rows += len(rows)
        return rows

    monkeypatch.setattr(metric_table, "rows_in", counted)
    monkeypatch.setattr(run_views, "_READ_AT_ONCE", 1000)
    tables, request = MetricTables(), CurveRequest("train/reward")
    monkeypatch.setattr(tables, "_read_tables", lambda: None)
    assert tables.names(runs)["first"] == ["train/reward"]
    lines = tables.curves(runs, {}, request)
    assert num_rows <= 50 * SAMPLE_ROWS < 50 * len(values) / 10
    for line in lines:
        assert line["is_sample"]
        assert (line["x"][0], line["x"][-1], line["y"][-1]) == (1, 2000, 1.999)
        assert len(line["x"]) > 0.9 * SAMPLE_ROWS
    monkeypatch.undo()
    monkeypatch.setattr(run_views, "_UPDATE_S", 0.0)
    monkeypatch.setattr(run_views, "_READ_AT_ONCE", 1000)
    tables.names(runs)
    wait_until(lambda: not any(line["is_sample"] for line in tables.curves(runs, {}, request)), 120)
    lines = tables.curves(runs, {}, request)
    assert [max(line["y"]) for line in lines] == [9.0] * 50
    num_points = sum(len(line["x"]) for line in lines)
    assert num_points <= _MAX_CHART_POINTS + 2 * len(lines)
    assert len(json.dumps(lines)) < 30 * _MAX_CHART_POINTS
    alone = tables.curves({"push-0": runs["push-0"]}, {}, request)
    assert len(alone[0]["x"]) > 3 * len(lines[0]["x"])


def test_runs_that_do_not_fit_into_memory_remain_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = {f"push-{number}": run_with(tmp_path / f"push-{number}", [1.0] * 1000, number) for number in range(4)}
    for name, value in {"_READ_AT_ONCE": 1000, "_UPDATE_S": 0.0, "_MAX_TABLE_BYTES": 40_000}.items():
        monkeypatch.setattr(run_views, name, value)
    tables, request = MetricTables(), CurveRequest("train/reward")

    def num_read() -> int:
        return sum(not line["is_sample"] for line in tables.curves(runs, {}, request))

    wait_until(lambda: num_read() == 2, 60)
    time.sleep(0.2)
    assert num_read() == 2
    wait_until(lambda: not tables.curves({"push-3": runs["push-3"]}, {}, request)[0]["is_sample"], 60)


def test_samples_are_found_by_text_verdict_and_reward(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    samples = [sample(n) for n in range(8)]
    samples[5]["episode"] = [{"role": "a", "parts": [{"turn": 0, "read": "TOOL says 42"}]}]
    samples[6]["response"] = "\x1b[31mred\u202e<script>"
    name = write_samples(paths, samples)

    def ids(**query: Any) -> list[int]:
        return [row["id"] for row in find_samples(paths, name, SampleQuery(**query))["rows"]]

    assert ids() == list(range(8))
    assert ids(verdict="right") == [0, 2, 4, 6]
    assert ids(verdict="wrong", min_reward=0.3) == [3, 5, 7]
    assert ids(max_reward=0.2) == [0, 1, 2]
    assert ids(text="tool SAYS") == [5]
    assert ids(text="what is 7") == [7]
    assert ids(start=2, count=3) == [2, 3, 4]
    found = find_samples(paths, name, SampleQuery(count=1, verdict="right"))
    assert (found["matches"], found["samples"]) == (4, 8)
    assert find_samples(paths, name, SampleQuery(text="red"))["rows"][0]["response"] == "red\\u202e<script>"
    [result] = run_views.evaluations(paths)
    assert (result["step"], result["suite"], result["numbers"]["accuracy"], result["samples"]) == (
        3,
        "held-out",
        0.5,
        name,
    )
    for wrong in ("eval/global_step_3/held-out.json", "../secret.samples.jsonl", str(tmp_path / name)):
        with pytest.raises(UserError, match="has no samples"):
            find_samples(paths, wrong, SampleQuery())


def test_only_films_and_pictures_of_the_run_are_shown(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    video = paths.video(4)
    video.parent.mkdir(parents=True)
    video.write_bytes(b"video")
    (tmp_path / "secret.mp4").write_bytes(b"secret")
    os.symlink(tmp_path / "secret.mp4", video.with_name("link.mp4"))
    video.with_name("notes.txt").write_text("no")
    paths.config.write_text("key: value")
    assert run_views.media_file(paths, "play/global_step_4.mp4") == video.resolve()
    for name in ("play/link.mp4", "play/notes.txt", "config.yaml", "play/../config.yaml", "../secret.mp4", "play/missing.mp4",
                 str(tmp_path / "secret.mp4")):  # fmt: skip
        with pytest.raises(UserError, match="has no video or picture"):
            run_views.media_file(paths, name)


def test_only_the_images_of_an_evaluation_belong_to_its_samples(tmp_path: Path) -> None:
    """A samples file may have been written by others: names that lead elsewhere are left out, whatever lies there."""
    paths = RunPaths(tmp_path / "run")
    (tmp_path / "secret.png").write_bytes(b"secret")
    wrong = [
        "../held-out.png",
        "../../../../secret.png",
        str(tmp_path / "secret.png"),
        "link.png",
        "notes.txt",
        "gone.png",
        "",
        "a\0.png",
    ]
    names = ["one.jpg", *wrong, "two.svg"]
    name = write_samples(
        paths, [sample(0, images=names, num_images=12), sample(1), sample(2, images="one.jpg"), sample(3, images=[4])]
    )
    folder = paths.root / "eval" / "global_step_3" / "held-out.images"
    folder.mkdir()
    for file in ("one.jpg", "two.svg", "notes.txt", "../held-out.png"):
        (folder / file).write_bytes(b"x")
    os.symlink(tmp_path / "secret.png", folder / "link.png")
    rows = find_samples(paths, name, SampleQuery())["rows"]
    shown = [f"eval/global_step_3/held-out.images/{file}" for file in ("one.jpg", "two.svg")]
    assert [row.get("images") for row in rows] == [shown, None, None, None]
    assert rows[0]["num_images"] == 12
    assert [run_views.media_file(paths, file).parent for file in shown] == [folder.resolve()] * 2
    assert run_views.media(paths) == ["eval/global_step_3/held-out.png"], "they are no videos of the run"
    many = write_samples(RunPaths(tmp_path / "many"), [sample(0, images=["one.jpg"] * 1000)])
    copies = tmp_path / "many" / "eval" / "global_step_3" / "held-out.images"
    copies.mkdir()
    (copies / "one.jpg").write_bytes(b"x")
    assert len(find_samples(RunPaths(tmp_path / "many"), many, SampleQuery())["rows"][0]["images"]) == 32


def test_reading_ends_when_the_tables_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_views, "_READ_AT_ONCE", 0)
    runs = {name: run_with(tmp_path / name, [1.0] * 20_000) for name in "abcdefgh"}
    tables, request = MetricTables(), CurveRequest("train/reward")
    assert all(line["is_sample"] for line in tables.curves(runs, {}, request))
    tables.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "metrics-reader"]
    monkeypatch.setattr(run_views, "_UPDATE_S", 0.0)
    assert any(line["is_sample"] for line in tables.curves(runs, {}, request))
    assert not [thread for thread in threading.enumerate() if thread.name == "metrics-reader"]


def test_logs_are_listed_and_their_ends_shown(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    folder = paths.segment_logs(0)
    folder.mkdir(parents=True)
    (folder / "rollout-0.out").write_text("".join(f"line {n}\n" for n in range(30)) + "\x1b]0;title\x07\x1b[1mbold\n")
    (folder / "driver.err").write_text("")
    assert run_views.logs(paths) == ["driver", "rollout-0"]
    lines = run_views.log_tail(paths, "rollout-0", 2)
    assert lines[0] == "line 29"
    assert "\x1b" not in lines[1]
    assert "bold" in lines[1]
    assert run_views.log_tail(paths, "driver", 5) == []
    with pytest.raises(UserError, match="has no log 'env-9'"):
        run_views.log_tail(paths, "env-9", 5)
