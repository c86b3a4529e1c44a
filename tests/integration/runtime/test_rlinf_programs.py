"""Programs written for RLinf, with only their imports changed, and RLinf's own unit tests over the import shim."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests import warm
from tests.rlinf_shim import run as shim

PROGRAMS = Path(__file__).parents[2] / "data" / "rlinf_programs"


@pytest.mark.parametrize(
    ("name", "output"), [("send_recv", "exchanged"), ("runner", "learned"), ("placements", "placed")]
)
def test_a_program_of_rlinf_runs_with_other_imports(name: str, output: str, tmp_path: Path) -> None:
    program = (PROGRAMS / f"{name}.py").read_text()
    ported, count = re.subn(r"^from rlinf[\w.]* import", "from rlhpc import", program, flags=re.M)
    assert count and "rlinf" not in re.sub(r"RLinf.*", "", ported), "nothing else is of RLinf"
    script = tmp_path / f"{name}.py"
    script.write_text(ported)
    done = warm.run([sys.executable, script], capture_output=True, text=True, timeout=200, cwd=tmp_path)
    assert done.stdout.split() == [output], done.stdout + done.stderr


#: Tests as RLinf has them: of a group of real ranks, of an error, of what is absent, and one that needs an accelerator.
UNIT_TESTS = """
import pytest
from rlinf.scheduler import Channel, Cluster, NodePlacementStrategy, PackedPlacementStrategy, Worker
from rlinf.scheduler.hardware.accelerators.amd_gpu import RocprofSysConfig


class Doubler(Worker):
    def double(self, channel: Channel):
        channel.put(2 * self._rank, key=self._worker_address.get_name())
        return self._cluster_node_rank


def test_ranks():
    group = Doubler.create_group().launch(Cluster(num_nodes=1), NodePlacementStrategy([0, 0]), "doublers")
    channel = Channel.create("doubles")
    assert group.double(channel).wait() == [0, 0]
    assert [channel.get(key=f"doublers:{rank}") for rank in (0, 1)] == [0, 2]
    group._close()


def test_refused():
    with pytest.raises(AssertionError, match="do not divide"):
        PackedPlacementStrategy(0, 3, stride=5)


def test_profile():
    RocprofSysConfig()


def test_wrong():
    assert 1 == 2, "arithmetic"


@pytest.mark.skipif(Worker.torch_platform is None, reason="no accelerator")
def test_accelerator():
    raise AssertionError
"""


def test_unit_tests_of_rlinf_run_over_the_shim_and_say_why_they_fail(tmp_path: Path) -> None:
    folder = tmp_path / "tests" / "unit_tests"
    folder.mkdir(parents=True)
    (folder / "test_worker.py").write_text(UNIT_TESTS)
    cases = {case.name: (case.outcome, case.reason) for case in shim.run_file(tmp_path, "test_worker")}
    assert cases.pop("test_wrong")[1].startswith("AssertionError: arithmetic")
    assert cases == {
        "test_ranks": ("passed", ""),
        "test_refused": ("passed", ""),
        "test_profile": (
            "failed",
            "rlhpc has no start of ranks under rocprof-sys",
        ),
        "test_accelerator": ("skipped", ""),
    }


@pytest.mark.skipif(shim.VARIABLE not in os.environ, reason=f"{shim.VARIABLE} names no checkout of RLinf")
@pytest.mark.timeout(shim.TIMEOUT_S * len(shim.FILES))
def test_the_list_of_rlinf_s_tests_is_current() -> None:
    cases = [case for name in shim.FILES for case in shim.run_file(Path(os.environ[shim.VARIABLE]), name)]
    assert shim.render(cases) == shim.RESULTS.read_text(), "python -m tests.rlinf_shim.run --write"
