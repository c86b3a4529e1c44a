"""What the doctor makes of what commands and nodes said; the outputs are recorded from Slurm 22.05."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rlhpc.jobs.doctor import Finding, examine, render, to_json


def test_without_slurm_this_machine_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the GPUs that it has, or that a mask names; where there is none, torch is not asked."""
    monkeypatch.setenv("PATH", str(tmp_path))
    for mask, asked in (("0", True), ("", False)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
        lines = {line.check: line for line in examine(None, tmp_path)}
        assert lines["Slurm commands"].level == "warn" and lines["limits"].level == "pass"
        assert {"/dev/shm", "node-local disk", "Vulkan"} <= lines.keys()
        assert ("GPUs in torch" in lines) == asked
        lacking = {line.check: line for line in examine({"scratch": str(tmp_path / "nowhere")}, tmp_path)}
        assert lacking["node-local disk"].level == "fail" and "nowhere" in lacking["node-local disk"].result
        if asked and torch.version.cuda is None:
            found = lines["GPUs in torch"]
            assert found.level == "fail" and "granted 1, torch sees 0" in found.result


def test_text_and_json() -> None:
    lines = [Finding("pass", "a", "fine"), Finding("fail", "bc", "broken", "mend it")]
    text = render(lines)
    assert "pass  a   fine\n" in text and "fail  bc  broken\n" in text and "→ mend it" in text
    assert text.endswith("2 checks: 1 pass, 0 warn, 1 fail")
    assert json.loads(to_json(lines))["lines"][1]["do"] == "mend it" and json.loads(to_json(lines))["level"] == "fail"
