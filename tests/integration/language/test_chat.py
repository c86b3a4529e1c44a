"""`rlhpc play` of a language model: a conversation in the terminal with a trained checkpoint."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhpc import cli
from rlhpc.runtime.os_resources import readable_descriptors
from tests.extras import need_extra

ROOT = Path(__file__).resolve().parents[3]
PLAY = [sys.executable, "-m", "rlhpc.cli", "play"]
CONFIG: dict[str, Any] = {
    "defaults": [str(ROOT / "configs" / "base" / "language.yaml")],
    "runner": {"name": "words", "task_type": "sft", "max_steps": 1, "logger": {"logger_backends": ["jsonl"]}},
    "cluster": {"component_placement": {"actor": 0}},
    "data": {
        "train": {"source": "arithmetic", "size": 8, "kwargs": {"digits": 1}},
        "max_prompt_tokens": 16,
        "prompts_per_step": 8,
    },
    "reward": {"terms": [{"name": "exact"}]},
    "rollout": {"max_new_tokens": 12, "rollout_backend": "hf"},
    "actor": {"model": {"model_path": "builtin:tiny", "kwargs": {"hidden": 32, "layers": 1, "heads": 2}}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the runs `words`, of a model with a chat template, and `bare`, of one trained without."""
    need_extra("llm")
    folder = tmp_path_factory.mktemp("chat")
    for name, template in (("words", True), ("bare", False)):
        config = {**CONFIG, "runner": {**CONFIG["runner"], "name": name, "run_dir": str(folder)}}
        config["data"] = {**CONFIG["data"], "train": {**CONFIG["data"]["train"], "chat_template": template}}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(config))
        assert cli.main(["train", str(folder / f"{name}.yaml")]) == 0
    return folder


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, argv: list[str]) -> None:
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.execv(argv[0], argv)
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def expect(self, pattern: str, count: int = 1, limit_s: float = 240) -> None:
        """Reads until a pattern was shown so many times, or to the end for an empty one."""
        end = time.monotonic() + limit_s
        while not pattern or len(re.findall(pattern, self.shown)) < count:
            assert time.monotonic() < end, self.shown
            if not readable_descriptors([self._fd], 0.2):
                continue
            try:
                data = os.read(self._fd, 1 << 16)
            except OSError:
                assert not pattern, self.shown
                return
            self.shown += data.decode(errors="replace").replace("\r\n", "\n")

    def code(self) -> int:
        self.expect("")
        os.close(self._fd)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.mark.parametrize("end", ["/exit\n", "\x04"], ids=["/exit", "Ctrl-D"])
def test_a_conversation_at_a_terminal(folder: Path, end: str) -> None:
    terminal = Terminal([*PLAY, str(folder / "words"), "--system", "be brief", "--max-tokens", "5"])
    for turn, text in enumerate(("1+1=\n", "/clear\n", "2+2=\n"), 1):
        terminal.expect("> ", turn)
        terminal.type(text)
    terminal.expect("> ", 4)
    terminal.type(end)
    assert terminal.code() == 0
    assert "global_step_1; /clear begins anew, /exit" in terminal.shown
    assert "\x1b[2J" not in terminal.shown and "Traceback" not in terminal.shown


def test_lines_of_a_pipe_are_answered_alike_for_a_seed(folder: Path) -> None:
    def answers(*words: str) -> str:
        argv = [*PLAY, str(folder / "words"), "--seed", "3", *words]
        done = subprocess.run(argv, input="1+1=\n3+4=\n", capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    first = answers()
    assert first == answers() and first.count("\n") >= 2 and "WARNING" not in first
    assert len(answers("--max-tokens", "1")) < len(first)


def test_a_conversation_that_is_too_long_is_said_and_goes_on(folder: Path) -> None:
    argv = [*PLAY, str(folder / "words")]
    done = subprocess.run(
        argv, input="1" * 5000 + "\n/clear\n1+1=\n", capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0 and "/clear begins anew" in done.stderr.splitlines()[-1], done.stderr
    assert "5000" in done.stderr or "context" in done.stderr


def test_a_model_without_a_chat_template_continues_texts(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = iter(["1+1=", "/exit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    assert cli.main(["play", str(folder / "bare")]) == 0
    assert "without a chat template" in capsys.readouterr().err
    for wrong, said in {
        ("--system", "x"): "--system needs a chat template",
        ("--episodes", "2"): "--episodes is for runs with simulators",
        ("--max-tokens", "0"): "--max-tokens is 0",
    }.items():
        assert cli.main(["play", str(folder / "bare"), *wrong]) == 2
        (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
        assert said in line
