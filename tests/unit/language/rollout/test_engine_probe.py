"""The engine of two ranks that the doctor starts on a node: here with both ranks on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.extras import need_extra

need_extra("llm", "vllm")

from rlhpc.jobs.doctor import node_probe
from rlhpc.jobs.doctor.probe_jobs import _ENGINE_PROBE

ON_CPU = _ENGINE_PROBE.replace("'accelerators'", "'cpu'")


@pytest.fixture(autouse=True)
def in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a node, where the probe is a process of a job step."""
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")


@pytest.mark.long(together=True)
def test_two_ranks_start_and_generate() -> None:
    report = node_probe.ask_child(ON_CPU, 600)
    assert report["code"] == 0, report
    assert (report["ranks"], report["device"], report["tokens"]) == (2, "cpu", 4)
    assert report["start_s"] > 0 and "error" not in report


def test_a_stage_that_fails_is_the_first_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A vLLM that cannot be imported."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise ImportError('libcudart.so.13: no such file')")
    report = node_probe.ask_child(f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {ON_CPU}", 240)
    assert report["code"] == 1 and report["ranks"] == 2 and "device" not in report
    assert "libcudart.so.13" in report["error"], report
