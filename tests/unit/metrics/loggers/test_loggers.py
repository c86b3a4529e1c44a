"""Loggers by name, what they get, and what happens where they fail."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from rlhpc.jobs.paths import RunPaths
from rlhpc.metrics import MetricLogger, read_metrics
from rlhpc.metrics.loggers import RunFacts, check_loggers, feed
from rlhpc.metrics.loggers.base import printing_to_stderr, public_config, records
from rlhpc.metrics.loggers.swanlab import _remove_empty
from rlhpc.runtime.errors import ConfigError

OWN = f"{__name__}:Lines"
BROKEN = f"{__name__}:Broken"


class Lines:
    """A logger of one's own: a text file."""

    def __init__(self, title: str = "rows") -> None:
        self.title = title

    def open(self, run: RunFacts, resume_step: int | None) -> int | None:
        self.path = run.folder / f"{self.title}.txt"
        run.memory.setdefault("id", f"{run.name}-{run.config['seed']}")
        run.memory["starts"] = run.memory.get("starts", 0) + 1
        return max((int(line.split()[0]) for line in self.lines()), default=None) if resume_step is not None else None

    def lines(self) -> list[str]:
        return self.path.read_text().splitlines() if self.path.exists() else []

    def log(self, step: int, row: Mapping[str, float]) -> None:
        with self.path.open("a") as file:
            print(step, row["train/a"], file=file)

    def commit(self) -> None:
        self.committed = True

    def close(self) -> None:
        assert self.committed


class Broken(Lines):
    """Fails at the given step, as a full disk or a network that is down does; or hangs there."""

    def __init__(self, at: int, hang: bool = False) -> None:
        super().__init__("broken")
        self.at, self.hang = at, hang

    def log(self, step: int, row: Mapping[str, float]) -> None:
        if step == self.at:
            if self.hang:
                threading.Event().wait()
            raise ConnectionError("network is down\nand so on")
        super().log(step, row)


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, __name__, sys.modules[Lines.__module__])


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths.of(tmp_path, "run")


def write(paths: RunPaths, first: int, last: int, resume: int | None, backends: list[str], **kwargs: Any) -> None:
    named = {backend: kwargs for backend in backends if kwargs}
    with MetricLogger(paths, backends, resume, named, {"seed": 7}) as logger:
        for step in range(first, last + 1):
            logger.log(step, {"train/a": step * 10 + (resume or 0)})


def test_an_own_logger_goes_on_where_it_was(paths: RunPaths) -> None:
    write(paths, 1, 5, None, ["jsonl", OWN], title="mine")
    write(paths, 3, 7, 2, ["jsonl", OWN], title="mine")
    lines = (paths.root / "mine.txt").read_text().splitlines()
    assert lines == ["1 10", "2 20", "3 30", "4 40", "5 50", "6 62", "7 72"]
    assert json.loads(paths.loggers.read_text()) == {OWN: {"id": "run-7", "starts": 2}}
    write(paths, 1, 1, None, ["jsonl", OWN])  # a fresh start is another run
    assert json.loads(paths.loggers.read_text()) == {OWN: {"id": "run-7", "starts": 1}}


def test_a_logger_that_comes_later_gets_the_earlier_rows(paths: RunPaths) -> None:
    write(paths, 1, 4, None, ["jsonl"])
    write(paths, 4, 5, 3, [OWN, "tensorboard"])
    assert (paths.root / "rows.txt").read_text().splitlines() == ["1 10", "2 20", "3 30", "4 43", "5 53"]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(paths.tensorboard))
    events.Reload()
    assert [event.step for event in events.Scalars("train/a")] == [1, 2, 3, 4, 5]


def test_a_logger_that_fails_is_given_up_and_the_run_goes_on(
    paths: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    with MetricLogger(paths, [BROKEN, OWN], None, {BROKEN: {"at": 3}}, {"seed": 7}) as logger:
        for step in range(1, 6):
            logger.log(step, {"train/a": step})
    said = capsys.readouterr().err
    assert said.count("warning") == 1 and "is given up: ConnectionError: network is down." in said
    assert [row["step"] for row in read_metrics(paths.metrics)] == [1, 2, 3, 4, 5]
    assert len((paths.root / "rows.txt").read_text().splitlines()) == 5
    with MetricLogger(paths, [BROKEN], 5, {BROKEN: {"at": -1}}, {"seed": 7}) as logger:
        logger.log(6, {"train/a": 6})
    assert [line.split()[0] for line in (paths.root / "broken.txt").read_text().splitlines()] == list("123456")


@pytest.mark.parametrize("limit", ["time", "rows"])
def test_a_logger_that_hangs_holds_up_nothing(
    paths: RunPaths, limit: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "CLOSE_S", 0.2)
    monkeypatch.setattr(feed, "_ROWS", 3 if limit == "rows" else 100)
    write(paths, 1, 9, None, [BROKEN], at=1, hang=True)
    assert ("3 rows behind" if limit == "rows" else "did not end in time") in capsys.readouterr().err
    assert len(read_metrics(paths.metrics)) == 9


def test_what_is_no_logger() -> None:
    for names, kwargs, says in (
        (["tensorbord"], {}, "did you mean 'tensorboard'"),
        (["nosuch:Logger"], {}, "cannot be imported"),
        (["json:JSONDecoder"], {}, "not a class with the methods open, log, commit and close"),
        ([OWN], {OWN: {"titel": "x"}}, "it takes: title"),
        (["jsonl"], {"wandbb": {}}, "runner.logger.kwargs: 'wandbb' is not a logger; did you mean 'wandb'"),
        (["jsonl"], {"tensorboard": 3}, "write a mapping"),
    ):
        with pytest.raises(ConfigError, match=says):
            check_loggers(names, kwargs)
    check_loggers(["jsonl", "tensorboard", OWN], {"wandb": {"project": "p"}})


def test_an_entry_point_is_a_logger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "own_logger-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own-logger\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[rlhpc.loggers]\nlines = own_logger:Logger\n")
    (tmp_path / "own_logger.py").write_text(f"from {__name__} import Lines as Logger\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    check_loggers(["Lines"], {"lines": {"title": "x"}})


def test_a_services_config_has_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OWN_TOKEN", "s3cret")
    cfg = OmegaConf.create(
        {
            "runner": {"name": "a", "copy": "${runner.name}-b"},
            "rollout": {
                "max_new_tokens": 256, "logprob_type": "token_level", "hf_token": "s3cret", "seed": "${oc.env:OWN_TOKEN}"
            },
            "terms": [{"kwargs": {"url": "http://me:s3cret@host/x?api_key=s3cret&n=1", "headers": {"X-Own": "s3cret"}}}],
            "apiKey": "s3cret", "empty_token": None, "actor": {"author": "me"},
        }
    )  # fmt: skip
    shown = public_config(OmegaConf.to_container(cfg), OmegaConf.to_container(cfg, resolve=True))
    assert "s3cret" not in json.dumps(shown)
    assert shown["runner"] == {"name": "a", "copy": "a-b"} and shown["actor"] == {"author": "me"}
    assert shown["rollout"] == {
        "max_new_tokens": 256, "logprob_type": "token_level", "hf_token": "***", "seed": "${oc.env:OWN_TOKEN}"
    }  # fmt: skip
    assert shown["terms"][0]["kwargs"]["url"] == "http://***@host/x?api_key=***&n=1" and shown["empty_token"] is None


def test_a_service_that_hangs_holds_up_no_other_and_stdout_comes_back() -> None:
    inside, leave = threading.Event(), threading.Event()

    def hang() -> None:
        with printing_to_stderr():
            inside.set()
            leave.wait(60)

    def come_and_go() -> None:
        with printing_to_stderr():
            assert sys.stdout is sys.stderr

    before = sys.stdout
    hanging, other = (threading.Thread(target=target, daemon=True) for target in (hang, come_and_go))
    hanging.start()
    assert inside.wait(30)
    other.start()
    other.join(30)
    assert not other.is_alive() and sys.stdout is sys.stderr
    leave.set()
    hanging.join(30)
    assert sys.stdout is before


def fragment(kind: int, data: bytes) -> bytes:
    """Of a LevelDB log."""
    return b"crc!" + len(data).to_bytes(2, "little") + bytes([kind]) + data


def test_starts_that_left_no_record_are_removed(tmp_path: Path) -> None:
    contents = {
        "empty": b"", "header": b"HEADER!", "torn": b"HEADER!" + fragment(1, b"start")[:-1],
        "whole": b"HEADER!" + fragment(1, b"start"), "killed": b"HEADER!" + fragment(1, b"start") + b"torn",
    }  # fmt: skip
    for name, content in contents.items():
        (tmp_path / f"run-{name}/files").mkdir(parents=True)
        (tmp_path / f"run-{name}/run-id.swanlab").write_bytes(content)
    (tmp_path / "debug").mkdir()
    _remove_empty(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["debug", "run-killed", "run-whole"]


def test_records_of_a_torn_file(tmp_path: Path) -> None:
    room = 32768 - 7 - len(fragment(1, b"one")) - 7
    whole = b"HEADER!" + fragment(1, b"one") + fragment(2, b"a" * room) + fragment(4, b"bc") + fragment(1, b"last")
    file = tmp_path / "log"
    file.write_bytes(whole)
    assert list(records(file)) == [b"one", b"a" * room + b"bc", b"last"]
    file.write_bytes(whole[:-1])
    assert list(records(file)) == [b"one", b"a" * room + b"bc"]
    padded = b"HEADER!" + fragment(1, b"x" * (room + 4)) + b"\0" * (32768 - 14 - room - 4)
    file.write_bytes(padded + fragment(1, b"next block"))
    assert [len(record) for record in records(file)] == [room + 4, 10]
