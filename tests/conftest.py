from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # in the background of a script; programs of tests would ignore it, too
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("RLHPC_POWERCAP", "/nowhere")  # no run has metrics that another machine's does not have
os.environ |= {"SDL_VIDEODRIVER": "dummy", "SDL_AUDIODRIVER": "dummy", "MPLBACKEND": "Agg"}  # no test opens a window
for screen in ("DISPLAY", "WAYLAND_DISPLAY"):
    os.environ.pop(screen, None)
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # each process that a test starts would compile the project anew

from tests.extras import RANK_VARIABLES, ROOT, is_checkout_installed

if not is_checkout_installed():  # the programs that tests start import this checkout, too
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))

from rlhpc.runtime import env_references
from tests import warm
from tests.warm import engines

gc.disable()  # until everything is imported

pytest_plugins = ["tests.crashes", "tests.took", "tests.drawn", "tests.accelerators", "tests.warm.workers"]

HERE = Path(__file__).parent
#: Files of long tests, the longest first: no worker is left with one at the end.
LONG = (
    "integration/embodied/test_lerobot.py", "integration/language/test_pretrained.py",
    "integration/language/test_replicas.py", "integration/language/test_engine_runs.py",
    "integration/language/test_deepspeed.py", "integration/language/test_reasoning.py", "integration/test_workflow.py",
    "integration/embodied/test_env_ranks.py", "integration/language/test_memory.py", "integration/jobs/test_submit.py",
    "integration/embodied/test_off_policy.py", "integration/runs/test_resume.py", "docs/test_docs.py",
    "integration/runtime/test_start_and_end.py", "integration/language/test_groups.py",
    "integration/training/test_mesh.py", "integration/runs/test_every_key.py", "integration/runtime/test_leases.py",
    "integration/language/test_training_backends.py", "integration/cli/test_terminal.py",
    "integration/language/test_rollout_backends.py", "integration/language/test_agent_runs.py",
    "integration/runtime/test_elastic_groups.py", "integration/embodied/test_own_python.py",
    "integration/embodied/test_sharded_policies.py", "unit/language/data/test_reasoning_gym.py",
    "integration/language/test_sandbox.py", "integration/language/test_distillation.py",
    "integration/jobs/test_handover.py", "integration/runs/test_saving.py",
    "integration/language/test_engine_of_several.py", "integration/language/test_agent_clients.py",
    "integration/language/test_baseline_runs.py", "integration/embodied/test_baseline_runs.py",
)  # fmt: skip


# A busy machine is no fault of what is tested.
hypothesis.settings.register_profile("tests", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("tests")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    rank = {HERE / name: number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: rank.get(item.path, len(rank)))


def pytest_collection_finish() -> None:
    """What all the tests import stays: each search for garbage would look through its millions of objects again.

    vLLM does the same with its engines, and takes it back for everything when one ends; here it does neither.
    """
    gc.enable()
    gc.collect()
    gc.freeze()
    for name in ("freeze", "unfreeze"):
        setattr(gc, name, lambda: None)


@pytest.fixture(scope="session", autouse=True)
def own_notices(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Robots of tests leave no notices where those of this user are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True)
def no_values_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """What configurations of a test read from the environment is no secret of the next test."""
    monkeypatch.setattr(env_references, "_values_read", {})


@pytest.fixture(scope="module", autouse=True)
def no_ranks_of_other_tests() -> Iterator[None]:
    """A file whose tests are ranks in this process (DeepSpeed reads these variables) leaves none for the next: Accelerate
    would wait for the others of its group."""
    before = {name: os.environ.get(name) for name in RANK_VARIABLES}
    yield
    for name, setting in before.items():
        if setting is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = setting


@pytest.fixture(scope="session", autouse=True)
def warm_fork_servers() -> Iterator[None]:
    """The fork servers and simulators that this process starts are started warm: no test of theirs is about imports."""
    from rlhpc.embodied.envs import subprocess_env
    from rlhpc.runtime.launchers import local

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "subprocess", warm)
        patch.setattr(subprocess_env, "subprocess", warm)
        yield


@pytest.fixture(scope="session", autouse=True)
def architectures_are_looked_at_here() -> Iterator[None]:
    """vLLM has a Python of its own look at each architecture's class, lest that touch an accelerator: eight seconds each; and
    it looks for its kernels in all modules of the process, once an engine."""
    from rlhpc.language.engines.vllm_launch import VLLMProcess

    build = VLLMProcess._build_engine

    def build_here(self: VLLMProcess, config: Any, seed: int) -> None:
        if "vllm" in sys.modules:
            from vllm.model_executor.models import registry

            patch.setattr(registry, "_run_in_subprocess", lambda look: look())
            engines.replace_kernels_once()
        build(self, config, seed)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VLLMProcess, "_build_engine", build_here)
        yield
