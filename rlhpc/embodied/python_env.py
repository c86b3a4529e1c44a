"""Evaluation, recording and conversion of policies that only another Python can build: LeRobot's.

`python -m rlhpc.embodied.python_env ANSWER` in that Python takes a pickled call on its input and writes the pickled answer to
a file. Both sides are this same program; what is pickled never comes from a checkpoint.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

from rlhpc.runtime.errors import ConfigError, RlhpcError
from rlhpc.runtime.files import read_json

#: The variable that names the Python.
PYTHON = "RLHPC_LEROBOT_PYTHON"
Given = ParamSpec("Given")
Found = TypeVar("Found")


def importable() -> bool:
    """Whether this Python has LeRobot."""
    return importlib.util.find_spec("lerobot") is not None


def needs_lerobot(why: str) -> ConfigError:
    """What to do where it is missing."""
    return ConfigError(
        f"{why} needs lerobot, which has a Python of its own: make setup-lerobot, export "
        "RLHPC_LEROBOT_PYTHON=$PWD/.venv-lerobot/bin/python, and name it as cluster.node_groups[].python_interpreter of "
        "actor and rollout (docs/how-to/lerobot.md)"
    )


def where_it_can(of: str | Path, function: Callable[Given, Found], *args: Given.args, **kwargs: Given.kwargs) -> Found:
    """Calls a function of this package here, or in LeRobot's Python if it is about one of LeRobot's policies.

    Args:
        of: The checkpoint or export that it is about, or anything else.
        function: At the top of a module.
        *args, **kwargs: Its arguments, and its answer, can be pickled.

    Raises:
        ConfigError: It is needed, and no Python is named; or the named one cannot be started.
        RlhpcError: What the function raised there.
    """
    if importable() or not _is_lerobot(Path(of)):
        return function(*args, **kwargs)
    python = os.environ.get(PYTHON)
    if not python:
        raise needs_lerobot(f"the policy of {of}")
    call = pickle.dumps((function.__module__, function.__qualname__, args, kwargs))
    root = str(Path(__file__).resolve().parents[2])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])}
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer")
        try:
            done = subprocess.run([python, "-m", __name__, str(answer)], input=call, env=env, stdout=subprocess.DEVNULL)
        except OSError as error:
            raise needs_lerobot(f"{PYTHON} is {python!r}, which cannot be started ({error.strerror}); {of}") from error
        if not answer.is_file():
            raise RlhpcError(f"{python} ended with {done.returncode} and no answer; what it said is above")
        found, raised = pickle.loads(answer.read_bytes())
    if raised is not None:
        raise raised
    result: Found = found
    return result


def _is_lerobot(folder: Path) -> bool:
    """Whether a checkpoint or an export has one of LeRobot's policies."""
    for name in ("model.json", "config.json"):
        try:
            spec = read_json((folder / name).read_bytes())
            found = spec.get("policy", spec)["model"]["model_type"]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
        return str(found).lower() == "lerobot"
    return False


def main() -> None:
    """The other side."""
    module, name, args, kwargs = pickle.loads(sys.stdin.buffer.read())
    found, raised = None, None
    try:
        found = getattr(importlib.import_module(module), name)(*args, **kwargs)
    except RlhpcError as error:
        raised = error
    Path(sys.argv[1]).write_bytes(pickle.dumps((found, raised)))


if __name__ == "__main__":
    main()
