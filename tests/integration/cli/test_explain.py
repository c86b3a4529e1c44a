"""Errors of commands end with the command that explains them, and that command works offline."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CONFIG = Path(__file__).resolve().parents[3] / "configs" / "quickstart.yaml"


def rlhpc(folder: Path, *words: str, text: str = "") -> tuple[int, str, str]:
    command = [sys.executable, "-m", "rlhpc.cli", *words]
    done = subprocess.run(command, cwd=folder, input=text, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("words", "slug"),
    [
        (("train", str(CONFIG), "runner.max_stepz=3"), "unknown-key"),
        (("plan", str(CONFIG), "actor.optim.lr=-1"), "value-not-allowed"),
        (("status", "runs/nothing"), "run-not-found"),
        (("train", "missing.yaml"), "config-file"),
        (("plan", str(CONFIG), "cluster.component_placement={actor: 3-1}"), "placement"),
        (("plan", str(CONFIG), "algorithm.adv_type=gaee"), "unknown-name"),
        (("eval", "--checkpoint", "nothing"), "checkpoint-damaged"),
        (("report", "--nothing"), ""),  # argparse names the help of the command
    ],
)
def test_a_real_error_leads_to_its_explanation(tmp_path: Path, words: tuple[str, ...], slug: str) -> None:
    code, _, err = rlhpc(tmp_path, *words)
    assert code == 2 and err.startswith("rlhpc: error: ")
    if not slug:
        assert "--help" in err
        return
    assert err.splitlines()[-1] == f"  what to do: rlhpc explain {slug}"
    shown = [
        rlhpc(tmp_path, "explain", slug),
        rlhpc(tmp_path, "explain", err),
        rlhpc(tmp_path, "explain", "-", text=err),
    ]
    assert len({out for _, out, _ in shown}) == 1 and [code for code, _, _ in shown] == [0, 0, 0]
    assert f"({slug})" in shown[0][1] and "What to do: " in shown[0][1]
    assert not list(tmp_path.iterdir())


def test_without_a_message_all_explanations_are_listed(tmp_path: Path) -> None:
    code, out, _ = rlhpc(tmp_path, "explain")
    assert code == 0 and "  no-usable-gpu " in out and len(out.splitlines()) > 60
    code, out, err = rlhpc(tmp_path, "explain", "an elephant")
    assert code == 2 and "no explanation fits" in err and not out


def test_the_first_error_of_a_log_is_explained(tmp_path: Path) -> None:
    log = "starting\nrlhpc: error: memory does not suffice, so nothing is started: x\nrlhpc: error: unknown key a.b\n"
    assert "(planned-memory)" in rlhpc(tmp_path, "explain", "-", text=log)[1]
