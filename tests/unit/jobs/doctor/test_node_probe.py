"""Program that the doctor runs on a node."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhpc.jobs.doctor import node_checks as nodes
from rlhpc.jobs.doctor import node_probe, torch_probe
from rlhpc.jobs.doctor.probe_jobs import source_of
from tests.extras import need_extra
from tests.unit.jobs.doctor.cluster import hello, probed


def test_a_child_says_what_torch_sees() -> None:
    """The real one, where no GPU is to be seen; and one that hangs, and one that dies."""
    found = probed(hello("n1", mask=""), gpus=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        found.jobs[0].torch["n1"] = node_probe.ask_child(source_of(torch_probe), 120)
    [line] = nodes.gpus_in_torch(found, {})
    assert line.level == "fail" and line.result.startswith(
        f"n1: granted 1, torch sees 0: torch {torch.__version__} is built "
    )
    assert ("for the CPU;" if torch.version.cuda is None else "finds 0 of them") in line.result
    assert "RLHPC_TORCH=" in line.advice
    first = 'print(\'{"driver": "", "torch": "2.13"}\', flush=True); print(\'is\', \'loading\', flush=True); '
    hangs = node_probe.ask_child(f"{first} import time; time.sleep(60)", 2)
    assert hangs == {"driver": "", "torch": "2.13", "words": "is loading", "hung_s": 2}
    assert node_probe.ask_child(f"{first} import os; os._exit(3)", 60)["code"] == 3


def test_the_probe_imports_vllms_kernels(tmp_path: Path) -> None:
    """Those of the first known name; what they need and lack is the error, which vLLM itself would only log."""

    def ask(*modules: str, body: str = "") -> dict[str, Any]:
        package = tmp_path / str(len(list(tmp_path.iterdir())))
        (package / "vllm").mkdir(parents=True)
        for name in ("__init__", *modules):
            (package / "vllm" / f"{name}.py").write_text(body if name in modules else "")
        script = f"import sys; sys.path.insert(0, {str(package)!r})\n{source_of(torch_probe)}".replace(
            'if __name__ == "__main__":', "if False:"
        )
        return node_probe.ask_child(f"{script}\nprint_values(vllm=import_vllm_kernels())", 60)

    assert ask("_C_stable_libtorch")["vllm"] is True and ask("_C")["vllm"] is True
    assert "No module named 'vllm._C'" in ask()["words"]  # a build without kernels
    broken = ask("_C_stable_libtorch", body="raise ImportError('libcudart.so.13: no such file')")
    assert "libcudart.so.13" in broken["words"] and broken["code"] == 1


def test_the_kernels_have_the_name_that_vllm_imports() -> None:
    need_extra("vllm")
    source = Path(find_spec("vllm").submodule_search_locations[0], "platforms", "cuda.py").read_text()  # type: ignore[union-attr,index]
    assert f"import {torch_probe.VLLM_KERNELS[0]} " in source


def test_the_library_of_gpu_simulation_is_looked_for_where_sapien_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_extra("embodied")
    source = Path(find_spec("sapien").submodule_search_locations[0], "physx", "__init__.py").read_text()  # type: ignore[union-attr,index]
    assert '".sapien" / "physx" / physx_version' in source and '"libPhysXGpu_64.so"' in source
    monkeypatch.setenv("HOME", str(tmp_path))
    assert not node_probe.physx()
    (tmp_path / ".sapien/physx/105.1").mkdir(parents=True)
    (tmp_path / ".sapien/physx/105.1/libPhysXGpu_64.so").touch()
    assert node_probe.physx()


def test_the_probe_needs_nothing_but_python(tmp_path: Path) -> None:
    """Its text alone, as a node gets it; it says in short lines what it sees."""
    canary = tmp_path / "canary"
    canary.mkdir()
    (canary / "login").write_text("token")
    (canary / "second").write_text("token")
    plan = {
        "token": "token", "canary": str(canary), "timeout_s": 2, "limit_s": 60, "packages": ["json", "nonesuch"],
        "torch": "print('{\"torch\": \"2.13\"}')", "torch_s": 30,
    }  # fmt: skip
    told = {"peers": [], "second": True}
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", Path(node_probe.__file__).read_text()],
        input=f"{json.dumps(plan)}\n{json.dumps(told)}\n\n", capture_output=True, text=True, timeout=60,
        env={"SLURM_PROCID": "3", "SLURMD_NODENAME": "n3", "CUDA_VISIBLE_DEVICES": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert {(words[0], words[1]) for words in lines} == {(node_probe.MARK, "3")}
    assert [words[2] for words in lines if words[3] == "0"] == ["hello", "clock", "peers", "torch"]
    assert max(map(len, done.stdout.splitlines())) < 700
    assert (canary / "node-n3").read_text() == "token"
