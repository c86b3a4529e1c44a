"""ManiSkill where slots that reset together draw together, as on a GPU; scenes on the CPU stand in for its simulation."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from omegaconf import OmegaConf

from rlhpc.embodied.config import EnvSideConfig
from rlhpc.embodied.envs import subprocess_env
from rlhpc.embodied.envs.registry import check_env
from tests.extras import need_extra

need_extra("embodied")


def test_what_needs_a_gpu_is_known_without_asking_for_one_at_import() -> None:
    program = """
import torch
def asked(*_, **__): raise SystemExit("an import looked for an accelerator")
torch.cuda.is_available = torch.cuda.device_count = torch.accelerator.current_accelerator = asked
import rlhpc.embodied.envs.maniskill
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_slots_on_an_accelerator_stay_in_one_process_and_are_tried_in_another(monkeypatch: pytest.MonkeyPatch) -> None:
    from rlhpc.embodied.envs import maniskill

    def section(**kwargs: Any) -> Any:
        return OmegaConf.structured(EnvSideConfig(env_type="maniskill", env_id="PushCube-v1", kwargs=kwargs))

    monkeypatch.setattr(maniskill, "accelerator", lambda: "cuda")
    uses = maniskill.ManiSkillVectorEnv.uses_accelerator
    assert uses(section()) and uses(section(sim_backend="physx_cuda:0"))
    assert not uses(section(sim_backend="physx_cpu"))
    assert uses(section(sim_backend="physx_cpu", obs_mode="rgb")) and not uses(
        section(sim_backend="physx_cpu", obs_mode="rgb", render_backend="cpu")
    )
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    cores = min(2, len(subprocess_env.os.sched_getaffinity(0)))
    factory = maniskill.ManiSkillVectorEnv
    assert subprocess_env.process_count(section(), factory, 8) == 0
    assert subprocess_env.process_count(section(sim_backend="physx_cpu"), factory, 8) == (cores if cores > 1 else 0)
    started = []
    start = subprocess_env._Simulator.start

    def noted(self: Any, *args: Any) -> None:
        start(self, *args)
        started.append(self.process)

    monkeypatch.setattr(subprocess_env._Simulator, "start", noted)
    monkeypatch.setattr(maniskill.ManiSkillVectorEnv, "__init__", None)  # in this process it would fail
    # Its process has no accelerator, and so simulates on the CPU: what is seen here is where it is built.
    observation_space, action_space = check_env(section())
    assert observation_space.shape[0] > 10 and action_space.shape == (8,)
    assert len(started) == 1 and started[0].returncode is not None
