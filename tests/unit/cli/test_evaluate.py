"""Commands that evaluate and record: which result is written where."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhpc import cli
from rlhpc.config import config_to_yaml
from rlhpc.runs.configuration import load_config
from rlhpc.runs.task_type import find_task_type

QUICKSTART = str(Path(__file__).resolve().parents[3] / "configs" / "quickstart.yaml")


@pytest.mark.parametrize("words", [["--episodes", "2"], ["env.eval.seed=3"], ["--episodes", "2", "env.eval.seed=3"]])
def test_another_evaluation_does_not_replace_the_runs_own(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = tmp_path / "run" / "checkpoints" / "global_step_3"
    checkpoint.mkdir(parents=True)
    (checkpoint / "config.yaml").write_text(config_to_yaml(load_config(QUICKSTART, [])))
    evaluated: list[tuple[str, Path | None]] = []

    def evaluate(offline: Any, cfg: Any, source: Path, *, suite: str, output: Path | None, **options: Any) -> str:
        evaluated.append((suite, output))
        return "played"

    monkeypatch.setattr(type(find_task_type("embodied").offline), "evaluate", evaluate)
    own = tmp_path / "run" / "eval" / "global_step_3" / "default.json"
    asked = ["eval", "--checkpoint", str(checkpoint)]
    assert cli.main([*asked, *words]) == 2
    said = capsys.readouterr().err
    assert f"the run's own evaluation belongs in {own}, and " in said and "--suite" in said and not evaluated
    named = (["--suite", "again"], ["--suite", "default"], ["--output", str(tmp_path / "x.json")])
    for more in ([], *([*name, *words] for name in named)):
        assert cli.main([*asked, *more]) == 0
    assert evaluated == [
        ("default", own), ("again", own.with_name("again.json")), ("default", own), ("default", tmp_path / "x.json"),
    ]  # fmt: skip


def test_only_runs_with_environments_are_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = Path(QUICKSTART).parent / "reasoning" / "demo.yaml"
    argv = ["record", "--expert", "module:function", "--config", str(config), "--output", str(tmp_path / "made.h5")]
    assert cli.main(argv) == 2
    assert f"{config}: a run of kind reasoning has no environment (section env)" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
