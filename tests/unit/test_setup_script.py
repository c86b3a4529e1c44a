"""envs/setup.sh refuses a driver that vLLM's wheel cannot use, before it makes anything; the image that it makes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from rlhpc.jobs.doctor.node_checks import MINIMUM_DRIVER
from rlhpc.share import FOLDERS

ROOT = Path(__file__).resolve().parents[2]
NO_PYTHON = "Python 3.11 or newer is needed"  # the next thing that the script looks at


@pytest.mark.parametrize(
    ("driver", "torch", "extras", "message"),
    [
        ("550.54.15", "auto", "dev,vllm", "found 550.54.15"),
        ("580.65.06\n535.10.1", "auto", "llm,vllm,embodied", "found 535.10.1"),
        ("", "cu128", "all", "found RLHPC_TORCH=cu128"),
        ("580.65.06", "auto", "dev,vllm", NO_PYTHON),
        ("No devices were found", "cu130", "dev,vllm", NO_PYTHON),
        ("550.54.15", "auto", "dev,slurm,vllm-cpu", NO_PYTHON),
        ("550.54.15", "cu126", "dev,embodied", NO_PYTHON),
        ("550.54.15", "cpu", "dev,vllm", NO_PYTHON),
    ],
)
def test_a_driver_that_is_too_old_for_vllm_is_refused(
    tmp_path: Path, driver: str, torch: str, extras: str, message: str
) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\nprintf '%s\\n' '{driver}'\n")
    smi.chmod(0o755)
    words = {"RLHPC_TORCH": torch, "RLHPC_EXTRAS": extras, "RLHPC_PYTHON": str(tmp_path / "no-python")}
    done = subprocess.run(
        ["bash", str(ROOT / "envs/setup.sh"), str(tmp_path / "venv")], capture_output=True, text=True, check=False,
        env={**os.environ, **words, "PATH": f"{tmp_path}:{os.environ['PATH']}"}, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2 and done.stderr.startswith("setup: ") and message in done.stderr
    assert not (tmp_path / "venv").exists()
    if message != NO_PYTHON:
        assert (
            f"{MINIMUM_DRIVER} or newer" in done.stderr
            and f"{MINIMUM_DRIVER} or newer" in (ROOT / "README.md").read_text()
        )
        assert "580 or newer" in done.stderr and "vllm" not in done.stderr.partition("RLHPC_EXTRAS=")[2]


def test_the_two_files_of_the_image_have_the_same_steps() -> None:
    """envs/rlhpc.def for Apptainer, envs/Dockerfile for others: base, files, commands PATH, and all that setup.py names."""
    sections: dict[str, list[str]] = {"": []}
    for line in (ROOT / "envs/rlhpc.def").read_text().splitlines():
        if line.startswith("%"):
            section = sections.setdefault(line, [])
        elif line.strip() and not line.startswith("#"):
            (section if len(sections) > 1 else sections[""]).append(line.strip())
    steps = [
        line.split(maxsplit=1)
        for line in (ROOT / "envs/Dockerfile").read_text().splitlines()
        if line and line[0] != "#"
    ]
    docker = {word: [rest for first, rest in steps if first == word] for word, _ in steps}
    assert sections[""] == ["Bootstrap: docker", f"From: {docker['FROM'][0]}"]
    assert sections["%arguments"] == docker["ARG"] == ["TORCH=cpu"]
    copied = {
        (source, target + source if target.endswith("/") else target)
        for *sources, target in map(str.split, docker["COPY"])
        for source in sources
    }
    assert {tuple(line.split()) for line in sections["%files"]} == copied
    assert {source for source, _ in copied} >= {"setup.py", "envs", "rlhpc", *FOLDERS}
    assert all((ROOT / source).exists() and target == f"/opt/rlhpc/{source}" for source, target in copied)
    post = " && ".join(sections["%post"]).replace("{{ TORCH }}", "$TORCH")
    assert docker["RUN"] == [post, *sections["%test"]]
    assert sections["%environment"] == [f"export {docker['ENV'][0]}"]
