"""The page of a sweep: what is compared, which way is better, and who is not in it."""

from __future__ import annotations

import json
import re
from pathlib import Path

from rlhpc.jobs.paths import SweepPaths
from rlhpc.runs.sweep_page import write_sweep_page


def sweep_of(folder: Path, scores: dict[str, list[float | None]], **record: object) -> SweepPaths:
    """A sweep with these labels and the scores of their seeds; one without a score is still training."""
    sweep, runs = SweepPaths(folder / "lr"), []
    for label, values in scores.items():
        for seed, value in enumerate(values, 1):
            name = f"{label.replace('=', '_')}-s{seed}"
            runs.append({"name": name, "label": label, "seed": seed, "values": {}})
            run = sweep.run(name)
            run.eval_result(4, "held").parent.mkdir(parents=True)
            run.config.write_text("env: {train: {env_id: Task-v1}}\n")
            rows = [{"step": step, "time/wall_s": 1.0 * step, "train/loss": value or 0.0} for step in (1, 2, 3, 4)]
            run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
            run.driver_state.write_text(
                json.dumps({"state": "finished" if value is not None else "failed", "stop_reason": "x"})
            )
            if value is not None:
                result = {"suite": "held", "global_step": 4, "return_mean": value, "episodes": 4}
                run.eval_result(4, "held").write_text(json.dumps(result))
    sweep.record.write_text(json.dumps({"name": "lr", "suite": "held", "runs": runs, **record}))
    return sweep


def order_of(page: Path) -> list[str]:
    """The labels of the table of scores, from the top."""
    table = page.read_text().split("<h2>Scores</h2>")[1].split("</table>")[0]
    return re.findall(r'<tr><td class="t">([^<]*)', table)


def test_the_best_comes_first_and_those_that_failed_are_named(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, {"lr=1": [1.0, 2.0, 3.0], "lr=2": [4.0, 5.0, None], "lr=3": [None]})
    page = write_sweep_page(sweep, sweep.page)
    assert order_of(page) == ["lr=2", "lr=1"]
    html = page.read_text()
    assert "5 of 7" in html and "2 of 3" in html and "Without a score yet: 1 of 3 configurations" in html
    assert "best so far" in html and "100% (100% … 100%)" in html  # every run of lr=2 is better than every one of lr=1
    assert len(re.findall(r'<td class="t bad">failed', html)) == 2


def test_less_may_be_better(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, {"lr=1": [1.0, 2.0], "lr=2": [4.0, 5.0]}, metric="train/loss", goal="minimize")
    page = write_sweep_page(sweep, sweep.page)
    assert order_of(page) == ["lr=1", "lr=2"] and "100% (100% … 100%)" in page.read_text()


def test_a_configuration_has_one_colour(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, {"lr=1": [1.0, 2.0], "lr=2": [4.0, 5.0]})
    html = write_sweep_page(sweep, sweep.page).read_text()
    found = re.findall(r'var\(--(c\d)\)"/><text class="key"[^>]*>(lr=\d)<', html)
    found += re.findall(r'>(lr=\d)</text><path d="[^"]*" style="stroke:var\(--(c\d)\)', html)
    assert {frozenset(pair) for pair in found} == {frozenset(("c0", "lr=2")), frozenset(("c1", "lr=1"))}


def test_of_many_configurations_the_best_are_drawn(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, {f"lr={k}": [float(k)] for k in range(12)})
    page = write_sweep_page(sweep, sweep.page)
    assert order_of(page) == [f"lr={k}" for k in reversed(range(12))]
    assert (
        "IQM over seeds, the best 8 of 12" in page.read_text() and "The 8 best of 12 configurations" in page.read_text()
    )


def test_before_anything_has_begun(tmp_path: Path) -> None:
    sweep = SweepPaths(tmp_path)
    sweep.record.write_text(
        json.dumps({"name": "lr", "runs": [{"name": "a-s1", "label": "a", "seed": 1, "values": {}}]})
    )
    html = write_sweep_page(sweep, sweep.page).read_text()
    assert "No run has finished yet." in html and "not started" in html
