"""Follower of logs: which files it reads."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from rlhpc.cli import main
from rlhpc.jobs import logs
from rlhpc.jobs.logs import LogFollower, mark_start
from rlhpc.jobs.paths import RunPaths
from rlhpc.jobs.status import print_logs
from rlhpc.runtime.host import node_name
from rlhpc.runtime.log_sizes import LOG_SIZES

RANKS = 50


class Followed:
    """A run with logs, whose sizes its driver may write, and what a follower reads and prints of them."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.paths = RunPaths(root)
        self.logs = self.paths.segment_logs(0)
        self.logs.mkdir(parents=True)
        for rank in range(RANKS):
            self.file(rank).write_text("before\n")
        self.status("running")
        self.now, self.lines, self.opened = 0.0, list[str](), list[str]()
        self.states: Callable[[], str] = lambda: "running"
        offsets = {self.file(rank): self.file(rank).stat().st_size for rank in range(RANKS)}
        self.follower = LogFollower(
            self.paths, lambda: {path: path.stem for path in sorted(self.logs.glob("*.err"))}, offsets,
            lambda label, lines: self.lines.extend(f"{label}: {line}" for line in lines), lambda: self.now,
        )  # fmt: skip
        original = logs.open_file

        def open_file(path: Path) -> object:
            self.opened.append(path.name)
            return original(path)

        monkeypatch.setattr(logs, "open_file", open_file)

    def file(self, rank: int) -> Path:
        return self.logs / f"env-{rank}.err"

    def status(self, state: str) -> None:
        status = {"state": state, "pid": os.getpid(), "host": node_name()}
        self.paths.driver_state.write_text(json.dumps(status))

    def write(self, rank: int, text: str) -> None:
        with self.file(rank).open("a") as log:
            log.write(text)

    def sizes(self, **states: str) -> None:
        """Writes the sizes as the driver does."""
        rows = [
            f"{0:>15} {self.file(rank).stat().st_size:>15} {states.get(f'env{rank}', 'ready'):<8} env-{rank}\n"
            for rank in range(RANKS)
        ]
        (self.logs / LOG_SIZES).write_text("".join(rows))

    def poll(self) -> tuple[bool, list[str], int]:
        """Returns whether the run is over, the lines that were printed, and the number of logs that were opened."""
        self.lines, self.opened = [], []
        is_over = self.follower.poll()
        self.now += 1.0
        return is_over, self.lines, sum(name.endswith(".err") for name in self.opened)


@pytest.fixture
def followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Followed:
    return Followed(tmp_path / "run", monkeypatch)


def test_only_logs_that_have_grown_are_opened(followed: Followed) -> None:
    followed.sizes()
    assert followed.poll() == (False, [], 0)
    followed.write(7, "one\ntwo\nthr")
    followed.write(9, "nine\n")
    followed.sizes()
    assert followed.poll() == (False, ["env-7: one", "env-7: two", "env-9: nine"], 2)
    assert followed.poll() == (False, [], 0)
    followed.write(7, "ee\n")
    followed.sizes()
    assert followed.poll() == (False, ["env-7: three"], 1)
    followed.write(8, "what it said while it died\n")  # it tells its size no more, but the driver sees its end
    (followed.logs / LOG_SIZES).write_text(
        (followed.logs / LOG_SIZES).read_text().replace("ready    env-8", "ended    env-8")
    )
    assert followed.poll() == (False, ["env-8: what it said while it died"], 1)


def test_lines_that_are_visible_later_than_their_size_are_printed(followed: Followed) -> None:
    """As on a network filesystem, where what a rank has written reaches the server later than what it tells its driver."""
    followed.sizes()
    followed.poll()
    for rank in (5, 6):
        followed.write(rank, "delayed\n")
    followed.sizes()
    for rank in (5, 6):
        followed.file(rank).write_text("before\n")
    polls = [followed.poll() for _ in range(5)]
    assert not any(lines for _, lines, _ in polls) and [count for *_, count in polls] == [2, 1, 1, 1, 1]
    for rank in (5, 6):
        followed.write(rank, "delayed\n")
    polls = [followed.poll() for _ in range(3)]
    assert sorted(line for _, lines, _ in polls for line in lines) == ["env-5: delayed", "env-6: delayed"]
    assert polls[2] == (False, [], 0)
    followed.write(5, "no line")
    followed.sizes()
    counts = [followed.poll()[2] for _ in range(70)]
    assert sum(counts) in (60, 61) and not counts[-1], "not for ever"


def test_lines_between_the_first_print_and_the_first_poll_are_not_lost(followed: Followed) -> None:
    followed.write(3, "early\n")
    followed.sizes()
    assert followed.poll() == (False, ["env-3: early"], 1)


def test_logs_of_a_run_whose_driver_writes_no_sizes_are_read_in_turn(followed: Followed) -> None:
    """As those of an earlier version: two a second, and first what has grown."""
    followed.write(30, "a\n")
    polls = [followed.poll() for _ in range(RANKS)]
    assert [line for _, lines, _ in polls for line in lines] == ["env-30: a"]
    assert max(count for *_, count in polls) <= 2
    followed.write(30, "b\n")
    seen = next(number for number in range(RANKS) if followed.poll()[1])
    followed.write(30, "c\n")
    assert followed.poll()[1] == ["env-30: c"], "it has grown lately"
    assert seen <= RANKS


def test_a_new_log_is_found_and_damaged_sizes_are_none(followed: Followed) -> None:
    followed.sizes()
    followed.poll()
    (followed.logs / LOG_SIZES).write_bytes(b"\xff\x00 x\n1 2\n")
    (followed.logs / "reward.err").write_text("new\n")
    lines = [line for _ in range(RANKS) for line in followed.poll()[1]]
    assert lines == ["reward: new"]


def test_at_the_end_all_logs_are_read_once(followed: Followed) -> None:
    followed.sizes()
    followed.poll()
    followed.write(49, "last\n")
    followed.status("finished")
    polls = [followed.poll() for _ in range(6)]
    _, lines, count = next(poll for poll in polls if poll[0])
    assert lines == ["env-49: last"] and count == RANKS


def test_a_cancel_is_seen_at_the_next_look(followed: Followed, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder of the submissions changes; while it does not, the run's records are not read."""
    asked = []

    def states(folders: object, probe: object) -> list[tuple[object, object]]:
        asked.append(followed.now)
        return original(folders, probe)  # type: ignore[arg-type]

    original = logs.states
    monkeypatch.setattr(logs, "states", states)
    followed.paths.submit.mkdir()
    followed.sizes()
    for _ in range(40):
        followed.poll()
    assert asked == [0.0]
    (followed.paths.submit / "segment_0.cancel").touch()
    for _ in range(6):
        followed.poll()
    assert len(asked) == 2 and asked[1] <= 45.0


def test_a_log_that_was_replaced_by_a_shorter_one_is_read_from_its_start(followed: Followed) -> None:
    followed.sizes()
    followed.poll()
    followed.file(1).write_text("x\n")
    followed.sizes()
    assert followed.poll()[1] == ["env-1: x"]


WRITTEN = {1: "Traceback of the first\n", 2: "without an end of line", 3: "third\n"}


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    """A run that was started three times."""
    paths = RunPaths(tmp_path / "run")
    folder = paths.segment_logs(0)
    folder.mkdir(parents=True)
    for number, text in WRITTEN.items():
        (folder / "driver.err").open("a").write(f"driver {number}\n")
        mark_start(folder)
        (folder / "actor-0.err").open("a").write(text)
    (folder / "actor-1.err").write_text("joined late\n")
    return paths


def printed(paths: RunPaths, **options: str) -> list[str]:
    out = io.StringIO()
    print_logs(paths, "actor", 0, out=out, **options)
    return [line.removeprefix("[actor-0] ") for line in out.getvalue().splitlines()]


def test_the_last_start_is_shown(paths: RunPaths) -> None:
    assert printed(paths) == ["third"]
    for number, text in WRITTEN.items():
        assert printed(paths, start=str(number)) == [text.rstrip("\n")]
    assert printed(paths, start="4") == []
    rules = [line for line in printed(paths, start="all") if line.startswith("---- start ")]
    assert [line.split()[2] for line in rules] == ["2,", "3,"]
    mark_start(paths.segment_logs(0))  # a fourth start, of which this rank has no part
    assert printed(paths) == []


def test_a_first_start_has_no_rule(tmp_path: Path) -> None:
    (tmp_path / "driver.out").write_text("checks\n")
    mark_start(tmp_path)
    mark_start(tmp_path)
    assert (tmp_path / "driver.out").read_text() == "checks\n"


@pytest.mark.parametrize("start", ["0", "-1", "first", "1.5"])
def test_a_start_that_is_none_is_refused(start: str, paths: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs", str(paths.root), f"--start={start}"]) == 2
    assert "allowed: 1, 2, …, last or all" in capsys.readouterr().err
