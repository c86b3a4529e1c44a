"""Text that a terminal obeys, in every name, JSON file and log of a run folder: no command lets it through."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.attack.run_folders import OBEYED, OBEYED_TEXT, reading_commands, whole_run, with_text_everywhere
from tests.integration.cli.test_terminal import RLHPC, at_a_terminal

#: Words that decide what a command does with a run; in half of the runs they stay.
_KEPT = ("running", "finished", "local-0", "i", "max_steps")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs whose texts, logs and folders' names are hostile."""
    folder = tmp_path_factory.mktemp("runs")
    for kind in ("language", "embodied"):
        for kept in ((), _KEPT):
            run = whole_run(kind, folder / f"{kind}-{len(kept)}-{OBEYED_TEXT.replace('/', '')}")
            for file in run.rglob("*.json*"):
                lines = file.read_text().splitlines() if file.suffix == ".jsonl" else [file.read_text()]
                changed = [
                    with_text_everywhere(json.loads(line), lambda text: text if text in kept else text + OBEYED_TEXT)  # noqa: B023
                    for line in lines
                ]
                if "checkpoints" not in file.parts:
                    file.write_text("".join(f"{json.dumps(row)}\n" for row in changed))
            for log in (run / "logs").rglob("*.err"):
                log.write_text(f"{OBEYED_TEXT} said\n\x1b[32mgreen\x1b[0m\n10%\r20%\rdone\n")
    return folder


def _shown(words: list[str], folder: Path) -> str:
    code, shown = at_a_terminal([*RLHPC, *words], folder, limit=120)
    assert "Traceback" not in shown
    assert not OBEYED.findall(shown), (words, shown)
    assert code in (0, 1, 2), (words, shown)
    return shown


@pytest.mark.long
def test_nothing_that_a_terminal_obeys_is_printed(runs: Path, tmp_path: Path) -> None:
    for run in sorted(runs.glob("*-*")):
        for words in reading_commands(run).values():
            _shown(words, tmp_path)
    [run, *_] = sorted(runs.glob("*-*"))
    others = [
        ["cancel", str(run)], ["join", str(run), "--patience", "0"], ["scale", str(run), "env=2"],
        ["feedback", str(run), "x", "--reward", "1"], ["eval", "--run", str(run), "--step", "9"],
        ["robot", "resume", OBEYED_TEXT],
        ["data", "info", str(run / "metrics.jsonl")], ["replay", "info", str(run)],
        ["train", str(run / "config.yaml"), OBEYED_TEXT],
        [OBEYED_TEXT], ["convert", "--checkpoint", str(run / "eval"), "--output", str(tmp_path / "out")],
    ]  # fmt: skip
    for words in others:
        _shown(words, tmp_path)


def test_logs_show_colours_plain_and_bars_line_by_line(runs: Path, tmp_path: Path) -> None:
    shown = _shown(["logs", str(sorted(runs.glob("*-*"))[0])], tmp_path)
    assert "\\x1b]0;owned\\x07\\x1b[2J\\x9b31mred\\u202e" in shown
    assert "] green\n" in shown and "] 10%\n" in shown and "] done\n" in shown


def test_a_bar_may_overwrite_its_line_and_foreign_text_may_not(tmp_path: Path) -> None:
    program = (
        "import sys\nfrom rlhpc.runtime.standard_streams import standard_streams\nstandard_streams()\n"
        r"for text in ('one\n', '\r\x1b[2K  two\x1b[2K', '\r  \rthree', '\n', 'safe\rforged\r\nnext\n'):"
        " sys.stderr.write(text)"
    )
    code, shown = at_a_terminal([sys.executable, "-c", program], tmp_path, limit=60)
    assert code == 0 and shown == "one\n\r\x1b[2K  two\\x1b[2K\r  \rthree\nsafe\\rforged\nnext\n"
