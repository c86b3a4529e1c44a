"""What `openpi` assumes of LeRobot and of the transformers beside it, in the Python that has them (`make setup-lerobot`)."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.extras import find_python, needs_python

PYTHON = find_python("lerobot")
ROOT = Path(__file__).parents[5]

_PROGRAM = """
import importlib, importlib.metadata, importlib.util, inspect
from rlhpc.runtime.torch_adapter import import_torchvision
import_torchvision()
from rlhpc.embodied.models.lerobot import openpi

for package, version in openpi.VERIFIED.items():
    installed = importlib.metadata.version(package)
    assert installed.startswith(version + "."), f"{package} {installed}: read its sources, and change openpi.VERIFIED"
spec = importlib.util.find_spec(openpi._CHECK_MODULE)
assert spec is None, "transformers has openpi's files: openpi.py is not needed any more"
openpi.patch_lerobot()
for name in ("pi0", "pi05"):
    module = importlib.import_module(f"lerobot.policies.{name}.modeling_{name}")
    source = inspect.getsource(module)
    for use in (
        "PaliGemmaForConditionalGeneration(config=", "GemmaForCausalLM(config=", "modeling_gemma._gated_residual(",
        "check.check_whether_transformers_replace_is_installed_correctly()",
    ):
        assert use in source, f"{name} no longer has {use!r}"
    assert module.GemmaForCausalLM is openpi.gemma
from transformers.models.gemma import modeling_gemma
block = inspect.getsource(modeling_gemma.GemmaDecoderLayer)
for part in ("self.input_layernorm", "self.self_attn", "self.post_attention_layernorm", "self.mlp"):
    assert part in block, f"a block of Gemma has no {part}"
assert modeling_gemma._gated_residual is openpi.gated_residual
"""


@needs_python("lerobot")
def test_what_is_replaced_is_used_by_lerobot() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [PYTHON, "-c", _PROGRAM], capture_output=True, text=True, timeout=300, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("package", ["lerobot", "transformers"])
def test_the_environment_has_the_versions_that_were_read(package: str) -> None:
    pins = (ROOT / "envs" / "lerobot.txt").read_text()
    source = (ROOT / "rlhpc" / "embodied" / "models" / "lerobot" / "openpi.py").read_text()
    pinned = next(line for line in pins.splitlines() if line.startswith(f"{package}=="))
    minor = pinned.partition("==")[2].rsplit(".", 1)[0]
    assert f'"{package}": "{minor}"' in source
