"""What the fork server imports leaves accelerators alone: their driver does not survive a fork, and a login node has none."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from rlhpc.runs.task_type import all_task_types
from rlhpc.runtime.launchers.local import PRELOAD
from tests.extras import need_extra

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
