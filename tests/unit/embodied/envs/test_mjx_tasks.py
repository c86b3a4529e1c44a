"""Tasks of MJX: they move as Gymnasium's, and keep what environments of tensors promise. `mjx_program` runs where JAX is."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rlhpc.embodied.config import EnvSideConfig
from rlhpc.embodied.envs.registry import make_env
from rlhpc.runtime.errors import ConfigError
from tests.extras import find_python, needs_python

ROOT = Path(__file__).parents[4]
TASKS = ("mjx_half_cheetah", "mjx_inverted_pendulum")


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """Findings of `mjx_program`."""
    command = [find_python("simulators"), "-m", "tests.unit.embodied.envs.mjx_program"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=290)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.long
@needs_python("simulators")
@pytest.mark.parametrize("name", TASKS)
def test_a_task_moves_as_gymnasiums(report: dict[str, Any], name: str) -> None:
    comparison = report[name]["gymnasium"]
    assert comparison["observation"] < 1e-3 and comparison["reward"] < 1e-4  # float32 against MuJoCo's float64
    assert comparison["same_limit"] and comparison["same_spaces"]
    assert (comparison["ends"] > 0) == (name == "mjx_inverted_pendulum")


@pytest.mark.long
@needs_python("simulators")
@pytest.mark.parametrize("name", TASKS)
def test_episodes_reset_on_the_device_and_go_on_from_a_saved_state(report: dict[str, Any], name: str) -> None:
    task = report[name]
    assert task["ends"] >= 2 and task["final_differs"] and task["distinct_starts"] == 4
    assert task["repeated"] and task["continued"] and task["same_starts"] and task["forgets"]
    assert task["part_error"] < 1e-3  # another number of slots is compiled anew
    assert report["reads_in_place"]


@pytest.mark.skipif(importlib.util.find_spec("jax") is not None, reason="JAX is installed")
@pytest.mark.parametrize("name", TASKS)
def test_a_python_without_jax_is_told_what_to_install(name: str) -> None:
    with pytest.raises(ConfigError, match=r"MJX needs JAX .*: pip install 'rlhpc\[mjx\]'"):
        make_env(EnvSideConfig(env_type="tensors", env_id=name, num_envs=2), 2)


@needs_python("simulators")
def test_a_device_that_jax_does_not_have_is_refused() -> None:
    program = (
        "import torch\nfrom rlhpc.embodied.envs.mjx_tasks import MjxInvertedPendulum\n"
        "from rlhpc.runtime.errors import ConfigError\n"
        "try:\n    MjxInvertedPendulum(2, torch.device('cuda'))\nexcept ConfigError as error:\n    print(error)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": ""}
    done = subprocess.run(
        [find_python("simulators"), "-c", program],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert "policy's device, which is cuda, and JAX has only" in done.stdout and "jax[cuda13]" in done.stdout, done
