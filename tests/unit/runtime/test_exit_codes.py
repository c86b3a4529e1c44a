"""Programs of the project that a user starts end alike: a mistake of the user is one message and exit code 2."""

import ast
import errno
import os
import runpy
import sys
from pathlib import Path

import pytest

from rlhpc.runtime.errors import ConfigError, RlhpcError
from rlhpc.runtime.exit_codes import report_errors
from tests.extras import need_extra

REPO = Path(__file__).parents[3]
#: Helper programs, which only rlhpc starts, and whose text it reads.
HELPERS = {"rlhpc/jobs/elastic/helper_job.py", "rlhpc/language/agents/runner/loopback.py"}


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("rlhpc.reference", ["nope"]),
        ("rlhpc.language.models.tiny", ["/dev/null/model"]),
        ("rlhpc.language.models.tiny", ["{tmp}/model", "--heads", "3"]),
        ("rlhpc.language.models.tiny_vision", ["/dev/null/model"]),
        ("rlhpc.language.models.builtin", ["/dev/null/model"]),
        ("rlhpc.language.planning.memory_tables", []),
        ("rlhpc.language.planning.memory_tables", ["nope.yaml"]),
        ("examples/train_embodied.py", []),
        ("examples/train_embodied.py", ["nope.yaml"]),
        ("examples/train_embodied.py", ["configs/quickstart.yaml", "runner.max_step=1"]),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(
    program: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if "language" in program:
        need_extra("llm")
    monkeypatch.setattr(sys, "argv", [program, *(word.format(tmp=tmp_path) for word in words)])
    monkeypatch.chdir(REPO)
    with pytest.raises(SystemExit) as ended:
        if program.endswith(".py"):
            runpy.run_path(program, run_name="__main__")
        else:
            runpy.run_path(str(REPO / f"{program.replace('.', '/')}.py"), run_name="__main__")
    text = capsys.readouterr().err
    assert ended.value.code == 2, text
    assert "error: " in text and "Traceback" not in text
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(("error", "code"), [(ConfigError("no"), 2), (RlhpcError("no"), 1), (KeyError("no"), 1)])
def test_the_exit_code_is_the_kind_of_error(error: Exception, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> int:
        raise error

    assert report_errors(command) == code
    first, *rest = capsys.readouterr().err.splitlines()
    assert first.startswith("rlhpc: error: ")
    assert rest == (["  what to do: rlhpc explain fault"] if isinstance(error, KeyError) else [])


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EROFS])
def test_a_file_that_is_closed_to_the_user_is_named(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> int:
        raise OSError(number, os.strerror(number), "/data/of/another/config.yaml")

    assert report_errors(command) == 2
    text = capsys.readouterr().err
    assert f"rlhpc: error: /data/of/another/config.yaml: {os.strerror(number)}" in text
    assert "a fault of rlhpc" not in text


def test_no_program_ends_with_a_text() -> None:
    """The exit code of `sys.exit("text")` is 1, whoever made the mistake."""
    texts = set()
    for root in ("rlhpc", "examples", "workflow"):
        for path in (REPO / root).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                ends = isinstance(node, ast.Call) and ast.unparse(node.func) in ("sys.exit", "exit", "SystemExit")
                if ends and node.args and isinstance(node.args[0], (ast.JoinedStr, ast.Constant, ast.Call)):
                    constant = node.args[0].value if isinstance(node.args[0], ast.Constant) else ""
                    called = ast.unparse(node.args[0].func) if isinstance(node.args[0], ast.Call) else ""
                    if isinstance(constant, str) and called not in ("main", "report_errors"):
                        texts.add(str(path.relative_to(REPO)))
    assert texts == HELPERS
