"""Configuration of a submitted segment: it says from which file and with which overrides."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

from rlhpc.config import segment_ends
from rlhpc.jobs.paths import RunPaths
from rlhpc.jobs.segment import SegmentJournal
from rlhpc.runs.configuration import load_config
from rlhpc.runs.run_identity import SubmittedConfig, make_longer, read_source, write_config
from tests.at_each_line import at_each_line

ROOT = Path(__file__).resolve().parents[3]


def test_source_and_overrides_are_read_back(tmp_path: Path) -> None:
    overrides = [f"runner.run_dir={tmp_path}", "runner.name=a", "data.x='two\nlines'"]
    cfg = load_config(ROOT / "configs" / "quickstart.yaml", overrides[:2], check=False)
    files = SegmentJournal(RunPaths.from_run_dir(tmp_path, "a"), 0)
    submitted = SubmittedConfig(files, cfg, "configs/quickstart.yaml", overrides)
    submitted(is_live=False)
    assert read_source(submitted.path) == (str(Path("configs/quickstart.yaml").absolute()), overrides)
    assert load_config(submitted.path, check=False) == cfg
    write_config(tmp_path / "by_hand.yaml", cfg, "of somebody else")
    assert read_source(tmp_path / "by_hand.yaml") == read_source(tmp_path / "missing") == ("", [])


def test_a_run_that_two_make_longer_at_once_is_reopened_once(tmp_path: Path) -> None:
    """The other one's job may have ended the segment again before the first one renames its marker."""
    numbers = itertools.count()
    cfg = load_config(
        ROOT / "configs" / "quickstart.yaml", [f"runner.run_dir={tmp_path}", "runner.segments=1"], check=False
    )
    [end] = segment_ends(cfg)

    def prepare() -> RunPaths:
        paths = RunPaths(tmp_path / str(next(numbers)))
        paths.segments.mkdir(parents=True)
        paths.segment_done(0).write_text(json.dumps({"global_step": end - 1, "stop_reason": "max_steps"}))
        return paths

    def other(paths: RunPaths) -> None:
        if SegmentJournal(paths, 0).lease.exists():
            return  # it waits
        make_longer(paths, cfg, 0)
        if not paths.segment_done(0).exists():  # and its job trains to the new end
            paths.segment_done(0).write_text(json.dumps({"global_step": end, "stop_reason": "max_steps"}))

    for paths, line in at_each_line(
        prepare, lambda paths: make_longer(paths, cfg, 0), other, "run_identity.py", "job_record.py"
    ):
        left = [json.loads(path.read_text())["global_step"] for path in sorted(paths.segments.iterdir())]
        assert left in ([end - 1], [end, end - 1]), f"line {line}: {left}"
