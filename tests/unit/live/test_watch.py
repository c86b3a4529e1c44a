"""The terminal screen: what it shows of runs, what keys do, and that nothing a run has written controls the terminal."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot
from textual.widgets import DataTable, RichLog, Sparkline, Static

from rlhpc.jobs.paths import RunPaths
from rlhpc.live.metric_table import MetricTable
from rlhpc.live.run_index import RunIndex
from rlhpc.live.watch import WatchApp, idle_shares
from rlhpc.runtime.host import host_id, node_name
from tests.unit.live.test_run_index import write_run

HOSTILE = "a\x1b]0;title\x07[red]b"


def table(app: WatchApp, name: str) -> list[list[str]]:
    widget = app.query_one(f"#{name}", DataTable)
    return [[str(cell) for cell in widget.get_row_at(index)] for index in range(widget.row_count)]


def use(folders: list[Path], steps: Callable[[WatchApp, Pilot[None]], Any], size: tuple[int, int] = (160, 45)) -> None:
    """Opens the screen of the folders without a terminal, and does the steps."""

    async def main() -> None:
        app = WatchApp([RunIndex(folder) for folder in folders])
        async with app.run_test(size=size) as pilot:
            await pilot.pause()
            await steps(app, pilot)

    asyncio.run(main())


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    live = write_run(
        folder / "live",
        state="running",
        step=3,
        max_steps=9,
        eta_s=65,
        reward=0.25,
        tokens_per_s=1234,
        host="elsewhere",
    )
    live.joinpath("metrics.jsonl").write_text(
        "".join(
            f'{{"step": {s}, "train/reward": {s}, "train/loss": {-s}, "time/step_s": 2, "time/train_s": 0.5}}\n'
            for s in (1, 2, 3)
        )
    )
    members = live / "registry/job-0/members"
    members.mkdir(parents=True)
    (live / "registry/current").write_text("job-0")
    for rank, pid in enumerate((os.getpid(), 2**22 + 1)):
        facts = {
            "group": "actor",
            "rank": rank,
            "node": node_name(),
            "host": host_id(),
            "pid": pid,
            "state": "ready",
            "incarnation": 1,
        }
        (members / f"actor-{rank}.json").write_text(json.dumps(facts))
    (live / "registry/job-0/ranks").mkdir()
    usage = {"actor-0": [1.25, 3 * 2**30, 2.0**29, 97], HOSTILE: [1, 2, 3, 4], "actor-1": ["a", None]}
    (live / "registry/job-0/ranks/usage.json").write_text(json.dumps({"usage": usage}))
    logs = RunPaths(live).segment_logs(0)
    logs.mkdir(parents=True)
    (logs / "driver.out").write_text("first\n\x1b]0;title\x07\x1b[31mred[bold]\x1b[0m\n")
    (logs / "actor-0.out").write_text("of the actor\n")
    write_run(folder / HOSTILE, state="failed", step=1, stop_reason=HOSTILE)
    return folder


def test_runs_ranks_curve_and_log(runs: Path) -> None:
    async def steps(app: WatchApp, pilot: Pilot[None]) -> None:
        rows = {row[0]: row for row in table(app, "runs")}
        assert rows["live"][1:7] == ["running", "3/9", "1m05s", "", "0.25", "1234 tokens/s"]
        hostile = next(row for name, row in rows.items() if name != "live")
        assert all("\x1b" not in cell and "\x07" not in cell for cell in hostile)
        assert hostile[0].endswith("[red]b")  # shown as it is, not as a style
        await pilot.press("j", "j")
        await pilot.pause()
        assert "live: train/reward 3" in str(app.query_one("#title", Static).content)
        assert list(app.query_one("#curve", Sparkline).data or ()) == [1.0, 2.0, 3.0]
        first, second = table(app, "ranks")
        assert first[0] == "actor-0"
        assert first[3:] == ["125 %", "3.0 GiB", "97 %", "512.0 MiB"]
        assert second[3:] == ["–", "–", "–", "–"]  # it has reported nothing that can be read
        assert "idle in the last steps: actor 75 %" in str(app.query_one("#title", Static).content)
        log = app.query_one("#log", RichLog)
        assert log.border_title == "driver"
        text = "\n".join(line.text for line in log.lines)
        assert "red[bold]" in text
        assert "\x1b" not in text
        await pilot.press("l")
        assert log.border_title == "actor-0"
        await pilot.press("k", "k")
        await pilot.pause()
        assert "live: " not in str(app.query_one("#title", Static).content)
        await pilot.press("j")
        await pilot.pause()
        await pilot.press("m")
        assert "train/loss -3" in str(app.query_one("#title", Static).content)

    use([runs], steps)


@pytest.mark.parametrize("size", [(40, 14), (60, 20), (80, 24), (160, 45)])
def test_a_small_terminal_shows_a_row_of_everything(runs: Path, size: tuple[int, int]) -> None:
    async def steps(app: WatchApp, pilot: Pilot[None]) -> None:
        await pilot.pause()
        for name in ("runs", "ranks"):
            inner = app.query_one(f"#{name}", DataTable).scrollable_content_region
            assert inner.height >= 2 and inner.width >= 0.45 * size[0], name  # the titles and a row
        log = app.query_one("#log", RichLog).scrollable_content_region
        assert log.height >= 1 and log.width >= 35

    use([runs], steps, size)


def test_the_ranks_of_a_run_that_is_over_have_ended(runs: Path) -> None:
    write_run(runs / "live", state="finished", step=9, max_steps=9, host="elsewhere")

    async def steps(app: WatchApp, pilot: Pilot[None]) -> None:
        await pilot.press("j", "j")
        await pilot.pause()
        assert "live: " in str(app.query_one("#title", Static).content)
        assert [row[2] for row in table(app, "ranks")] == ["ended", "ended"]

    use([runs], steps)


def test_a_run_that_goes_on_and_one_that_disappears(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def steps(app: WatchApp, pilot: Pilot[None]) -> None:
        write_run(runs / "live", state="running", step=7, max_steps=9, host="elsewhere")
        os.utime(runs / "live/status.json", ns=(5, 5))
        monkeypatch.setattr(app._indices[0], "_clock", lambda: time.monotonic() + 30)
        app.renew()
        assert {row[0]: row[2] for row in table(app, "runs")}["live"] == "7/9"
        shutil.rmtree(runs / "live")
        monkeypatch.setattr(app._indices[0], "_clock", lambda: time.monotonic() + 90)
        app.renew()
        assert [row[0] for row in table(app, "runs") if row[0] == "live"] == []
        await pilot.press("q")

    use([runs], steps)


def test_runs_are_found_by_words(runs: Path) -> None:
    async def steps(app: WatchApp, pilot: Pilot[None]) -> None:
        await pilot.press("slash", *"live", "enter")
        await pilot.pause()
        assert [row[0] for row in table(app, "runs")] == ["live"]
        await pilot.press("slash")
        await pilot.press("escape")
        await pilot.pause()
        assert len(table(app, "runs")) == 2

    use([runs], steps)


def test_several_folders_and_an_empty_one(runs: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()

    async def steps(app: WatchApp, pilot: Pilot[None]) -> None:
        assert [row[0] for row in table(app, "runs")] == ["live"]

    use([empty, runs / "live"], steps)

    async def nothing(app: WatchApp, pilot: Pilot[None]) -> None:
        assert "no runs here yet" in str(app.query_one("#title", Static).content)

    use([empty], nothing)


def test_idle_shares_of_the_groups_that_are_measured(tmp_path: Path) -> None:
    """Over the last ten steps, each group by its slowest rank; a metric of an earlier kind of step does not count."""
    rows: list[dict[str, float]] = [{"step": 1, "time/step_s": 100.0, "time/act_s": 0.0, "time/judge_s": 50.0}]
    times = {"time/step_s": 4.0, "time/train_s": 2.0, "time/score_s": 1.0, "time/act_s": 5.0}
    rows += [{"step": step, **times} for step in range(2, 12)]
    table = MetricTable(tmp_path / "metrics.jsonl")
    assert idle_shares(table, ["actor"]) == {}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table.update()
    shares = idle_shares(table, {"actor", "rollout", "env", "judge", "driver"})
    assert shares == {"actor": pytest.approx(0.25), "rollout": 0.0}
