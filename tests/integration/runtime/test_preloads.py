"""Imports that a host makes once for its ranks.

What the fork server imports leaves accelerators alone: their driver does not survive a fork, and a login node has none.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rlhpc import Cluster
from rlhpc.runs.task_type import all_task_types
from rlhpc.runtime.cluster_config import ClusterConfig
from rlhpc.runtime.joining import DriverConnection, JoinedRank, join_request
from rlhpc.runtime.launchers.local import PRELOAD
from rlhpc.runtime.placement import NodePlacementStrategy
from rlhpc.runtime.policies import GroupPolicy, SessionPolicies
from rlhpc.runtime.session import Session
from tests.eventually import wait_until
from tests.extras import need_extra
from tests.probes import Preloading

#: What torch was built for, not what there is: transformers and torch's own compiler ask that, and no driver is called for it.
HARMLESS = (["torch.accelerator.current_accelerator", "((), {})"], ["torch.cuda._is_compiled", "((), {})"])
#: Imports what it is given, and says which functions of torch's modules for accelerators that has called, and from where.
TRAP = """
import functools, importlib, json, sys, threading, traceback, types
import torch

called = []

def trapped(name, function):
    @functools.wraps(function)
    def call(*given, **options):
        caller = traceback.extract_stack()[-2]
        called.append([name, repr((given, options)), f"{caller.filename}:{caller.lineno}"])
        return function(*given, **options)
    return call

for module in (torch.cuda, torch.accelerator):
    for name, value in list(vars(module).items()):
        if isinstance(value, (types.FunctionType, types.BuiltinFunctionType)):
            setattr(module, name, trapped(f"{module.__name__}.{name}", value))
for name in sys.argv[1:]:
    importlib.import_module(name)
print(json.dumps({"called": called, "threads": threading.active_count()}))
"""


@pytest.mark.long
def test_nothing_that_a_fork_server_imports_asks_for_an_accelerator() -> None:
    need_extra("llm")
    modules = dict.fromkeys([*PRELOAD, *(name for kind in all_task_types() for name in kind.groups.preload)])
    assert len(modules) > len(PRELOAD) + 10
    done = subprocess.run(
        [sys.executable, "-c", TRAP, *modules], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert [call for call in found["called"] if call[:2] not in HARMLESS] == []
    assert found["threads"] == 1


def test_a_host_imports_once_for_the_drivers_ranks_and_once_for_those_that_join(tmp_path: Path) -> None:
    imports = tmp_path / "imports"
    session = Session.start()
    try:
        group = Preloading.create_group().launch(
            Cluster(ClusterConfig(num_nodes=1)), NodePlacementStrategy([0, 0, 0]), "many",
            env_vars={"RLHPC_TEST_IMPORTS": str(imports)},
        )  # fmt: skip
        [importer] = imports.read_text().split()
        assert {rank["ppid"] for rank in group.identity().wait(60)} == {int(importer)}
        with session.training(SessionPolicies({"many": GroupPolicy(min_ranks=1)})):
            door = DriverConnection(session.registry.root.parent)
            joined = []
            for number in (3, 4):
                joined.append(JoinedRank(door.ask(join_request("many", 1, 0))))
                wait_until(lambda number=number: group.admit() == [number], 60)  # type: ignore[misc]
            _, importer = imports.read_text().split()
            assert {rank["ppid"] for rank in group.identity().wait(60)[3:]} == {int(importer)}
            for rank in joined:
                rank.end(30.0)
            door.close()
    finally:
        session.stop()
